"""What is said to a launcher's store and how a caller proves that it belongs to the run.

A request is one byte and its arguments: numbers of 8 bytes, texts with their length before them.
That is torch's protocol, so one server answers torch's clients too. Callers on the launcher's
machine use a socket in its private folder. Callers on other machines first prove that they know
the run's secret, and the launcher proves it to them; neither sends the secret.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from paceline import env

CONNECT_TIMEOUT_S = 2.0
NONCE_BYTES, PROOF_BYTES = 16, 32
STORE_CALLER = bytes(NONCE_BYTES)
"""The name of a caller that wants the store; launchers have random names."""
READY, NOT_READY = b"\0", b"\1"
GO_ON, CANCELLED = b"\0", b"\1"
_LONGEST_PATH = 100
_NUMBER = struct.Struct("<q")


class Query(IntEnum):
    """What a client asks for; the number is its first byte."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    COUNT_KEYS = 7
    DELETE = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    PUSH = 14
    POP = 15
    QUEUE_LENGTH = 16
    LIST_KEYS = 17
    BARRIER = 18
    PROVE = 100
    """Ours alone: the caller will prove that it belongs to the run."""


class Refused(ConnectionError):
    """The launcher does not take this caller for one of its run, or is not of that run itself."""


def pack_number(value: int) -> bytes:
    return _NUMBER.pack(value)


def unpack_number(data: bytes) -> int:
    found: int = _NUMBER.unpack(data)[0]
    return found


def pack_text(value: bytes) -> bytes:
    return _NUMBER.pack(len(value)) + value


def make_key(secret: str, run_id: str) -> bytes:
    """What all launchers and workers of a run know."""
    return hmac.digest(secret.encode(), f"paceline/{run_id}".encode(), "sha256")


def read_key() -> bytes:
    """The same in a worker."""
    return make_key(env.read(env.SECRET_VARIABLE), env.read("PACELINE_RUN_ID"))


def prove(key: bytes, whose: bytes, name: bytes, *nonces: bytes) -> bytes:
    """That `whose` side of a conversation knows the key; the nonces make it hold only once."""
    return hmac.digest(key, b"/".join([whose, name.hex().encode(), *nonces]), "sha256")


def call(place: str, key: bytes, name: bytes = STORE_CALLER) -> tuple[socket.socket, bytes]:
    """Connect with the launcher at `place`; the connection, and a key for it alone.

    A place is `host:port`, or the path of a socket, which only this user can reach.
    """
    if os.path.isabs(place):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(place) as path:
                connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection, b""
    host, _, port = place.rpartition(":")
    connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
    try:
        # Otherwise a request after one without an answer waits for a delayed receipt.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(bytes([Query.PROVE]) + name + ours)
        theirs = receive_all(connection, NONCE_BYTES)
        connection.sendall(prove(key, b"caller", name, ours, theirs))
        try:
            answer = receive_all(connection, PROOF_BYTES)
        except ConnectionError as error:
            raise Refused("it has refused this caller") from error
        if not hmac.compare_digest(answer, prove(key, b"launcher", name, ours, theirs)):
            raise Refused("it does not know the secret of this run")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection, prove(key, b"channel", name, ours, theirs)


def receive_all(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes; a connection that ends before is a ConnectionError."""
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(count - len(received), 2**20))
        if not part:
            raise ConnectionError("the launcher has closed the connection")
        received += part
    return bytes(received)


@contextmanager
def short_path(path: str) -> Iterator[str]:
    """The path of a socket as the kernel takes it, which is at most about 100 bytes long."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
