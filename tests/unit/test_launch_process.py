"""Who failed first, what is printed, which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.errors import DesyncError, PeerError
from paceline.launcher.process import Ending, WorkerEnd, read_error
from paceline.launcher.worker import is_secondary, write_error


def end(rank: int, code: int = 0, *, at: int = 0, **more: object) -> WorkerEnd:
    return WorkerEnd(rank=rank, exit_code=code, **{"time_ns": at} | more)  # type: ignore[arg-type]


def record(text: str, at: int, *, secondary: bool = False) -> dict[str, object]:
    traceback = f"Traceback (most recent call last):\n{text}\n"
    return {"summary": text, "traceback": traceback, "time_ns": at, "is_secondary": secondary}


def test_the_first_real_failure_is_shown_even_if_a_secondary_one_came_before() -> None:
    ending = Ending(
        workers=(
            end(0, 1, **record("RuntimeError: Connection closed by peer", 1, secondary=True)),
            end(1, 1, **record("ValueError: boom", 2)),
            end(2, 1, **record("ValueError: boom too", 3)),
        )
    )
    text = str(ending)
    assert text.startswith("paceline: rank 1 failed:\nTraceback")
    assert text.count("Traceback") == 1
    assert "  rank 0: RuntimeError: Connection closed by peer\n" in text
    assert "  rank 2: ValueError: boom too\n" in text
    assert ending.exit_code == 1


def test_only_secondary_failures_leave_the_earliest() -> None:
    ending = Ending(
        workers=(
            end(0, 1, **record("PeerError: b", 9, secondary=True)),
            end(1, 1, **record("PeerError: a", 5, secondary=True)),
        )
    )
    assert ending.first_failure is ending.workers[1]


def test_a_killed_worker_is_the_cause_and_names_its_signal() -> None:
    ending = Ending(
        workers=(
            end(0, 1, at=9, **record("PeerError: gone", 8, secondary=True)),
            end(1, -9, at=10),
            end(2, -15, at=11, ended_by_launcher=True),
        )
    )
    text = str(ending)
    assert text.startswith("paceline: rank 1 failed: killed by signal 9 (SIGKILL).\n")
    assert "  rank 2: ended by the launcher\n" in text
    assert ending.exit_code == 137


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (Ending(workers=(end(0), end(1))), 0),
        (Ending(workers=(end(0), end(1, 3))), 1),
        (Ending(workers=(end(0, -11),)), 139),
        (Ending(workers=(end(0, 143), end(1, 143))), 143),
        (Ending(workers=(end(0, 255),)), 1),
        (Ending(workers=(end(0, -15, ended_by_launcher=True),), signal=15), 143),
        (Ending(workers=(end(0, -2, ended_by_launcher=True),), signal=2), 130),
        (Ending(workers=(end(0, -15, ended_by_launcher=True),), elsewhere="Rank 3 failed."), 1),
        (Ending(workers=(end(0, -15, **record("ValueError: x", 1)),)), 1),
    ],
)
def test_exit_codes(ending: Ending, code: int) -> None:
    assert ending.exit_code == code
    assert ending.succeeded == (code == 0)


def test_success_is_silent() -> None:
    assert str(Ending(workers=(end(0), end(1)))) == ""


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    try:
        raise ValueError("boom: ü")
    except ValueError as error:
        write_error(path, error)
    found = read_error(path)
    assert found["summary"] == "ValueError: boom: ü"
    assert "test_launch_process.py" in found["traceback"]
    assert not found["is_secondary"]
    assert found["time_ns"] > 0
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "error.json"]


def test_a_record_of_torchs_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1"}
    path.write_text(json.dumps({"message": {"message": "KeyError: 1", "extraInfo": extra}}))
    expected = {"summary": "KeyError: 1", "traceback": "Traceback ...", "is_secondary": False}
    assert read_error(str(path)) == expected | {"ends_run": False}


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
