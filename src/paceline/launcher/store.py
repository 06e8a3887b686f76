"""The store where workers meet, served by the launcher: torch's protocol without torch.

A store in a worker would stop with it, and leave all others waiting. The launcher cannot import
torch, which takes seconds. So this is the server side of what `torch.distributed.TCPStore` speaks.

There are two stores in it, and nothing passes from one to the other:

    ours      what workers of the run agree on: for callers of the socket in the launcher's private
              folder, and from other machines for those who prove the run's secret
    theirs    for scripts that call torch's own `init_process_group`, on the port that they are
              told. torch's protocol has no secret: nothing of ours is decided by what is there

Both are bounded in bytes and callers, and what goes wrong for one caller ends that one alone.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress

from paceline.env import LOOPBACK, Placement
from paceline.group import (
    CANCELLED,
    GO_ON,
    NONCE_BYTES,
    NOT_READY,
    PROOF_BYTES,
    READY,
    STORE_CALLER,
    Query,
    find_peer_user,
    listen,
    pack_number,
    pack_text,
    prove,
    short_path,
)
from paceline.launcher.space import (
    MAX_VALUE_BYTES,
    Caller,
    Space,
    Talk,
    join_texts,
    read_count,
    read_key,
    read_keys,
    read_number,
    read_value,
)

MAGIC = struct.pack("<I", 0x3C85F7CE)
OUR_BYTES = THEIR_BYTES = 4 * MAX_VALUE_BYTES
"""A comparison keeps three of the longest values: the old one, the one expected, the new one."""
WORKER_BYTES = 2**16
"""What a worker may take of ours; two generations of eight workers took 11 kB of each."""
MOST_CALLERS = 2**12
PROOF_S = 5.0
"""How long a caller from another machine may take to prove that it belongs to the run."""
MOST_UNPROVEN = 64
SLICE_S = 0.002
"""How long callers of the port are attended to before those of the run have their turn again."""
NAME = "store"
_READ_BYTES = 2**13


class HandOver(Exception):
    """The connection is not for the store: it is that of a launcher of this name."""

    def __init__(self, name: bytes, key: bytes) -> None:
        self.name, self.key = name, key


class StoreServer:
    """Serves both stores from a thread of this process, from `start` until `close`.

    Callers that come before `start` wait in the socket's queue, so workers can be forked first.
    `key` is what callers from other machines must know; without one they can have torch's store
    only.
    """

    def __init__(self, folder: str, host: str = "", port: int = 0, key: bytes = b"") -> None:
        self.host, self.key = host or LOOPBACK, key
        self.path = os.path.join(folder, NAME)
        self.socket = listen(self.host, port)
        self.near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self.path) as path:
            self.near.bind(path)
        self.near.listen(MOST_CALLERS)
        for each in (self.socket, self.near):
            each.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self.ours, self.theirs = Space(OUR_BYTES), Space(THEIR_BYTES)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most_callers = min(limit // 4, MOST_CALLERS) if limit > 0 else MOST_CALLERS
        """In each of the stores: descriptors must be left for workers."""
        self.channels: dict[bytes, tuple[socket.socket, bytes, bytes]] = {}
        """By name, connections of launchers: what came since, and the connection's key."""
        self.admitted: set[bytes] | None = None
        """The names of launchers that may connect; None as long as all may."""
        self._unproven: dict[Caller, None] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    def make_room(self, size: int) -> None:
        """Let `size` workers meet here."""
        self.ours.most_bytes = max(self.ours.most_bytes, size * WORKER_BYTES)

    def first_place(self, size: int) -> Placement:
        """The place of the first of `size` workers that meet here, all on this machine."""
        self.make_room(size)
        return Placement(
            size=size,
            local_size=size,
            master_addr=self.host,
            master_port=self.port,
            store=self.path,
        )

    def start(self) -> None:
        if self._thread is None:
            self._selector = selectors.DefaultSelector()
            self._wake_reader, self._wake_writer = socket.socketpair()
            for each in (self.socket, self.near, self._wake_reader):
                self._selector.register(each, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="paceline store", daemon=True)
            self._thread.start()

    def give_up(self, place: str) -> None:
        """End all waits for keys below `place`, with an error: they will not be set any more."""

        def end_waits() -> None:
            self.ours.given_up.append(prefix := f"{place}/".encode())
            for key, waiting in list(self.ours.waiting.items()):
                if key.startswith(prefix):
                    self._release(list(waiting))

        self._do(end_waits)

    def clear(self) -> None:
        """Forget what workers have left, before others start."""
        for space in (self.ours, self.theirs):
            self._do(space.clear)

    def close(self) -> None:
        if self._thread is not None:
            self._wake_writer.send(b"!")  # its end might be held open by a fork
            self._thread.join()
            for each in (self._wake_writer, self._wake_reader, self._selector):
                each.close()
        for caller in [*self.ours.callers, *self.theirs.callers]:
            caller.connection.close()
        for connection, _, _ in self.channels.values():
            connection.close()
        self.near.close()
        self.socket.close()

    def _do(self, task: Callable[[], None]) -> None:
        """Have the thread do it before it answers a client that calls from now on."""
        if self._thread is None:
            task()
            return
        self._tasks.append(task)
        self._wake_writer.send(b"?")

    def _serve(self) -> None:
        while True:
            events = self._selector.select(PROOF_S if self._unproven else None)
            while self._tasks:
                self._tasks.popleft()()
            now_s = time.monotonic()
            for caller in [c for c in self._unproven if c.prove_by_s < now_s]:
                self._drop(caller)
            # What is not attended to now is told of again: epoll and poll forget nothing.
            for key, mask in sorted(events, key=self._is_strangers):
                if key.fileobj is self._wake_reader:
                    if b"!" in self._wake_reader.recv(2**10):
                        return
                elif key.fileobj is self.near:
                    self._accept(self.near, self.ours)
                elif key.fileobj is self.socket:
                    self._accept(self.socket, self.theirs)
                elif self._is_strangers((key, mask)) and time.monotonic() > now_s + SLICE_S:
                    break
                elif key.data in key.data.space.callers:  # not dropped by an event before this one
                    self._attend(key.data, mask)

    def _is_strangers(self, event: tuple[selectors.SelectorKey, int]) -> bool:
        caller = event[0].data
        return caller is not None and caller.space is self.theirs

    def _accept(self, listener: socket.socket, space: Space) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # or this would be asked all the time
                time.sleep(SLICE_S)
            return
        caller = Caller(connection, space)
        try:
            if listener is self.socket:
                if find_peer_user(connection) not in (None, os.geteuid()):
                    raise PermissionError("another user of this machine")
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(space.callers) >= self.most_callers:
                self._drop(self._most_idle(space))
            caller.count()
        except (OSError, ValueError, StopIteration):
            connection.close()
            return
        connection.setblocking(False)
        caller.talk = self._converse(caller)
        caller.wanted = next(caller.talk)
        space.callers[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _most_idle(self, space: Space) -> Caller:
        """Who makes room for another: one that has never asked for anything, or, of those that
        prove nothing, the one that has said nothing for the longest and waits for nothing."""
        silent = (other for other in space.callers if not other.has_asked)
        idle = (other for other in self.theirs.callers if not other.awaited)
        return next(silent, None) or next(idle if space is self.theirs else iter(()))

    def _attend(self, caller: Caller, events: int) -> None:
        """Read and answer; a client that does not read answers is not heard, and not waited for."""
        try:
            self._send(caller, b"")
            if events & selectors.EVENT_READ:
                caller.arrived += (arrived := caller.connection.recv(_READ_BYTES))
                if not arrived:
                    raise ConnectionError
                caller.space.callers[caller] = caller.space.callers.pop(caller)  # the last now
            while len(caller.arrived) >= caller.wanted and not caller.unsent:
                taken = bytes(caller.arrived[: caller.wanted])
                del caller.arrived[: caller.wanted]
                caller.held += len(taken)
                caller.wanted = caller.talk.send(taken)
            caller.count()
        except BlockingIOError:
            pass
        except HandOver as asked:
            if self.admitted is not None and asked.name not in self.admitted:
                self._drop(caller)
                return
            self._forget(caller)
            before = self.channels.get(asked.name)
            self.channels[asked.name] = caller.connection, bytes(caller.arrived), asked.key
            if before is not None:
                before[0].close()
        except Exception:  # whatever it was, this caller has brought it about
            self._drop(caller)

    def _send(self, caller: Caller, answer: bytes) -> None:
        """Send as much as goes without waiting."""
        caller.unsent += answer
        with suppress(BlockingIOError):
            while caller.unsent:
                del caller.unsent[: caller.connection.send(caller.unsent)]
        wanted = selectors.EVENT_WRITE if caller.unsent else selectors.EVENT_READ
        if wanted != caller.events:
            caller.events = wanted
            self._selector.modify(caller.connection, wanted, caller)

    def _forget(self, caller: Caller) -> None:
        self._stop_waiting(caller)
        caller.count(is_gone=True)
        del caller.space.callers[caller], caller.talk  # which refer to each other
        self._unproven.pop(caller, None)
        self._selector.unregister(caller.connection)

    def _drop(self, caller: Caller) -> None:
        if caller in caller.space.callers:
            self._forget(caller)
            caller.connection.close()

    def _converse(self, caller: Caller) -> Talk:
        """Everything that one caller asks for, request by request."""
        while True:
            caller.held = 0
            query = Query((yield 1)[0])
            caller.has_asked = True
            if query is Query.PROVE:
                yield from self._prove(caller)
            else:
                self._send(caller, (yield from self._answer(query, caller)))

    def _prove(self, caller: Caller) -> Talk:
        """Let a caller from another machine prove that it belongs to the run."""
        if not self.key or caller.space is self.ours:
            raise ValueError("this store has no secret")
        while len(self._unproven) >= MOST_UNPROVEN:
            self._drop(next(iter(self._unproven)))
        self._unproven[caller] = None
        caller.prove_by_s = time.monotonic() + PROOF_S
        name = yield NONCE_BYTES
        nonces = (yield NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        self._send(caller, nonces[1])
        proof = yield PROOF_BYTES
        if not hmac.compare_digest(proof, prove(self.key, b"caller", name, *nonces)):
            raise ValueError("it does not know the secret")
        self._send(caller, prove(self.key, b"launcher", name, *nonces))
        del self._unproven[caller]
        if name != STORE_CALLER:
            raise HandOver(name, prove(self.key, b"channel", name, *nonces))
        caller.count(is_gone=True)
        del caller.space.callers[caller]
        caller.space = self.ours
        caller.space.callers[caller] = None

    def _answer(self, query: Query, caller: Caller) -> Generator[int, bytes, bytes]:
        space = caller.space
        match query:
            case Query.VALIDATE:
                if (yield 4) != MAGIC:
                    raise ValueError("not a client of this store")
            case Query.PING:
                return (yield 4)
            case Query.SET:
                self._set(caller, (yield from read_key()), (yield from read_value()))
            case Query.MULTI_SET:
                for _ in range((yield from read_count())):
                    self._set(caller, (yield from read_key()), (yield from read_value()))
            case Query.APPEND:
                key, more = (yield from read_key()), (yield from read_value())
                self._set(caller, key, space.values.get(key, b"") + more)
            case Query.ADD:
                key, more_by = (yield from read_key()), (yield from read_number())
                answer = pack_number(total := int(space.values.get(key, b"0")) + more_by)
                self._set(caller, key, str(total).encode())
                return answer
            case Query.COMPARE_SET:
                key, expected = (yield from read_key()), (yield from read_value())
                wanted = yield from read_value()
                if space.values.get(key, b"") == expected:
                    self._set(caller, key, wanted)
                # Where there is no such key torch's server answers with what was expected.
                return pack_text(space.values.get(key, expected))
            case Query.GET:
                return pack_text(space.values.get((yield from read_key()), b""))
            case Query.MULTI_GET:
                return join_texts([space.values.get(key, b"") for key in (yield from read_keys())])
            case Query.CHECK:
                keys = yield from read_keys()
                return READY if all(map(space.has, keys)) else NOT_READY
            case Query.WAIT:
                self._wait(caller, (yield from read_keys()))
            case Query.CANCEL_WAIT:
                self._stop_waiting(caller)
                return CANCELLED
            case Query.COUNT_KEYS:
                return pack_number(len(space.values))
            case Query.LIST_KEYS:
                return pack_number(len(space.values)) + join_texts(space.values)
            case Query.DELETE:
                return pack_number(int(space.delete((yield from read_key()))))
            case Query.PUSH:
                key, value = (yield from read_key()), (yield from read_value())
                caller.give()
                self._release(space.push(key, value))
            case Query.POP:
                found = space.pop((yield from read_key()))
                return pack_number(0) if found is None else pack_number(1) + pack_text(found)
            case Query.QUEUE_LENGTH:
                return pack_number(len(space.queues.get((yield from read_key()), ())))
            case Query.BARRIER:
                key, size = (yield from read_key()), (yield from read_number())
                arrived = int(space.values.get(key, b"0")) + 1
                last = b"%s/last" % key
                self._set(caller, key, str(arrived).encode())
                if arrived == size:
                    self._set(caller, last, b"1")
                self._wait(caller, [last])
        return b""

    def _set(self, caller: Caller, key: bytes, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError("too long")
        caller.give()
        self._release(caller.space.set(key, value))

    def _stop_waiting(self, caller: Caller) -> None:
        waiting = caller.space.waiting
        if caller.awaited and (others := waiting.get(caller.awaited[-1])) is not None:
            others.discard(caller)
            if not others:
                del waiting[caller.awaited[-1]]
        caller.awaited = []

    def _release(self, callers: Iterable[Caller]) -> None:
        """Answer those whose last awaited key is there now, or will never be."""
        for caller in callers:
            try:
                self._wait(caller, caller.awaited)
            except Exception:  # as in `_attend`; others must not notice
                self._drop(caller)

    def _wait(self, caller: Caller, keys: list[bytes]) -> None:
        """Answer when all keys have been there, or one will never be."""
        self._stop_waiting(caller)
        space = caller.space
        while keys and space.has(keys[-1]):
            keys.pop()
        if not keys:
            self._send(caller, GO_ON)
        elif keys[-1].startswith(tuple(space.given_up)):
            self._send(caller, CANCELLED)
        else:
            caller.awaited = keys
            space.waiting.setdefault(keys[-1], set()).add(caller)
