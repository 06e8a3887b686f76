"""`paceline run --island`: islands survive the deaths of workers, and of each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from paceline.env import read_process
from paceline.files import RunFolder, read_events, read_info
from tests.sentences import says

SCRIPT = str(Path(__file__).with_name("islands_script.py"))


def start(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Two islands of two workers, until they have ended."""
    out.mkdir()
    command = [sys.executable, "-m", "paceline", "run", "--workers", "4", "--island", "2"]
    command += [SCRIPT, "--out", str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@contextmanager
def running(out: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Two islands of two workers that train, for long; and what they have said."""
    out.mkdir()
    command = [sys.executable, "-m", "paceline", "run", "--workers", "4", "--island", "2"]
    command += [SCRIPT, "--out", str(out), "--epochs", "1000000"]
    with (
        open(out / "said", "w+") as said,
        subprocess.Popen(command, stdout=said, stderr=said, text=True) as launcher,
    ):
        try:
            poll(lambda: len(list(out.glob("* trains"))) == 2)
            yield launcher, said
        finally:
            launcher.terminate()


def poll(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def has(said: IO[str], text: str, times: int) -> bool:
    said.seek(0)
    return said.read().count(text) == times


def launch(out: Path, *flags: str) -> list[Any]:
    """Step and weights of both islands."""
    ended = start(out, *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((out / f"result.{number}").read_text()) for number in range(2)]


def assert_close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(one, dtype=torch.float64),
            torch.tensor(other, dtype=torch.float64),
            rtol=0,
            atol=1e-10,
        )


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ([], 8, 16),
        (["--delay", "2"], 10, 18),
        (["--every", "8", "--fragments", "2", "--delay", "2"], 9, 13),
    ],
    ids=["in rounds", "when a delayed round is applied", "while a fragment is on its way"],
)
def test_workers_that_die_in_rounds_change_nothing(
    flags: list[str], first: int, second: int, tmp_path: Path
) -> None:
    """The leader of one island and the other worker of the other, each after its inner step."""
    calm = launch(tmp_path / "calm", *flags)
    deaths = {"0.0": first, "1.1": second}
    got = launch(tmp_path / "deaths", *flags, "--die-in-update", json.dumps(deaths))
    assert {each.name for each in (tmp_path / "deaths").glob("* died")} == {"0.0 died", "1.1 died"}
    for (step, weights), (_, expected) in zip(got, calm, strict=True):
        assert step == 24
        assert_close(weights, expected)
    assert got[0] == got[1]


def test_an_island_that_dies_as_a_whole_comes_back_with_the_state_of_the_other(
    tmp_path: Path,
) -> None:
    flags = ["--all-die-at", "5", "--every", "1", "--epochs", "50"]
    first, second = launch(tmp_path / "out", *flags)
    assert first[0] == 300
    assert first == second
    assert (tmp_path / "out" / "island 1 is back").exists()


def test_an_island_that_comes_back_when_the_other_has_ended_has_its_state(tmp_path: Path) -> None:
    first, second = launch(tmp_path / "out", "--all-die-at", "5", "--late")
    assert first[0] == 24
    assert first == second


def test_an_island_that_dies_after_the_last_step_has_the_state_of_the_other(tmp_path: Path) -> None:
    first, second = launch(tmp_path / "out", "--all-die-at", "24")
    assert (first[0], (tmp_path / "out" / "island 1 died").exists()) == (24, True)
    assert first == second


def test_an_exception_in_one_island_is_the_reason_of_the_end_of_all(tmp_path: Path) -> None:
    ended = start(tmp_path / "out", "--raise-at", "5", "--epochs", "100000")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") + ended.stdout.count("Traceback") == 1
    folder = tmp_path / "out" / "run"
    for path, who in ((folder, "island 1: worker 1"), (folder / "island-1", "worker 1")):
        info = read_info(RunFolder(path))
        events = read_events(RunFolder(path))
        stops = [event["reason"] for event in events if event["kind"] == "stop"]
        assert info is not None
        assert (info.status, [info.reason]) == ("failed", stops[-1:])
        assert info.reason.startswith(f"{who} failed in step 5: KeyError")
        command = [sys.executable, "-m", "paceline", "report", str(path), "--output", "page.html"]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=120)
        assert json.dumps(info.reason)[1:-1] in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "3", "--island", "2"],
        ["--workers", "2", "--island", "0"],
        ["--workers", "2", "--island", "1", "--as-torch"],
        ["--island", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"],
    ],
    ids=["unequal", "none", "as torch", "several machines"],
)
def test_islands_that_cannot_be_formed_are_refused(flags: list[str]) -> None:
    command = [sys.executable, "-m", "paceline", "run", *flags, SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("paceline run: ")) == (2, 1)


def test_a_script_without_a_run_is_told_that_its_islands_never_met(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('trained')")
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--island", "1"]
    command.append(str(tmp_path / "script.py"))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.count("trained")) == (0, 2)
    assert says(ended.stderr, "paceline run", "islands=Islands(...)")


def test_signals_that_add_a_worker_and_take_one_away_go_to_every_island(tmp_path: Path) -> None:
    with running(tmp_path / "out") as (launcher, said):
        launcher.send_signal(signal.SIGUSR2)
        poll(lambda: has(said, "worker 1 has left", 2))
        launcher.send_signal(signal.SIGUSR1)
        poll(lambda: has(said, "all 2 workers train again", 2))
        launcher.send_signal(signal.SIGHUP)
        assert launcher.wait(120) == 128 + signal.SIGHUP
        assert has(said, "stopped by SIGHUP", 2)
        assert not has(said, "1 other continues", 1), "both were asked to end"


def test_an_island_that_is_asked_to_end_ends_the_others_in_order(tmp_path: Path) -> None:
    with running(tmp_path / "out") as (launcher, said):
        found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(found[-1]), signal.SIGTERM)
        assert launcher.wait(120) == 128 + signal.SIGTERM
        assert has(said, "paceline: stopped by SIGTERM", 2)
        assert has(said, "failed", 0)


def test_islands_whose_launcher_is_killed_end_in_order(tmp_path: Path) -> None:
    with running(tmp_path / "out") as (launcher, said):
        found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        launcher.kill()
        launcher.wait()
        poll(lambda: all(read_process(int(pid))[0] in (b"", b"Z") for pid in found))
        assert has(said, "paceline: stopped by SIGTERM", 1), "the other's pipe has no reader"
