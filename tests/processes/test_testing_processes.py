"""Ranks as processes: crashes, exits, hangs and results, and no process left behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import group as comm
from paceline.errors import UsageError, WireError, WorkerError
from paceline.group.world import World
from paceline.testing import run_processes
from tests.faults.planned import Faults

FOREVER_S = 3600.0
"""Longer than a test may take: a call that waits for it never returns."""


def add(world: World, start: int = 1) -> float:
    total = torch.tensor([float(world.rank + start)])
    comm.all_reduce(world.group, total, "the sum")
    return total.item()


def describe(world: World) -> tuple[Any, ...]:
    return world.rank, world.size, world.local_rank, world.local_size, dist.get_rank(), add(world)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_torch_s_default_group_and_results_come_in_rank_order(size: int) -> None:
    total = size * (size + 1) / 2
    expected = [(rank, size, rank, size, rank, total) for rank in range(size)]
    assert run_processes(size, describe) == expected


def echo(world: World, *args: Any) -> Any:
    return list(args)


def test_tensors_and_containers_travel_both_ways() -> None:
    weights = {"w": torch.arange(6.0).view(2, 3), "n": [1, None, (2.5, 1.0)]}
    (got,) = run_processes(1, echo, weights, b"raw", "text")
    torch.testing.assert_close(got[0], weights)
    assert got[1:] == [b"raw", "text"]


def large(world: World) -> torch.Tensor:
    return torch.full((2**20,), float(world.rank))


def test_large_results_arrive() -> None:
    first, second = run_processes(2, large)
    assert (first.sum().item(), second.sum().item()) == (0.0, 2.0**20)


def call(world: World, function: Any) -> Any:
    return function(world)


def test_functions_travel_by_name() -> None:
    assert run_processes(2, call, add) == [3.0, 3.0]


def identify(world: World) -> int:
    return os.getpid()


def test_every_rank_of_every_call_is_a_fresh_process() -> None:
    pids = {os.getpid(), *run_processes(2, identify), *run_processes(2, identify)}
    assert len(pids) == 5


def look_around(world: World) -> tuple[str | None, str, int]:
    return os.environ.get("PACELINE_TEST"), os.getcwd(), torch.get_num_threads()


def test_workers_see_the_caller_s_environment_and_folder_and_use_one_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_TEST", "here")
    monkeypatch.chdir(tmp_path)
    assert run_processes(1, look_around) == [("here", str(tmp_path), 1)]


def train(world: World, plan: list[dict[str, Any]]) -> int:
    faults = Faults.unpack(plan)
    for step in range(4):
        faults.strike(world.rank, step)
        add(world)
    return step


def test_a_plan_without_faults_changes_nothing() -> None:
    assert run_processes(2, train, []) == [3, 3]


DEATHS = {
    "kill -9": (Faults().kill(rank=1, step=2), "Rank 1 was killed by SIGKILL before it finished"),
    "a crash": (Faults().kill(rank=1, step=2, signal=signal.SIGSEGV), "killed by SIGSEGV"),
    "an abort": (Faults().kill(rank=1, step=2, signal=signal.SIGABRT), "killed by SIGABRT"),
    "exit 0": (Faults().exit(rank=1, step=2), "Rank 1 raised SystemExit: 0"),
    "a hard exit 0": (Faults().exit(rank=1, step=2, abrupt=True), "exited with code 0 before"),
    "a hard exit 7": (Faults().exit(rank=1, step=2, code=7, abrupt=True), "exited with code 7"),
    "an exception": (
        Faults().fail(rank=1, step=2, error=ValueError("no luck")),
        "Rank 1 raised ValueError: no luck",
    ),
}


@pytest.mark.parametrize(("plan", "words"), DEATHS.values(), ids=DEATHS.keys())
def test_a_rank_that_goes_in_the_middle_is_named_before_any_timeout_and_ends_the_rest(
    plan: Faults, words: str
) -> None:
    with pytest.raises(WorkerError, match=words) as caught:
        run_processes(3, train, plan.pack(), timeout_s=FOREVER_S)
    assert caught.value.rank == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_survivors_report_what_they_saw_when_asked(rank: int) -> None:
    plan = Faults().kill(rank=rank, step=1).pack()
    ends = run_processes(3, train, plan, return_exceptions=True)
    assert [end.rank for end in ends] == [0, 1, 2]
    assert "killed by SIGKILL" in str(ends[rank])
    for survivor in set(range(3)) - {rank}:
        assert "PeerError" in ends[survivor].traceback


def test_the_traceback_of_the_first_real_error_is_the_worker_s_own() -> None:
    with pytest.raises(WorkerError) as caught:
        run_processes(2, train, Faults().fail(rank=0, step=1).pack())
    assert "in train" in caught.value.traceback
    assert "PlannedFault: planned for rank 0, step 1" in caught.value.traceback
    assert caught.value.traceback in str(caught.value)


def read_address_zero(world: World) -> None:
    if world.rank == 1:
        ctypes.string_at(0)
    add(world)


def test_a_crash_in_native_code_shows_the_python_line_it_came_from() -> None:
    with pytest.raises(WorkerError, match="SIGSEGV") as caught:
        run_processes(2, read_address_zero)
    assert "in read_address_zero" in caught.value.traceback


def leave_first(world: World) -> float:
    return 0.0 if world.rank == 1 else add(world)


def test_a_rank_that_returns_early_is_named_by_those_that_wait_for_it() -> None:
    with pytest.raises(WorkerError, match="PeerError") as caught:
        run_processes(2, leave_first)
    assert caught.value.rank == 0
    assert "rank 1 finished" in caught.value.traceback.lower()


def wait_forever(world: World) -> None:
    if world.rank == 1:
        threading.Event().wait()


def expire(size: int, function: Any, word: str) -> WorkerError:
    """What is raised when time is up; more is given until the ranks have come as far as `word`."""
    for timeout_s in (1.5, 15.0, 60.0):
        with pytest.raises(WorkerError) as caught:
            run_processes(size, function, timeout_s=timeout_s)
        if word in f"{caught.value}{caught.value.traceback}":
            break
    return caught.value


def test_a_rank_that_never_returns_is_killed_and_shows_where_it_was() -> None:
    error = expire(2, wait_forever, "in wait_forever")
    assert "Rank 1 was still running after" in str(error)
    assert "in wait_forever" in error.traceback


def test_a_stopped_rank_is_killed_and_the_others_keep_their_results() -> None:
    first, second = run_processes(2, stop_second, timeout_s=6, return_exceptions=True)
    assert first == "done"
    assert "still running after 6 s" in str(second)


def stop_second(world: World) -> str:
    Faults().stop(rank=1, step=0).strike(world.rank, 0)
    return "done"


def leave_a_thread(world: World) -> None:
    threading.Thread(target=threading.Event().wait).start()


def test_a_process_that_cannot_end_after_its_result_is_reported() -> None:
    claim = "had finished but did not end"
    assert claim in str(expire(1, leave_a_thread, claim))


def return_an_object(world: World) -> object:
    return object()


def test_a_result_that_cannot_travel_is_the_rank_s_error() -> None:
    with pytest.raises(WorkerError, match=r"raised WireError: value\['result'\].* .*object"):
        run_processes(2, return_an_object)


def test_an_argument_that_cannot_travel_is_refused_before_anything_starts() -> None:
    with pytest.raises(WireError):
        run_processes(2, echo, object())


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    def local(world: World) -> None: ...

    for function in (local, lambda world: None):
        with pytest.raises(UsageError, match="another process cannot import"):
            run_processes(1, function)
        with pytest.raises(UsageError, match=r"args\[0\]"):
            run_processes(1, call, function)


@pytest.mark.parametrize("size", [0, -2, "two"])
def test_a_world_without_ranks_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match=rf"size.* {re.escape(repr(size))}"):
        run_processes(size, add)


def test_the_folder_where_ranks_meet_is_private_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (mode,) = run_processes(1, mode_of_meeting_place, str(tmp_path))
    assert mode == 0o700
    assert list(tmp_path.iterdir()) == []


def mode_of_meeting_place(world: World, parent: str) -> int:
    (folder,) = Path(parent).iterdir()
    return folder.stat().st_mode & 0o777


def test_workers_die_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    (tmp_path / "sleepers.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, threading
            from paceline.testing import run_processes

            def sleep(world, folder):
                pathlib.Path(folder, f"pid{os.getpid()}").touch()
                threading.Event().wait()

            if __name__ == "__main__":
                run_processes(2, sleep, os.path.dirname(__file__), timeout_s=1000)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, tmp_path / "sleepers.py"])
    try:
        until(lambda: len(list(tmp_path.glob("pid*"))) == 2)
        pids = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
        assert all(map(is_running, pids))
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(holds: Any, timeout_s: float = 100.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
