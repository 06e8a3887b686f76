"""What launcher and worker tell each other, and what a worker leaves behind.

They talk through a pair of sockets, one JSON message at a time. What others need of a worker that
was killed lies in memory that the launcher has mapped too: writing there wakes no process, so it
can be done in every step, and it outlives the worker.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline import env

MESSAGE_BYTES = 64 * 2**10
SLOT_BYTES = 2**20
"""Takes memory only as far as it is used."""
LAST_GENERATION = 2**53
"""The number of the generation without members: the run ends."""
MEETINGS = "paceline/generation"
"""In the launcher's store, what members of generations need to find each other."""
_WORD_BYTES = 8


def meeting_place(generation: int) -> str:
    """What the keys of a generation in the launcher's store begin with."""
    return f"{MEETINGS}/{generation}"


@dataclass(frozen=True, slots=True)
class Generation:
    """Who takes part from now on, seen by one of them."""

    number: int
    rank: int
    size: int
    workers: list[int] = field(default_factory=list)
    """By rank, their numbers."""
    is_near: bool = False
    """All of them are on one machine, though others had been with them."""
    is_urgent: bool = True
    """The one before is broken; otherwise it ends between two steps."""
    leaves: bool = False
    """This worker is asked to go when it begins."""
    is_welcome: bool = False
    """Said again to a newcomer that has joined: from now on it is not left behind."""
    is_awaited: bool = False
    """No generation yet: the launcher waits for workers, and those who are there wait with it."""
    ends: str = ""
    """Why no generation follows, if none does: this one is not to be joined."""
    inherited: dict[str, Any] = field(default_factory=dict)
    """The ledgers of workers that died, by name; on rank 0 only."""


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Send a message of any length; one that a socket would not take travels as a file."""
    data = json.dumps(message).encode()
    if len(data) <= MESSAGE_BYTES:
        line.send(data)
        return
    with open(os.memfd_create("paceline-message", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        socket.send_fds(line, [b"f"], [file.fileno()])


def receive(line: socket.socket) -> dict[str, Any] | None:
    """The next message; {} at the end, None on a line that does not wait if there is none yet."""
    try:
        data, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 1)
    except BlockingIOError:
        return None
    except OSError:
        return {}
    for number in files:
        with open(number, "rb") as file:
            file.seek(0)  # a descriptor that is sent shares its position
            data = file.read()
    return json.loads(data) if data else {}


class Ledger:
    """A page of a worker: what only it knows.

    Two slots take turns, and the number of the one that is complete is written last: whenever
    the worker is killed, what it wrote before is whole.
    """

    BYTES = _WORD_BYTES + 2 * SLOT_BYTES

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self.BYTES)
        self._words = memoryview(self._memory)[:_WORD_BYTES].cast("Q")

    @classmethod
    def create(cls) -> int:
        """The descriptor of an empty one."""
        descriptor = os.memfd_create("paceline-ledger", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, cls.BYTES)
        return descriptor

    def write(self, value: dict[str, Any]) -> bool:
        """Replace what is there; False where it is too long, which leaves the old value."""
        data = json.dumps(value).encode()
        if len(data) + _WORD_BYTES > SLOT_BYTES:
            return False
        turn = self._words[0] + 1
        start = _WORD_BYTES + turn % 2 * SLOT_BYTES
        record = len(data).to_bytes(_WORD_BYTES, "little") + data
        self._memory[start : start + len(record)] = record
        self._words[0] = turn
        return True

    def read(self) -> dict[str, Any]:
        turn = self._words[0]
        if not turn:
            return {}
        start = _WORD_BYTES + turn % 2 * SLOT_BYTES
        length = int.from_bytes(self._memory[start : start + _WORD_BYTES], "little")
        data = self._memory[start + _WORD_BYTES : start + _WORD_BYTES + min(length, SLOT_BYTES)]
        try:
            value = json.loads(data)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def close(self) -> None:
        self._words.release()
        self._memory.close()


class Link:
    """A worker's line to its launcher."""

    def __init__(
        self,
        line: socket.socket,
        ledger: Ledger,
        is_replacement: bool = False,
        facts: dict[str, Any] | None = None,
        survives_errors: bool = False,
    ) -> None:
        self.ledger = ledger
        self.facts = facts or {}
        """Of the run that a replacement joins."""
        self.code: dict[str, int] = self.facts.pop("code", {})
        """What its script was when it began."""
        self.facts.pop("grows", None)  # said to the launcher alone
        self.backend = str(self.facts.pop("backend", ""))
        """Of its group."""
        self.began: tuple[int, float] | None = self.facts.pop("began", None)
        """After which step, and when, the first workers began; None where this is one of them."""
        self.is_replacement = is_replacement
        """Whether the others are training already."""
        self.survives_errors = survives_errors
        """Whether the others continue after an exception of this worker's script."""
        self._line = line

    @classmethod
    def find(cls) -> Link | None:
        """The line that this process was started with, if its launcher keeps trainings alive.

        It is for the first run of a process: a replacement could not begin with a later one.
        """
        given = env.take_survival()
        if given is None:
            return None
        # A copy: the line stays open as long as the process, whatever becomes of the run.
        line, is_replacement = socket.socket(fileno=os.dup(given["line"])), given["is_replacement"]
        facts = receive(line) if is_replacement else None
        survives_errors = bool(given.get("survives_errors"))
        return cls(line, Ledger(given["ledger"]), is_replacement, facts, survives_errors)

    def tell(self, what: str, **values: Any) -> None:
        """Say something; a launcher that is gone ends this process soon enough."""
        with suppress(OSError):
            send(self._line, {"said": what, **values})

    def announcements(self) -> Iterator[Generation]:
        """Every generation that is announced, as it is; ends with the launcher."""
        while message := receive(self._line):
            yield Generation(**message)
