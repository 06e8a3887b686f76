"""Where the time went that the ideal would not have taken: pure, and it always adds up.

With r the share of one worker's samples that each of n workers has (1/n in strong scaling, 1 in
weak), the ideal step takes r times one worker's. What a step takes longer is taken apart by phase.
docs/scaling.md has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.explain.scaling.profile import Profile

PARTS = ("sharing", "communication", "waiting", "data", "optimizer", "compute", "other")
PART_BY_PHASE = {
    "data": "data",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "optimizer",
    "other": "other",
}

Mode = Literal["strong", "weak"]

BALANCED_AFTER_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the workers share."""

    cores: int

    def crowding(self, profile: Profile, others_cores: float = 0.0) -> float:
        """How many want each core or device; 1 where nobody shares."""
        wanted = profile.workers * profile.threads + others_cores
        return max(1.0, wanted / self.cores, float(profile.ranks_per_device))

    def crowding_of(self, profile: Profile, one: Profile) -> float:
        """The same, against what one worker already had to share."""
        return max(1.0, self.crowding(profile) / self.crowding(one))

    def crowding_with_others(self, profile: Profile, one: Profile) -> float:
        """The same, with the other programs that used cores meanwhile."""
        alone = self.crowding(one, one.others_cores)
        return max(1.0, self.crowding(profile, profile.others_cores) / alone)


def stretch_of(crowding: float, own_s: float) -> float:
    """How much longer the fullest core makes its workers' own work.

    The system moves work between cores now and then. In a short step nobody is moved: of three
    workers on two cores, two share one to the end, and the third waits for them.
    """
    return crowding if own_s >= BALANCED_AFTER_S else float(math.ceil(crowding))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One size, compared with one worker."""

    workers: int
    step_s: float
    ideal_s: float
    speedup: float
    efficiency: float
    lost_s: Mapping[str, float]
    """By part, none negative; together `step_s - ideal_s`, or nothing if that is negative."""
    crowding: float = 1.0

    @property
    def lost(self) -> float:
        """The share of the step that the ideal would not have taken."""
        return sum(self.lost_s.values()) / self.step_s


def share_of_samples(one: Profile, many: Profile, mode: Mode) -> float:
    """How many samples each of many workers has for each that one worker alone has."""
    if one.samples and many.samples:
        return many.samples / many.workers / one.samples
    return 1 / many.workers if mode == "strong" else 1.0


def detect_mode(profiles: list[Profile]) -> tuple[Mode, str]:
    """Strong or weak scaling by the samples of a step, and why."""
    one, most = profiles[0], profiles[-1]
    if one.samples is None or most.samples is None:
        return "strong", "assumed, as the samples of a step are not known; see --mode"
    counts = f"{one.samples:,} samples a step with 1 worker, {most.samples:,} with {most.workers}"
    grows = most.samples / one.samples
    # Between the two, the nearer one by ratio.
    return ("strong" if grows * grows <= most.workers else "weak"), f"found: {counts}"


def attribute(
    one: Profile,
    many: Profile,
    mode: Mode,
    crowding: float = 1.0,
    crowding_with_others: float = 1.0,
) -> Result:
    """Compare a size with one worker, and say where time is lost."""
    own_s = sum(many.seconds[phase] for phase in PART_BY_PHASE)
    stretch = max(stretch_of(crowding, own_s), crowding_with_others)
    share = share_of_samples(one, many, mode)
    ideal = share * one.step_s
    parts = dict.fromkeys(PARTS, 0.0)
    parts["communication"] = many.seconds["communication"]
    parts["waiting"] = many.seconds["waiting"]
    for phase, part in PART_BY_PHASE.items():
        before, now = one.seconds[phase], many.seconds[phase]
        # An update costs the same for any number of samples: every worker repeats all of it.
        expected = before if phase == "optimizer" else share * before
        shared = min(max(0.0, now - expected), (stretch - 1) * expected)
        parts["sharing"] += shared
        parts[part] += now - share * before - shared
    # One worker waits for nobody, but its recording may hold waits of a collective of its own.
    alone = one.seconds["communication"] + one.seconds["waiting"]
    parts["communication"] -= share * alone
    return Result(
        workers=many.workers,
        step_s=many.step_s,
        ideal_s=ideal,
        speedup=many.workers * ideal / many.step_s,
        efficiency=ideal / many.step_s,
        lost_s=without_gains(parts, many.step_s - ideal),
        crowding=crowding,
    )


def without_gains(parts: Mapping[str, float], lost: float) -> dict[str, float]:
    """The same sum without negative parts: what one part gains pays for all others alike."""
    losses = {name: max(0.0, value) for name, value in parts.items()}
    total = sum(losses.values())
    if lost <= 0 or total <= 0:
        return dict.fromkeys(parts, 0.0)
    return {name: value / total * lost for name, value in losses.items()}


def percentages(parts: Mapping[str, float]) -> dict[str, int]:
    """Whole percents that add up to 100: the largest remainders are rounded up."""
    total = sum(parts.values())
    if total <= 0:
        return dict.fromkeys(parts, 0)
    exact = {name: 100 * value / total for name, value in parts.items()}
    found = {name: int(value) for name, value in exact.items()}
    left = 100 - sum(found.values())
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[:left]:
        found[name] += 1
    return found
