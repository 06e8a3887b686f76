"""What sizes that were not measured would take: one worker's work, and the simulated exchange.

The model knows the job from two sizes, one worker and the smallest number of several: how much of
each phase depends on the samples, when each bucket is ready, how uneven the workers are. It is
checked against every other size that was measured, on this machine's own transport, with cores
shared where there are fewer than workers. Predictions for a network give each worker a core or
device of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline.explain.scaling.attribution import Machine, Mode, share_of_samples, stretch_of
from paceline.explain.scaling.profile import OWN, Profile
from paceline.explain.scaling.simulation import Bucket, Network, exposed_s

LOCAL = Network("this machine", 30e-6, 3e9)
"""What shared memory is like; how good it is here is fitted as one factor for both numbers."""
HAND_OVER_S = 1.5e-3
"""What a step takes longer once workers share cores: a worker that waits sleeps between looks, and
must be given a core again. Measured with a few jobs on one machine; see docs/scaling.md."""
_LEAST_FACTOR, _MOST_FACTOR = 1e-4, 1e6
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Cost:
    """A phase: a part for every step, a part for the samples."""

    fixed_s: float
    per_share_s: float
    """For as many samples as one worker alone has."""

    def at(self, share: float) -> float:
        return self.fixed_s + self.per_share_s * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A size that was computed, not measured."""

    workers: int
    network: str
    step_s: float
    speedup: float
    efficiency: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the model knows of the job."""

    one_s: float
    """One worker's step."""
    mode: Mode
    costs: Mapping[str, Cost]
    buckets: tuple[Bucket, ...]
    backward_s: float
    """The backward pass to which the buckets' times belong."""
    unevenness: float
    """How much longer the slowest worker takes, as a share of the own work, ..."""
    fitted_size: int
    """... with so many workers."""
    local: Network

    def predict(
        self, workers: int, network: Network, *, crowding: float = 1.0, share: float | None = None
    ) -> Prediction:
        """One size; `share` is that of one worker's samples, by default what the mode says."""
        if share is None:
            share = 1 / workers if self.mode == "strong" else 1.0
        alone_s = sum(cost.at(share) for cost in self.costs.values())
        stretch = stretch_of(crowding, crowding * alone_s)
        seconds = {phase: stretch * cost.at(share) for phase, cost in self.costs.items()}
        own = sum(seconds.values())
        if workers == 1:
            step, exposed = self.one_s * share, 0.0
        else:
            exposed = self._exposed_s(seconds["backward"], workers, network)
            if crowding > 1:
                # No more than with few workers: whoever waits leaves its core to the others.
                waiting = own * self.unevenness + HAND_OVER_S
            else:
                more = _expected_largest(workers) / _expected_largest(self.fitted_size)
                waiting = own * self.unevenness * more
            step = own + waiting + exposed
        ideal = share * self.one_s
        return Prediction(
            workers=workers,
            network=network.name,
            step_s=step,
            speedup=workers * ideal / step,
            efficiency=ideal / step,
            exposed_s=exposed,
        )

    def _exposed_s(self, backward_s: float, workers: int, network: Network) -> float:
        return exposed_s(
            rescale(self.buckets, self.backward_s, backward_s), backward_s, workers, network
        )


def fit(one: Profile, several: Profile, mode: Mode, machine: Machine) -> Job:
    """Learn the job from one worker and from one size of several."""
    share = share_of_samples(one, several, mode)
    own = sum(several.seconds[phase] for phase in OWN)
    stretch = stretch_of(machine.crowding_of(several, one), own)
    costs = {
        phase: Cost(several.seconds[phase] / stretch, 0.0)
        if phase == "optimizer"
        else fit_cost(one.seconds[phase], several.seconds[phase] / stretch, share)
        for phase in OWN
    }
    backward = several.seconds["backward"]
    return Job(
        one_s=one.step_s,
        mode=mode,
        costs=costs,
        buckets=several.buckets,
        backward_s=backward,
        unevenness=several.seconds["waiting"] / own if own > 0 else 0.0,
        fitted_size=several.workers,
        local=fit_network(
            several.buckets, backward, several.workers, several.seconds["communication"]
        ),
    )


def fit_cost(alone_s: float, together_s: float, share: float) -> Cost:
    """A straight line through two points, as far as it can be a cost at all."""
    if share >= 0.95:  # as many samples as before: nothing tells what fewer would take
        return Cost(0.0, together_s / share)
    slope = (alone_s - together_s) / (1 - share)
    slope = min(max(0.0, slope), together_s / share)
    return Cost(together_s - slope * share, slope)


def fit_network(
    buckets: Sequence[Bucket], backward_s: float, size: int, measured_s: float
) -> Network:
    """This machine's transport: as slow as makes the simulated exposure what was measured."""

    def slower(factor: float) -> Network:
        return Network(LOCAL.name, LOCAL.latency_s * factor, LOCAL.bytes_per_s / factor)

    low, high = _LEAST_FACTOR, _MOST_FACTOR
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if exposed_s(buckets, backward_s, size, slower(middle)) < measured_s:
            low = middle
        else:
            high = middle
    return slower(high)


def rescale(buckets: Sequence[Bucket], was_s: float, is_s: float) -> list[Bucket]:
    """The same buckets in a longer or shorter backward pass."""
    factor = is_s / was_s if was_s > 0 else 1.0
    return [Bucket(bucket.ready_s * factor, bucket.nbytes) for bucket in buckets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A size that was measured, and not used to learn the job."""

    workers: int
    measured_s: float
    predicted_s: float
    crowding: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def check(job: Job, one: Profile, others: Sequence[Profile], machine: Machine) -> list[Check]:
    """How far off the model is for sizes it has not seen."""
    found = []
    for profile in others:
        crowding = machine.crowding_of(profile, one)
        share = share_of_samples(one, profile, job.mode)
        predicted = job.predict(profile.workers, job.local, crowding=crowding, share=share)
        found.append(
            Check(
                workers=profile.workers,
                measured_s=profile.step_s,
                predicted_s=predicted.step_s,
                crowding=crowding,
            )
        )
    return found


def _expected_largest(count: int) -> float:
    """Of so many normal numbers, by Blom: where all vary alike, the last of more is later."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
