"""Launchers believe what a launcher of their own run has said, once and in order."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.group.sockets import NONCE_BYTES, make_key
from paceline.launcher import channel as channel_module
from paceline.launcher.channel import (
    MESSAGE_BYTES,
    Channel,
    ChannelBroken,
    Connected,
    Connector,
)
from paceline.launcher.store import StoreServer

KEY = make_key("secret", "run")


class Ends:
    """Both ends of a channel, and a network between them that can be cut."""

    def __init__(self) -> None:
        self.waiting: list[list[Connected]] = [[], []]
        self.lead, self.follower = (
            Channel(lambda needed, at=at: at.pop() if at else None, is_lead=at is self.waiting[0])
            for at in self.waiting
        )
        self.connect(KEY, KEY)

    def connect(self, *keys: bytes) -> None:
        """Give both ends a connection; the one before, if any, is over."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
        for at, connection, key in zip(self.waiting, (ours, theirs), keys, strict=True):
            at.append((connection, b"", key))
        self.raw = theirs
        for end in (self.lead, self.follower):
            end.beat(time.monotonic())

    def settle(self) -> None:
        """Let both say what they have heard."""
        while not (self.lead._is_resumed and self.follower._is_resumed):
            for end in (self.lead, self.follower):
                assert not end.receive()

    def close(self) -> None:
        self.lead.close()
        self.follower.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as ends:
        ends.settle()
        yield ends


def hear(channel: Channel, count: int = 1) -> list[dict[str, object]]:
    """The next messages."""
    heard: list[dict[str, object]] = []
    while len(heard) < count:
        channel.beat(time.monotonic())
        heard += channel.receive()
    return heard


def take_frame(channel: Channel) -> bytes:
    """What has arrived, before the channel has seen it."""
    assert channel._connection is not None
    channel._connection.setblocking(True)
    frame = channel._connection.recv(4096)
    channel._connection.setblocking(False)
    return frame


def test_a_secret_may_have_any_bytes() -> None:
    keys = {make_key(os.fsdecode(secret), "run") for secret in (b"\xff", b"\xfe", b"secret")}
    assert len({KEY, *keys}) == 3


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    ends.follower.send({"said": "ready", "worker_id": 3})
    ends.follower.beat(time.monotonic() + 10)
    ends.follower.send({"ledger": "x" * 200_000})
    expected = [{"said": "ready", "worker_id": 3}, {"ledger": "x" * 200_000}]
    assert hear(ends.lead, 2) == expected


def test_what_was_said_while_the_network_was_cut_is_heard_once(ends: Ends) -> None:
    ends.follower.send({"number": 0})
    assert hear(ends.lead) == [{"number": 0}]
    # Sent, but never read: the connection is lost with it, as is the receipt of the first.
    ends.follower.send({"number": 1})
    ends.lead._detach()
    ends.follower._detach()
    ends.follower.send({"number": 2})
    ends.lead.send({"order": 0})
    assert ends.lead.receive() == []
    ends.connect(b"new", b"new")
    heard: list[list[dict[str, object]]] = [[], []]
    while len(heard[0]) < 2 or not heard[1]:
        heard[0] += ends.lead.receive()
        heard[1] += ends.follower.receive()
    assert heard == [[{"number": 1}, {"number": 2}], [{"order": 0}]]
    ends.follower.send({"number": 3})
    assert hear(ends.lead) == [{"number": 3}]


def test_the_end_of_a_connection_that_was_replaced_is_not_that_of_the_machine(ends: Ends) -> None:
    old = ends.lead._connection
    assert old is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    ends.waiting[1].append((theirs, b"", b"new"))
    ends.follower.beat(time.monotonic())  # which closes the old one
    ends.follower.send({"said": "ready"})
    ends.waiting[0].append((ours, b"", b"new"))
    old.setblocking(True)
    old.recv(1, socket.MSG_PEEK)
    old.setblocking(False)
    heard = []
    while not heard:
        heard = ends.lead.receive()
        ends.follower.receive()
    assert heard == [{"said": "ready"}]


def test_a_machine_that_takes_nothing_is_given_up_before_memory_is(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "KEPT_BYTES", 1000)
    ends.lead.send({"text": "x" * 900})
    ends.lead.receive()
    ends.lead.send({"text": "x" * 900})
    with pytest.raises(ChannelBroken):
        ends.lead.receive()


@pytest.mark.parametrize("unread", [False, True])
def test_a_machine_that_has_gone_is_noticed(ends: Ends, unread: bool) -> None:
    if unread:  # the kernel then resets the connection
        ends.lead.send({"do": "leave"})
        ends.raw.setblocking(True)
        ends.raw.recv(1, socket.MSG_PEEK)
    ends.follower.close()
    with pytest.raises(ChannelBroken, match="its launcher has ended"):
        hear(ends.lead)


@pytest.mark.parametrize("attack", ["altered", "repeated", "left out", "sent back", "too long"])
def test_what_was_not_said_so_breaks_the_channel(ends: Ends, attack: str) -> None:
    ends.follower.send({"said": "ready", "worker_id": 3})
    first, hearer = take_frame(ends.lead), ends.lead
    match attack:
        case "altered":
            ends.raw.sendall(first.replace(b"3", b"4"))
        case "repeated":
            ends.raw.sendall(first + first)
        case "left out":
            ends.follower.send({})
        case "sent back":
            assert ends.lead._connection is not None
            ends.lead._connection.sendall(first)
            hearer = ends.follower
        case "too long":
            ends.raw.sendall(struct.pack("<I", MESSAGE_BYTES + 1) + bytes(64))
    with pytest.raises(ChannelBroken):
        hear(hearer, 2)


def test_a_launcher_with_another_key_is_not_heard(ends: Ends) -> None:
    ends.connect(b"one", b"other")
    with pytest.raises(ChannelBroken, match="not signed"):
        hear(ends.lead)


def test_the_store_hands_a_launchers_connection_on_and_the_next_one_too(tmp_path: Path) -> None:
    name = secrets.token_bytes(NONCE_BYTES)
    with closing(StoreServer(str(tmp_path), key=KEY)) as server:
        server.start()
        connector = Connector(f"{server.host}:{server.port}", KEY, name)
        ends = [
            Channel(lambda needed: server.channels.pop(name, None), is_lead=True),
            Channel(connector, is_lead=False),
        ]
        for number in range(2):
            ends[1].send({"number": number})
            heard: list[object] = []
            while not heard:
                for end in ends:
                    end.beat(time.monotonic())
                    heard += end.receive()
            assert heard == [{"number": number}]
            ends[1].heard_s = 0.0  # silent for so long that it connects anew
        for end in ends:
            end.close()
        server.admitted = set()
        other = Connector(f"{server.host}:{server.port}", KEY, secrets.token_bytes(NONCE_BYTES))
        late = Channel(other, is_lead=False)
        with pytest.raises(ChannelBroken):
            hear(late)
        late.close()
        for each in (connector, other):
            each.close()


def test_a_follower_that_may_start_no_thread_tries_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as server:
        connector = Connector(f"127.0.0.1:{server.getsockname()[1]}", b"key", bytes(NONCE_BYTES))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert connector(True) is None
        assert connector(True) is None
        caller, _ = server.accept()
        caller.close()
        connector.close()
    assert connector.problem is not None, "it has tried"
