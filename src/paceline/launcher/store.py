"""The store where workers meet, served by the launcher: torch's protocol without torch.

A store in a worker would stop with it, and leave everybody else waiting. The launcher cannot import
torch, which takes seconds. So this is the server side of what `torch.distributed.TCPStore` speaks,
and as much of the client side as launchers on several machines need. Like torch's own it trusts
whoever reaches its socket, which is bound to one address, on a single machine to loopback.

A request is one byte and its arguments: numbers of 8 bytes, texts with their length before them.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from enum import IntEnum
from typing import Any

from paceline.comm.sockets import listen
from paceline.env import LOOPBACK, Placement
from paceline.errors import UsageError

MAGIC = struct.pack("<I", 0x3C85F7CE)
MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_KEYS = 2**13, 2**23, 2**17
"""torch's own limits."""
CONNECT_TIMEOUT_S = 2.0
MOST_GIVEN_UP = 8
_READY, _NOT_READY = b"\0", b"\1"
_GO_ON, _CANCELLED = b"\0", b"\1"
_END, _LOOK = b"!", b"?"


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
    LINE = 100
    """Ours alone: the connection becomes the line of a machine's launcher, whose number follows."""


class Incomplete(Exception):
    """The rest of the request has not arrived yet."""


class HandOver(Exception):
    """The connection is not for the store any more, from byte `at` of what has arrived."""

    def __init__(self, node: int, at: int) -> None:
        self.node, self.at = node, at


class Request:
    """Takes a request apart, as far as it has arrived; what is too long is a ValueError."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise Incomplete
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def number(self, limit: int | None = None) -> int:
        found: int = struct.unpack("<q", self.take(8))[0]
        if limit is not None and not 0 <= found <= limit:
            raise ValueError(f"{found} is beyond {limit}")
        return found

    def key(self) -> bytes:
        return self.take(self.number(MAX_KEY_BYTES))

    def value(self) -> bytes:
        return self.take(self.number(MAX_VALUE_BYTES))

    def several_keys(self) -> list[bytes]:
        return [self.key() for _ in range(self.number(MAX_KEYS))]


class Caller:
    """One connection: what has arrived, what is still to be sent, which keys it waits for."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.arrived, self.unsent = bytearray(), bytearray()
        self.awaited: set[bytes] | None = None


class StoreServer:
    """Serves a store from a thread of this process, from `start` until `close`.

    Callers that come before `start` wait in the socket's queue, so workers can be forked first.
    """

    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host = host or LOOPBACK
        self.socket = listen(self.host, port)
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self.near: socket.socket | None = None
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.callers: set[Caller] = set()
        self.lines: dict[int, tuple[socket.socket, bytes]] = {}
        """By machine, connections of launchers that are not for the store, with what came since."""
        self._given_up: deque[bytes] = deque(maxlen=MOST_GIVEN_UP)
        """What keys begin with that nobody will set any more."""
        self._thread: threading.Thread | None = None

    def first_place(self, size: int) -> Placement:
        """The place of the first of `size` workers that meet here, all on this machine."""
        return Placement(size=size, local_size=size, master_addr=self.host, master_port=self.port)

    def start(self) -> None:
        if self._thread is None:
            self._selector = selectors.DefaultSelector()
            self._wake_reader, self._wake_writer = socket.socketpair()
            for each in (self.socket, self.near, self._wake_reader):
                if each is not None:
                    self._selector.register(each, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="paceline store", daemon=True)
            self._thread.start()

    def listen_nearby(self) -> bool:
        """Also listen on loopback, which stays when the way to other machines is lost; if it can.

        To be called before `start`.
        """
        with suppress(UsageError):
            self.near = listen(LOOPBACK, self.port)
            self.near.setblocking(False)
        return self.near is not None

    def connect(self) -> socket.socket:
        """A connection from inside this process, which no interface that goes down can cut."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        caller = Caller(ours)
        self.callers.add(caller)
        self._selector.register(ours, selectors.EVENT_READ, caller)
        return theirs

    def give_up(self, place: str) -> None:
        """End all waits for keys below `place`, with an error: nobody will set them any more."""
        self._given_up.append(f"/{place}/".encode())
        self._wake_writer.send(_LOOK)

    def clear(self, keep: str = "") -> None:
        """Forget what workers have left here, for those that come next."""
        kept = f"/{keep}/".encode()
        self.queues.clear()
        self._given_up.clear()
        for key in [key for key in self.values if not (keep and key.startswith(kept))]:
            self.values.pop(key, None)

    def close(self) -> None:
        if self._thread is not None:
            self._wake_writer.send(_END)  # its end might be held open by a fork
            self._thread.join()
            for each in (self._wake_writer, self._wake_reader, self._selector):
                each.close()
        for caller in self.callers:
            caller.connection.close()
        for connection, _ in self.lines.values():
            connection.close()
        if self.near is not None:
            self.near.close()
        self.socket.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._wake_reader:
                    if _END in self._wake_reader.recv(2**10):
                        return
                    self._release(self.callers)
                elif key.fileobj in (self.socket, self.near):
                    self._accept(key.fileobj)
                elif key.data in self.callers:  # not dropped by an event before this one
                    self._attend(key.data, events)

    def _accept(self, listener: Any) -> None:
        with suppress(OSError):  # it has left already, or there are too many open files
            connection, _ = listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = Caller(connection)
            self.callers.add(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _attend(self, caller: Caller, events: int) -> None:
        """Read and answer; whoever does not read answers is not heard, and nobody waits for it."""
        try:
            self._send(caller, b"")
            if events & selectors.EVENT_READ:
                caller.arrived += (arrived := caller.connection.recv(2**16))
                if not arrived:
                    raise ConnectionError
            while caller.arrived and not caller.unsent:
                request = Request(caller.arrived)
                answer = self._answer(caller, request)
                del caller.arrived[: request.at]
                self._send(caller, answer)
        except (Incomplete, BlockingIOError):
            pass
        except HandOver as asked:
            self.callers.remove(caller)
            self._selector.unregister(caller.connection)
            before = self.lines.get(asked.node)
            self.lines[asked.node] = caller.connection, bytes(caller.arrived[asked.at :])
            if before is not None:
                before[0].close()
        except (OSError, ValueError):
            self._drop(caller)

    def _send(self, caller: Caller, answer: bytes) -> None:
        """Send as much as goes without waiting."""
        caller.unsent += answer
        with suppress(BlockingIOError):
            while caller.unsent:
                del caller.unsent[: caller.connection.send(caller.unsent)]
        wanted = selectors.EVENT_WRITE if caller.unsent else selectors.EVENT_READ
        self._selector.modify(caller.connection, wanted, caller)

    def _drop(self, caller: Caller) -> None:
        if caller in self.callers:
            self.callers.remove(caller)
            self._selector.unregister(caller.connection)
            caller.connection.close()

    def _answer(self, caller: Caller, request: Request) -> bytes:
        match Query(request.take(1)[0]):
            case Query.VALIDATE:
                if request.take(4) != MAGIC:
                    raise ValueError("not a client of this store")
            case Query.PING:
                return request.take(4)
            case Query.LINE:
                if request.take(4) != MAGIC:
                    raise ValueError("not a launcher of ours")
                raise HandOver(request.number(MAX_KEYS), request.at)
            case Query.SET:
                self._set({request.key(): request.value()})
            case Query.MULTI_SET:
                count = request.number(MAX_KEYS)
                self._set({request.key(): request.value() for _ in range(count)})
            case Query.APPEND:
                key, more = request.key(), request.value()
                self._set({key: self.values.get(key, b"") + more})
            case Query.ADD:
                key, more_by = request.key(), request.number()
                total = int(self.values.get(key, b"0")) + more_by
                self._set({key: str(total).encode()})
                return _number(total)
            case Query.COMPARE_SET:
                key, expected, wanted = request.key(), request.value(), request.value()
                if self.values.get(key, b"") == expected:
                    self._set({key: wanted})
                return _text(self.values.get(key, expected))
            case Query.GET:
                return _text(self.values.get(request.key(), b""))
            case Query.MULTI_GET:
                return b"".join(_text(self.values.get(key, b"")) for key in request.several_keys())
            case Query.CHECK:
                return _READY if all(map(self._has, request.several_keys())) else _NOT_READY
            case Query.WAIT:
                caller.awaited = set(request.several_keys())
                self._release({caller})
            case Query.CANCEL_WAIT:
                caller.awaited = None
                return _CANCELLED
            case Query.COUNT_KEYS:
                return _number(len(self.values))
            case Query.LIST_KEYS:
                return _number(len(self.values)) + b"".join(map(_text, self.values))
            case Query.DELETE:
                return _number(int(self.values.pop(request.key(), None) is not None))
            case Query.PUSH:
                key, value = request.key(), request.value()
                self.queues.setdefault(key, deque()).append(value)
                self._release(self.callers)
            case Query.POP:
                found = self.queues.get(request.key())
                return _number(1) + _text(found.popleft()) if found else _number(0)
            case Query.QUEUE_LENGTH:
                return _number(len(self.queues.get(request.key(), ())))
            case Query.BARRIER:
                key, size = request.key(), request.number()
                arrived = int(self.values.get(key, b"0")) + 1
                last = b"%s/last" % key
                self._set({key: str(arrived).encode()} | ({last: b"1"} if arrived == size else {}))
                caller.awaited = {last}
                self._release({caller})
        return b""

    def _set(self, values: dict[bytes, bytes]) -> None:
        self.values |= values
        self._release(self.callers)

    def _has(self, key: bytes) -> bool:
        return key in self.values or bool(self.queues.get(key))

    def _release(self, callers: set[Caller]) -> None:
        """Answer those whose last awaited key is there now, or will never be."""
        given_up = tuple(self._given_up)
        for caller in list(callers):
            if caller.awaited is None:
                continue
            missing = [key for key in caller.awaited if not self._has(key)]
            if not missing or any(key.startswith(given_up) for key in missing):
                caller.awaited = None
                try:
                    self._send(caller, _CANCELLED if missing else _GO_ON)
                except OSError:
                    self._drop(caller)


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _text(value: bytes) -> bytes:
    return _number(len(value)) + value


class StoreClient:
    """What launchers of several machines ask their store. A store that is gone is an OSError."""

    def __init__(
        self, host: str, port: int, prefix: str, timeout_s: float, server: StoreServer | None = None
    ) -> None:
        """`server` is the one to ask if it is in this process."""
        self.prefix = prefix
        if server is not None:
            self.connection = server.connect()
        else:
            self.connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
            # Otherwise a request after one without an answer waits for a delayed receipt.
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ping = bytes([Query.PING]) + MAGIC
        self.connection.sendall(bytes([Query.VALIDATE]) + MAGIC + ping)
        if self._receive(4) != MAGIC:
            raise ConnectionError("what listens there is not a store")
        self.connection.settimeout(timeout_s)

    def set(self, key: str, value: str) -> None:
        self._ask(Query.SET, self._key(key), _text(value.encode()))

    def get(self, key: str) -> str:
        """A value that is there."""
        self._ask(Query.GET, self._key(key))
        return self._receive(self._receive_number()).decode()

    def add(self, key: str, number: int) -> int:
        self._ask(Query.ADD, self._key(key), _number(number))
        return self._receive_number()

    def has(self, key: str) -> bool:
        self._ask(Query.CHECK, _number(1), self._key(key))
        return self._receive(1) == _READY

    def set_first(self, key: str, value: str) -> None:
        """Set what nobody has set before."""
        self._ask(Query.COMPARE_SET, self._key(key), _text(b""), _text(value.encode()))
        self._receive(self._receive_number())

    def close(self) -> None:
        self.connection.close()

    def _key(self, key: str) -> bytes:
        return _text(f"/{self.prefix}/{key}".encode())

    def _ask(self, query: Query, *parts: bytes) -> None:
        self.connection.sendall(b"".join([bytes([query]), *parts]))

    def _receive_number(self) -> int:
        return Request(bytearray(self._receive(8))).number()

    def _receive(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            part = self.connection.recv(min(count - len(received), 2**16))
            if not part:
                raise ConnectionError("the store has closed the connection")
            received += part
        return received
