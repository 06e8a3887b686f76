"""The protocol between islands and their meeting place: a JSON object and bytes, once each way.

A caller from another machine first proves that it knows the run's secret, as with the store.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from typing import Any

from paceline import env
from paceline.group import NONCE_BYTES, PROOF_BYTES, Query, call, make_key, prove, receive_all

CALLER = b"paceline-islands"
MOST_HEAD_BYTES = 2**20
MOST_BODY_BYTES = 2**40
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
    views = [memoryview(body).cast("B") for body in bodies]
    connection.sendall(_LENGTHS.pack(len(data), sum(view.nbytes for view in views)) + data)
    for view in views:
        connection.sendall(view)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytearray]:
    head_bytes, body_bytes = _LENGTHS.unpack(receive_all(connection, _LENGTHS.size))
    if head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES:
        raise ConnectionError(f"a message of {head_bytes} and {body_bytes} bytes")
    head = json.loads(receive_all(connection, head_bytes))
    if not isinstance(head, dict):
        raise ConnectionError("a message that is not an object")
    return head, receive_all(connection, body_bytes)
