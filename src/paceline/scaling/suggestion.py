"""One thing to try, with what it would gain: the best of a few, by the numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.scaling.attribution import Machine, Result, stretch_of
from paceline.scaling.prediction import Job
from paceline.scaling.profile import OWN, Profile

LEAST_GAIN = 0.03
"""Less is not worth a person's time, and may be chance."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to do, and how much faster it would be (0.1 is a tenth)."""

    text: str
    gain: float


def suggest(
    results: Sequence[Result], profiles: Sequence[Profile], job: Job | None, machine: Machine
) -> Suggestion | None:
    """The suggestion that gains most at the largest size, if any is worth it."""
    result, profile = results[-1], profiles[-1]
    if profile.workers == 1 or profile.is_whole_job:
        return None
    candidates = [
        _fewer_workers(results, profile, machine),
        _larger_batch(result, profile, job),
        _slow_rank(profile),
        _loading(profile),
        _optimizer(profile),
    ]
    found = [each for each in candidates if each is not None and each.gain >= LEAST_GAIN]
    return max(found, key=lambda each: each.gain, default=None)


def _fewer_workers(
    results: Sequence[Result], profile: Profile, machine: Machine
) -> Suggestion | None:
    last = results[-1]
    best = max(results, key=lambda result: result.speedup)
    if best.workers == last.workers:
        return None
    if best.workers == 1:
        why = f"a step of {best.step_s * 1e3:.1f} ms is too short to be shared by more"
    elif profile.ranks_per_device > 1:
        why = f"{profile.ranks_per_device} workers share a device"
    elif last.crowding > 1:
        why = f"{last.workers} workers of {_threads(profile.threads)} share {machine.cores} cores"
    else:
        why = f"more are not faster, {last.speedup:.2f}x instead of {best.speedup:.2f}x"
    return Suggestion(
        f"Use {best.workers} worker{'s' if best.workers > 1 else ''} here: {why}.",
        best.speedup / last.speedup - 1,
    )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _larger_batch(result: Result, profile: Profile, job: Job | None) -> Suggestion | None:
    """Twice the samples for each worker: what does not depend on samples is paid half as often."""
    if job is None:
        return None
    share = result.ideal_s / job.one_s
    stretch = stretch_of(result.crowding, profile.step_s)
    more_s = stretch * share * sum(cost.per_share_s for cost in job.costs.values())
    batch = f" ({profile.samples:,} samples now)" if profile.samples else ""
    return Suggestion(
        f"Use a global batch twice as large{batch}: exchange, update and other costs of a step "
        "are paid half as often. Adapt the learning rate.",
        2 * profile.step_s / (profile.step_s + more_s) - 1,
    )


def _slow_rank(profile: Profile) -> Suggestion | None:
    own = [sum(rank[phase] for phase in OWN) for rank in profile.own_by_rank]
    slowest = max(range(len(own)), key=lambda rank: own[rank])
    others = [rank for rank in range(len(own)) if rank != slowest]
    excess = own[slowest] - median(own[rank] for rank in others)
    if excess < 0.05 * profile.step_s:
        return None

    def by(phase: str) -> float:
        usual = median(profile.own_by_rank[rank][phase] for rank in others)
        return profile.own_by_rank[slowest][phase] - usual

    phase = max(OWN, key=by)
    return Suggestion(
        f"Make worker {slowest} as quick as the others: its {phase} takes "
        f"{by(phase) * 1000:.1f} ms longer.",
        _gain(min(excess, profile.seconds["waiting"]), profile),
    )


def _loading(profile: Profile) -> Suggestion | None:
    return Suggestion(
        "Load samples ahead in other processes: Run(workers=...) or DataLoader(num_workers=...).",
        _gain(profile.seconds["data"], profile),
    )


def _optimizer(profile: Profile) -> Suggestion | None:
    # Fused updates go over the parameters once; about half of the time is what one can hope for.
    return Suggestion(
        "Try the optimizer with fused=True.", _gain(profile.seconds["optimizer"] / 2, profile)
    )


def _gain(saved_s: float, profile: Profile) -> float:
    return saved_s / max(profile.step_s - saved_s, 0.1 * profile.step_s)
