"""The launcher's store, as its callers see it: what is said, who may say it, and a client.

A request is one byte and its arguments: numbers of 8 bytes, texts with their length before them.
That is torch's protocol, so one server answers torch's clients too. Callers on the launcher's
machine use a socket in its private folder. Callers on other machines first prove that they know
the run's secret, and the launcher proves it to them; neither sends the secret.

Nothing here needs torch, because the launcher has none. `world` makes groups with this client:
torch's own connects to a port, which every user of the machine can reach.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

from paceline import env

CONNECT_TIMEOUT_S = 2.0
_ANSWER_S = 60.0
"""How long the launcher may take for what needs no wait: it is busy, or the network is cut."""
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


def unpack_number(data: bytes | bytearray) -> int:
    found: int = _NUMBER.unpack(data)[0]
    return found


def pack_text(value: bytes) -> bytes:
    return _NUMBER.pack(len(value)) + value


def make_key(secret: str, run_id: str) -> bytes:
    """What all launchers and workers of a run know."""
    return hmac.digest(secret.encode(), f"paceline/{run_id}".encode(), "sha256")


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
        theirs = bytes(receive_all(connection, NONCE_BYTES))
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


def receive_all(connection: socket.socket, count: int) -> bytearray:
    """Exactly so many bytes; a connection that ends before is a ConnectionError."""
    received = bytearray(count)
    receive_into(connection, memoryview(received))
    return received


def receive_into(connection: socket.socket, missing: memoryview) -> None:
    """Fill this memory, in one system call if the socket has no timeout."""
    while missing:
        if not (got := connection.recv_into(missing, 0, socket.MSG_WAITALL)):
            raise ConnectionError("the other end has closed the connection")
        missing = missing[got:]


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


class StoreClient:
    """A caller of the launcher's store; each thread has a connection of its own.

    A wait that is given up closes its connection, so no answer of the past is ever taken for one
    of now.
    """

    gone: type[Exception]
    late: type[Exception]
    """What is raised where the launcher has gone, and where it has not answered in time."""
    timeout: timedelta
    """How long a wait may take; torch's, as are the errors: `world` has the other half."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._threads = threading.local()
        self._key = make_key(env.read(env.SECRET_VARIABLE), env.read("PACELINE_RUN_ID"))
        self._tell(b"")  # a launcher that cannot be reached is told of at once

    def clone(self) -> StoreClient:
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
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()
        with self._asked(_encode_several(Query.WAIT, keys), limit_s) as connection:
            if receive_all(connection, 1) != GO_ON:
                raise self.late(f"The launcher gave up the wait for {keys[0]!r}.")

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
        except BaseException as error:  # also an interrupt, which leaves the answer unread
            self._threads.__dict__.pop("connection", None)
            if connection is not None:
                connection.close()
            if not isinstance(error, OSError):
                raise
            if isinstance(error, TimeoutError):
                text = f"The launcher's store did not answer within {timeout_s:g} s."
                raise self.late(text) from error
            raise self.gone(f"The launcher's store is gone: {error}.") from error


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encode(query: Query, key: str) -> bytes:
    return bytes([query]) + pack_text(key.encode())


def _encode_several(query: Query, keys: Sequence[str]) -> bytes:
    texts = [pack_text(key.encode()) for key in keys]
    return bytes([query]) + pack_number(len(texts)) + b"".join(texts)


def _receive_text(connection: socket.socket) -> bytes:
    return bytes(receive_all(connection, unpack_number(receive_all(connection, 8))))
