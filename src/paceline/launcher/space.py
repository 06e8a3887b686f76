"""What a store keeps, within limits: keys and queues, and who waits for them; requests, in parts.

A request is read as it arrives, each of its parts once, so one that never ends costs no more than
its bytes.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Generator, Iterable

from paceline.group import pack_text, unpack_number

MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_KEYS = 2**13, 2**21, 2**12
"""Of a request; torch's own client allows keys as long, and values of 8 MiB."""
MAX_ANSWER_BYTES = 2 * MAX_VALUE_BYTES
ENTRY_BYTES = 2**8
"""What a key costs beside its bytes."""
CALLER_BYTES = 2**12
"""What a caller costs that says nothing."""
MOST_GIVEN_UP = 8

Talk = Generator[int, bytes, None]
"""Asks for so many bytes, one after the other; what is sent in answer goes through the caller."""


class Space:
    """Keys, queues and waits of one store, and how much its callers take.

    Invariant: `used` counts every stored byte and every byte that is kept for a caller.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used = most_bytes, 0
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waiting: dict[bytes, set[Caller]] = {}
        """By the key that they wait for next."""
        self.given_up: deque[bytes] = deque(maxlen=MOST_GIVEN_UP)
        """Prefixes of keys that will not be set any more."""
        self.callers: dict[Caller, None] = {}
        """In the order in which they last said something."""

    def take(self, count: int) -> None:
        """Count bytes that are kept from now on; negative for those that are not any more."""
        if count > 0 and self.used + count > self.most_bytes:
            raise ValueError("the store is full")
        self.used += count

    def has(self, key: bytes) -> bool:
        return key in self.values or bool(self.queues.get(key))

    def set(self, key: bytes, value: bytes) -> list[Caller]:
        """Keep a value; those who have waited for it."""
        old = self.values.get(key)
        entry = len(key) + ENTRY_BYTES
        self.take(len(value) - len(old) if old is not None else len(value) + entry)
        self.values[key] = value
        return list(self.waiting.get(key, ()))

    def delete(self, key: bytes) -> bool:
        if (old := self.values.pop(key, None)) is not None:
            self.take(-len(key) - len(old) - ENTRY_BYTES)
        return old is not None

    def push(self, key: bytes, value: bytes) -> list[Caller]:
        self.take(len(key) + len(value) + ENTRY_BYTES)
        self.queues.setdefault(key, deque()).append(value)
        return list(self.waiting.get(key, ()))

    def pop(self, key: bytes) -> bytes | None:
        queue = self.queues.get(key)
        if not queue:
            return None
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        self.take(-len(key) - len(value) - ENTRY_BYTES)
        return value

    def clear(self) -> None:
        """Forget what workers have left here, for those that come next."""
        for key in list(self.values):
            self.delete(key)
        for key in list(self.queues):
            while self.pop(key) is not None:
                pass
        self.given_up.clear()


class Caller:
    """One connection: what has arrived, what is still to be sent, which keys it waits for."""

    def __init__(self, connection: socket.socket, space: Space) -> None:
        self.connection, self.space = connection, space
        self.arrived, self.unsent = bytearray(), bytearray()
        self.awaited: list[bytes] = []
        """The last of them is waited for next."""
        self.counted = self.held = 0
        """What the space knows of; what the talk has taken of a request that is not all there."""
        self.talk: Talk
        self.wanted = 0
        """The talk continues when so many bytes have arrived."""
        self.prove_by_s = 0.0
        self.has_asked = False
        """Who never asks for anything makes room for others."""
        self.events = selectors.EVENT_READ

    def count(self, *, is_gone: bool = False) -> None:
        """Let the space know what is kept for this caller."""
        kept = CALLER_BYTES + len(self.arrived) + self.held + len(self.unsent)
        kept += sum(len(key) + ENTRY_BYTES for key in self.awaited)
        kept = 0 if is_gone else kept
        self.space.take(kept - self.counted)  # first: where there is no room, nothing is counted
        self.counted = kept

    def give(self) -> None:
        """What was taken of a request belongs to the store now, which counts it once."""
        self.held = 0
        self.count()


def read_number() -> Generator[int, bytes, int]:
    return unpack_number((yield 8))


def read_text(most: int) -> Generator[int, bytes, bytes]:
    length = yield from read_number()
    if not 0 <= length <= most:
        raise ValueError(f"{length} is beyond {most}")
    return (yield length) if length else b""


def read_key() -> Generator[int, bytes, bytes]:
    return read_text(MAX_KEY_BYTES)


def read_value() -> Generator[int, bytes, bytes]:
    return read_text(MAX_VALUE_BYTES)


def read_count() -> Generator[int, bytes, int]:
    count = yield from read_number()
    if not 0 <= count <= MAX_KEYS:
        raise ValueError(f"{count} is beyond {MAX_KEYS}")
    return count


def read_keys() -> Generator[int, bytes, list[bytes]]:
    keys, left = [], MAX_ANSWER_BYTES
    for _ in range((yield from read_count())):
        keys.append((yield from read_text(min(left, MAX_KEY_BYTES))))
        left -= len(keys[-1])
    return keys


def join_texts(values: Iterable[bytes]) -> bytes:
    """An answer of several texts, if it is not too long."""
    parts, left = [], MAX_ANSWER_BYTES
    for value in values:
        parts.append(pack_text(value))
        if (left := left - len(parts[-1])) < 0:
            raise ValueError("too long an answer")
    return b"".join(parts)
