"""The protocol between islands and their meeting place: a JSON object and bytes, once each way.

A caller from another machine first proves that it knows the run's secret, as with the store.
"""

from __future__ import annotations

import hmac
import json
import mmap
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from paceline import env
from paceline.group import (
    NONCE_BYTES,
    PROOF_BYTES,
    Query,
    call,
    make_key,
    prove,
    receive_all,
    receive_into,
)

T = TypeVar("T")
Room = bytearray | mmap.mmap
"""Memory that holds a body."""
CALLER = b"paceline-islands"
MOST_HEAD_BYTES = 2**20
MOST_BODY_BYTES = 2**40
_LARGE_BYTES = 2**20
_LENGTHS = struct.Struct("<QQ")
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}
"""A connection whose peer is unreachable ends after about 15 s."""


def island_key() -> bytes:
    """The key that all islands of a run share, on several machines."""
    return make_key(env.read(env.SECRET_VARIABLE), "islands")


def connect(address: str) -> socket.socket:
    """A connection with the meeting place."""
    connection, _ = call(address, island_key(), CALLER)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def admit(connection: socket.socket, key: bytes) -> bool:
    """Have a caller prove that it belongs to the run; the counterpart of `group.call`."""
    asked = receive_all(connection, 1 + 2 * NONCE_BYTES)
    name, theirs = bytes(asked[1 : 1 + NONCE_BYTES]), bytes(asked[1 + NONCE_BYTES :])
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    proof = bytes(receive_all(connection, PROOF_BYTES))
    is_known = hmac.compare_digest(proof, prove(key, b"caller", name, theirs, ours))
    if is_known and asked[0] == Query.PROVE and name == CALLER:
        connection.sendall(prove(key, b"launcher", name, theirs, ours))
        return True
    return False


def send(connection: socket.socket, head: dict[str, Any], *bodies: Any) -> None:
    data = json.dumps(head).encode()
    # A peer may close as soon as it has read everything; sending an empty body would fail then.
    views = [view for body in bodies if (view := memoryview(body).cast("B")).nbytes]
    connection.sendall(_LENGTHS.pack(len(data), sum(view.nbytes for view in views)) + data)
    for view in views:
        connection.sendall(view)


def make_room(count: int) -> tuple[Room, memoryview]:
    """Memory for a received body; large ones are not filled with zeros first."""
    if count < _LARGE_BYTES:
        small = bytearray(count)
        return small, memoryview(small)
    room = mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # only an optimization
            room.madvise(mmap.MADV_HUGEPAGE)
    return room, memoryview(room)


def receive(
    connection: socket.socket, room_for: Callable[[int], tuple[T, memoryview]]
) -> tuple[dict[str, Any], T]:
    """A head and a body; the body is read into what `room_for` its size returns."""
    head_bytes, body_bytes = _LENGTHS.unpack(receive_all(connection, _LENGTHS.size))
    if head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES:
        raise ConnectionError(f"a message of {head_bytes} and {body_bytes} bytes")
    head = json.loads(receive_all(connection, head_bytes))
    if not isinstance(head, dict):
        raise ConnectionError("a message that is not an object")
    body, view = room_for(body_bytes)
    receive_into(connection, view)
    return head, body
