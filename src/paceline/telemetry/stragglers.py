"""Comparing the pace of the ranks while they train; `blame` says what makes one slow.

Every few steps all ranks exchange a handful of numbers, so seldom that it takes about two
thousandths of the time; a rank that becomes slow is named within some hundred steps.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import torch

from paceline.errors import PeerError
from paceline.group import Cadence, Membership, all_gather, word_device
from paceline.telemetry import spans, stopwatch
from paceline.telemetry.blame import WINDOWS, Blame, OwnWork, find_slow, has_lead, summarise
from paceline.telemetry.stopwatch import StepTimes, Stopwatch

WARM_UP_STEPS = 2
"""The first steps allocate memory and learn the order of gradients; they compare with nothing."""
LEAST_PERIOD, MOST_PERIOD = 5, 100
COST_SHARE = 0.002
"""Of the training time, about this much is spent on comparing, where steps are not tiny."""


def next_period(window: Sequence[OwnWork]) -> int:
    """In how many steps to compare again: the same answer on every rank."""
    took = min(each.took_s for each in window)
    step = max(each.step_s for each in window)
    wanted = took / (COST_SHARE * step) if step > 0 else MOST_PERIOD
    return max(LEAST_PERIOD, min(MOST_PERIOD, math.ceil(wanted)))


class StragglerDetector:
    """One rank's part in the comparisons of its group.

        counting steps --(period over)--> exchange --> windows --> a new Blame is told, on rank 0

    Invariant: the number of the step, and what the ranks of this generation have exchanged, decide
    when to exchange, so all ranks do.
    """

    def __init__(self, watch: Stopwatch, membership: Membership) -> None:
        self.tell: Callable[[int, Blame], None] = print_to_stderr
        """Called on rank 0 with the step and what was found.

        It lives as long as the group, so it must not hold it."""
        self._watch = watch
        self.cadence = Cadence(membership, WARM_UP_STEPS + LEAST_PERIOD)
        self.on_generation()
        membership.follow(self.on_generation)

    def on_generation(self) -> None:
        """Another group, perhaps of other ranks: nothing known before counts."""
        self.blame: Blame | None = None
        """Who is slow now, as far as is known; the same on every rank."""
        self.windows: deque[list[OwnWork]] = deque(maxlen=WINDOWS)
        self._seen: StepTimes | None = self._watch.finished[-1] if self._watch.finished else None
        """The last step that is compared already; numbers of steps may begin again."""
        self._warm_up_steps = WARM_UP_STEPS
        self._under_way: tuple[Any, Any] | None = None
        """On a GPU, numbers on their way to the host and the event of their arrival."""
        self._took_s = 0.0
        self._hurries = False
        """Whether the next comparison comes soon, to confirm what the last one showed."""

    def after_step(self, membership: Membership, device: torch.device) -> None:
        """The gradients of a step are averaged, and it may be time to compare; on every rank."""
        step = self._watch.step
        if self.cadence.is_due(step):
            self.cadence.agree(step, LEAST_PERIOD)
            # Whoever is missing here is missed by the next sum too, which says so better.
            with stopwatch.waiting(membership.group), suppress(PeerError):
                self._exchange(membership, device)

    def _exchange(self, membership: Membership, device: torch.device) -> None:
        if self._under_way is not None:
            gathered, arrival = self._under_way
            self._under_way = None
            arrival.synchronize()  # long past: that was some steps ago
            self._read(membership.rank, gathered)
        steps = list(takewhile(lambda step: step is not self._seen, reversed(self._watch.finished)))
        self._seen = steps[0] if steps else self._seen
        steps = steps[: len(steps) - self._warm_up_steps]
        self._warm_up_steps = 0
        where = word_device(membership.group, device)
        begun = spans.now_ns()
        in_s = [{phase: ns / 1e9 for phase, ns in step.ns_by_phase.items()} for step in steps]
        mine = torch.tensor(summarise(in_s, self._took_s).row(), dtype=torch.float64).to(where)
        by_rank = all_gather(membership.group, mine, "Comparing the pace of the ranks")
        gathered = torch.stack(by_rank).to("cpu", non_blocking=True)
        self._took_s = (spans.now_ns() - begun) / 1e9
        if where.type == "cpu":
            self._read(membership.rank, gathered)
        else:  # the host does not wait for the device
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
            self._under_way = gathered, arrival

    def _read(self, rank: int, gathered: torch.Tensor) -> None:
        window = [OwnWork.from_row(row) for row in gathered.tolist()]
        self.windows.append(window)
        known, self.blame = self.blame, find_slow(list(self.windows))
        # Whoever leads for the first time is looked at again soon; who always leads, by chance or
        # because it is known to be slow, is not worth that.
        self._hurries = self.blame is None and not self._hurries and has_lead(window)
        if len(self.windows) == WINDOWS:  # until then often, whatever it costs
            period = LEAST_PERIOD if self._hurries else next_period(window)
            self.cadence.agree(self._watch.step, period)
        if self.blame is not None and self.blame.culprit != (known and known.culprit) and rank == 0:
            self._say(self.blame)

    def _say(self, blame: Blame) -> None:
        step, recorder = self._watch.step, spans.current
        if recorder is not None:
            facts = {"slow_rank": blame.rank, "phase": blame.phase, "step": step}
            recorder.add("blame", spans.now_ns(), None, facts)
        self.tell(step, blame)


def print_to_stderr(step: int, blame: Blame) -> None:
    print(f"paceline: step {step}: {blame}", file=sys.stderr, flush=True)


def find_detector(group: Any) -> StragglerDetector | None:
    """The detector of this rank in `group`, if it takes part in comparisons."""
    watch = stopwatch.find_stopwatch(group)
    return None if watch is None else watch.detector
