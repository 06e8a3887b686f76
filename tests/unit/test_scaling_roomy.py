"""Predictions where every worker has a core of its own: against recordings made in virtual time.

A world of workers is played step by step: each draws how long its own work takes, buckets are
summed in order over a ring once the last worker has them, and all go on together. What each would
have recorded is written with the real recorder and read by the real reader; the model learns from
1 and 2 workers and must foretell the others. It shares no formula with the player but the
ring's, which is the definition of the network.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.explain.scaling.attribution import Machine, Mode
from paceline.explain.scaling.prediction import Check, check, fit
from paceline.explain.scaling.profile import Profile, combine, read_run
from paceline.explain.scaling.simulation import Network, ring_s
from paceline.observe.spans import SpanRecorder

STEPS = 160
MACHINE = Machine(cores=64)
MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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
    "even": Job(
        mode="strong", samples=256, forward_ms=40, backward_ms=80, fixed_ms=2, optimizer_ms=3,
        jitter=0.01, bucket_bytes=4_000_000, network=Network("fast", 20e-6, 5e9),
    ),
    "uneven": Job(
        mode="strong", samples=256, forward_ms=40, backward_ms=80, fixed_ms=2, optimizer_ms=3,
        jitter=0.08, bucket_bytes=4_000_000, network=Network("fast", 20e-6, 5e9),
    ),
    "bound by the network": Job(
        mode="weak", samples=32, forward_ms=10, backward_ms=20, fixed_ms=1, optimizer_ms=2,
        jitter=0.02, bucket_bytes=4_000_000, network=Network("slow", 100e-6, 4e8),
    ),
}  # fmt: skip


class Worker:
    """One rank: its clock, what it records, and the chance in what it does."""

    def __init__(self, job: Job, rank: int, size: int, folder: Path) -> None:
        self.now = 10**9
        self.recorder = SpanRecorder(folder, rank)
        self.recorder.tell({"size": size, "device": "cpu", "threads": 1})
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


def play(job: Job, size: int, folder: Path) -> Profile:
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
    return combine(size, [read_run(folder, wall_s=10.0)])


@pytest.fixture(params=JOBS, scope="module")
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Check]:
    job = JOBS[request.param]
    one, two, *others = (
        play(job, workers, tmp_path_factory.mktemp(f"of-{workers}")) for workers in (1, 2, 3, 4, 8)
    )
    return check(fit(one, two, job.mode, MACHINE), one, others, MACHINE)


def test_sizes_that_were_not_learned_from_are_within_fifteen_percent(checks: list[Check]) -> None:
    assert [each.workers for each in checks] == [3, 4, 8]
    assert all(each.crowding == 1.0 for each in checks)
    wrong = {each.workers: f"{each.error:+.1%}" for each in checks if abs(each.error) > 0.15}
    assert not wrong
