"""Predictions: the simulated exchange, exact jobs, played jobs, and what to try."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.show.scaling.attribution import Mode, stretch_of
from paceline.show.scaling.measure import BucketTiming, Profile, read_run
from paceline.show.scaling.prediction import (
    NETWORKS,
    RESCHEDULE_S,
    Network,
    PhaseCost,
    PredictionCheck,
    exposed_s,
    fit_cost,
    fit_job,
    fit_network,
    ring_s,
)
from paceline.telemetry.phases import Phase
from paceline.telemetry.spans import SpanRecorder

CORES = 64
COSTS = {
    Phase.DATA: PhaseCost(0.001, 0.002),
    Phase.FORWARD: PhaseCost(0.002, 0.02),
    Phase.BACKWARD: PhaseCost(0.004, 0.04),
    Phase.OPTIMIZER: PhaseCost(0.005, 0.0),
    Phase.OTHER: PhaseCost(0.001, 0.0),
}
NETWORK = Network("made up", 60e-6, 1.5e9)


def made_up(workers: int, mode: Mode, stretch: float = 1.0) -> Profile:
    """What a job of these costs would show on `workers` workers."""
    share = 1 / workers if mode == "strong" else 1.0
    seconds = {phase: stretch * cost.at(share) for phase, cost in COSTS.items()}
    backward = seconds[Phase.BACKWARD]
    buckets = tuple(BucketTiming(backward * part, 4_000_000) for part in (0.4, 0.8, 1.0))
    seconds[Phase.WAIT] = 0.0
    seconds[Phase.TRANSFER] = exposed_s(buckets, backward, workers, NETWORK)
    return Profile(
        workers=workers,
        seconds=seconds,
        buckets=buckets,
        steps=100,
        samples=96 if mode == "strong" else 96 * workers,
    )


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize("fitted", [2, 3])
def test_sizes_that_were_not_seen_are_predicted_from_two_that_were(mode: Mode, fitted: int) -> None:
    job = fit_job(made_up(1, mode), made_up(fitted, mode), mode, CORES)
    for workers in (4, 8, 32):
        assert abs(job.check(made_up(workers, mode)).error) < 0.02


def test_shared_cores_make_every_worker_slower() -> None:
    job = fit_job(made_up(1, "strong"), made_up(2, "strong"), "strong", cores=2)
    crowded = made_up(4, "strong", stretch=2.0)

    found = job.check(crowded)

    assert found.predicted_s == pytest.approx(crowded.step_s + RESCHEDULE_S, rel=0.02)


def test_in_a_short_step_three_workers_on_two_cores_are_as_slow_as_four() -> None:
    assert stretch_of(1.5, own_s=0.01) == 2.0
    assert stretch_of(1.5, own_s=1.0) == 1.5
    assert stretch_of(1.0, own_s=0.01) == 1.0


@given(
    st.floats(1e-6, 10),
    st.floats(1e-6, 10),
    st.one_of(st.floats(0.01, 0.9), st.just(1.0)),
)
def test_a_cost_fits_what_several_workers_took_and_is_never_negative(
    alone_s: float, together_s: float, share: float
) -> None:
    cost = fit_cost(alone_s, together_s, share)
    assert cost.at(share) == pytest.approx(together_s)
    assert cost.fixed_s >= -1e-12
    assert cost.per_share_s >= 0


@given(st.floats(1e-5, 1.0), st.integers(2, 16))
def test_the_fitted_network_gives_the_exposure_that_was_measured(
    measured_s: float, size: int
) -> None:
    buckets = (BucketTiming(0.05, 10**6), BucketTiming(0.1, 10**6))
    seconds = {Phase.BACKWARD: 0.1, Phase.TRANSFER: measured_s}
    network = fit_network(Profile(workers=size, seconds=seconds, buckets=buckets))
    assert exposed_s(buckets, 0.1, size, network) == pytest.approx(measured_s, rel=1e-3)


def test_an_uneven_job_waits_longer_for_the_last_of_more_workers() -> None:
    two = made_up(2, "weak")
    seconds = {**two.seconds, Phase.WAIT: 0.01}
    uneven = fit_job(made_up(1, "weak"), replace(two, seconds=seconds), "weak", CORES)
    even = fit_job(made_up(1, "weak"), two, "weak", CORES)

    def more(workers: int) -> float:
        network = NETWORKS["100g"]
        return uneven.predict(workers, network).step_s - even.predict(workers, network).step_s

    assert more(2) == pytest.approx(0.01)
    assert 0.01 < more(8) < more(1024) < 0.1


def test_slower_networks_and_more_workers_are_never_more_efficient() -> None:
    job = fit_job(made_up(1, "weak"), made_up(2, "weak"), "weak", CORES)
    by_network = [job.predict(64, network).efficiency for network in NETWORKS.values()]
    by_size = [job.predict(size, NETWORKS["1g"]).efficiency for size in (1, 2, 8, 64, 1024)]

    assert by_network == sorted(by_network, reverse=True)
    assert by_size == sorted(by_size, reverse=True)
    assert by_size[0] == 1.0
    assert job.predict(64, NETWORKS["1g"]).network == "1g"


SECOND = Network("a byte a second", 0.0, 1.0)

networks = st.builds(
    Network, st.just("some"), st.floats(0, 1e-2), st.floats(min_value=1e3, max_value=1e12)
)
buckets = st.lists(
    st.builds(BucketTiming, st.floats(0, 1), st.integers(0, 10**9)), min_size=1, max_size=8
)


def test_a_ring_sends_almost_twice_the_bytes_in_twice_the_neighbours() -> None:
    assert ring_s(8, 4, SECOND) == 2 * 3 / 4 * 8
    assert ring_s(8, 4, Network("slow to start", 1.0, 1e30)) == pytest.approx(2 * 3)
    assert ring_s(8, 1, SECOND) == 0


def test_buckets_leave_in_order_and_what_fits_into_backward_is_hidden() -> None:
    # Two workers: a bucket of n bytes takes n seconds.
    assert exposed_s([BucketTiming(1.0, 3), BucketTiming(5.0, 2)], 10.0, 2, SECOND) == 0
    assert exposed_s([BucketTiming(1.0, 3), BucketTiming(10.0, 2)], 10.0, 2, SECOND) == 2
    # 0 is under way from 2 to 9, so 1, ready at 3, from 9 to 13, and 2, ready at 10, to 14.
    queue = [BucketTiming(2.0, 7), BucketTiming(3.0, 4), BucketTiming(10.0, 1)]
    assert exposed_s(queue, 10.0, 2, SECOND) == 4


def test_one_worker_exchanges_nothing() -> None:
    assert ring_s(8, 1, SECOND) == 0
    assert exposed_s([BucketTiming(5.0, 100)], 1.0, 1, SECOND) == 0


@given(buckets, st.floats(0, 2), st.integers(2, 2000), networks, st.floats(1, 100))
def test_more_workers_a_slower_network_or_more_bytes_are_never_faster(
    some: list[BucketTiming], backward_s: float, size: int, network: Network, factor: float
) -> None:
    slower = Network("slower", network.latency_s * factor, network.bytes_per_s / factor)
    more = [BucketTiming(bucket.ready_s, round(bucket.nbytes * factor)) for bucket in some]
    now = exposed_s(some, backward_s, size, network)

    assert exposed_s(some, backward_s, size + 1, network) >= now
    assert exposed_s(some, backward_s, size, slower) >= now
    assert exposed_s(more, backward_s, size, network) >= now - 1e-9


@given(buckets, st.floats(0, 2), st.integers(2, 2000), networks)
def test_exposure_is_at_least_the_last_bucket_and_at_most_all_of_them(
    some: list[BucketTiming], backward_s: float, size: int, network: Network
) -> None:
    late = [*some, BucketTiming(backward_s, 10**6)]
    found = exposed_s(late, backward_s, size, network)
    alone = [ring_s(bucket.nbytes, size, network) for bucket in late]

    assert alone[-1] - 1e-9 <= found <= sum(alone) + 1e-9


def test_presets_are_ordered_from_fast_to_slow() -> None:
    steps = [ring_s(1e8, 8, network) for network in NETWORKS.values()]
    assert steps == sorted(steps)


# Where every worker has a core of its own, a world of workers is played step by step, in virtual
# time: each draws how long its own work takes, buckets are summed in order over a ring once the
# last worker has them, and all continue together. What each would have recorded is written with
# the real recorder and read by the real reader; the model learns from 1 and 2 workers and must
# foretell the others. It shares no formula with the player but the ring's.
MS = 1_000_000
STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedJob:
    """What one step of a made-up training takes, in milliseconds."""

    mode: Mode
    samples: int
    forward_ms: float
    backward_ms: float
    """For all the samples of one worker alone, ..."""
    fixed_ms: float
    """... and for a step without any."""
    optimizer_ms: float
    jitter: float
    """Standard deviation of a worker's own work, as a share of it."""
    bucket_bytes: int
    network: Network


JOBS = {
    "even": PlayedJob(
        mode="strong", samples=256, forward_ms=40, backward_ms=80, fixed_ms=2, optimizer_ms=3,
        jitter=0.01, bucket_bytes=4_000_000, network=Network("fast", 20e-6, 5e9),
    ),
    "uneven": PlayedJob(
        mode="strong", samples=256, forward_ms=40, backward_ms=80, fixed_ms=2, optimizer_ms=3,
        jitter=0.08, bucket_bytes=4_000_000, network=Network("fast", 20e-6, 5e9),
    ),
    "bound by the network": PlayedJob(
        mode="weak", samples=32, forward_ms=10, backward_ms=20, fixed_ms=1, optimizer_ms=2,
        jitter=0.02, bucket_bytes=4_000_000, network=Network("slow", 100e-6, 4e8),
    ),
}  # fmt: skip


class Worker:
    """One rank: its clock, what it records, and the chance in what it does."""

    def __init__(self, job: PlayedJob, rank: int, size: int, folder: Path) -> None:
        self.now = 10**9
        self.recorder = SpanRecorder(folder, rank, zero_ns=0)
        self.recorder.describe_rank({"size": size, "device": "cpu", "threads": 1})
        self._job = job
        self._share = 1 / size if job.mode == "strong" else 1.0
        self._chance = random.Random(f"{rank} of {size}")

    def work(self, step: int) -> list[int]:
        """Everything up to the wait; when each bucket is ready."""
        job, share = self._job, self._share
        self._spend(step, "optimizer", job.optimizer_ms)
        self._spend(step, "forward", job.fixed_ms / 2 + job.forward_ms * share)
        samples = {"step": step, "samples": round(job.samples * share)}
        self.recorder.add("batch", self.now, None, samples)
        begin = self.now
        self._spend(step, "backward", job.fixed_ms / 2 + job.backward_ms * share)
        ready = [begin + (self.now - begin) * part // 4 for part in (1, 2, 3, 4)]
        for bucket, at in enumerate(ready):
            facts = {"step": step, "bucket": bucket, "bytes": job.bucket_bytes}
            self.recorder.add("ready", at, None, facts)
        return ready

    def wait(self, step: int, until: int) -> None:
        self.recorder.add("wait", self.now, until, {"step": step, "last": True})
        self.now = until

    def _spend(self, step: int, name: str, ms: float) -> None:
        begin = self.now
        self.now += round(ms * MS * max(0.1, self._chance.gauss(1, self._job.jitter)))
        self.recorder.add(name, begin, self.now, {"step": step})


def play(job: PlayedJob, size: int, folder: Path) -> Profile:
    """Write what so many workers would have recorded, and read it."""
    workers = [Worker(job, rank, size, folder) for rank in range(size)]
    sum_ns = round(ring_s(job.bucket_bytes, size, job.network) * 1e9)
    for step in range(STEPS):
        ready = [worker.work(step) for worker in workers]
        arrived = 0
        for times in zip(*ready, strict=True):
            arrived = max(arrived, *times) + sum_ns
        end = max(arrived, *(worker.now for worker in workers))
        for worker in workers:
            worker.wait(step, end)
    for worker in workers:
        worker.recorder.close()
    return read_run(folder, size)


@pytest.fixture(params=JOBS, scope="module")
def checks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[PredictionCheck]:
    job = JOBS[request.param]
    one, two, *others = (
        play(job, workers, tmp_path_factory.mktemp(f"of-{workers}")) for workers in (1, 2, 3, 4, 8)
    )
    learned = fit_job(one, two, job.mode, CORES)
    return [learned.check(each) for each in others]


def test_sizes_that_were_not_learned_from_are_within_fifteen_percent(
    checks: list[PredictionCheck],
) -> None:
    assert [each.workers for each in checks] == [3, 4, 8]
    wrong = {each.workers: f"{each.error:+.1%}" for each in checks if abs(each.error) > 0.15}
    assert not wrong
