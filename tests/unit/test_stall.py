"""Stalls: what a rank that stands still says, and whom the others name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sentences import says
from torch.distributed import HashStore

from paceline.group.membership import Membership
from paceline.telemetry.phases import Phase
from paceline.telemetry.stopwatch import Awaited, Stopwatch
from paceline.telemetry.stragglers import (
    StallWatch,
    Status,
    describe_stall,
    line_of,
    name_causes,
    status_of,
)

SECOND = 10**9


def waiting(rank: int) -> Status:
    return Status(worker=rank, step=7, phase="wait", what="the sum of bucket 1 ('a' to 'b')")


def busy(rank: int) -> Status:
    return Status(worker=rank, step=7, phase="data", line="train.py:12 in load: sleep()")


def test_a_rank_says_step_bucket_parameters_and_line() -> None:
    status = Status(
        worker=1,
        step=412,
        phase="wait",
        what="the sum of bucket 3 ('a.weight' to 'b.bias')",
        line="train.py:57 in main: loss.backward()",
    )
    assert says(
        describe_stall(status, 120.4), "Worker 1", "120 s", "step 412", status.what, status.line
    )
    assert says(describe_stall(busy(0), 5), "step 7", "data", "train.py:12")


def test_those_that_wait_name_the_one_that_does_not() -> None:
    said = name_causes([waiting(0), busy(1), waiting(2)], [], range(3))
    assert says(said, "Workers 0 and 2", "worker 1", "data", "train.py:12 in load: sleep()")


def test_a_rank_that_says_nothing_is_named() -> None:
    said = name_causes([waiting(0)], [1], range(3))
    assert says(said, "Worker 0", "worker 1", "stopped or gone", "worker 2", "not come")
    said = name_causes([waiting(0), busy(2)], [1], range(3))
    assert says(said, "Worker 0", "worker 2", "data", "train.py:12", "worker 1", "stopped or gone")


def test_ranks_at_different_sums_are_told_so() -> None:
    said = name_causes([waiting(0), waiting(1)], [], range(2))
    assert says(said, "All 2 workers wait for each other", "same sum")


def test_only_a_heartbeat_that_has_stopped_is_silence() -> None:
    """Of three ranks that others wait for, one is busy, one has stopped, one never came."""
    lines, now, store = list[str](), [0], HashStore()
    watches = {rank: Stopwatch(lambda: now[0]) for rank in range(3)}
    stalls = {
        rank: StallWatch(watch, 8, print_line=lines.append, clock=lambda: now[0])
        for rank, watch in watches.items()
    }
    for rank in (0, 1):
        watches[rank].enter(Phase.WAIT)
    for seconds in range(12):
        now[0] = seconds * SECOND
        for rank, each in stalls.items():
            if rank != 1 or seconds < 3:
                phase = "data" if rank == 2 else "wait"
                each.exchange(store, Status(rank, 7, phase, "", "a.py:1", seconds), range(4))
    assert len(lines) == 1
    parts = ("Worker 0", "worker 2", "data", "a.py:1", "worker 1", "stopped or gone", "worker 3")
    assert says(lines[0], *parts)


def test_the_line_is_the_users_own() -> None:
    seen: list[str] = []
    hook = lambda _: seen.append(line_of(sys._getframe(1)))  # noqa: E731
    json.loads('{"a": 1}', object_hook=hook)  # calls it from a file of Python's own
    path, rest = seen[0].split(":", 1)
    assert Path(path).name == "test_stall.py"
    assert "json.loads('{\"a\": 1}', object_hook=hook)" in rest
    assert line_of(None) == ""


def test_code_that_is_in_no_file_is_not_the_users_line() -> None:
    seen: list[str] = []
    generated: dict[str, Any] = {}
    exec("def call(look): look()", generated)  # as dataclasses and named tuples do
    generated["call"](lambda: seen.append(line_of(sys._getframe(1))))
    assert "test_stall.py" in seen[0]
    assert seen[0].endswith('generated["call"](lambda: seen.append(line_of(sys._getframe(1))))')


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"worker": "0"}',
        b'{"worker":0,"step":"x","phase":"wait"}',
        b"[" * 10_000,
    ],
)
def test_nonsense_in_the_store_is_ignored(data: bytes) -> None:
    assert Status.from_json(data) is None


def test_a_status_survives_the_store() -> None:
    assert Status.from_json(json.dumps(busy(3)._asdict()).encode()) == busy(3)


class Group:
    """As much of a process group as watching needs."""

    def __init__(self, size: int = 1) -> None:
        self.store, self._size = HashStore(), size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> Any:
        return self.store


def test_it_speaks_once_per_stall_and_when_it_continues() -> None:
    lines, now = list[str](), [0]
    watch = Stopwatch(lambda: now[0])
    membership = Membership(Group())
    watch.membership = lambda: membership
    stalls = StallWatch(watch, 100, print_line=lines.append, clock=lambda: now[0])
    for seconds in (50, 99, 101, 150, 300):
        now[0] = seconds * SECOND
        stalls.exchange(HashStore(), busy(0), range(1))
        stalls.check_progress()
    assert len(lines) == 1
    assert says(lines[0], "Worker 0", "no progress", "101 s", "step 0")
    assert "test_stall.py" in lines[0]
    watch.enter(Phase.FORWARD)
    stalls.check_progress()
    assert lines[1:] == ["This worker continues, at step 0."]
    now[0] += 100 * SECOND
    stalls.check_progress()
    assert len(lines) == 4
    assert says(lines[3], "store", "does not answer")
    watch.enter(Phase.FORWARD)


@pytest.mark.parametrize(
    ("missing", "words"),
    [([], "('a' to 'b')"), ([2], "which lacks worker 6"), ([0, 1], "which lacks other hosts")],
)
def test_a_rank_that_waits_for_another_host_does_not_name_itself(
    missing: list[int], words: str
) -> None:
    class Sum:
        def missing(self) -> list[int]:
            return missing

    watch = Stopwatch()
    watch.awaited = Awaited(lambda number: f"the sum of bucket {number} ('a' to 'b')", 1, Sum())
    members = Membership(Group(3))
    members.move_on(members.group, [4, 5, 6])  # of a training that has lost others
    status = status_of(watch, members)
    assert status.worker == 4
    assert status.what.endswith(words)


def test_a_stopwatch_that_is_gone_is_not_watched() -> None:
    watch = Stopwatch()
    lines: list[str] = []
    stalls = StallWatch(watch, 0, print_line=lines.append)
    del watch
    stalls.check_progress()
    assert (stalls.watch(), lines) == (None, [])
