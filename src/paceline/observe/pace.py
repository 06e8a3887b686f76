"""Lets the ranks of a group compare their pace, and says which one is slow.

Every few steps all ranks exchange a handful of numbers: where their own time went, and what their
clocks show. How many steps lie between is chosen so that comparing takes about a thousandth of
the time at most; all ranks choose alike, because they choose from the same numbers.
"""

from __future__ import annotations

import hashlib
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.errors import PeerError
from paceline.observe import spans, stopwatch
from paceline.observe.stopwatch import OWN, Stopwatch
from paceline.observe.stragglers import WINDOWS, Blame, Pace, find_slow, summarise

WARM_UP_STEPS = 2
"""The first steps allocate memory and learn the order of gradients; they compare with nothing."""
LEAST_PERIOD, MOST_PERIOD = 5, 500
COST_SHARE = 0.001
"""Of the training time, at most this much is spent on comparing."""

_CLOCK_ROUNDS = 8
_SECOND_NS = 10**9


class Message(NamedTuple):
    """What one rank tells the others, all of it numbers."""

    steps: float
    variance: float
    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    machine: float
    """The same number on ranks that read the same clock."""
    begun_s: float
    begun_ns: float
    """When this rank began this exchange, on its own clock: whole seconds, and the rest."""
    ended_s: float
    ended_ns: float
    """When it ended the one before."""
    took_s: float
    """How long that one took; the rank that came last did not wait in it."""
    step_s: float

    @property
    def pace(self) -> Pace:
        seconds = {phase: getattr(self, phase) for phase in OWN}
        return Pace(steps=int(self.steps), seconds_by_phase=seconds, variance=self.variance)

    @property
    def begun(self) -> int:
        return int(self.begun_s) * _SECOND_NS + int(self.begun_ns)

    @property
    def ended(self) -> int:
        return int(self.ended_s) * _SECOND_NS + int(self.ended_ns)


class Round(NamedTuple):
    """One exchange as two ranks saw it, each on its own clock."""

    my_begin: int
    my_end: int
    zero_begin: int
    zero_end: int


def clock_offset(rounds: Sequence[Round]) -> tuple[int, int]:
    """How much more rank 0's clock shows than mine, and how far that may be off.

    Nobody can leave an exchange before everybody has entered it. So each round bounds the offset
    from both sides, and the tightest bounds of several rounds count.
    """
    lower = max(each.zero_begin - each.my_end for each in rounds)
    upper = min(each.zero_end - each.my_begin for each in rounds)
    return (lower + upper) // 2, abs(upper - lower) // 2


def next_period(messages: Sequence[Message]) -> int:
    """In how many steps to compare again: the same answer on every rank."""
    took = min(message.took_s for message in messages)
    step = max(message.step_s for message in messages)
    wanted = took / (COST_SHARE * step) if step > 0 else MOST_PERIOD
    return max(LEAST_PERIOD, min(MOST_PERIOD, math.ceil(wanted)))


@dataclass(slots=True)
class _Exchange:
    """One exchange under way: on a GPU its result is read in the next."""

    gathered: Tensor
    arrival: torch.cuda.Event | None = None


class Comparison:
    """One rank's part in the comparisons of its group.

        counting steps --(period over)--> exchange --> windows --> a new Blame is told, on rank 0

    Invariant: the number of synchronised steps alone decides when to exchange, so all ranks do.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.listeners: list[Callable[[int, Blame], None]] = []
        """Called on rank 0 with the step and what was found, besides the line on stderr.

        They live as long as the group, so they must not hold it."""
        self.print_line: Callable[[str], None] = _print_to_stderr
        self.blame: Blame | None = None
        """Who is slow now, as far as is known; the same on every rank."""
        self._steps = 0
        self._next = WARM_UP_STEPS + LEAST_PERIOD
        self._first_step = watch.step + WARM_UP_STEPS
        self._windows: deque[list[Pace]] = deque(maxlen=WINDOWS)
        self._under_way: _Exchange | None = None
        self._before: list[Message] = []
        self._ended_ns = 0
        self._took_s = 0.0
        self._rounds: deque[Round] = deque(maxlen=_CLOCK_ROUNDS)
        self._clock_error_ns: int | None = None

    def on_step(self, group: Group, device: torch.device) -> None:
        """The sums of a step have arrived; every rank calls this at the same point."""
        self._steps += 1
        if self._steps >= self._next:
            self._next = self._steps + LEAST_PERIOD
            # Whoever is missing here is missed by the next sum too, which says so better.
            with stopwatch.waiting(group), suppress(PeerError):
                self._compare(group, device)

    def _compare(self, group: Group, device: torch.device) -> None:
        if self._under_way is not None:
            self._read(group, self._under_way)
        begun = spans.now_ns()
        mine = torch.tensor([*self._message(begun)], dtype=torch.float64)
        where = _exchange_device(group, device)
        gathered = comm.all_gather(group, mine.to(where), "Comparing the pace of the ranks")
        exchange = _Exchange(torch.stack(gathered).to("cpu", non_blocking=True))
        ended = spans.now_ns()
        self._took_s = (ended - begun) / 1e9
        if where.type == "cpu":
            self._ended_ns = ended
            self._read(group, exchange)
        else:
            self._under_way = exchange  # the host does not wait for the device
            exchange.arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            exchange.arrival.record()

    def _message(self, begun_ns: int) -> Message:
        steps = [step for step in self.watch.finished if step.step >= self._first_step]
        self._first_step = max((step.step + 1 for step in steps), default=self._first_step)
        pace = summarise(steps)
        total_ns = sum(sum(step.ns_by_phase.values()) for step in steps)
        return Message(
            steps=pace.steps,
            variance=pace.variance,
            **pace.seconds_by_phase,
            machine=_machine_number(),
            begun_s=begun_ns // _SECOND_NS,
            begun_ns=begun_ns % _SECOND_NS,
            ended_s=self._ended_ns // _SECOND_NS,
            ended_ns=self._ended_ns % _SECOND_NS,
            took_s=self._took_s,
            step_s=total_ns / 1e9 / len(steps) if steps else 0.0,
        )

    def _read(self, group: Group, exchange: _Exchange) -> None:
        self._under_way = None
        if exchange.arrival is not None:
            exchange.arrival.synchronize()  # long past: that was some steps ago
        messages = [Message(*row) for row in exchange.gathered.tolist()]
        self._windows.append([message.pace for message in messages])
        if len(self._windows) == WINDOWS:  # until then often, whatever it costs
            self._next = self._steps + next_period(messages)
        self._set_clock(group.rank(), messages)
        blame = find_slow(list(self._windows))
        known, self.blame = self.blame, blame
        is_news = blame is not None and (
            known is None or (known.rank, known.phase) != (blame.rank, blame.phase)
        )
        if blame is not None and is_news and group.rank() == 0:
            self._tell(blame)

    def _set_clock(self, rank: int, messages: list[Message]) -> None:
        """Write into the recording how far rank 0's clock is, whenever that is known better."""
        before, self._before = self._before, messages
        recorder = spans.recorder()
        if recorder is None or not before:
            return
        if messages[rank].machine == messages[0].machine:
            offset, error = 0, 0
        elif messages[rank].ended:
            self._rounds.append(
                Round(
                    my_begin=before[rank].begun,
                    my_end=messages[rank].ended,
                    zero_begin=before[0].begun,
                    zero_end=messages[0].ended,
                )
            )
            offset, error = clock_offset(self._rounds)
        else:
            return  # read late, as on a GPU: the times say nothing
        if self._clock_error_ns is None or error:
            self._clock_error_ns = error
            recorder.set_clock(offset, error)

    def _tell(self, blame: Blame) -> None:
        step = self.watch.step
        self.print_line(f"step {step}: {blame}")
        recorder = spans.recorder()
        if recorder is not None:
            facts = {"slow_rank": blame.rank, "phase": blame.phase, "step": step}
            recorder.add("blame", spans.now_ns(), None, facts)
        for listener in self.listeners:
            listener(step, blame)


def _print_to_stderr(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)


def of(group: Group, device: torch.device) -> Comparison:
    """The comparison of this rank in `group`: one, however many models it trains there."""
    found = _comparisons.get(group)
    if found is None:
        found = _comparisons[group] = Comparison(stopwatch.of(group, device))
    return found


def find(group: Group) -> Comparison | None:
    """The comparison of this rank in `group`, if it takes part in one."""
    return _comparisons.get(group)


_comparisons: weakref.WeakKeyDictionary[Any, Comparison] = weakref.WeakKeyDictionary()


def _exchange_device(group: Group, device: torch.device) -> torch.device:
    """The CPU where the group can, because numbers that lie there already need no copy."""
    cpu = torch.device("cpu")
    try:
        group._get_backend(cpu)
    except RuntimeError:
        return device
    return cpu


@cache
def _machine_number() -> float:
    """`machine_id` as a number that a float holds exactly."""
    digest = hashlib.sha256(spans.machine_id().encode()).digest()
    return float(int.from_bytes(digest[:6], "big"))
