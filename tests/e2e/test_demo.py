"""`paceline demo`: the table, the checks, what it leaves behind, and its mistakes."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sentences import says

from paceline.cli import main
from paceline.files.run_folder import RunFolder, read_events, read_info
from paceline.record import stages
from paceline.show import demo
from paceline.show.demo import BATCH_ROWS, DemoOptions, DemoOutcome
from paceline.show.trace.task import built_in

pytestmark = pytest.mark.usefixtures("_half_of_torch")

# As many as two workers and three make of them.
SHARDS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "demo", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # On a busy machine one worker may be slow for real.
    assert [line for line in done.stderr.splitlines() if " is slow: " not in line] == []
    return done.stdout


def rows_of(text: str) -> list[tuple[int, float, float, float]]:
    """The table of epochs: epoch, loss, accuracy in percent, seconds."""
    found = re.findall(r"^ +(\d+) +(\d\.\d{4}) +(\d+\.\d)% +(\d+\.\d{3})$", text, re.M)
    return [(int(e), float(loss), float(acc), float(s)) for e, loss, acc, s in found]


def test_the_demo_shows_a_table_of_falling_losses_and_good_accuracy(shown: str) -> None:
    table = rows_of(shown)
    assert [row[0] for row in table] == [1, 2, 3, 4, 5]
    losses = [row[1] for row in table]
    assert losses == sorted(set(losses), reverse=True)
    assert table[-1][2] >= 88


def test_the_demo_says_who_gets_what_where_gradients_meet_and_why(shown: str) -> None:
    assert "1,000 generated rows of 10 features" in shown
    assert "worker 0  50 rows" in shown
    assert "worker 1  50 rows" in shown
    assert "gradients summed" in shown
    assert "Global batch 100, as on one device: each of 2 workers gets 50 rows" in shown
    assert "6 in each step: 2 workers share them evenly, and so will 3 after" in shown


def test_the_demo_proves_that_workers_are_equal_and_exact(shown: str) -> None:
    assert says(shown, "2 workers' parameters are equal to", "last bit.")
    found = re.search(r"one process gives the same parameters: difference (\S+)\.\n", shown)
    assert found
    assert float(found[1]) < 1e-5


def test_the_demo_ends_with_equal_hashes_on_one_two_and_three_workers(shown: str) -> None:
    found = re.findall(r"^  (\d) workers? +SHA-256 ([0-9a-f]{16})$", shown, re.M)
    assert [workers for workers, _ in found] == ["1", "2", "3"]
    assert len({each for _, each in found}) == 1
    assert says(shown, "1 worker, 2 workers, 3 workers", "step 25", "equal to the last bit")


def test_the_demo_says_whether_more_workers_would_help(shown: str) -> None:
    assert re.search(r"gradient noise scale is about \d+, the\s+global\s+batch\s+100", shown)


def test_the_demo_is_plain_text_of_80_columns(shown: str, folder: Path) -> None:
    assert shown.isascii()
    assert "\x1b" not in shown
    lines = [line for line in shown.splitlines() if str(folder) not in line]
    assert max(map(len, lines)) <= 80


def test_the_demo_leaves_a_run_with_checkpoints_and_a_report(shown: str, folder: Path) -> None:
    report = folder / "demo" / "report.html"
    told = [word for word in shown.split() if word.startswith(str(folder))]
    assert told[-3:] == [str(folder / "demo"), str(report), str(folder / "demo")]
    assert "ame as one process on the whole batch" in report.read_text()
    run, resumed = RunFolder(folder / "demo"), RunFolder(folder / "resumed")
    info = read_info(run)
    assert info is not None
    assert (info.status, info.workers, info.shards, info.step) == ("finished", 2, SHARDS, 50)
    assert info.policy == [DemoOptions().policy]
    assert {e["kind"] for e in read_events(run)} >= {"step", "epoch", "checkpoint", "noise"}
    check = stages.read(run.pipeline_of(3)).check
    assert check is not None
    assert (check.how, check.is_same) == ("whole batch", True)
    assert [run.timeline_of(rank).exists() for rank in range(3)] == [True, True, False]
    assert run.path.stat().st_mode & 0o777 == 0o700
    first = next(e for e in read_events(resumed) if e["kind"] == "start")
    assert (first["size"], first["step"]) == (3, 25)


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_trains_what_one_process_trains(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--workers", str(workers), "--seed", "3", "--epochs", "2", "--json"]
    assert main(["demo", *flags, "--folder", str(tmp_path / "new")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["is_bit_equal"]
    assert result["difference"] < 1e-6
    assert result["resumed"] == {"workers": workers + 1, "step": 15, "steps": 5}
    assert len(set(result["hashes"].values())) == 1
    assert sum(result["rows_by_worker"]) == 2 * 1000
    assert max(result["rows_by_worker"]) - min(result["rows_by_worker"]) <= 20
    losses = [row["loss"] for row in result["epochs"]]
    assert losses == sorted(losses, reverse=True)


def outcome(**changes: Any) -> DemoOutcome:
    """An outcome whose checks all pass, but for the changes."""
    good = DemoOutcome(
        epochs=[{"epoch": 1, "loss": 0.5, "accuracy": 0.8, "seconds": 0.1}],
        rows_by_worker=[50, 50],
        is_bit_equal=True,
        difference=0.0,
        hashes={"1 worker": "1234abcd" * 8, "2 workers": "1234abcd" * 8},
        resumed={"workers": 3, "step": 25, "steps": 25},
        checkpoints=6,
        noise="The gradient noise scale is unknown.",
        folder="/somewhere/demo",
        report="/somewhere/demo/report.html",
    )
    return dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "words_said"),
    [
        ({}, ""),
        ({"is_bit_equal": False}, "NOT EQUAL"),
        ({"difference": 0.01}, "one process gives DIFFERENT parameters"),
        ({"hashes": outcome().hashes | {"3 workers": "0" * 64}}, "3 workers continued"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--quiet"], ["--json"]])
def test_a_failed_check_is_printed_and_fails(
    changes: dict[str, Any],
    words_said: str,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("paceline.show.demo.training.train", lambda *_: outcome(**changes))
    code = main(["demo", *flags, "--folder", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert code == (1 if changes else 0)
    if flags == ["--quiet"]:
        assert bool(shown) == bool(changes)
    if flags != ["--json"]:
        assert words_said in shown.replace("\n", " ")


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_a_narrow_terminal_breaks_no_word(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = [*demo.introduction(built_in(0), DemoOptions()), *outcome().conclusion()]
    demo.print_lines(lines)
    shown = capsys.readouterr().out
    assert shown.split() == " ".join(lines).split()
    assert max(map(len, shown.splitlines())) <= min(columns, 80)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 9, 10, 100])
def test_the_rows_of_the_picture_add_up(workers: int) -> None:
    shown = "\n".join(demo.introduction(built_in(0), DemoOptions(workers=workers)))
    rows = [int(number) for number in re.findall(r"worker \d+ +(\d+) row", shown)]
    if workers <= 4:
        assert sum(rows) == BATCH_ROWS
    assert max(rows) - min(rows) <= 1


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 9, 10, 55, 100])
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_every_demo_can_be_resumed_by_others_in_the_middle_of_an_epoch(
    workers: int, epochs: int
) -> None:
    options = DemoOptions(workers=workers, epochs=epochs)
    assert options.other_workers != workers
    assert 1 <= options.other_workers <= options.shards <= BATCH_ROWS
    assert 0 < options.checkpoint_step < epochs * 10
    assert options.checkpoint_step % 10 != 0


@pytest.mark.parametrize(
    ("arguments", "words_said"),
    [
        (["--workers", "0"], "--workers is 0"),
        (["--workers", "101"], "1 to 100"),
        (["--epochs", "0"], "--epochs is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--worker", "2"], "Did you mean '--workers'?"),
    ],
)
def test_a_mistake_is_explained(
    arguments: list[str], words_said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert words_said in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert says(capsys.readouterr().err, "not empty")
    assert main(["demo", "--folder", str(tmp_path / "thesis.txt")]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_the_default_folder_is_new_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other = demo.make_folder(None), demo.make_folder(None)
    assert one != other
    assert one.parent == tmp_path
    assert one.stat().st_mode & 0o777 == 0o700


def test_a_killed_worker_is_seen_to_make_no_difference(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "demo", "--kill", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert re.search(r"kill -9 \d+: that was worker 1, in mid-step", told)
    assert re.search(r"worker 1 was killed by signal 9 \(SIGKILL\) in step \d+; 2 continue", told)
    assert re.search(r"the others continue after \d+ ms; no step was lost", told)
    assert says(told, "parameters of all 3 workers are equal to", "last bit.")
    assert says(told, "gives", "same parameters")
    events = read_events(RunFolder(tmp_path / "killed"))
    died = [event for event in events if event["kind"] == "generation" and event["died"]]
    assert [each["worker"] for event in died for each in event["died"]] == [1]
    starts = [event["step"] for event in events if event["kind"] == "start"]
    assert starts[:3] == [0, 0, 0]
    assert all(step > 0 for step in starts[3:])


def test_a_single_worker_cannot_be_killed_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--kill", "--workers", "1"]) == 2
    assert "no worker would be left" in capsys.readouterr().err
