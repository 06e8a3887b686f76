"""Keeping a training alive: who died is replaced, and the others are told to continue without it.

`survive.roster` decides, the supervisor hears and starts; here is what lies between: the lines to
the workers, the ledgers of the dead, and what a person reads of it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.units import count_text
from paceline.survive.link import Ledger, receive, send
from paceline.survive.roster import (
    Announce,
    Dismiss,
    GiveUp,
    Order,
    RestartAll,
    Roster,
    Start,
    Stop,
)


@dataclass
class Line:
    """The launcher's end of what it shares with one worker."""

    socket: socket.socket
    ledger: Ledger
    theirs: tuple[int, int]
    """Descriptors for the worker: its end of the line, and its ledger."""

    @classmethod
    def open(cls) -> Line:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # a worker that is stopped must not stop the launcher
        descriptor = Ledger.create()
        return cls(ours, Ledger(descriptor), (theirs.detach(), descriptor))

    def close(self) -> None:
        self.socket.close()
        self.ledger.close()


@dataclass
class Generations:
    """The workers of one machine, from generation to generation."""

    roster: Roster
    say: Callable[[str], None]
    lines: dict[int, Line] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the run, as its first workers told them."""
    starts: list[Start] = field(default_factory=list)
    """Replacements that are to be started when their time has come."""
    dismissed: set[int] = field(default_factory=set)
    """Replacements that came too late, and are to be ended."""
    is_over: bool = False
    """Nobody can continue, or nobody should."""
    lost_in: int = 0
    """The step in which the last worker died; 0 while somebody lives."""
    is_on: bool = False
    """Whether a run of ours trains: other scripts end with their first worker."""
    _finished: set[int] = field(default_factory=set)
    _leavers: list[int] = field(default_factory=list)
    """Workers whose script has left its loop, while others have not."""
    _left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ledgers of the dead, and of those who left, that nobody has taken yet."""
    _ledgers: int = 0
    _died_s: float = 0.0
    _training: int = 0
    """How many were training when that was last looked at."""

    def on_word(self, seat: int) -> None:
        """A worker says something."""
        while (message := receive(self.lines[seat].socket)) is not None:
            self._hear(seat, message)

    def _hear(self, seat: int, message: dict[str, Any]) -> None:
        match message:
            case {"said": "joined", "generation": int(number)}:
                self.is_on = True
                self.facts = message.get("facts", self.facts)
                for name in message.get("taken", ()):
                    self._left.pop(name, None)
                self._carry_out(self.roster.on_joined(seat, number))
                self._tell_of_recovery(seat, number)
            case {"said": "ready"}:
                self._carry_out(self.roster.on_ready(seat))
            case {"said": "lost", "generation": int(number)}:
                self._carry_out(self.roster.on_lost(seat, number, time.monotonic()))
            case {"said": "leaving"}:
                self._carry_out(self.roster.on_leaving(seat, time.monotonic()))
            case {"said": "left", "step": int(step)}:
                self._inherit(seat, self.lines[seat].ledger.read())
                orders = self.roster.on_left(seat)
                self.say(
                    f"worker {seat} has left after step {step}, as asked; {self._rest()}. "
                    f"`kill -USR1 {os.getpid()}` adds one."
                )
                self._carry_out(orders)
            case {"said": "finished", "is_left": bool(is_left)}:
                self._finished.add(seat)
                if is_left:
                    self._leavers.append(seat)
                    self._inherit(seat, self.lines[seat].ledger.read())
                self._carry_out(
                    self.roster.on_finished(seat, is_left=is_left, now_s=time.monotonic())
                )

    def open_line(self, seat: int) -> Line:
        """The line to a worker that is about to be started."""
        line = self.lines[seat] = Line.open()
        self._finished.discard(seat)
        if self.is_on:
            send(line.socket, self.facts)
        return line

    def close_line(self, seat: int) -> dict[str, Any]:
        """Hear the last words of a worker that has ended; its ledger."""
        self.on_word(seat)
        line = self.lines.pop(seat)
        ledger = line.ledger.read()
        line.close()
        return ledger

    def on_exit(
        self,
        seat: int,
        ledger: dict[str, Any],
        how: str,
        *,
        step: int,
        is_kill: bool,
        is_error: bool,
        ends_run: bool = False,
    ) -> bool:
        """A worker has ended early, by an error of its own or not; whether others can continue.

        `ends_run` is its word that nobody should.
        """
        if seat in self.dismissed:
            return True
        if not self.is_on or seat in self._finished:
            return False
        if self.roster.has_left(seat):
            self.roster.on_gone(seat)
            return True
        was_member = seat in self.roster.members
        if was_member:
            self._died_s = time.monotonic()
            self._inherit(seat, ledger)
        orders = self.roster.on_died(
            seat, step=step, how=how, is_kill=is_kill, now_s=time.monotonic(), ends_run=ends_run
        )
        if was_member and not ends_run:
            self.say(f"worker {seat} {how} in step {step}; {self._rest()}.")
        self._carry_out(orders)
        if not self.roster.members and not is_error:
            self.lost_in = step
        return not self.is_over and (bool(self.roster.members) or not self.roster.is_finished)

    def grow(self) -> None:
        """A person wants one worker more."""
        size, shards = self.roster.size, self.facts.get("shards", 0)
        if not self.is_on:
            self.say("SIGUSR1 adds a worker to a run that trains, and none does yet.")
        elif size >= shards:
            self.say(
                f"no worker is added: {size} share {count_text(shards, 'shard')}, so another one "
                "would have nothing to compute. A new run can have more: Run(shards=...)."
            )
        else:
            self._carry_out(self.roster.grow(time.monotonic()))

    def shrink(self) -> None:
        """A person wants one worker less."""
        if not self.is_on:
            self.say("SIGUSR2 takes a worker from a run that trains, and none does yet.")
        elif self.roster.size <= self.roster.min_workers:
            self.say(
                f"no worker is taken away: {self.roster.size} train, and --min-workers is "
                f"{self.roster.min_workers}."
            )
        else:
            self._carry_out(self.roster.shrink(time.monotonic()))

    def give_up(self, seat: int, reason: str) -> None:
        """A worker cannot be started."""
        self._carry_out(self.roster.give_up(seat, reason))

    def _rest(self) -> str:
        left = len(self.roster.members)
        return "1 continues" if left == 1 else f"{left} continue"

    def _inherit(self, seat: int, ledger: dict[str, Any]) -> None:
        """Keep what a worker leaves behind for the others."""
        for name in ledger.get("taken", ()):
            self._left.pop(name, None)
        self._ledgers += 1
        self._left[f"{seat}.{self._ledgers}"] = ledger

    @property
    def due_s(self) -> float | None:
        times = [start.at_s for start in self.starts]
        if self.roster.due_s is not None:
            times.append(self.roster.due_s)
        return min(times, default=None)

    def take_starts(self) -> list[int]:
        """Seats whose replacement is to be started now."""
        now_s = time.monotonic()
        self._carry_out(self.roster.on_time(now_s))
        due = [start for start in self.starts if start.at_s <= now_s]
        self.starts = [start for start in self.starts if start.at_s > now_s]
        return [start.seat for start in due]

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Announce():
                    self._announce(order)
                case Start():
                    self.starts.append(order)
                case Dismiss(seat):
                    self.starts = [start for start in self.starts if start.seat != seat]
                    self.dismissed.add(seat)
                case GiveUp(seat, reason):
                    self.say(f"worker {seat} is not replaced: {reason}.")
                case Stop(reason):
                    self.is_over = True
                    self.say(f"{reason}.")
                case RestartAll():
                    self.is_over = True

    def _announce(self, order: Announce) -> None:
        while self._leavers and order.members:
            seat = self._leavers.pop()
            self.say(f"worker {seat} has left its loop; {self._rest()}.")
        for rank, seat in enumerate(order.members):
            message = {
                "number": order.generation,
                "rank": rank,
                "size": len(order.members),
                "is_urgent": order.is_urgent,
                "leaves": seat in order.leaving,
                "inherited": self._left if rank == 0 else {},
            }
            try:
                send(self.lines[seat].socket, message)
            except (OSError, KeyError):
                continue  # its end will be heard of next

    def _tell_of_recovery(self, seat: int, number: int) -> None:
        if not self.roster.is_formed:
            return
        size = len(self.roster.members)
        if self._died_s:
            ms = 1000 * (time.monotonic() - self._died_s)
            self._died_s = 0.0
            self.say(f"the others continue after {ms:.0f} ms; no step was lost.")
        elif number and size == self.roster.size > self._training:
            self.say(f"all {size} workers train again.")
        self._training = size
