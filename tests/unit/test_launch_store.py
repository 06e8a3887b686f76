"""The launcher's store: to torch's own client it is torch's own server."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from paceline.launcher.store import MAGIC, Query, StoreClient, StoreServer

SOON = timedelta(seconds=5)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer()) as server:
        server.start()
        yield server


def client(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=SOON, wait_for_workers=False)


def caught(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return type(error)


def converse(store: Any, other: Any) -> list[object]:
    """Everything a client can ask for; what it heard. A write is over when its writer reads."""
    short = timedelta(milliseconds=50)
    return [
        *(store.set("a", "1"), store.get("a"), other.check(["a"]), other.check(["a", "b"])),
        *(store.add("n", 3), other.add("n", -5), other.get("n"), other.add("a", 1)),
        *(store.append("ap", "x"), store.get("ap"), other.append("ap", "y"), other.get("ap")),
        *(store.compare_set("c", "", "first"), other.compare_set("c", "", "second")),
        *(store.compare_set("c", "first", "third"), other.compare_set("none", "x", "y")),
        *(store.delete_key("c"), store.delete_key("c"), store.check([])),
        *(store.multi_set(["m", "k"], ["1", "22"]), store.multi_get(["k", "m"])),
        *(caught(lambda: store.wait(["never"], short)), other.wait(["a", "n"])),
        *(store.num_keys(), store.set("large", "x" * 3_000_000), len(store.get("large"))),
        *(store.queue_push("q", "one"), store.queue_len("q"), other.queue_pop("q")),
        caught(lambda: other.queue_pop("q", False)),
        caught(lambda: sorted(store.list_keys())),  # torch 2.11 has no such call
        store.clone().get("a"),
    ]


SERVES_BOTH = """
import sys
import torch.distributed as dist
from paceline.launcher.store import StoreServer
ours, theirs = StoreServer(), dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
ours.start()
print(ours.port, theirs.port, flush=True)
sys.stdin.read()
"""


def test_torchs_client_hears_what_torchs_server_would_say() -> None:
    # In another process: some calls of torch's client do not let other threads of Python run.
    with subprocess.Popen(
        [sys.executable, "-c", SERVES_BOTH], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        ours, theirs = (
            converse(client(int(port)), client(int(port)))
            for port in serving.stdout.readline().split()
        )
        serving.stdin.close()
    assert ours == theirs


def test_who_waits_is_answered_when_the_last_key_is_there(server: StoreServer) -> None:
    waiting, setting = StoreClient("127.0.0.1", server.port, "p", 5.0), client(server.port)
    waiting._ask(Query.WAIT, b"\2" + bytes(7), waiting._key("x"), waiting._key("y"))
    setting.set("p/x", "1")
    assert not StoreClient("127.0.0.1", server.port, "p", 5.0).has("y")
    setting.set("p/y", "1")
    assert waiting._receive(1) == b"\0"


def test_launchers_need_no_torch_to_ask(server: StoreServer) -> None:
    store = StoreClient("127.0.0.1", server.port, "run", 5.0)
    store.set("key", "ü")
    store.set_first("key", "late")
    assert (store.get("key"), store.has("key"), store.has("other")) == ("ü", True, False)
    assert (store.add("n", 2), store.add("n", 0)) == (2, 2)
    worker = client(server.port)
    worker.set("worker", "1")
    assert worker.get("worker") == b"1"
    server.clear(keep="run")
    assert store.has("key")
    assert not worker.check(["worker"])


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes([Query.VALIDATE, 1, 2, 3, 4]),
        bytes([Query.SET]) + b"\xff" * 8,
        bytes([Query.GET]) + (2**40).to_bytes(8, "little"),
        bytes([Query.WAIT]) + (2**20).to_bytes(8, "little"),
        bytes([200]),
    ],
)
def test_a_caller_that_speaks_something_else_is_dropped_alone(
    server: StoreServer, data: bytes
) -> None:
    other = client(server.port)
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as caller:
        caller.sendall(data)
        assert caller.recv(1) == b""
    other.set("still", "there")
    assert other.get("still") == b"there"


def test_a_caller_that_stops_reading_keeps_nobody_waiting(server: StoreServer) -> None:
    other = client(server.port)
    other.set("large", "x" * 4_000_000)
    other.wait(["large"])
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as stopped:
        ask = bytes([Query.GET]) + (6).to_bytes(8, "little") + b"/large"
        stopped.sendall(bytes([Query.VALIDATE]) + MAGIC + 50 * ask)
        other.set("small", "1")
        assert other.get("small") == b"1"
        got = bytearray()
        while len(got) < 50 * 4_000_008:
            got += stopped.recv(2**20)
    assert len(got) == 50 * 4_000_008
