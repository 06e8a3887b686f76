"""A machine of several that does not lead: its launcher passes on what its workers say, and obeys.

      this launcher                              the lead's
    joined, ready, lost, finished, died  ---->   roster, of the workers of all machines
    ledgers, twice a second              ---->   kept, in case this machine is lost
    announce it, start a replacement     <----   orders
    leave, when no worker is left here           all have finished

A lead that is gone, or out of reach, takes everything along: others may continue without this
machine, so no worker here may write any more.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.launcher.channel import BEAT_S
from paceline.launcher.deaths import StopReason, WorkerExit
from paceline.launcher.workers import Workers


@dataclass(kw_only=True)
class Follower(Workers):
    """The workers of this machine, about whom the launcher of another one decides."""

    lead: int
    """The machine that leads."""
    lead_name: str
    may_leave: bool = False
    _left: set[int] = field(default_factory=set)
    """Workers that were asked to go, and have gone."""
    _ledgers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """As the lead knows them."""
    _ledgers_at_s: float = 0.0
    _told_places: list[str] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        """Whether to stay although no worker is left here: the lead may want another."""
        return self.is_on and self.end is None and not self.may_leave

    @property
    def due_s(self) -> float | None:
        return None

    def is_member(self, worker: int) -> bool:
        return worker not in self._finished | self._left

    def on_exit(self, end: WorkerExit, ledger: dict[str, Any]) -> bool:
        """A worker has ended early; the lead decides, and ends all if none continues."""
        worker = end.rank
        if worker in self.dismissed:
            return True
        self._was_thrown_out(end)
        if not self.is_on or worker in self._finished:
            return False
        if worker not in self._left and (self.survives_errors or not end.is_scripts):
            self.say(f"worker {worker} {end.how}{end.where}.")
        self._report(said="died", worker=worker, end=asdict(end), ledger=ledger)
        return True

    def gather_places(self, places: list[str]) -> list[str]:
        if places != self._told_places and self.lead in self.channels:
            self._told_places = places
            self.channels[self.lead].send({"machine": "stuck", "places": places})
        return []

    def keep_in_touch(self) -> None:
        """And let the lead know what it would miss if this machine was lost, as of just now."""
        super().keep_in_touch()
        now_s = time.monotonic()
        if now_s < self._ledgers_at_s:
            return
        self._ledgers_at_s = now_s + BEAT_S
        for worker, channel in self.worker_channels.items():
            ledger = channel.ledger.read()
            if ledger != self._ledgers.get(worker, {}):
                self._ledgers[worker] = ledger
                self._report(said="ledger", worker=worker, ledger=ledger)

    def _hear(self, worker: int, message: dict[str, Any]) -> None:
        match message:
            case {"said": "joined"}:
                self.is_on = True
                self.facts = message.get("facts", self.facts)
            case {"said": "facts", "facts": dict(facts)}:
                self.facts = {**self.facts, **facts}
            case {"said": "left"}:
                self._left.add(worker)
            case {"said": "finished", "is_left": is_left}:
                self._finished.add(worker)
                self._leavers += [worker] if is_left else []
        # The lead decides by it at once, and its copy may be as old as `BEAT_S`.
        if message["said"] in ("joined", "left", "finished"):
            message["ledger"] = self.worker_channels[worker].ledger.read()
        self._report(**message, worker=worker)

    def _hear_machine(self, message: dict[str, Any]) -> None:
        match message:
            case {"do": "leave"}:
                self.may_leave = True
            case {"do": "end", **end}:
                self.end = self.end or StopReason(**end)
            case _:
                self.obey(message)

    def _lose_machine(self, machine: int, why: str) -> None:
        text = f"{self.lead_name} is gone: {why}"
        self.end = self.end or StopReason(text=text, is_final=True, is_hard=True)

    def _report(self, **message: Any) -> None:
        if self.lead in self.channels:
            self.channels[self.lead].send(message)
