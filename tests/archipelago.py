"""Islands of thread ranks in one process, with a real meeting place."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.islands import RoundServer
from paceline.testing import run_ranks


@contextmanager
def meeting_place(count: int, say: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """The address of a meeting place of `count` islands."""
    with tempfile.TemporaryDirectory() as folder:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{folder}/islands")
        listener.listen()
        server = RoundServer(listener, count, say)
        try:
            yield f"{folder}/islands"
        finally:
            server.close()


def run_islands(
    count: int, size: int, body: Callable[..., Any], timeout_s: float = 60.0
) -> list[list[Any]]:
    """Run `body(world, at)` on `size` ranks of each of `count` islands; results by island, rank."""
    results: dict[int, Any] = {}

    def run_island(number: int, address: str) -> None:
        at = f"{number}/{count}@{address}"
        try:
            results[number] = run_ranks(size, body, at, timeout_s=timeout_s)
        except BaseException as error:
            results[number] = error

    with meeting_place(count) as address:
        threads = [
            threading.Thread(target=run_island, args=(number, address)) for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in results.values():
        if isinstance(error, BaseException):
            raise error
    return [results[number] for number in range(count)]
