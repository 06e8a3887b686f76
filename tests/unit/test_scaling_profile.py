"""From recordings to a usual step: matched over ranks, split, and without the unusual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.explain.scaling.profile import (
    PHASES,
    Run,
    combine,
    read_rank,
    read_run,
    spread,
    typical,
    usual_buckets,
    usual_steps,
    warm_up,
)
from paceline.explain.scaling.simulation import Bucket
from paceline.observe.spans import COMMUNICATION, COMPUTE, SpanRecorder

MS = 1_000_000


def record(folder: Path, rank: int, steps: list[dict[str, int]], **facts: Any) -> None:
    """Write a recording with these phases, in milliseconds, for each step."""
    recorder = SpanRecorder(folder, rank)
    recorder.tell({"size": 2, "device": "cpu", "threads": 1, **facts})
    now = 10 * MS
    for number, phases in enumerate(steps):
        for name in ("optimizer", "data", "forward", "other", "backward", "wait"):
            begin, now = now, now + phases.get(name, 0) * MS
            step = {"step": number}
            if name == "forward":
                recorder.add("batch", now, None, {**step, "samples": 8})
            if name == "backward":
                for bucket in range(2):
                    at = begin + (now - begin) * (bucket + 1) // 2
                    recorder.add("ready", at, None, {**step, "bucket": bucket, "bytes": 100})
            if name == "wait":
                recorder.add(name, begin, now, {**step, "last": True})
            elif name != "other":
                recorder.add(name, begin, now, step)
    recorder.close()


FIRST = {"data": 1, "forward": 2, "other": 1, "backward": 4, "optimizer": 1, "wait": 6}
SECOND = {"data": 1, "forward": 2, "other": 1, "backward": 8, "optimizer": 1, "wait": 2}


def test_recordings_of_two_ranks_become_one_step(tmp_path: Path) -> None:
    record(tmp_path, 0, [FIRST] * 9)
    record(tmp_path, 1, [SECOND] * 9)

    run = read_run(tmp_path, wall_s=1.0)
    found = combine(2, [run])

    assert len(run.steps) == 6  # one has no begin, two are warm-up
    assert found.samples == 16
    assert found.step_s == pytest.approx(0.015)
    # Rank 1 waits least, so 2 ms are the exchange; rank 0 is typical and waits 4 ms for it.
    assert found.seconds == pytest.approx(
        {
            "data": 0.001,
            "forward": 0.002,
            "backward": 0.004,
            "optimizer": 0.001,
            "other": 0.001,
            "waiting": 0.004,
            "communication": 0.002,
        }
    )
    assert [rank["backward"] for rank in found.own_by_rank] == pytest.approx([0.004, 0.008])
    assert [bucket.nbytes for bucket in found.buckets] == [100, 100]
    assert found.buckets[0].ready_s == pytest.approx(0.003)  # the median of 2 and 4
    assert found.ranks_per_device == 1


@pytest.mark.parametrize(("devices", "sharing"), [(["cuda:0"] * 2, 2), (["cuda:0", "cuda:1"], 1)])
def test_ranks_on_one_gpu_share_it(tmp_path: Path, devices: list[str], sharing: int) -> None:
    for rank, device in enumerate(devices):
        record(tmp_path, rank, [FIRST] * 4, device=device)
    assert combine(2, [read_run(tmp_path, wall_s=1.0)]).ranks_per_device == sharing


def test_a_rank_without_a_recording_leaves_only_the_time_of_the_job(tmp_path: Path) -> None:
    record(tmp_path, 0, [FIRST] * 9)

    found = combine(2, [read_run(tmp_path, wall_s=3.0)])

    assert found.is_whole_job
    assert found.step_s == found.seconds["other"] == 3.0
    assert combine(2, [read_run(tmp_path / "none", wall_s=4.0)]).step_s == 4.0


def test_damaged_events_are_left_out() -> None:
    whole = {"ph": "X", "tid": COMPUTE, "ts": 5.0, "dur": 1.0, "args": {"step": 0, "last": True}}
    found = read_rank(
        [
            {"name": "wait"},
            {"name": "wait", **whole, "ts": "5"},
            {"name": "wait", **whole, "dur": None},
            {"name": "ready", "ph": "i", "tid": COMMUNICATION, "ts": 1, "args": {"step": 0}},
            {"name": "batch", "ph": "i", "ts": 1, "args": {"step": 0, "samples": "8"}},
            {"name": "paceline_rank", "ph": "M", "args": {"size": "2", "threads": 3}},
            {"name": "wait", **whole},
        ]
    )
    assert found.facts == {"threads": 3}
    assert not found.seconds
    assert not found.samples


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_typical_step_adds_up_to_the_rank_in_the_middle(size: int) -> None:
    own = {"data": 1.0, "forward": 2.0, "optimizer": 0.5, "other": 0.25}
    ranks = [{**own, "backward": 4.0 + r, "wait": 9.0 - r} for r in range(size)]
    found = typical(ranks)
    assert set(found) == set(PHASES)
    assert sum(found.values()) == pytest.approx(16.75)
    assert found["waiting"] == size - 1 - (size - 1) // 2


def test_a_tenth_of_the_steps_on_either_end_is_unusual() -> None:
    steps = [{"forward": float(length)} for length in (900, *range(10, 28), 0)]
    kept = [steps[index]["forward"] for index in usual_steps(steps)]
    assert kept == [float(length) for length in range(11, 27)]
    assert usual_steps(steps[:1]) == [0]


def test_the_warm_up_ends_after_twenty_steps_or_a_third() -> None:
    assert [warm_up(steps) for steps in (0, 1, 3, 30, 60, 1000)] == [0, 0, 1, 10, 20, 20]


def test_buckets_that_changed_their_sizes_are_those_of_most_steps() -> None:
    before, after = [Bucket(1.0, 10)], [Bucket(2.0, 5), Bucket(3.0, 5)]
    assert usual_buckets([before, after, after]) == tuple(after)
    assert usual_buckets([]) == ()
    assert spread(after, 4.0) == (Bucket(2.0, 5), Bucket(4.0, 5))


def test_the_faster_half_of_the_runs_counts_and_all_times_are_kept() -> None:
    def run(seconds: float) -> Run:
        step = {**dict.fromkeys(PHASES, 0.0), "forward": seconds}
        own = ({phase: step.get(phase, 0.0) for phase in PHASES},)
        return Run(wall_s=9.0, steps=(step,) * 5, own_by_rank=(own,) * 5, samples=4)

    found = combine(1, [run(9.0), run(1.0), run(3.0)])

    assert found.step_s == pytest.approx(2.0)
    assert found.runs_s == (9.0, 1.0, 3.0)
    assert (found.steps, found.samples) == (10, 4)
    assert combine(1, [run(3.0), run(1.0)]).step_s == pytest.approx(1.0)
