"""Contestants in processes of their own: they answer in turn, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks import step
from benchmarks.contestants import FLOOR, KEPT_FLOOR
from benchmarks.teams import standing
from paceline import World
from paceline.errors import WorkerError

PATIENCE_S = 30.0


class Counter:
    """Adds up what it is told, and can fail."""

    def __init__(self, world: World, start: int, name: str) -> None:
        if name == "broken":
            raise ValueError("cannot be built")
        self.world, self.total = world, start

    def add(self, number: int) -> list[int]:
        self.total += number * (self.world.rank + 1)
        self.world.barrier()
        return [self.world.rank, self.total]

    def pid(self) -> int:
        return os.getpid()

    def fail(self, rank: int) -> None:
        if rank == self.world.rank:
            raise ValueError("failed as asked")
        self.world.barrier()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_answers_and_remembers(size: int) -> None:
    with standing(size, ["a", "b"], Counter, 10) as teams:
        teams["a"].ask("add", number=1)
        assert teams["a"].ask("add", number=1) == [[r, 10 + 2 * (r + 1)] for r in range(size)]
        assert teams["b"].ask("add", number=5) == [[r, 10 + 5 * (r + 1)] for r in range(size)]
        pids = [pid for team in teams.values() for pid in team.ask("pid")]
        assert len({*pids, os.getpid()}) == 2 * size + 1
    assert not any(map(is_alive, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the kernel says of a process")
def test_a_team_that_is_not_asked_takes_no_time() -> None:
    with standing(2, ["a"], Counter, 0) as teams:
        for pid in teams["a"].ask("pid"):
            deadline = time.monotonic() + PATIENCE_S
            while state_of(pid) != "T" and time.monotonic() < deadline:
                os.sched_yield()
            assert state_of(pid) == "T"


def test_a_contestant_that_cannot_be_built_is_named() -> None:
    with (
        pytest.raises(WorkerError, match="cannot be built") as caught,
        standing(2, ["fine", "broken", "later"], Counter, 0),
    ):
        pass
    assert caught.value.__notes__ == ["It was in the team of 'broken'."]


@pytest.mark.parametrize(("method", "words"), [("fail", "failed as asked"), ("die", "SIGKILL")])
def test_a_contestant_that_fails_in_its_turn_is_named(method: str, words: str) -> None:
    arguments = {"rank": 1} if method == "fail" else {}
    with (
        standing(2, ["fine", "other"], Counter, 0) as teams,
        pytest.raises(WorkerError, match=words) as caught,
    ):
        teams["other"].ask(method, **arguments)
    assert caught.value.__notes__ == ["It was in the team of 'other'."]


PARENT = """
from benchmarks.teams import standing
from tests.processes.test_benchmark_teams import Counter

with standing(2, ["a", "b"], Counter, 0) as teams:
    print(*(pid for team in teams.values() for pid in team.ask("pid")), flush=True)
    input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there are idle teams stopped")
def test_no_team_outlives_a_parent_that_is_killed() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,  # a killed process cannot clean up
        subprocess.Popen(
            [sys.executable, "-c", PARENT],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent,
    ):
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 4
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        os.sched_yield()
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_contestants_take_turns_on_a_small_model() -> None:
    names = [FLOOR, KEPT_FLOOR, "paceline"]
    entry = step.measure("small-600", names, 2, rounds=3, block_ms=1, budget_s=60, screens=False)
    assert [row["contestant"] for row in entry["rows"]] == names
    assert (entry["ranks"], entry["rounds"], entry["steps"]) == (2, 3, 1)
    assert all(row["ms"] > 0 and row[f"/ {KEPT_FLOOR}"] > 0 for row in entry["rows"])
    assert "shared memory" in entry["transport"]
