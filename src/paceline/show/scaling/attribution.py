"""Attributing the time lost against ideal scaling to parts that always add up; pure functions.

With r the share of one worker's samples that each of n workers has (1/n in strong scaling, 1 in
weak), the ideal step takes r times one worker's. The rest of a step is attributed by phase.
docs/scaling.md has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.show.scaling.measure import Profile
from paceline.telemetry import OWN, Phase

PART_BY_PHASE = {
    Phase.TRANSFER: "communication",
    Phase.WAIT: "waiting",
    Phase.DATA: "data",
    Phase.OPTIMIZER: "optimizer",
    Phase.FORWARD: "compute",
    Phase.BACKWARD: "compute",
    Phase.OTHER: "other",
}
MEANINGS = {
    "sharing": "workers share cores or a device",
    "communication": "the exchange of gradients that backward does not hide",
    "waiting": "waiting for the slowest worker",
    "data": "fetching samples",
    "optimizer": "the update, which every worker repeats",
    "compute": "forward and backward take longer for each sample than on one worker",
    "other": "everything else, such as the loss and logging",
}
"""The parts of the lost time, by their names in scaling.json."""
PARTS = tuple(MEANINGS)

Mode = Literal["strong", "weak"]

BALANCED_AFTER_S = 0.1


def crowding_of(many: Profile, one: Profile, cores: int) -> float:
    """How many threads share each core, or ranks each device, relative to one worker."""

    def wanted(profile: Profile) -> float:
        threads = profile.workers * profile.threads
        return max(1.0, threads / cores, float(profile.ranks_per_device))

    return max(1.0, wanted(many) / wanted(one))


def stretch_of(crowding: float, own_s: float) -> float:
    """The factor by which the busiest core prolongs its workers' own work.

    The system balances threads between cores at intervals, so not within a short step: of three
    workers on two cores, two share a core to the end, and the third waits for them.
    """
    return crowding if own_s >= BALANCED_AFTER_S else float(math.ceil(crowding))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """One size, compared with one worker."""

    workers: int
    step_s: float
    ideal_s: float
    speedup: float
    efficiency: float
    lost: Mapping[str, float]
    """Seconds by part, none negative: in total `step_s - ideal_s`, or zero if that is negative."""
    crowding: float = 1.0


def share_of_samples(one: Profile, many: Profile, mode: Mode) -> float:
    """One of many workers' samples, as a share of a single worker's."""
    if one.samples and many.samples:
        return many.samples / many.workers / one.samples
    return 1 / many.workers if mode == "strong" else 1.0


def detect_mode(profiles: Sequence[Profile]) -> tuple[Mode, str]:
    """Strong or weak scaling, by the samples of a step, and the reason."""
    one, most = profiles[0], profiles[-1]
    if one.samples is None or most.samples is None:
        return "strong", "assumed, as the samples of a step are not known; see --mode"
    counts = f"{one.samples:,} samples a step with 1 worker, {most.samples:,} with {most.workers}"
    grows = most.samples / one.samples
    # Between the two, choose the nearer one on a logarithmic scale.
    return ("strong" if grows * grows <= most.workers else "weak"), f"found: {counts}"


def attribute(one: Profile, many: Profile, mode: Mode, cores: int) -> SizeResult:
    """Compare a size with one worker, and attribute the lost time."""
    crowding = crowding_of(many, one, cores)
    stretch = stretch_of(crowding, many.own_s)
    share = share_of_samples(one, many, mode)
    ideal_s = share * one.step_s
    parts = dict.fromkeys(PARTS, 0.0)
    for phase, part in PART_BY_PHASE.items():
        before, now = one.seconds[phase], many.seconds[phase]
        shared = 0.0
        if phase in OWN:
            # The update takes equally long for any number of samples: every worker does all of it.
            expected = before if phase is Phase.OPTIMIZER else share * before
            shared = min(max(0.0, now - expected), (stretch - 1) * expected)
        parts["sharing"] += shared
        parts[part] += now - share * before - shared
    return SizeResult(
        workers=many.workers,
        step_s=many.step_s,
        ideal_s=ideal_s,
        speedup=many.workers * ideal_s / many.step_s,
        efficiency=ideal_s / many.step_s,
        lost=without_gains(parts, many.step_s - ideal_s),
        crowding=crowding,
    )


def without_gains(parts: Mapping[str, float], lost: float) -> dict[str, float]:
    """The same sum without negative parts: gains are subtracted from all losses in proportion."""
    losses = {name: max(0.0, value) for name, value in parts.items()}
    total = sum(losses.values())
    if lost <= 0 or total <= 0:
        return dict.fromkeys(parts, 0.0)
    return {name: value / total * lost for name, value in losses.items()}
