"""The launcher's store, as an object that torch makes groups with.

torch's own client connects to a port, which every user of the machine can reach. This one uses the
socket in the launcher's private folder, or from another machine proves the run's secret.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from paceline.group.wire import (
    GO_ON,
    READY,
    Query,
    call,
    pack_number,
    pack_text,
    read_key,
    receive_all,
    unpack_number,
)
from paceline.torch_private import Store

_ANSWER_S = 60.0
"""How long the launcher may take for what needs no wait: it is busy, or the network is cut."""


class LauncherStore(Store):
    """A client of the launcher's store; each thread has a connection of its own.

    A wait that is given up closes its connection, so no answer of the past is ever taken for one
    of now.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self._threads = threading.local()
        self._key = read_key()
        self._tell(b"")  # a launcher that cannot be reached is told of at once

    def clone(self) -> LauncherStore:
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: Any) -> None:
        self._tell(_encode(Query.SET, key) + pack_text(_to_bytes(value)))

    def append(self, key: str, value: Any) -> None:
        self._tell(_encode(Query.APPEND, key) + pack_text(_to_bytes(value)))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        with self._asked(_encode_several(Query.MULTI_GET, keys)) as connection:
            return [_receive_text(connection) for _ in keys]

    def add(self, key: str, amount: int) -> int:
        with self._asked(_encode(Query.ADD, key) + pack_number(amount)) as connection:
            return unpack_number(receive_all(connection, 8))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        values = [pack_text(_to_bytes(value)) for value in (expected, desired)]
        with self._asked(_encode(Query.COMPARE_SET, key) + b"".join(values)) as connection:
            return _receive_text(connection)

    def check(self, keys: Sequence[str]) -> bool:
        with self._asked(_encode_several(Query.CHECK, keys)) as connection:
            return receive_all(connection, 1) == READY

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        default: timedelta = self.timeout  # type: ignore[attr-defined]
        limit_s = (default if timeout is None else timeout).total_seconds()
        with self._asked(_encode_several(Query.WAIT, keys), limit_s) as connection:
            if receive_all(connection, 1) != GO_ON:
                raise dist.DistStoreError(f"The launcher gave up the wait for {keys[0]!r}.")

    def num_keys(self) -> int:
        with self._asked(bytes([Query.COUNT_KEYS])) as connection:
            return unpack_number(receive_all(connection, 8))

    def delete_key(self, key: str) -> bool:
        with self._asked(_encode(Query.DELETE, key)) as connection:
            return bool(unpack_number(receive_all(connection, 8)))

    def list_keys(self) -> list[str]:
        with self._asked(bytes([Query.LIST_KEYS])) as connection:
            count = unpack_number(receive_all(connection, 8))
            return [_receive_text(connection).decode() for _ in range(count)]

    def _tell(self, request: bytes) -> None:
        with self._asked(request):
            pass  # there is no answer

    @contextmanager
    def _asked(self, request: bytes, timeout_s: float = _ANSWER_S) -> Iterator[socket.socket]:
        """This thread's connection, for the answer; one that fails is not used again."""
        connection = getattr(self._threads, "connection", None)
        try:
            if connection is None:
                connection, _ = call(self.place, self._key)
                self._threads.connection = connection
            connection.settimeout(max(timeout_s, 1e-3))
            connection.sendall(request)
            yield connection
        except OSError as error:
            self._threads.__dict__.pop("connection", None)
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                text = f"The launcher's store did not answer within {timeout_s:g} s."
                raise dist.DistStoreError(text) from error
            raise dist.DistNetworkError(f"The launcher's store is gone: {error}.") from error


@cache
def launcher_store(place: str) -> LauncherStore:
    """The one at this place, for as long as the process lives.

    torch keeps only its own half of the object, which is of no use without the other.
    """
    return LauncherStore(place)


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encode(query: Query, key: str) -> bytes:
    return bytes([query]) + pack_text(key.encode())


def _encode_several(query: Query, keys: Sequence[str]) -> bytes:
    texts = [pack_text(key.encode()) for key in keys]
    return bytes([query]) + pack_number(len(texts)) + b"".join(texts)


def _receive_text(connection: socket.socket) -> bytes:
    return receive_all(connection, unpack_number(receive_all(connection, 8)))
