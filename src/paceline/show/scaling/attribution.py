"""Where the time went that the ideal would not have taken: pure, and it always adds up.

With r the share of one worker's samples that each of n workers has (1/n in strong scaling, 1 in
weak), the ideal step takes r times one worker's. What a step takes longer is taken apart by phase.
docs/scaling.md has the definitions. `speedup` is for two times alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError, check_whole
from paceline.show.scaling.measure import Profile
from paceline.telemetry import OWN, Phase, count_text, share_text

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
"""Where time can be lost, as scaling.json names it."""
PARTS = tuple(MEANINGS)

Mode = Literal["strong", "weak"]

BALANCED_AFTER_S = 0.1


def crowding_of(many: Profile, one: Profile, cores: int) -> float:
    """How many want each core or device, against what one worker already had to share."""

    def wanted(profile: Profile) -> float:
        threads = profile.workers * profile.threads
        return max(1.0, threads / cores, float(profile.ranks_per_device))

    return max(1.0, wanted(many) / wanted(one))


def stretch_of(crowding: float, own_s: float) -> float:
    """How much longer the fullest core makes its workers' own work.

    The system moves work between cores now and then. In a short step nobody is moved: of three
    workers on two cores, two share one to the end, and the third waits for them.
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
    """Seconds by part, none negative: together `step_s - ideal_s`, or nothing if that is."""
    crowding: float = 1.0


def share_of_samples(one: Profile, many: Profile, mode: Mode) -> float:
    """How many samples each of many workers has for each that one worker alone has."""
    if one.samples and many.samples:
        return many.samples / many.workers / one.samples
    return 1 / many.workers if mode == "strong" else 1.0


def detect_mode(profiles: Sequence[Profile]) -> tuple[Mode, str]:
    """Strong or weak scaling by the samples of a step, and why."""
    one, most = profiles[0], profiles[-1]
    if one.samples is None or most.samples is None:
        return "strong", "assumed, as the samples of a step are not known; see --mode"
    counts = f"{one.samples:,} samples a step with 1 worker, {most.samples:,} with {most.workers}"
    grows = most.samples / one.samples
    # Between the two, the nearer one by ratio.
    return ("strong" if grows * grows <= most.workers else "weak"), f"found: {counts}"


def attribute(one: Profile, many: Profile, mode: Mode, cores: int) -> SizeResult:
    """Compare a size with one worker, and say where time is lost."""
    crowding = crowding_of(many, one, cores)
    stretch = stretch_of(crowding, many.own_s)
    share = share_of_samples(one, many, mode)
    ideal_s = share * one.step_s
    parts = dict.fromkeys(PARTS, 0.0)
    for phase, part in PART_BY_PHASE.items():
        before, now = one.seconds[phase], many.seconds[phase]
        shared = 0.0
        if phase in OWN:
            # An update costs the same for any number of samples: every worker repeats all of it.
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
    """The same sum without negative parts: what one part gains pays for all others alike."""
    losses = {name: max(0.0, value) for name, value in parts.items()}
    total = sum(losses.values())
    if lost <= 0 or total <= 0:
        return dict.fromkeys(parts, 0.0)
    return {name: value / total * lost for name, value in losses.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """The same work, before on one worker and after on several."""

    before: float
    after: float
    workers: int

    @property
    def ratio(self) -> float:
        """How many times as fast."""
        return self.before / self.after

    @property
    def efficiency(self) -> float:
        """The share of the ideal that was reached; the ideal is n times as fast with n workers."""
        return self.ratio / self.workers

    @property
    def lost(self) -> float:
        """The share of the ideal that was not reached; 0 if it was exceeded."""
        return max(0.0, 1.0 - self.efficiency)

    @property
    def serial_share(self) -> float | None:
        """The share of the work that, if it could not be shared, would explain the loss.

        Amdahl's law turned round. None where it explains nothing: one worker, or no loss.
        """
        if self.workers == 1 or self.efficiency >= 1:
            return None
        share = (1 / self.ratio - 1 / self.workers) / (1 - 1 / self.workers)
        return share if share <= 1 else None

    def __str__(self) -> str:
        text = f"{self.ratio:.2f}x with {count_text(self.workers, 'worker')}: "
        text += f"{share_text(self.efficiency)} efficiency, "
        if self.efficiency > 1:
            return text + "more than the ideal. Check that both times are of the same work."
        text += f"{share_text(self.lost)} of the ideal {self.workers}x is lost"
        if self.serial_share is None:
            return text + "."
        share = share_text(self.serial_share, 1)
        return text + f", as if {share} of the work could not be shared (Amdahl)."


def speedup(*, before: float, after: float, workers: int) -> SpeedUp:
    """Compare two times of the same work: on one worker, and on `workers`.

    >>> print(speedup(before=100, after=30, workers=4))
    3.33x with 4 workers: 83 % efficiency, 17 % of the ideal 4x is lost, as if 6.7 % of the work
    could not be shared (Amdahl).
    """
    check_whole("speedup(): workers", workers)
    for name, value in (("before", before), ("after", after)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1e-100 < value < 1e100:  # their ratio is a number too
            raise UsageError(
                f"{name}={value!r} was passed to speedup(), which is not a time.",
                advice="Pass seconds, or any other unit, the same for both; more than 0.",
            )
    return SpeedUp(before=float(before), after=float(after), workers=workers)
