"""Planned faults: what goes wrong, on which rank, at which step; not part of the package.

A plan is plain data, so a failure can be repeated, printed and passed to another process. The code
under test calls `strike` at the points where something may happen; nothing happens unless planned.
"""

from __future__ import annotations

import builtins
import math
import os
import random
import signal as signals
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from paceline.errors import UsageError


class PlannedFault(Exception):
    """The error that `Faults.fail` raises unless told another; not one of Paceline's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once `rank` reaches point `where` of step `step`."""

    action: str
    rank: int | None
    """None for whichever gets there first."""
    step: int
    where: str = "step"
    signal: int = int(signals.SIGKILL)
    """For `kill`: what the rank sends itself."""
    error: str = PlannedFault.__name__
    """For `fail`: the name of a built-in exception, or `PlannedFault`."""
    message: str = ""
    seconds: float = 0.0
    """For `delay`: how long."""
    code: int = 0
    abrupt: bool = False
    """For `exit`: leave without unwinding, as a crashing library would."""

    def __post_init__(self) -> None:
        is_time = type(self.seconds) in (int, float) and 0 <= self.seconds < math.inf
        possible = {
            "action": self.action in ("kill", "fail", "delay", "exit"),
            "rank": self.rank is None or _is_count(self.rank),
            "step": _is_count(self.step),
            "where": type(self.where) is str,
            "signal": self.signal in signals.valid_signals(),
            "error": _error_class(self.error) is not None,
            "seconds": is_time,
            "code": _is_count(self.code) and self.code < 256,
        }
        for name, is_possible in possible.items():
            if not is_possible:
                raise UsageError(
                    f"A fault with {name}={getattr(self, name)!r} is impossible.",
                    advice="Ranks, steps and codes count from 0; an error must be a built-in "
                    "exception, which every process can build from its name.",
                )

    def strike(self) -> None:
        """Do it."""
        if self.action == "delay":
            time.sleep(self.seconds)
        elif self.action == "fail":
            error = _error_class(self.error) or PlannedFault
            raise error(self.message or f"planned for rank {self.rank}, step {self.step}")
        elif self.action == "exit" and not self.abrupt:
            sys.exit(self.code)
        elif threading.current_thread().name.startswith("rank "):  # of run_ranks
            raise UsageError(
                f"rank {self.rank}, step {self.step}: a planned {self.action} would end the whole "
                "test, because this rank is a thread.",
                advice="Use run_processes for faults that end a process.",
            )
        elif self.action == "exit":
            os._exit(self.code)
        else:
            os.kill(os.getpid(), self.signal)


@dataclass(frozen=True, slots=True)
class Faults:
    """A plan of faults. Every method returns a longer plan and leaves this one as it is.

    Faults().kill(rank=1, step=3).delay(rank=0, step=2, seconds=0.1)
    """

    planned: tuple[Fault, ...] = ()

    def kill(
        self,
        *,
        rank: int | None,
        step: int,
        where: str = "step",
        signal: int = signals.SIGKILL,
    ) -> Self:
        """The process gets a signal; SIGKILL unless told another, such as SIGSEGV."""
        return self._with(action="kill", rank=rank, step=step, where=where, signal=int(signal))

    def stop(self, *, rank: int | None, step: int, where: str = "step") -> Self:
        """The process is stopped (SIGSTOP): alive, silent, and woken by nobody."""
        return self.kill(rank=rank, step=step, where=where, signal=signals.SIGSTOP)

    def fail(
        self, *, rank: int | None, step: int, where: str = "step", error: Exception | str = ""
    ) -> Self:
        """The rank raises: `PlannedFault` with a message, or the built-in exception given."""
        name, message = PlannedFault.__name__, str(error)
        if isinstance(error, Exception):
            name = type(error).__qualname__
            if _error_class(name) is not type(error):
                name = f"{type(error).__module__}.{name}"  # refused below, by its full name
        return self._with(
            action="fail", rank=rank, step=step, where=where, error=name, message=message
        )

    def delay(self, *, rank: int | None, step: int, seconds: float, where: str = "step") -> Self:
        """The rank is late."""
        return self._with(action="delay", rank=rank, step=step, where=where, seconds=seconds)

    def exit(
        self,
        *,
        rank: int | None,
        step: int,
        code: int = 0,
        where: str = "step",
        abrupt: bool = False,
    ) -> Self:
        """The rank calls `sys.exit`, or `os._exit` when abrupt: 0 in the middle fails too."""
        return self._with(
            action="exit", rank=rank, step=step, where=where, code=code, abrupt=abrupt
        )

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        ranks: int | Iterable[int],
        steps: int | Iterable[int],
        count: int,
        wheres: Sequence[str] = ("step",),
    ) -> Self:
        """`count` kills, no two at the same rank, step and point; the same for the same seed."""
        places = [
            (step, rank, where)
            for step in _counted(steps)
            for rank in _counted(ranks)
            for where in wheres
        ]
        if not 0 <= count <= len(places):
            raise UsageError(
                f"count is {count}, but {len(places)} places for a fault were given.",
                advice="Give more ranks, steps or points, or ask for fewer faults.",
            )
        plan = cls()
        for step, rank, where in sorted(random.Random(seed).sample(places, count)):
            plan = plan.kill(rank=rank, step=step, where=where)
        return plan

    def strike(self, rank: int, step: int, where: str = "step") -> None:
        """Do what is planned for this rank, step and point, in the order it was planned."""
        for fault in self.planned:
            if fault.rank in (None, rank) and (fault.step, fault.where) == (step, where):
                fault.strike()

    def pack(self) -> list[dict[str, Any]]:
        """The plan as data that goes to another process, or into a file."""
        return [asdict(fault) for fault in self.planned]

    @classmethod
    def unpack(cls, data: Iterable[dict[str, Any]]) -> Self:
        return cls(tuple(Fault(**fields) for fields in data))

    def _with(self, **fields: Any) -> Self:
        return replace(self, planned=(*self.planned, Fault(**fields)))


def _counted(these: int | Iterable[int]) -> list[int]:
    return list(range(these)) if isinstance(these, int) else sorted(set(these))


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


def _error_class(name: str) -> type[Exception] | None:
    if name == PlannedFault.__name__:
        return PlannedFault
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
