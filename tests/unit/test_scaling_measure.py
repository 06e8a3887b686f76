"""Runs of the job, and from their recordings to a usual step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.show.scaling.measure import (
    BucketTiming,
    Profile,
    combine,
    command_of,
    read_run,
    spread,
    steps_made,
    typical,
    usual_buckets,
    usual_steps,
)
from paceline.telemetry.phases import Phase
from paceline.telemetry.spans import SpanRecorder

MS = 1_000_000


def record(folder: Path, rank: int, steps: list[dict[str, int]], **facts: Any) -> None:
    """Write a recording with these phases, in milliseconds, for each step."""
    recorder = SpanRecorder(folder, rank, zero_ns=0)
    recorder.describe_rank({"size": 2, "device": "cpu", "threads": 1, **facts})
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

    found = read_run(tmp_path, 2)

    assert found.steps == 6  # one has no begin, two are warm-up
    assert found.samples == 16
    assert found.step_s == pytest.approx(0.015)
    # Rank 1 waits least, so 2 ms are the transfer; rank 0 is typical and waits 4 ms for it.
    assert found.seconds == pytest.approx(
        {
            "data": 0.001,
            "forward": 0.002,
            "backward": 0.004,
            "optimizer": 0.001,
            "other": 0.001,
            "wait": 0.004,
            "transfer": 0.002,
        }
    )
    assert [bucket.nbytes for bucket in found.buckets] == [100, 100]
    assert found.buckets[0].ready_s == pytest.approx(0.003)  # the median of 2 and 4
    assert found.ranks_per_device == 1


@pytest.mark.parametrize(("devices", "sharing"), [(["cuda:0"] * 2, 2), (["cuda:0", "cuda:1"], 1)])
def test_ranks_on_one_gpu_share_it(tmp_path: Path, devices: list[str], sharing: int) -> None:
    for rank, device in enumerate(devices):
        record(tmp_path, rank, [FIRST] * 4, device=device)
    assert read_run(tmp_path, 2).ranks_per_device == sharing


def test_a_script_that_records_nothing_is_told_what_can_be_measured(tmp_path: Path) -> None:
    record(tmp_path, 0, [FIRST] * 9)
    for folder, workers in ((tmp_path, 2), (tmp_path / "none", 1)):
        with pytest.raises(UsageError, match="recorded no steps"):
            read_run(folder, workers)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_typical_step_adds_up_to_the_rank_in_the_middle(size: int) -> None:
    own = {Phase.DATA: 1.0, Phase.FORWARD: 2.0, Phase.OPTIMIZER: 0.5, Phase.OTHER: 0.25}
    ranks = [{**own, Phase.BACKWARD: 4.0 + r, Phase.WAIT: 9.0 - r} for r in range(size)]
    found = typical(ranks, transfer_s=9.0 - (size - 1))
    assert set(found) == set(Phase)
    assert sum(found.values()) == pytest.approx(16.75)
    assert found[Phase.WAIT] == size - 1 - (size - 1) // 2


def test_a_tenth_of_the_steps_on_either_end_is_unusual() -> None:
    steps = [{Phase.FORWARD: float(length)} for length in (900, *range(10, 28), 0)]
    kept = [step[Phase.FORWARD] for step in usual_steps(steps)]
    assert kept == [float(length) for length in range(11, 27)]
    assert usual_steps(steps[:1]) == steps[:1]


def test_buckets_that_changed_their_sizes_are_those_of_most_steps() -> None:
    before, after = [(1e6, 10)], [(2e6, 5), (3e6, 5)]
    usual = (BucketTiming(2.0, 5), BucketTiming(3.0, 5))
    assert usual_buckets([before, after, after]) == usual
    assert usual_buckets([]) == ()
    assert spread(usual, 4.0) == (BucketTiming(2.0, 5), BucketTiming(4.0, 5))


def test_the_faster_half_of_the_runs_counts_and_all_times_are_kept() -> None:
    def run(seconds: float) -> Profile:
        every = {**dict.fromkeys(Phase, 0.0), Phase.FORWARD: seconds}
        return Profile(workers=1, seconds=every, samples=4, steps=5)

    found = combine([run(9.0), run(1.0), run(3.0)])
    assert found.step_s == pytest.approx(2.0)
    assert found.runs_s == (9.0, 1.0, 3.0)
    assert (found.steps, found.samples) == (10, 4)
    assert combine([run(3.0), run(1.0)]).step_s == pytest.approx(1.0)


def test_a_run_is_paceline_run_with_a_timeline_and_arguments_filled_in(tmp_path: Path) -> None:
    script = ["--threads=2", "train.py", "--batch", "{workers}00", "{folder}"]
    _python, *command = command_of(script, 3, tmp_path)
    assert command == [
        *("-m", "paceline", "run", "--workers", "3", "--timeline", str(tmp_path / "timeline")),
        *("--threads=2", "train.py", "--batch", "300", str(tmp_path / "job")),
    ]


def test_steps_are_counted_where_the_slowest_rank_is(tmp_path: Path) -> None:
    assert steps_made(tmp_path, 2) == 0
    for rank, steps in enumerate((7, 5)):
        recorder = SpanRecorder(tmp_path, rank, zero_ns=0)
        for step in range(steps + 1):
            recorder.add("wait", 0, 1, {"step": step, "last": True})
        recorder.close()
    assert steps_made(tmp_path, 2) == 5
    assert steps_made(tmp_path, 3) == 0
