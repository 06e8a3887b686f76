"""What was not measured: other sizes, other networks, and the one change that would gain most.

The model knows the job from two sizes, one worker and the smallest number of several: how much of
each phase depends on the samples, when each bucket is ready, how uneven the workers are. It is
checked against every other size that was measured, on this machine's own transport, with cores
shared where there are fewer than workers. Predictions for a network give each worker a core or
device of its own.

The exchange is simulated. A ring all-reduce of n workers sends 2(n-1)/n of the bytes over every
link, in 2(n-1) messages. One bucket is under way at a time, none before its gradients are ready.

    backward   |=======================|
    buckets         |--0--|  |---1---|  |--2--|
                                       exposed ^
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from paceline.show.scaling.attribution import (
    Mode,
    SizeResult,
    crowding_of,
    share_of_samples,
    stretch_of,
)
from paceline.show.scaling.measure import BucketTiming, Profile
from paceline.telemetry import OWN, Phase, count_text

HAND_OVER_S = 1.5e-3
"""What a step takes longer once workers share cores: a worker that waits sleeps between looks, and
must be given a core again. Measured with a few jobs on one machine; see docs/scaling.md."""
LEAST_GAIN = 0.03
"""Less is not worth a person's time, and may be chance."""
_LEAST_FACTOR, _MOST_FACTOR = 1e-4, 1e6
_HALVINGS = 60


class Network(NamedTuple):
    """What a message costs between two neighbours."""

    name: str
    latency_s: float
    bytes_per_s: float

    def slower(self, factor: float) -> Network:
        return Network(self.name, self.latency_s * factor, self.bytes_per_s / factor)


NETWORKS = {
    "nvlink": Network("nvlink", 3e-6, 300e9),
    "100g": Network("100g", 10e-6, 11e9),
    "1g": Network("1g", 60e-6, 0.115e9),
    "home": Network("home", 20e-3, 5e6),
}
"""Usual networks: what one direction of a link carries for one worker, after protocols."""
LOCAL = Network("this machine", 30e-6, 3e9)
"""What shared memory is like; how good it is here is fitted as one factor for both numbers."""


def ring_s(nbytes: float, size: int, network: Network) -> float:
    """How long one all-reduce takes if nobody is late."""
    hops = 2 * (size - 1)
    return hops * network.latency_s + hops / size * nbytes / network.bytes_per_s


def exposed_s(
    buckets: Sequence[BucketTiming], backward_s: float, size: int, network: Network
) -> float:
    """How long after the end of backward the last bucket arrives."""
    free = 0.0
    for bucket in buckets:
        free = max(free, min(bucket.ready_s, backward_s)) + ring_s(bucket.nbytes, size, network)
    return max(0.0, free - backward_s) if size > 1 else 0.0


class PhaseCost(NamedTuple):
    """A phase: a part for every step, a part for the samples."""

    fixed_s: float
    per_share_s: float
    """For as many samples as one worker alone has."""

    def at(self, share: float) -> float:
        return self.fixed_s + self.per_share_s * share


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePrediction:
    """A size that was computed, not measured."""

    workers: int
    network: str
    step_s: float
    speedup: float
    efficiency: float
    exposed_s: float
    without_rows: int = 0
    """Workers that the batch is too small for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    """A size that was measured, and not used to learn the job."""

    workers: int
    measured_s: float
    predicted_s: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the model knows of the job."""

    one: Profile
    several: Profile
    """The sizes that it was learned from."""
    mode: Mode
    cores: int
    costs: Mapping[Phase, PhaseCost]
    unevenness: float
    """How much longer the slowest of several takes, as a share of its own work."""
    local: Network

    def predict(
        self, workers: int, network: Network, *, crowding: float = 1.0, share: float | None = None
    ) -> SizePrediction:
        """One size; `share` is that of one worker's samples, by default what the mode says."""
        busy = min(workers, self.one.samples or workers) if self.mode == "strong" else workers
        if share is None:
            share = 1 / busy if self.mode == "strong" else 1.0
        alone_s = sum(cost.at(share) for cost in self.costs.values())
        stretch = stretch_of(crowding, crowding * alone_s)
        own_s = stretch * alone_s
        ideal_s = share * self.one.step_s
        step_s, exposed = ideal_s, 0.0
        if workers > 1:
            backward_s = stretch * self.costs[Phase.BACKWARD].at(share)
            exposed = self._exposed_s(backward_s, workers, network)
            step_s = own_s * (1 + self.unevenness) + HAND_OVER_S + exposed
            if crowding == 1:  # else no more than with few: whoever waits leaves its core to others
                more = _expected_largest(workers) / _expected_largest(self.several.workers)
                step_s = own_s * (1 + self.unevenness * more) + exposed
        speedup = busy * ideal_s / step_s
        return SizePrediction(
            workers=workers,
            network=network.name,
            step_s=step_s,
            speedup=speedup,
            efficiency=speedup / workers,
            exposed_s=exposed,
            without_rows=workers - busy,
        )

    def check(self, profile: Profile) -> PredictionCheck:
        """How far off the model is for a size it has not seen."""
        crowding = crowding_of(profile, self.one, self.cores)
        share = share_of_samples(self.one, profile, self.mode)
        predicted = self.predict(profile.workers, self.local, crowding=crowding, share=share)
        return PredictionCheck(
            workers=profile.workers,
            measured_s=profile.step_s,
            predicted_s=predicted.step_s,
            error=predicted.step_s / profile.step_s - 1,
        )

    def _exposed_s(self, backward_s: float, workers: int, network: Network) -> float:
        """With the same buckets, in a longer or shorter backward pass."""
        was_s = self.several.seconds[Phase.BACKWARD]
        factor = backward_s / was_s if was_s > 0 else 1.0
        moved = [BucketTiming(each.ready_s * factor, each.nbytes) for each in self.several.buckets]
        return exposed_s(moved, backward_s, workers, network)


def learn_job(one: Profile, several: Profile, mode: Mode, cores: int) -> Job:
    """Learn the job from one worker and from one size of several."""
    share = share_of_samples(one, several, mode)
    stretch = stretch_of(crowding_of(several, one, cores), several.own_s)
    costs = {
        phase: fit_cost(one.seconds[phase], several.seconds[phase] / stretch, share)
        for phase in OWN
    }
    costs[Phase.OPTIMIZER] = PhaseCost(several.seconds[Phase.OPTIMIZER] / stretch, 0.0)
    return Job(
        one=one,
        several=several,
        mode=mode,
        cores=cores,
        costs=costs,
        unevenness=several.seconds[Phase.WAIT] / several.own_s if several.own_s > 0 else 0.0,
        local=fit_network(several),
    )


def fit_cost(alone_s: float, together_s: float, share: float) -> PhaseCost:
    """A straight line through two points, as far as it can be a cost at all."""
    if share >= 0.95:  # as many samples as before: nothing tells what fewer would take
        return PhaseCost(0.0, together_s / share)
    slope = (alone_s - together_s) / (1 - share)
    slope = min(max(0.0, slope), together_s / share)
    return PhaseCost(together_s - slope * share, slope)


def fit_network(profile: Profile) -> Network:
    """This machine's transport: as slow as makes the simulated exposure what was measured."""
    backward_s, measured_s = profile.seconds[Phase.BACKWARD], profile.seconds[Phase.TRANSFER]
    low, high = _LEAST_FACTOR, _MOST_FACTOR
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        network = LOCAL.slower(middle)
        if exposed_s(profile.buckets, backward_s, profile.workers, network) < measured_s:
            low = middle
        else:
            high = middle
    return LOCAL.slower(high)


def _expected_largest(count: int) -> float:
    """Of so many normal numbers, by Blom: where all vary alike, the last of more is later."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


class Suggestion(NamedTuple):
    """What to do, and how much faster it would be (0.1 is a tenth)."""

    text: str
    gain: float


def suggest(results: Sequence[SizeResult], profile: Profile) -> Suggestion | None:
    """The suggestion that gains most at the largest size, if any is worth it."""
    best, last = max(results, key=lambda result: result.speedup), results[-1]
    fast = f"{best.speedup:.2f}x as fast as one, and " if best.workers > 1 else ""
    fewer = (
        f"Use {count_text(best.workers, 'worker')} here: {fast}{last.workers} are "
        f"{last.speedup:.2f}x{'' if fast else ' as fast'}."
    )
    ahead = "Load samples ahead: Run(loader_workers=...) or DataLoader(num_workers=...)."

    def gain_of(saved_s: float) -> float:
        return saved_s / max(profile.step_s - saved_s, 0.1 * profile.step_s)

    found = [
        Suggestion(fewer, best.speedup / last.speedup - 1),
        Suggestion(ahead, gain_of(profile.seconds[Phase.DATA])),
        # Fused updates go over the parameters once; about half of the time is all one can hope for.
        Suggestion(
            "Try the optimizer with fused=True.", gain_of(profile.seconds[Phase.OPTIMIZER] / 2)
        ),
    ]
    gainful = max(found, key=lambda each: each.gain)
    return gainful if last.workers > 1 and gainful.gain >= LEAST_GAIN else None
