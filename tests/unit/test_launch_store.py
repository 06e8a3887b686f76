"""The launcher's stores: torch's own client hears torch's answers, and no caller harms another."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.group.sockets import (
    NONCE_BYTES,
    Query,
    Refused,
    call,
    make_key,
    pack_number,
    pack_text,
)
from paceline.group.world import LauncherStore
from paceline.launcher import store as store_module
from paceline.launcher.space import MAX_VALUE_BYTES
from paceline.launcher.store import (
    MAGIC,
    OUR_BYTES,
    THEIR_BYTES,
    WORKER_BYTES,
    StoreServer,
)

SOON = timedelta(seconds=30)
KEY = make_key("secret", "run")
HELLO = bytes([Query.VALIDATE]) + MAGIC
SET_X = bytes([Query.SET]) + 2 * pack_text(b"x")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with closing(StoreServer(str(tmp_path), key=KEY)) as server:
        server.start()
        yield server


def client(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=SOON, wait_for_workers=False)


def stranger(server: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 5.0)


def is_alive(server: StoreServer) -> bool:
    """Whether it answers both kinds of callers."""
    ours, theirs = LauncherStore(server.path), client(server.port)
    key = secrets.token_hex(4)
    for each in (ours, theirs):
        each.set(key, "1")
    return ours.get(key) == theirs.get(key) == b"1"


def is_dropped(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def has_ended(caller: socket.socket) -> bool:
    """Whether the store has dropped a caller, as far as can be seen without waiting."""
    try:
        while data := caller.recv(2**20, socket.MSG_DONTWAIT):
            del data
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def poll(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


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
        *(store.num_keys(), store.set("large", "x" * 2_000_000), len(store.get("large"))),
        caught(lambda: sorted(store.list_keys())),  # torch 2.11 has no such call
        store.clone().get("a"),
    ]


def use_queue(store: Any, other: Any) -> list[object]:
    return [
        *(store.queue_push("q", "one"), store.queue_len("q"), other.queue_pop("q")),
        caught(lambda: other.queue_pop("q", False)),
    ]


SERVES_BOTH = """
import sys, tempfile
import torch.distributed as dist
from paceline.launcher.store import StoreServer
theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
with tempfile.TemporaryDirectory() as folder:
    ours = StoreServer(folder)
    ours.start()
    print(ours.port, theirs.port, ours.path, flush=True)
    sys.stdin.read()
"""


def test_torchs_client_and_ours_hear_what_torchs_server_would_say() -> None:
    # In another process: some calls of torch's client do not let other threads of Python run.
    with subprocess.Popen(
        [sys.executable, "-c", SERVES_BOTH], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        port, torchs, path = serving.stdout.readline().split()
        pairs = [[client(int(each)) for _ in range(2)] for each in (port, torchs)]
        pairs.append([LauncherStore(path.decode()) for _ in range(2)])
        at_port, torchs_own, at_path = (converse(*pair) for pair in pairs)
        assert at_port == at_path == torchs_own
        at_port, torchs_own = (use_queue(*pair) for pair in pairs[:2])
        assert at_port == torchs_own
        serving.stdin.close()


def test_an_answer_that_an_interrupt_left_unread_is_not_taken_for_the_next(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LauncherStore(server.path)

    def interrupt(*_: object) -> bytearray:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("paceline.group.sockets.receive_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.add("n", 1)
    assert store.add("n", 4) == 5


def test_who_waits_is_answered_when_the_last_key_is_there_or_will_never_be(
    server: StoreServer,
) -> None:
    store = LauncherStore(server.path)
    ends: list[object] = []
    threads = [
        threading.Thread(target=lambda p=place: ends.append(caught(lambda: store.wait([p, "y"]))))
        for place in ("x", "dead/x")
    ]
    for thread in threads:
        thread.start()
    store.set("y", "1")
    server.give_up("dead")
    threads[1].join()
    assert ends == [dist.DistStoreError]
    store.set("x", "1")
    threads[0].join()
    assert ends[1:] == [None]
    assert caught(lambda: store.wait(["dead/later"])) is dist.DistStoreError


def test_what_is_said_at_the_port_is_not_seen_by_the_run(server: StoreServer) -> None:
    run, script = LauncherStore(server.path), client(server.port)
    script.set("key", "poisoned")
    script.check(["key"])
    run.set("other", "1")
    assert run.check(["other"])
    assert not run.check(["key"])
    assert not script.check(["other"])


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes([Query.VALIDATE, 1, 2, 3, 4]),
        bytes([Query.SET]) + b"\xff" * 8,
        bytes([Query.GET]) + (2**40).to_bytes(8, "little"),
        bytes([Query.WAIT]) + (2**20).to_bytes(8, "little"),
        bytes([200]),
        2 * (bytes([Query.ADD]) + pack_text(b"n") + pack_number(2**62)),
        bytes([Query.SET]) + 2 * pack_text(b"x") + bytes([Query.ADD]) + pack_text(b"x") + bytes(8),
        bytes([Query.SET])
        + 2 * pack_text(b"x")
        + bytes([Query.BARRIER])
        + pack_text(b"x")
        + bytes(8),
        bytes([Query.PROVE]) + bytes(2 * NONCE_BYTES + 32),
    ],
)
def test_a_caller_that_says_something_impossible_is_dropped_alone(
    server: StoreServer, data: bytes
) -> None:
    with stranger(server) as caller:
        caller.sendall(data)
        while not is_dropped(caller):
            pass  # what was right before is answered
    assert is_alive(server)


def test_a_request_that_arrives_byte_by_byte_is_read_once(server: StoreServer) -> None:
    reads = 0
    original = store_module.read_key

    def counted() -> Any:
        nonlocal reads
        reads += 1
        return (yield from original())

    store_module.read_key = counted
    try:
        with stranger(server) as caller:
            request = HELLO + bytes([Query.MULTI_SET]) + pack_number(50)
            request += 50 * (pack_text(b"k") + pack_text(b"v"))
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(len(request)):
                caller.sendall(request[at : at + 1])
            caller.sendall(bytes([Query.PING]) + b"ping")
            assert caller.recv(4) == b"ping"
    finally:
        store_module.read_key = original
    assert reads == 50


KINDS = ["values", "queues", "answers", "unfinished", "waits", "compared", "unread keys"]


@pytest.mark.parametrize("how", KINDS)
def test_what_strangers_can_have_kept_is_bounded(
    server: StoreServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they do, the launcher keeps no more than it was meant to, and answers others."""
    most, take = 0, server.theirs.take

    def measured(count: int) -> None:
        nonlocal most
        take(count)
        most = max(most, server.theirs.used)

    monkeypatch.setattr(server.theirs, "take", measured)
    large = pack_text(bytes(MAX_VALUE_BYTES))
    keys = 1024 * pack_text(bytes(2000))
    callers = [stranger(server) for _ in range(30)]
    for number, caller in enumerate(callers):
        caller.settimeout(0.05)
        key = pack_text(b"key%d" % number)
        several = 8 * (bytes([Query.GET]) + key)
        request = {
            "values": bytes([Query.SET]) + key + large,
            "queues": bytes([Query.PUSH]) + pack_text(b"q") + large,
            "answers": bytes([Query.SET]) + key + pack_text(bytes(2**20)) + several,
            "unfinished": bytes([Query.SET]) + key + large[:-1],
            "waits": bytes([Query.WAIT]) + pack_number(1024) + keys,
            "compared": bytes([Query.COMPARE_SET]) + key + large,
            "unread keys": bytes([Query.CHECK]) + pack_number(1025) + keys,
        }[how]
        with suppress(OSError):  # dropped, or not read any more
            caller.sendall(HELLO + request)
    assert LauncherStore(server.path).num_keys() == 0
    poll(lambda: most > THEIR_BYTES - MAX_VALUE_BYTES)
    if how not in ("values", "queues"):  # of those one is dropped that had no room
        poll(lambda: sum(map(has_ended, callers)) >= 30 - THEIR_BYTES // 2**20)
    for caller in callers:
        caller.close()
    poll(lambda: not server.theirs.callers)
    assert most <= THEIR_BYTES
    server.clear()
    assert LauncherStore(server.path).num_keys() == server.theirs.used == 0


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_value_as_long_as_a_request_may_have_fits_for_every_request(
    server: StoreServer, whose: str
) -> None:
    store = LauncherStore(server.path) if whose == "ours" else client(server.port)
    one, other = (each * MAX_VALUE_BYTES for each in "12")
    store.set("x", one)
    assert store.compare_set("x", one, other) == other.encode()
    assert store.multi_get(["x"]) == [other.encode()]
    store.append("y", one)
    assert store.get("y") == one.encode()


def test_a_run_has_room_for_its_workers_and_no_more(server: StoreServer) -> None:
    def fill() -> int:
        for number in range(64):
            with suppress(dist.DistNetworkError):  # dropped, once the store is full
                LauncherStore(server.path).set(f"key{number}", bytes(2**19))
        return server.ours.used

    assert OUR_BYTES - 2**20 < fill() <= OUR_BYTES
    server.make_room(3)
    assert fill() <= OUR_BYTES
    server.make_room(256)
    assert OUR_BYTES < fill() <= 256 * WORKER_BYTES


@pytest.mark.parametrize("said", [b"", HELLO, HELLO + SET_X], ids=["nothing", "hello", "a value"])
def test_callers_that_say_nothing_more_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(store_module, "MOST_CALLERS", 8)
    with closing(StoreServer(str(tmp_path), key=KEY)) as server:
        server.start()
        silent = [stranger(server) for _ in range(20)]
        for each in silent:
            with suppress(OSError):  # dropped already
                each.sendall(said)
        assert is_alive(server)
        call(f"127.0.0.1:{server.port}", KEY)[0].close()
        assert len(server.theirs.callers) <= 8
        for each in silent:
            each.close()


def test_another_machine_has_the_runs_store_for_the_secret_only(server: StoreServer) -> None:
    place = f"127.0.0.1:{server.port}"
    LauncherStore(server.path).set("key", "1")
    connection, _ = call(place, KEY)
    with connection:
        connection.sendall(bytes([Query.GET]) + pack_text(b"key"))
        assert connection.recv(9) == pack_text(b"1")
    for key in (make_key("other", "run"), make_key("secret", "another")):
        with pytest.raises(Refused):
            call(place, key)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        met: list[socket.socket] = []

        def pretend() -> None:
            met.append(impostor.accept()[0])
            met[0].sendall(bytes(48))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Refused):
            call(f"127.0.0.1:{impostor.getsockname()[1]}", KEY)
        thread.join()
        met[0].close()


def test_who_does_not_prove_its_secret_in_time_is_dropped(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PROOF_S", 0.05)
    with stranger(server) as caller:
        caller.sendall(bytes([Query.PROVE]) + bytes(2 * NONCE_BYTES))
        assert len(caller.recv(NONCE_BYTES)) == NONCE_BYTES
        assert is_dropped(caller)


ANOTHER_USER = """
import encodings.idna, os, socket, sys  # before this user loses the right to read them
os.setuid(54321)
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) as caller:
    try:
        caller.sendall(bytes.fromhex(sys.argv[3]))
        assert caller.recv(1) == b""
    except ConnectionError:
        pass
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[2])
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_is_not_heard_at_all() -> None:
    from paceline.launcher.process import private_folder

    with private_folder() as folder, closing(StoreServer(folder)) as server:
        server.start()
        request = (HELLO + bytes([Query.PING]) + b"ping").hex()
        command = [sys.executable, "-c", ANOTHER_USER, str(server.port), server.path, request]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert said.stdout == "PermissionError\n"
        assert is_alive(server)


def test_a_caller_that_stops_reading_keeps_nobody_waiting(server: StoreServer) -> None:
    size = 1_000_000
    other = client(server.port)
    other.set("large", "x" * size)
    other.wait(["large"])
    with stranger(server) as stopped:
        ask = bytes([Query.GET]) + pack_text(b"/large")
        stopped.sendall(HELLO + 50 * ask)
        assert is_alive(server)
        got = bytearray()
        while len(got) < 50 * (size + 8):
            got += stopped.recv(2**20)
    assert len(got) == 50 * (size + 8)


def test_the_socket_may_lie_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with closing(StoreServer(str(folder))) as server:
        server.start()
        assert is_alive(server)


def test_forgetting_leaves_nothing(server: StoreServer) -> None:
    before = server.theirs.used
    with stranger(server) as caller:
        push = bytes([Query.PUSH]) + pack_text(b"q") + pack_text(b"v")
        value = bytes([Query.SET]) + pack_text(b"k") + pack_text(b"v")
        caller.sendall(HELLO + 3 * push + value + bytes([Query.PING]) + b"ping")
        assert caller.recv(4) == b"ping"
        assert server.theirs.used > before
    server.clear()
    # The thread does it in its own time. Not asked by a client of torch's: that has the name of its
    # address looked up, which takes seconds where the name service loses a packet.
    ours = LauncherStore(server.path)
    while server.theirs.callers or server.theirs.used != before:
        ours.set("turn", "")
