"""Launchers believe what a launcher of their own run has said, once and in order."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from paceline.launcher.store import StoreServer
from paceline.launcher.wire import MESSAGE_BYTES, LineBroken, Wire, make_key

KEY = make_key("secret", "token", 0, 1)
Ends = tuple[Wire, Wire, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The lead's, the other machine's, and the raw socket of that one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    lead, follower = Wire(ours, b"", KEY, is_lead=True), Wire(theirs, b"", KEY, is_lead=False)
    yield lead, follower, theirs
    lead.close()
    follower.close()


def hear(wire: Wire) -> list[dict[str, object]]:
    """What comes next, if anything does."""
    wire._connection.recv(1, socket.MSG_PEEK)
    return wire.receive()


def hear_on(wire: Wire) -> None:
    """All that comes, to the end."""
    while True:
        wire.receive()


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    lead, follower, _ = ends
    follower.send({"said": "ready", "seat": 3})
    follower.beat(1.0)
    follower.send({"ledger": "x" * 200_000})
    heard: list[dict[str, object]] = []
    while len(heard) < 2:
        heard += hear(lead)
    assert heard == [{"said": "ready", "seat": 3}, {"ledger": "x" * 200_000}]


@pytest.mark.parametrize("unread", [False, True])
def test_a_machine_that_has_gone_is_noticed(ends: Ends, unread: bool) -> None:
    lead, follower, raw = ends
    if unread:  # the kernel then resets the connection
        lead.send({"do": "leave"})
        raw.recv(1, socket.MSG_PEEK)
    follower.close()
    with pytest.raises(LineBroken, match="its launcher has ended"):
        hear_on(lead)


@pytest.mark.parametrize("attack", ["altered", "repeated", "left out", "sent back", "too long"])
def test_what_was_not_said_so_breaks_the_line(ends: Ends, attack: str) -> None:
    lead, follower, raw = ends
    follower.send({"said": "ready", "seat": 3})
    first = lead._connection.recv(4096)
    match attack:
        case "altered":
            raw.sendall(first.replace(b"3", b"4"))
        case "repeated":
            raw.sendall(first + first)
        case "left out":
            follower.send({})
        case "sent back":
            lead._connection.sendall(first)
            lead = follower
        case "too long":
            raw.sendall(struct.pack("<I", MESSAGE_BYTES + 1) + bytes(64))
    with pytest.raises(LineBroken):
        hear(lead)


@pytest.mark.parametrize(("secret", "token"), [("other", "token"), ("secret", "t")])
def test_a_launcher_with_another_secret_is_not_heard(ends: Ends, secret: str, token: str) -> None:
    lead, _, raw = ends
    stranger = Wire(raw, b"", make_key(secret, token, 0, 1), is_lead=False)
    stranger.send({"said": "died", "seat": 0})
    with pytest.raises(LineBroken, match="not signed"):
        hear(lead)


def test_the_store_hands_a_launchers_connection_on_with_what_came_early() -> None:
    server = StoreServer()
    server.start()
    try:
        follower = Wire.connect(server.host, server.port, 1, KEY)
        follower.send({"said": "hello"})
        while 1 not in server.lines:
            pass
        connection, arrived = server.lines.pop(1)
        lead = Wire(connection, arrived, KEY, is_lead=True)
        if not arrived:
            connection.recv(1, socket.MSG_PEEK)
        assert lead.receive() == [{"said": "hello"}]
        lead.close()
        follower.close()
    finally:
        server.close()
