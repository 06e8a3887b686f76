"""A machine of several that does not lead: its launcher passes on what its workers say, and obeys.

      this launcher                              the lead's
    joined, ready, lost, finished, died  ---->   roster, of the workers of all machines
    ledgers, twice a second              ---->   kept, in case this machine is lost
    announce it, start a replacement     <----   orders
    leave, when no worker is left here           everybody has finished

A lead that is gone, or out of reach, takes everything along: others may continue without this
machine, so nobody here may write any more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.launcher.generations import FOLLOWER_SILENCE_S, End, Workers
from paceline.launcher.wire import BEAT_S


@dataclass(kw_only=True)
class Follower(Workers):
    """The workers of this machine, about whom the launcher of another one decides."""

    silence_s = FOLLOWER_SILENCE_S
    lead: int
    """The machine that leads."""
    lead_is_gone: str
    """What to say then."""
    may_leave: bool = False
    _left: set[int] = field(default_factory=set)
    """Workers that were asked to go, and have gone."""
    _ledgers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """As the lead knows them."""
    _ledgers_at_s: float = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether to stay although no worker is left here: the lead may want another."""
        return self.is_on and self.end is None and not self.may_leave

    @property
    def due_s(self) -> float | None:
        return None

    def is_member(self, seat: int) -> bool:
        return seat not in self._finished | self._left

    def on_exit(self, seat: int, ledger: dict[str, Any], how: str, **death: Any) -> bool:
        """A worker has ended early; the lead decides, and ends everybody if nobody continues."""
        if seat in self.dismissed:
            return True
        if not self.is_on or seat in self._finished:
            return False
        if seat not in self._left:
            self.say(f"worker {seat} {how} in step {death['step']}.")
        self._report(said="died", seat=seat, death={"ledger": ledger, "how": how, **death})
        return True

    def keep_in_touch(self) -> None:
        """And let the lead know what it would miss if this machine was lost, as of just now."""
        super().keep_in_touch()
        now_s = time.monotonic()
        if now_s < self._ledgers_at_s:
            return
        self._ledgers_at_s = now_s + BEAT_S
        for seat, line in self.lines.items():
            ledger = line.ledger.read()
            if ledger != self._ledgers.get(seat, {}):
                self._ledgers[seat] = ledger
                self._report(said="ledger", seat=seat, ledger=ledger)

    def _hear(self, seat: int, message: dict[str, Any]) -> None:
        match message:
            case {"said": "joined"}:
                self.is_on = True
                self.facts = message.get("facts", self.facts)
            case {"said": "left"}:
                self._left.add(seat)
                message["ledger"] = self.lines[seat].ledger.read()
            case {"said": "finished"}:
                self._finished.add(seat)
                message["ledger"] = self.lines[seat].ledger.read()
        self._report(**message, seat=seat)

    def _hear_machine(self, message: dict[str, Any]) -> None:
        match message:
            case {"do": "leave"}:
                self.may_leave = True
            case {"do": "end", **end}:
                self.end = self.end or End(**end)
            case _:
                self.obey(message)

    def _lose_machine(self, machine: int, why: str) -> None:
        self.end = self.end or End(text=self.lead_is_gone, is_final=True, is_hard=True)

    def _report(self, **message: Any) -> None:
        if self.lead in self.wires:
            self.wires[self.lead].send(message)
