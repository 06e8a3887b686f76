"""What workers die of, what of it a run survives, who failed first, what is said of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.env import REASON_VARIABLE
from paceline.errors import DesyncError, PeerError
from paceline.launcher.deaths import (
    OWN_STEPS,
    Deaths,
    OomKills,
    RunResult,
    StopReason,
    WorkerExit,
    read_error,
)
from paceline.launcher.worker import is_accident, is_secondary, write_error
from tests.sentences import says


def end(rank: int, code: int = 0, *, at_ns: int = 0, **more: object) -> WorkerExit:
    return WorkerExit(rank=rank, exit_code=code, **{"time_ns": at_ns} | more)  # type: ignore[arg-type]


def record(text: str, at: int, *, secondary: bool = False) -> dict[str, object]:
    traceback = f"Traceback (most recent call last):\n{text}\n"
    return {"summary": text, "traceback": traceback, "time_ns": at, "is_secondary": secondary}


def test_the_first_real_failure_is_shown_even_if_a_secondary_one_came_before() -> None:
    result = RunResult(
        workers=(
            end(0, 1, **record("RuntimeError: Connection closed by peer", 1, secondary=True)),
            end(1, 1, **record("ValueError: boom", 2)),
            end(2, 1, **record("ValueError: boom too", 3)),
        )
    )
    text = str(result)
    assert text.startswith("paceline: worker 1 failed:\nTraceback")
    assert text.count("Traceback") == 1
    assert "  worker 0: raised RuntimeError: Connection closed by peer\n" in text
    assert "  worker 2: raised ValueError: boom too\n" in text
    assert result.reason is not None
    assert result.reason.text == "worker 1 failed: ValueError: boom"
    assert (result.reason.status, result.reason.worker) == ("failed", 1)
    assert result.exit_code == 1


def test_an_error_that_all_workers_raise_is_said_once() -> None:
    ends = [end(rank, 1, **record("NotFiniteError: Step 6: nan", rank)) for rank in range(3)]
    text = str(RunResult(workers=tuple(ends)))
    assert text.count("NotFiniteError: Step 6") == 1
    assert "  worker 1: raised" in text


def test_only_secondary_failures_leave_the_earliest() -> None:
    result = RunResult(
        workers=(
            end(0, 1, **record("PeerError: b", 9, secondary=True)),
            end(1, 1, **record("PeerError: a", 5, secondary=True)),
        )
    )
    assert result.first_failure is result.workers[1]


def test_a_killed_worker_is_the_cause_and_names_its_signal() -> None:
    result = RunResult(
        workers=(
            end(0, 1, at_ns=9, **record("PeerError: gone", 8, secondary=True)),
            end(1, -9, at_ns=10),
            end(2, -15, at_ns=11, ended_by_launcher=True),
        )
    )
    text = str(result)
    assert text.startswith("paceline: worker 1 was killed by signal 9 (SIGKILL).\n")
    assert re.search("^  worker 2: ended by .*launcher$", text, re.MULTILINE)
    assert result.exit_code == 137


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (RunResult(workers=(end(0), end(1))), 0),
        (RunResult(workers=(end(0), end(1, 3))), 3),
        (RunResult(workers=(end(0), end(1, 3, **record("ValueError: x", 1)))), 1),
        (RunResult(workers=(end(0, 3, accused="was stopped"),)), 1),
        (RunResult(workers=(end(0, -11),)), 139),
        (RunResult(workers=(end(0, 143), end(1, 143))), 143),
        (RunResult(workers=(end(0, 255),)), 255),
        (RunResult((end(0, -15, ended_by_launcher=True),), StopReason.by_signal(15)), 143),
        (RunResult((end(0, -2, ended_by_launcher=True),), StopReason.by_signal(2)), 130),
        (RunResult((end(0),), StopReason.of(end(3, -11))), 139),
        (RunResult(workers=(end(0, -15, **record("ValueError: x", 1)),)), 1),
    ],
)
def test_exit_codes(result: RunResult, code: int) -> None:
    assert result.exit_code == code
    assert (result.reason is None) == (code == 0)


def test_success_is_silent() -> None:
    assert str(RunResult(workers=(end(0), end(1)))) == ""


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    try:
        raise ValueError("boom: ü")
    except ValueError as error:
        write_error(path, error)
    found = read_error(path)
    assert found["summary"] == "ValueError: boom: ü"
    assert "test_launch_deaths.py" in found["traceback"]
    assert not found["is_secondary"]
    assert found["time_ns"] > 0
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "error.json"]


def test_a_record_of_torchs_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1"}
    path.write_text(json.dumps({"message": {"message": "KeyError: 1", "extraInfo": extra}}))
    expected = {"summary": "KeyError: 1", "traceback": "Traceback ...", "at": "", "named": -1}
    said = dict.fromkeys(("is_secondary", "is_accident", "ends_run"), False)
    assert read_error(str(path)) == expected | said


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"message": 3}', '{"message": {"a": 1}'])
def test_a_record_that_cannot_be_read_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert read_error(str(path)) == {}


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("[enforce fail at gloo/pair.cc:446] 24 vs 12"), False),
        (DesyncError("bucket 3 differs"), False),
        (KeyboardInterrupt(), False),
        (dist.DistBackendError("anything"), True),
        (dist.DistNetworkError("anything"), True),
        (RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (PeerError("rank 1 is gone."), True),
        (RuntimeError("[/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (caused(ValueError("training stopped"), PeerError("rank 1 is gone.")), True),
        (caused(RuntimeError("Connection reset by peer"), ValueError("real")), False),
    ],
)
def test_errors_that_only_blame_a_peer_are_told_from_real_ones(
    error: BaseException, secondary: bool
) -> None:
    assert is_secondary(error) is secondary


@pytest.mark.parametrize(
    ("error", "is_survived"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. "), True),
        (RuntimeError("DataLoader worker (pid(s) 17, 18) exited unexpectedly"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError(), False),
    ],
)
def test_devices_and_loaders_have_accidents_and_scripts_have_bugs(
    tmp_path: Path, error: Exception, is_survived: bool
) -> None:
    assert is_accident(error) is is_survived
    write_error(str(tmp_path / "error.json"), error)
    death = end(1, 1, step=5, **read_error(str(tmp_path / "error.json")))
    assert death.raised is not is_survived
    assert bool(Deaths().judge(death, generation=0)) is not is_survived


def raising(worker: int, step: int, line: int, **more: object) -> WorkerExit:
    at = f"KeyError at train.py:{line}"
    return end(worker, 1, step=step, **{**record("KeyError: 'label'", 0), "at": at, **more})  # type: ignore[arg-type]


def test_an_exception_of_the_script_ends_the_run_with_its_words() -> None:
    said = Deaths().judge(raising(1, step=5, line=30), generation=0)
    assert said == "worker 1 failed in step 5: KeyError: 'label'"
    assert raising(1, 40, 30, is_late=True).reason == (
        "worker 1 failed after its training was over: KeyError: 'label'"
    )


@pytest.mark.parametrize("more", [{"is_secondary": True}, {"accused": "was silent for 6 s"}])
def test_what_only_follows_from_another_death_does_not_end_the_run(more: dict[str, object]) -> None:
    assert Deaths().judge(raising(1, step=5, line=30, **more), generation=0) == ""


def test_exceptions_may_be_survived_until_one_comes_twice_at_its_line() -> None:
    deaths = Deaths(survives_errors=True)
    assert deaths.judge(raising(1, step=5, line=30), generation=0) == ""
    assert deaths.judge(raising(2, step=500, line=31), generation=1) == ""
    said = deaths.judge(raising(0, step=900, line=30), generation=2)
    assert says(said, "same exception came 2 times", "worker 0 failed in step 900: KeyError")
    assert deaths.judge(raising(0, step=1000, line=32, ends_run=True), generation=3)


CAUSES: dict[str, dict[str, object]] = {
    "SIGSEGV": {"exit_code": -11},
    "SIGABRT": {"exit_code": -6},
    "SIGBUS": {"exit_code": -7},
    "out of memory": {"exit_code": -9, "is_oom": True},
    "exception": {"exit_code": 1, "summary": "ValueError: x"},
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_worker_that_fails_three_times_within_a_hundred_of_its_own_steps_is_a_bug(
    cause: str,
) -> None:
    """Steps in which its place was empty are not its own."""
    for pause, ends in ((40, True), (60, False)):
        deaths, said, step = Deaths(survives_errors=True), "", 0
        for life in range(3):
            deaths.on_joined(1, step := step + 1000)
            step += pause if life else 5
            facts = {"rank": 1, "step": step, "at": f"line {life}", **CAUSES[cause]}
            said = deaths.judge(WorkerExit(**facts), generation=life)  # type: ignore[arg-type]
            assert not said or life == 2
        assert bool(said) is ends
    assert 40 * 2 < OWN_STEPS < 60 * 2


@pytest.mark.parametrize("cause", [{"exit_code": -9}, {"exit_code": -15}, {"exit_code": 143}])
def test_other_deaths_count_at_the_same_step_only(cause: dict[str, int]) -> None:
    deaths = Deaths()
    facts = [WorkerExit(rank=1, step=step, **cause) for step in (5, 6, 7, 8, 5, 5)]  # type: ignore[arg-type]
    said = [deaths.judge(each, generation) for generation, each in enumerate(facts)]
    assert not any(said[:5])
    assert says(said[5], "step 5 ended a worker 3 times", "not an accident")


def test_kills_by_the_kernel_are_told_by_its_counter_once_for_each(tmp_path: Path) -> None:
    path = tmp_path / "memory.events"
    path.write_text("low 0\noom 3\noom_kill 3\noom_group_kill 0\n")
    kills = OomKills(str(path))
    assert not kills.explains_one()
    path.write_text("oom 4\noom_kill 5\n")
    assert [kills.explains_one() for _ in range(3)] == [True, True, False]
    path.write_text("oom_kill 6\n")
    kills.forget()
    assert not kills.explains_one()
    assert not OomKills(str(tmp_path / "nothing")).explains_one()


def test_a_worker_that_stopped_as_asked_has_stopped_the_run() -> None:
    reason = RunResult((end(0, 143, at_ns=2), end(1, 143, at_ns=1))).reason
    assert reason is not None
    assert (reason.status, reason.text, reason.exit_code) == ("stopped", "stopped by SIGTERM", 143)
    crashed = RunResult((end(0, -11),)).reason
    assert crashed is not None
    assert crashed.status == "failed"


def test_a_launcher_that_no_other_has_started_reads_no_reason_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "end").write_text("my notes")
    monkeypatch.chdir(tmp_path)
    assert StopReason.behind(15) == StopReason.by_signal(15)
    monkeypatch.setenv(REASON_VARIABLE, str(tmp_path / "why 0"))
    assert StopReason.behind(15) == StopReason(text="my notes", is_final=True)
