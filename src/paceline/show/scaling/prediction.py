"""Predictions for other sizes and networks, and the change that would gain most.

The model is fitted to two sizes, one worker and the smallest number of several: how much of each
phase depends on the samples, when each bucket is ready, how uneven the workers are. It is checked
against every other measured size, on this machine's transport, with shared cores where there are
fewer than workers. Predictions for a network assume a core or device for each worker.

The exchange is simulated. A ring all-reduce of n workers sends 2(n-1)/n of the bytes over every
link, in 2(n-1) messages. One bucket is in flight at a time, none before its gradients are ready.

    backward   |=======================|
    buckets         |--0--|  |---1---|  |--2--|
                                       exposed ^
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

RESCHEDULE_S = 1.5e-3
"""The extra time of a step once workers share cores: a waiting worker sleeps between polls, and has
to be scheduled again. Measured with a few jobs on one machine; see docs/scaling.md."""
LEAST_GAIN = 0.03
"""Smaller gains are not suggested: they may be chance."""
_LEAST_FACTOR, _MOST_FACTOR = 1e-4, 1e6
_HALVINGS = 60


class Network(NamedTuple):
    """The latency and bandwidth between two neighbours."""

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
"""Typical networks: one direction of a link, for one worker, without protocol overhead."""
LOCAL = Network("this machine", 30e-6, 3e9)
"""Typical shared memory; a factor for both numbers is fitted to this machine."""


def ring_s(nbytes: float, size: int, network: Network) -> float:
    """How long one all-reduce takes if all ranks are ready."""
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
    """A phase's time: a fixed part, and a part proportional to the samples."""

    fixed_s: float
    per_share_s: float
    """For the samples of a single worker."""

    def at(self, share: float) -> float:
        return self.fixed_s + self.per_share_s * share


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePrediction:
    """A predicted size."""

    workers: int
    network: str
    step_s: float
    speedup: float
    efficiency: float
    exposed_s: float
    without_rows: int = 0
    """The number of workers without rows, because the batch is too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    """A measured size that was not used to fit the model."""

    workers: int
    measured_s: float
    predicted_s: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The fitted model of a job."""

    one: Profile
    several: Profile
    """The sizes to which it was fitted."""
    mode: Mode
    cores: int
    costs: Mapping[Phase, PhaseCost]
    unevenness: float
    """How long a typical worker waits for the slowest, as a share of its own work."""
    local: Network

    def predict(
        self, workers: int, network: Network, *, crowding: float = 1.0, share: float | None = None
    ) -> SizePrediction:
        """Predict one size; `share` is a worker's share of the samples, by default by `mode`."""
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
            step_s = own_s * (1 + self.unevenness) + RESCHEDULE_S + exposed
            # With shared cores more workers wait no longer: a waiting worker leaves its core to
            # others.
            if crowding == 1:
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
        """The model's error for a measured size that it was not fitted to."""
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


def fit_job(one: Profile, several: Profile, mode: Mode, cores: int) -> Job:
    """Fit the model to one worker and to one size of several."""
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
    """A line through two points, with both parts limited to be at least 0."""
    if share >= 0.95:  # about as many samples: the two parts cannot be told apart
        return PhaseCost(0.0, together_s / share)
    slope = (alone_s - together_s) / (1 - share)
    slope = min(max(0.0, slope), together_s / share)
    return PhaseCost(together_s - slope * share, slope)


def fit_network(profile: Profile) -> Network:
    """This machine's transport: scaled so that the simulated exposed time equals the measured."""
    backward_s, measured_s = profile.seconds[Phase.BACKWARD], profile.seconds[Phase.TRANSFER]

    def is_too_fast(factor: float) -> bool:
        network = LOCAL.slower(factor)
        return exposed_s(profile.buckets, backward_s, profile.workers, network) < measured_s

    return LOCAL.slower(find_turn(_LEAST_FACTOR, _MOST_FACTOR, is_too_fast))


def find_turn(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The number from which on `holds` is false, by bisection on a logarithmic scale."""
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def _expected_largest(count: int) -> float:
    """The expected largest of `count` normal numbers, by Blom: the last of more is later."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


class Suggestion(NamedTuple):
    """A change, and its gain in speed (0.1 is a tenth)."""

    text: str
    gain: float


def suggest(results: Sequence[SizeResult], profile: Profile) -> Suggestion | None:
    """The suggestion that gains most at the largest size, if it gains enough."""
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
        # A fused update reads the parameters once; it saves about half of the time at best.
        Suggestion(
            "Try the optimizer with fused=True.", gain_of(profile.seconds[Phase.OPTIMIZER] / 2)
        ),
    ]
    gainful = max(found, key=lambda each: each.gain)
    return gainful if last.workers > 1 and gainful.gain >= LEAST_GAIN else None
