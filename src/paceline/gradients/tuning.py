"""Which bucket capacity is fastest here: a short search over the first steps.

A capacity is tried for a few steps and scored by what the engine itself took in them: filling and
starting buckets, and waiting at the end of backward. When all were tried, ranks compare their
scores, so all choose the same. The search is over after a known number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

MIB = 2**20
CPU_CANDIDATES_BYTES = ([4 * MIB], [MIB], [16 * MIB])
GPU_CANDIDATES_BYTES = ([MIB, 25 * MIB], [MIB, 8 * MIB], [MIB, 80 * MIB])
"""The first of each is the default, and stays unless another one is clearly faster. On GPUs a
small first bucket leaves early; on CPUs a message costs little to start."""
WARM_UP_STEPS = 2
SCORED_STEPS = 4
MARGIN = 0.15
"""A capacity must be faster than the default by this share to be chosen."""


@dataclass(slots=True)
class BucketTuner:
    """The capacities to try, and how long the engine took with each.

    trying candidate 0 --(enough steps)--> trying candidate 1 --> ... --> all tried
    """

    candidates: Sequence[Sequence[int]]
    trial: int = 0
    seconds: list[list[float]] = field(default_factory=list)
    """By candidate, one score for each of its steps, warm-up included."""

    def note(self, seconds: float) -> bool:
        """Take in one step's score; whether that ends the trial."""
        while len(self.seconds) <= self.trial:
            self.seconds.append([])
        self.seconds[self.trial].append(seconds)
        return len(self.seconds[self.trial]) == WARM_UP_STEPS + SCORED_STEPS

    def next_candidate(self) -> Sequence[int] | None:
        """The capacities to try from now on, or None when all were tried."""
        self.trial += 1
        return self.candidates[self.trial] if self.trial < len(self.candidates) else None

    def scores(self) -> list[float]:
        """By candidate, the median of its steps after the warm-up."""
        return [median(steps[WARM_UP_STEPS:]) for steps in self.seconds]


def choose(scores_by_rank: Sequence[Sequence[float]]) -> int:
    """The candidate whose slowest rank is fastest; the first unless another is clearly faster."""
    slowest = [max(scores) for scores in zip(*scores_by_rank, strict=True)]
    best = min(range(len(slowest)), key=lambda index: slowest[index])
    return best if slowest[best] < slowest[0] * (1 - MARGIN) else 0


def report(candidates: Sequence[Sequence[int]], scores: Sequence[float], chosen: int) -> str:
    """What was tried and chosen, in one line."""
    tried = ", ".join(
        f"{capacities[-1] / MIB:g} MiB {score * 1e3:.2f} ms"
        for capacities, score in zip(candidates, scores, strict=True)
    )
    return (
        f"buckets of {candidates[chosen][-1] / MIB:g} MiB, chosen by the engine's own time a step: "
        f"{tried}"
    )


class EngineClock:
    """How long the engine takes in one step: the host's time, or the device's at the end."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._begin = 0.0
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._begin

    def mark(self) -> None:
        """On a GPU, note when what was queued until now is done."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)

    def read(self) -> float:
        """The seconds since the last reading; on a GPU this waits for the device."""
        seconds, self._seconds = self._seconds, 0.0
        if self._is_cuda:
            first, last = self._events[0], self._events[-1]
            last.synchronize()
            seconds = first.elapsed_time(last) / 1e3
            self._events = []
        return seconds
