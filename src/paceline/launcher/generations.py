"""Keeping a training alive: who died is replaced, and the others are told to continue without it.

`roster` decides, the supervisor hears and starts; here is what lies between: the ledgers of the
dead, and what a person reads of it. Of several machines the one that serves the store leads: its
launcher decides, and those of the others are `Follower`s.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.group import meeting_place
from paceline.launcher.deaths import ASKS_TO_END, BEFORE_TRAINING, StopReason, WorkerExit
from paceline.launcher.roster import (
    Announce,
    Dismiss,
    GiveUp,
    Order,
    RestartAll,
    Roster,
    Start,
    Stop,
)
from paceline.launcher.workers import Workers
from paceline.telemetry import count_text

BROKEN_S = 10.0
"""So long after a group broke may an error of one worker say that another is gone. What says so at
another time, as of a database, is the script's own."""
OVERTAKEN_S = 2.0
"""So long may it take to hear from another machine that its workers had begun before a death."""
WORD_EVERY_S = 2.0
HOW_LENGTH = 200
"""So much of how a worker ended is kept in the run folder."""


@dataclass(kw_only=True)
class Generations(Workers):
    """The workers of all machines, from generation to generation."""

    roster: Roster
    is_run: bool = False
    """Whether the script has a run of ours, as far as is known before that trains."""
    starts: list[Start] = field(default_factory=list)
    """Replacements that are to be started when their time has come."""
    on_machine_gone: Callable[[int], None] = lambda machine: None
    give_up_keys: Callable[[str], None] = lambda place: None
    """End waits in the store for keys that will not be set any more."""
    _left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ledgers of the dead, and of those who left, that no worker has taken yet."""
    _ledgers: int = 0
    _died_s: float = 0.0
    _broken_s: float = -BROKEN_S
    """When a worker last died, left, or lost its group."""
    _died_in: int = 1
    """The step in which a worker last died."""
    _ledger_by_worker: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of workers on other machines, as their launchers last told."""
    _training: int = 0
    """How many were training when that was last looked at."""
    _last_lead: int = 0
    """Who was rank 0 when the training was over."""
    _early: list[tuple[WorkerExit, dict[str, Any]]] = field(default_factory=list)
    """Deaths that are judged when it is known whether all had begun to train."""
    _early_s: float = math.inf
    """Until when that may become known."""
    _word_due_s: float = 0.0
    """When those who are kept waiting are told again that the launcher lives."""
    _is_rest_due: bool = False
    """Whether worker 0 is to be made up for, once the last of it has ended."""

    @property
    def is_needed(self) -> bool:
        """Whether to stay although no worker is left here: others train, elsewhere, or one that
        does the rest is about to begin."""
        is_awaited = bool(self.channels and self.roster.members) or self._is_rest_due
        return self.end is None and (bool(self._early) or (self.is_on and is_awaited))

    def is_member(self, worker: int) -> bool:
        return worker in self.roster.members

    def does_rest(self, worker: int) -> bool:
        return worker in (0, self._last_lead)

    def explains_loss(self, worker: int) -> bool:
        trains = self.is_on and self.is_member(worker) and not self.has_finished(worker)
        return not trains or time.monotonic() - self._broken_s < BROKEN_S

    def _hear(self, worker: int, message: dict[str, Any]) -> None:
        match message:
            case {"said": "joined", "generation": int(number)}:
                self.is_on = True
                if worker in self.worker_channels:  # another machine may have another script
                    self.facts = message.get("facts", self.facts)
                for name in message.get("taken", ()):
                    self._left.pop(name, None)
                was_new = self.roster.is_new(worker)
                orders = self.roster.on_joined(worker, number)
                if was_new and not self.roster.is_new(worker):
                    step = self._ledger_of(worker, message).get("last", 0)
                    self.roster.deaths.on_joined(worker, step)
                    self._welcome(worker, number)
                self._carry_out(orders)
                self._judge_early()
                self._tell_of_recovery(number, loses=bool(message.get("loses")))
            case {"said": "facts", "facts": dict(facts)}:
                self.facts = {**self.facts, **facts}
            case {"said": "building", "survives": bool(survives)}:
                self.is_run = survives
            case {"said": "ready"}:
                self._carry_out(self.roster.on_ready(worker))
            case {"said": "lost", "generation": int(number)}:
                self._broken_s, why = time.monotonic(), str(message.get("why", ""))
                self._carry_out(self.roster.on_lost(worker, number, time.monotonic(), why))
            case {"said": "leaving"}:
                self._carry_out(self.roster.on_leaving(worker, time.monotonic()))
                if self.roster.is_left:
                    self._end(StopReason.by_signal(signal.SIGTERM))
            case {"said": "left", "step": int(step)}:
                self._inherit(worker, self._ledger_of(worker, message))
                orders = self.roster.on_left(worker)
                self.say(
                    f"worker {worker} has left after step {step}, as asked; {self._rest()}. "
                    f"`kill -USR1 {os.getpid()}` adds one."
                )
                self._carry_out(orders)
            case {"said": "finished", "is_left": bool(is_left)}:
                if not self._finished:
                    self._last_lead = (*self.roster.members, worker)[0]
                    self.can_repeat = bool(message.get("is_saved")) and not self.channels
                    if self.channels:
                        self.why_not_repeated = "on several machines it is not done again"
                self._finished.add(worker)
                if is_left:
                    self._leavers.append(worker)
                    self._inherit(worker, self._ledger_of(worker, message))
                self._carry_out(
                    self.roster.on_finished(worker, is_left=is_left, now_s=time.monotonic())
                )
                if self.roster.is_finished and len(self._finished) == 1:
                    self._make_up_for_rank_0()

    def _make_up_for_rank_0(self) -> None:
        """Have done what scripts leave to it after the loop, if it has left or died before."""
        if self.roster.machine_of(0) != self.roster.here or 0 in (
            *self.roster.members,
            *self._finished,
        ):
            return
        self._is_rest_due = self.can_repeat
        what = "What it does after the loop is lost"
        if self.can_repeat:
            what = "Another one runs the script again, and finds the training complete"
        self.say(f"worker 0 was not there when the training was over. {what}.")

    def _hear_machine(self, message: dict[str, Any]) -> None:
        match message:
            case {"said": "died", "end": dict(how), "ledger": dict(ledger)}:
                self.hear_all()
                self.on_exit(WorkerExit(**how), ledger)
            case {"said": "ledger", "worker": int(worker), "ledger": dict(ledger)}:
                self._ledger_by_worker[worker] = ledger
            case {"said": _, "worker": int(worker)}:
                self._hear(worker, message)
            case {"do": "end", **end}:
                self._end(StopReason(**end))

    def _miss(self, machine: int, why: str) -> None:
        text = f"the other machines continue without this one: {why}"
        end = StopReason(text=text, is_final=True, is_hard=True)
        self.channels[machine].send({"do": "end", **asdict(end)})  # should it still hear
        super()._miss(machine, why)

    def _lose_machine(self, machine: int, why: str) -> None:
        self.on_machine_gone(machine)
        if self.roster.is_finished and not self.roster.members:
            return
        if not self.is_on:
            self._end(StopReason(text=f"machine {machine} is gone: {why}"))
            return
        self._died_s = time.monotonic()
        lost = [s for s in self.roster.members if self.roster.machine_of(s) == machine]
        for worker in lost:
            self._inherit(worker, self._ledger_by_worker.pop(worker, {}))
        orders = self.roster.on_machine_gone(machine)
        workers = count_text(len(lost), "worker")
        self.say(f"machine {machine} is gone, with {workers}: {why}; {self._rest()}.")
        self._carry_out(orders)

    def on_exit(self, end: WorkerExit, ledger: dict[str, Any]) -> bool:
        """A worker has ended early, or failed and will; whether the others can continue.

        Where a signal has ended it before any worker trained, nothing is lost, and all start again.
        """
        worker = end.rank
        if worker in self.dismissed:
            return True
        if end.is_secondary and not self.explains_loss(worker):
            end = replace(end, is_secondary=False)
        if self._may_be_overtaken(end):
            self._early.append((end, ledger))
            self._early_s = min(self._early_s, time.monotonic() + OVERTAKEN_S)
            return True
        is_kill = end.killed_by and end.killed_by not in ASKS_TO_END
        has_trained = self.is_on and self.roster.has_trained
        if is_kill and self.is_run and not self.channels and not has_trained:
            text = f"worker {worker} {end.how} before training began"
            self._end(StopReason.of(end, text, lost_in=BEFORE_TRAINING))
            return False
        if self._was_thrown_out(end):
            self.roster.take_back(worker)
            ledger = {}  # it is inherited already
        is_over = self.end is not None and not self.roster.is_stopping
        if not self.is_on or worker in self._finished or is_over:
            return False
        if self.roster.has_left(worker):
            self.roster.on_gone(worker)
            return True
        was_member = worker in self.roster.members
        if was_member:
            self._died_s, self._died_in = time.monotonic(), end.step
            left = {"how": end.how[:HOW_LENGTH], "died_in": end.step}
            self._inherit(worker, {**ledger, **left})
        orders = self.roster.on_died(end, time.monotonic())
        is_meant = self.roster.is_stopping and end.signal in ASKS_TO_END
        if was_member and not is_meant and not any(isinstance(order, Stop) for order in orders):
            when = end.where or " before its first step"
            self.say(f"worker {worker} {end.how}{when}; {self._rest()}.")
        self._carry_out(orders, end)
        if not self.roster.members:
            self._end(StopReason.of(end, lost_in=end.step))
        return self.end is None and (bool(self.roster.members) or not self.roster.is_finished)

    def _may_be_overtaken(self, end: WorkerExit) -> bool:
        """Whether a death in the first step has come before another machine's word that its workers
        are in it. Until they are, no death is survived."""
        is_accident = end.killed_by or end.is_secondary or end.is_accident
        is_first = self.end is None and not self.roster.has_trained
        is_ours = self.is_on and end.rank in self.roster.members
        is_open = is_first and is_ours and time.monotonic() < self._early_s
        return bool(self.channels and is_accident and is_open)

    def _judge_early(self) -> None:
        if self.roster.has_trained or time.monotonic() >= self._early_s:
            early, self._early = self._early, []
            for end, ledger in early:
                if not self.on_exit(end, ledger):
                    self._end(StopReason.of(end))

    def close_worker_channel(self, worker: int) -> dict[str, Any]:
        # What other machines have said before this death decides about it as well.
        for machine in list(self.channels):
            self.on_channel(machine)
        return super().close_worker_channel(worker)

    def resize(self, number: int) -> None:
        if self.roster.machine_by_worker or not self.survives:
            super().resize(number)
        elif number == signal.SIGUSR1:
            self._grow()
        else:
            self._shrink()

    def on_stop(self) -> None:
        self.hear_all()
        self.starts = []
        self._carry_out(self.roster.on_stop())

    def _grow(self) -> None:
        """A person wants one worker more."""
        self.hear_all()
        size, shards = self.roster.size, self.facts.get("shards", 0)
        if not self.is_on:
            self.say("SIGUSR1 adds a worker to a run that trains, and none does yet.")
        elif size >= shards and not self.facts.get("grows"):
            self.say(
                f"no worker is added: {size} share {count_text(shards, 'shard')}, so another one "
                "would have nothing to compute. A new run can have more: Run(shards=...)."
            )
        else:
            self._carry_out(self.roster.grow(time.monotonic()))

    def _shrink(self) -> None:
        """A person wants one worker less."""
        self.hear_all()
        if not self.is_on:
            self.say("SIGUSR2 takes a worker from a run that trains, and none does yet.")
        elif self.roster.size <= self.roster.min_workers:
            self.say(
                f"no worker is taken away: {self.roster.size} train, and --min-workers is "
                f"{self.roster.min_workers}."
            )
        else:
            self._carry_out(self.roster.shrink(time.monotonic()))

    def give_up(self, worker: int, reason: str) -> None:
        """A worker cannot be started."""
        self._carry_out(self.roster.give_up(worker, reason))

    def _rest(self) -> str:
        left = len(self.roster.members)
        return "1 continues" if left == 1 else f"{left} continue"

    def _ledger_of(self, worker: int, message: dict[str, Any]) -> dict[str, Any]:
        """What a worker has written, which comes along from another machine."""
        channel = self.worker_channels.get(worker)
        ledger: dict[str, Any] = message["ledger"] if channel is None else channel.ledger.read()
        return ledger

    def _inherit(self, worker: int, ledger: dict[str, Any]) -> None:
        """Keep what a worker leaves behind for the others."""
        self._broken_s = time.monotonic()
        # What it had inherited itself is in its ledger.
        for name in ledger.get("taken", ()):
            self._left.pop(name, None)
        self._ledgers += 1
        self._left[f"{worker}.{self._ledgers}"] = ledger

    @property
    def due_s(self) -> float | None:
        times = [start.at_s for start in self.starts]
        if self._early:
            times.append(self._early_s)
        elif self.roster.due_s is not None:
            times.append(self.roster.due_s)
        return min(times, default=None)

    def take_starts(self) -> list[int]:
        now_s = time.monotonic()
        self._judge_early()
        # A group that broke with a death is not formed anew before that is judged.
        orders = [] if self._early else self.roster.on_time(now_s)
        if orders and not self._leavers and self.roster.fruitless < 2:
            self.say("workers have lost their connection to each other; they form a new group.")
        self._carry_out(orders)
        if now_s >= self._word_due_s:
            self._word_due_s = now_s + WORD_EVERY_S
            message = {"number": 0, "rank": 0, "size": 0, "is_awaited": True}
            for worker in self.roster.kept_waiting:
                self._order(worker, {"do": "tell", "worker": worker, "generation": message})
        due = [start for start in self.starts if start.at_s <= now_s]
        self.starts = [start for start in self.starts if start.at_s > now_s]
        for start in due:
            self._order(start.worker, {"do": "start", "worker": start.worker})
        if self._is_rest_due and 0 not in self.worker_channels:
            self._is_rest_due = False
            self.rests.add(0)
            self._finished.add(0)
            self.dismissed.discard(0)
            self._order(0, {"do": "start", "worker": 0})
        return super().take_starts()

    def _carry_out(self, orders: list[Order], dead: WorkerExit | None = None) -> None:
        """Do what the roster wants, after the death of a worker or not."""
        for order in orders:
            match order:
                case Announce():
                    self._announce(order)
                case Start():
                    self.starts.append(order)
                case Dismiss(worker):
                    self.starts = [start for start in self.starts if start.worker != worker]
                    self._order(worker, {"do": "dismiss", "worker": worker})
                case GiveUp(worker, reason):
                    self.say(f"worker {worker} is not replaced: {reason}.")
                case Stop(reason):
                    self._end(StopReason.of(dead, reason))
                case RestartAll(reason):
                    is_bug = dead is not None and self.roster.deaths.ends_run(dead)
                    lost_in = 0 if is_bug or self.roster.members else self._died_in
                    self._end(StopReason.of(dead, reason, lost_in))
        if self.roster.is_finished and not self.roster.members:
            for channel in self.channels.values():
                channel.send({"do": "leave"})

    def _order(self, worker: int, order: dict[str, Any]) -> None:
        machine = self.roster.machine_of(worker)
        if machine == self.roster.here:
            self.obey(order)
        elif machine in self.channels:
            self.channels[machine].send(order)

    def _end(self, end: StopReason) -> None:
        if self.roster.is_stopping:
            if not end.signal:  # as other machines say it that got the same one
                self.tell_end(end.text)  # the end has a reason; no worker may wait for others
        elif self.end is None:
            self.end = end
            self.pass_on(end)

    def _announce(self, order: Announce) -> None:
        while self._leavers and order.members:
            self._left_early.add(worker := self._leavers.pop())
            self.say(f"worker {worker} has left its loop; {self._rest()}.")
        # Workers may wait there for the dead; or, while the group of the one before is used
        # until it ends between two steps, for those who go straight on to this one.
        before = meeting_place(order.generation - 1)
        self.give_up_keys(before if order.is_urgent else f"{before}/here")
        machines = {self.roster.machine_of(worker) for worker in order.members}
        is_near = len(machines) == 1 and bool(self.roster.machine_by_worker)
        for rank, worker in enumerate(order.members):
            message = {
                "number": order.generation,
                "rank": rank,
                "size": len(order.members),
                "workers": order.members,
                "is_near": is_near,
                "is_urgent": order.is_urgent,
                "leaves": worker in order.leaving,
                "inherited": self._left if rank == 0 else {},
            }
            self._order(worker, {"do": "tell", "worker": worker, "generation": message})

    def _welcome(self, worker: int, number: int) -> None:
        """Let a newcomer know that it is heard of, and that no generation leaves it out now."""
        rank, size = self.roster.members.index(worker), len(self.roster.members)
        message = {"number": number, "rank": rank, "size": size, "is_urgent": False}
        told = {**message, "is_welcome": True}
        self._order(worker, {"do": "tell", "worker": worker, "generation": told})

    def _tell_of_recovery(self, number: int, *, loses: bool) -> None:
        if not self.roster.is_formed:
            return
        size = len(self.roster.members)
        if self._died_s:
            ms = 1000 * (time.monotonic() - self._died_s)
            self._died_s = 0.0
            how = "a share of the state is lost" if loses else "no step was lost"
            self.say(f"the others continue after {ms:.0f} ms; {how}.")
        elif number and size == self.roster.size > self._training:
            self.say(f"all {size} workers train again.")
        self._training = size


def without_survival() -> Generations:
    """Workers of one machine, of whom the first death ends all."""
    return Generations(say=lambda text: None, roster=Roster(size=0), survives=False)
