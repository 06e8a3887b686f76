"""One thing to try, with what it would gain: the best of a few, by the numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.explain.scaling.attribution import Machine, Result, stretch_of
from paceline.explain.scaling.prediction import Job
from paceline.explain.scaling.profile import OWN, Profile
from paceline.explain.scaling.simulation import Bucket, exposed_s

LEAST_GAIN = 0.03
"""Less is not worth a person's time, and may be chance."""
CLEARLY = 1.25
"""By how much the gain of a change of the training must exceed that of any other."""


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
        _smaller_buckets(profile, job),
        _slow_rank(profile),
        _loading(profile),
        _optimizer(profile),
    ]
    found = [each for each in candidates if each is not None]
    best = max(found, key=lambda each: each.gain)
    batch = _larger_batch(result, profile, job)
    # It changes what is learned, so it has to be clearly better.
    if batch is not None and batch.gain > CLEARLY * best.gain:
        best = batch
    return best if best.gain >= LEAST_GAIN else None


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


def _smaller_buckets(profile: Profile, job: Job | None) -> Suggestion | None:
    """The last bucket leaves when backward ends; half of it could have left before."""
    if job is None or not profile.buckets:
        return None
    backward_s, size = profile.seconds["backward"], profile.workers
    now = exposed_s(profile.buckets, backward_s, size, job.local)
    then = exposed_s(halve(profile.buckets), backward_s, size, job.local)
    last = profile.buckets[-1].nbytes / 2**20
    return Suggestion(
        f"Use smaller buckets: the exchange after backward is mostly that of the last one, "
        f"{last:.1f} MiB. Try bucket_cap_mb={last / 2:.2g}.",
        _gain(max(0.0, min(now - then, profile.seconds["communication"])), profile),
    )


def halve(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Each bucket as two, the first of which is ready halfway since the bucket before."""
    found, before = list[Bucket](), 0.0
    for bucket in buckets:
        half = bucket.nbytes // 2
        found.append(Bucket((before + bucket.ready_s) / 2, half))
        found.append(Bucket(bucket.ready_s, bucket.nbytes - half))
        before = bucket.ready_s
    return found


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


def _loading(profile: Profile) -> Suggestion:
    return Suggestion(
        "Load samples ahead in other processes: Run(workers=...) or DataLoader(num_workers=...).",
        _gain(profile.seconds["data"], profile),
    )


def _optimizer(profile: Profile) -> Suggestion:
    # Fused updates go over the parameters once; about half of the time is what one can hope for.
    return Suggestion(
        "Try the optimizer with fused=True.", _gain(profile.seconds["optimizer"] / 2, profile)
    )


def _gain(saved_s: float, profile: Profile) -> float:
    return saved_s / max(profile.step_s - saved_s, 0.1 * profile.step_s)
