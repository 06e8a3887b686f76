"""Keeping a training alive: who died is replaced, and the others are told to continue without it.

`survive.roster` decides, the supervisor hears and starts; here is what lies between: the lines to
the workers, the ledgers of the dead, and what a person reads of it. Of several machines the one
that serves the store leads: its launcher decides, and those of the others are `Follower`s.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from paceline.launcher.wire import LineBroken, Wire
from paceline.observe.units import count_text
from paceline.survive.link import Ledger, meeting_place, receive, send
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

BEFORE_TRAINING = -1
"""Stands for the step in which a worker died, where nothing was trained yet."""
LEAD_SILENCE_S, FOLLOWER_SILENCE_S = 6.0, 4.0
"""After how long without a word a machine counts as gone, as seen by the lead and by the others.
Who is cut off ends its workers before the lead continues without them: two must never write."""

HOW_LENGTH = 200
"""So much of how a worker ended is kept in the run folder."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a launcher ends its workers, other than by a failure that it has seen itself."""

    text: str = ""
    signal: int = 0
    """The signal that another machine's launcher got, if that is why."""
    lost_in: int = 0
    """The step in which the last worker died: the checkpoint carries on."""
    seat: int = -1
    """The worker whose end was one too many."""
    is_final: bool = False
    """Nobody starts again."""
    is_hard: bool = False
    """Nobody here may write anything any more."""


@dataclass(kw_only=True)
class Workers:
    """The workers of this machine, whoever decides about them."""

    silence_s: ClassVar[float]
    say: Callable[[str], None]
    wires: dict[int, Wire] = field(default_factory=dict)
    """Lines to launchers of other machines, by machine."""
    lines: dict[int, Line] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the run, as its first workers told them."""
    wanted: list[int] = field(default_factory=list)
    """Seats of this machine that are to be filled now."""
    dismissed: set[int] = field(default_factory=set)
    """Replacements that came too late, and are to be ended."""
    end: End | None = None
    is_on: bool = False
    """Whether a run of ours trains: other scripts end with their first worker."""
    broken: list[Wire] = field(default_factory=list)
    """Lines that are over, but still open."""
    _finished: set[int] = field(default_factory=set)

    def on_word(self, seat: int) -> None:
        """A worker says something."""
        while (message := receive(self.lines[seat].socket)) is not None:
            self._hear(seat, message)

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

    def obey(self, order: dict[str, Any]) -> None:
        """Do what was decided about a worker of this machine."""
        match order:
            case {"do": "tell", "seat": int(seat), "generation": generation}:
                with suppress(OSError, KeyError):  # its end will be heard of next
                    send(self.lines[seat].socket, generation)
            case {"do": "start", "seat": int(seat)}:
                self.wanted.append(seat)
            case {"do": "dismiss", "seat": int(seat)}:
                self.dismissed.add(seat)

    def take_starts(self) -> list[int]:
        """Seats whose worker is to be started now."""
        taken, self.wanted = self.wanted, []
        return taken

    def on_wire(self, machine: int) -> None:
        """Another machine's launcher says something."""
        try:
            for message in self.wires[machine].receive():
                self._hear_machine(message)
        except LineBroken as error:
            self._miss(machine, str(error))

    def keep_in_touch(self) -> None:
        """Let other launchers know that this one lives, and notice which of them is silent."""
        now_s = time.monotonic()
        for machine, wire in list(self.wires.items()):
            wire.beat(now_s)
            if now_s - wire.heard_s > self.silence_s:
                self._miss(machine, f"it has said nothing for {self.silence_s:g} s")

    def pass_on(self, end: End) -> None:
        """Tell the launchers of other machines to end."""
        for wire in self.wires.values():
            wire.send({"do": "end", **asdict(end)})

    def _miss(self, machine: int, why: str) -> None:
        self.broken.append(self.wires.pop(machine))
        self._lose_machine(machine, why)

    def is_member(self, seat: int) -> bool:
        """Whether a worker takes part in the training now."""
        raise NotImplementedError

    def _hear(self, seat: int, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _hear_machine(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _lose_machine(self, machine: int, why: str) -> None:
        raise NotImplementedError


@dataclass(kw_only=True)
class Generations(Workers):
    """The workers of all machines, from generation to generation."""

    silence_s = LEAD_SILENCE_S
    roster: Roster
    is_run: bool = False
    """Whether the script has a run of ours, as far as is known before that trains."""
    starts: list[Start] = field(default_factory=list)
    """Replacements that are to be started when their time has come."""
    on_machine_gone: Callable[[int], None] = lambda machine: None
    give_up_keys: Callable[[str], None] = lambda place: None
    """End waits in the store for what nobody will set any more."""
    _leavers: list[int] = field(default_factory=list)
    """Workers whose script has left its loop, while others have not."""
    _left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ledgers of the dead, and of those who left, that nobody has taken yet."""
    _ledgers: int = 0
    _died_s: float = 0.0
    _died_in: int = 1
    """The step in which a worker last died."""
    _ledger_by_seat: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of workers on other machines, as their launchers last told."""
    _training: int = 0
    """How many were training when that was last looked at."""

    @property
    def is_needed(self) -> bool:
        """Whether to stay although no worker is left here: others train, elsewhere."""
        return self.is_on and self.end is None and bool(self.wires and self.roster.members)

    def is_member(self, seat: int) -> bool:
        return seat in self.roster.members

    def _hear(self, seat: int, message: dict[str, Any]) -> None:
        match message:
            case {"said": "joined", "generation": int(number)}:
                self.is_on = True
                self.facts = message.get("facts", self.facts)
                for name in message.get("taken", ()):
                    self._left.pop(name, None)
                was_new = self.roster.is_new(seat)
                orders = self.roster.on_joined(seat, number)
                if was_new and not self.roster.is_new(seat):
                    self._welcome(seat, number)
                self._carry_out(orders)
                self._tell_of_recovery(number, loses=bool(message.get("loses")))
            case {"said": "building", "survives": bool(survives)}:
                self.is_run = survives
            case {"said": "ready"}:
                self._carry_out(self.roster.on_ready(seat))
            case {"said": "lost", "generation": int(number)}:
                self._carry_out(self.roster.on_lost(seat, number, time.monotonic()))
            case {"said": "leaving"}:
                self._carry_out(self.roster.on_leaving(seat, time.monotonic()))
            case {"said": "left", "step": int(step)}:
                self._inherit(seat, self._ledger_of(seat, message))
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
                    self._inherit(seat, self._ledger_of(seat, message))
                self._carry_out(
                    self.roster.on_finished(seat, is_left=is_left, now_s=time.monotonic())
                )

    def _hear_machine(self, message: dict[str, Any]) -> None:
        match message:
            case {"said": "died", "seat": int(seat), "death": dict(death)}:
                self.on_exit(seat, **death)
            case {"said": "ledger", "seat": int(seat), "ledger": dict(ledger)}:
                self._ledger_by_seat[seat] = ledger
            case {"said": _, "seat": int(seat)}:
                self._hear(seat, message)
            case {"do": "end", **end}:
                self._end(End(**end))

    def _lose_machine(self, machine: int, why: str) -> None:
        self.on_machine_gone(machine)
        if self.roster.is_finished and not self.roster.members:
            return
        if not self.is_on:
            self._end(End(text=f"Machine {machine} is gone: {why}."))
            return
        self._died_s = time.monotonic()
        lost = [s for s in self.roster.members if self.roster.machine_of(s) == machine]
        for seat in lost:
            self._inherit(seat, self._ledger_by_seat.pop(seat, {}))
        orders = self.roster.on_machine_gone(machine)
        workers = count_text(len(lost), "worker")
        self.say(f"machine {machine} is gone, with {workers}: {why}; {self._rest()}.")
        self._carry_out(orders)

    def on_exit(
        self,
        seat: int,
        ledger: dict[str, Any],
        how: str,
        *,
        step: int,
        is_kill: bool,
        is_error: bool,
        is_signal: bool = False,
        ends_run: bool = False,
    ) -> bool:
        """A worker has ended early, by an error of its own or not; whether others can continue.

        `ends_run` is its word that nobody should. Where a signal has ended it before anybody
        trained, nothing is lost, and all start again.
        """
        if seat in self.dismissed:
            return True
        if is_signal and self.is_run and not self.wires and not self._has_trained():
            text = f"Worker {seat} {how} before training began."
            self._end(End(text=text, seat=seat, lost_in=BEFORE_TRAINING))
            return False
        if not self.is_on or seat in self._finished:
            return False
        if self.roster.has_left(seat):
            self.roster.on_gone(seat)
            return True
        was_member = seat in self.roster.members
        if was_member:
            self._died_s, self._died_in = time.monotonic(), step
            self._inherit(seat, {**ledger, "how": how[:HOW_LENGTH], "died_in": step})
        orders = self.roster.on_died(
            seat, step=step, how=how, is_kill=is_kill, now_s=time.monotonic(), ends_run=ends_run
        )
        if was_member and not ends_run:
            when = f"in step {step}" if step else "before its first step"
            self.say(f"worker {seat} {how} {when}; {self._rest()}.")
        self._carry_out(orders, seat, is_error=is_error)
        if not self.roster.members and not is_error:
            self._end(End(text=f"Worker {seat} {how}.", seat=seat, lost_in=step))
        return self.end is None and (bool(self.roster.members) or not self.roster.is_finished)

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

    def _has_trained(self) -> bool:
        return self.is_on and self.roster.has_trained

    def _rest(self) -> str:
        left = len(self.roster.members)
        return "1 continues" if left == 1 else f"{left} continue"

    def _ledger_of(self, seat: int, message: dict[str, Any]) -> dict[str, Any]:
        """What a worker has written, which comes along from another machine."""
        line = self.lines.get(seat)
        ledger: dict[str, Any] = message["ledger"] if line is None else line.ledger.read()
        return ledger

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
        now_s = time.monotonic()
        self._carry_out(self.roster.on_time(now_s))
        due = [start for start in self.starts if start.at_s <= now_s]
        self.starts = [start for start in self.starts if start.at_s > now_s]
        for start in due:
            self._order(start.seat, {"do": "start", "seat": start.seat})
        return super().take_starts()

    def _carry_out(self, orders: list[Order], dead: int = -1, *, is_error: bool = False) -> None:
        """Do what the roster wants, after the death of a worker or not."""
        for order in orders:
            match order:
                case Announce():
                    self._announce(order)
                case Start():
                    self.starts.append(order)
                case Dismiss(seat):
                    self.starts = [start for start in self.starts if start.seat != seat]
                    self._order(seat, {"do": "dismiss", "seat": seat})
                case GiveUp(seat, reason):
                    self.say(f"worker {seat} is not replaced: {reason}.")
                case Stop(reason):
                    self.say(f"{reason}.")
                    self._end(End(text=f"{reason}.", seat=dead))
                case RestartAll(reason):
                    lost_in = 0 if is_error or self.roster.members else self._died_in
                    self._end(End(text=f"{reason}.", seat=dead, lost_in=lost_in))
        if self.roster.is_finished and not self.roster.members:
            for wire in self.wires.values():
                wire.send({"do": "leave"})

    def _order(self, seat: int, order: dict[str, Any]) -> None:
        machine = self.roster.machine_of(seat)
        if machine == self.roster.here:
            self.obey(order)
        elif machine in self.wires:
            self.wires[machine].send(order)

    def _end(self, end: End) -> None:
        if self.end is None:
            self.end = end
            self.pass_on(end)

    def _announce(self, order: Announce) -> None:
        while self._leavers and order.members:
            seat = self._leavers.pop()
            self.say(f"worker {seat} has left its loop; {self._rest()}.")
        if order.is_urgent:  # somebody may wait there for the dead
            self.give_up_keys(meeting_place(order.generation - 1))
        machines = {self.roster.machine_of(seat) for seat in order.members}
        is_near = len(machines) == 1 and bool(self.roster.machine_by_seat)
        for rank, seat in enumerate(order.members):
            message = {
                "number": order.generation,
                "rank": rank,
                "size": len(order.members),
                "is_near": is_near,
                "is_urgent": order.is_urgent,
                "leaves": seat in order.leaving,
                "inherited": self._left if rank == 0 else {},
            }
            self._order(seat, {"do": "tell", "seat": seat, "generation": message})

    def _welcome(self, seat: int, number: int) -> None:
        """Let a newcomer know that it is heard of, and that no generation leaves it out now."""
        rank, size = self.roster.members.index(seat), len(self.roster.members)
        message = {"number": number, "rank": rank, "size": size, "is_urgent": False}
        told = {**message, "is_welcome": True}
        self._order(seat, {"do": "tell", "seat": seat, "generation": told})

    def _tell_of_recovery(self, number: int, *, loses: bool) -> None:
        if not self.roster.is_formed:
            return
        size = len(self.roster.members)
        if self._died_s:
            ms = 1000 * (time.monotonic() - self._died_s)
            self._died_s = 0.0
            how = ", from the newest checkpoint" if loses else "; no step was lost"
            self.say(f"the others continue after {ms:.0f} ms{how}.")
        elif number and size == self.roster.size > self._training:
            self.say(f"all {size} workers train again.")
        self._training = size
