"""`paceline demo`: the table, the promises it checks, and its mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from paceline import demo
from paceline.cli import main


def rows_of(text: str) -> list[tuple[int, float, float, float]]:
    """The table of epochs: epoch, loss, accuracy in percent, seconds."""
    found = re.findall(r"^ +(\d+) +(\d\.\d{4}) +(\d+\.\d)% +(\d+\.\d{3})$", text, re.M)
    return [(int(e), float(loss), float(acc), float(s)) for e, loss, acc, s in found]


@pytest.fixture(scope="module")
def shown() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "demo"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_demo_ends_in_a_table_of_falling_losses_and_good_accuracy(shown: str) -> None:
    table = rows_of(shown)
    assert [row[0] for row in table] == [1, 2, 3, 4, 5]
    losses = [row[1] for row in table]
    assert losses == sorted(set(losses), reverse=True)
    assert table[-1][2] >= 90


def test_the_demo_says_who_gets_what_and_where_gradients_meet(shown: str) -> None:
    assert "1,000 rows of 10 features" in shown
    assert "worker 0: 50 rows" in shown
    assert "worker 1: 50 rows" in shown
    assert "gradients summed" in shown


def test_the_demo_proves_that_workers_are_equal_and_exact(shown: str) -> None:
    assert "The 2 workers' parameters are equal to the last bit." in shown
    found = re.search(r"one process gives the same parameters: difference (\S+)\.\n", shown)
    assert found
    assert float(found[1]) < 1e-5


def test_the_demo_is_plain_text_of_80_columns(shown: str) -> None:
    assert shown.isascii()
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers_trains_what_one_process_trains(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--workers", str(workers), "--seed", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["is_bit_equal"]
    assert result["difference"] < 1e-6
    assert sum(result["rows_by_worker"]) == 5 * 1000
    assert max(result["rows_by_worker"]) - min(result["rows_by_worker"]) <= 50
    losses = [row["loss"] for row in result["epochs"]]
    assert losses == sorted(losses, reverse=True)
    assert result["epochs"][-1]["accuracy"] >= 0.9


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 100])
def test_the_picture_fits_and_its_rows_add_up(workers: int) -> None:
    shown = demo.introduction(demo.Options(workers=workers))
    assert max(map(len, shown.splitlines())) <= 80
    rows = [int(number) for number in re.findall(r"worker \d+: +(\d+) row", shown)]
    if workers <= 4:
        assert sum(rows) == 100
    assert max(rows) - min(rows) <= 1


def test_a_broken_promise_is_said_and_fails() -> None:
    epochs = [demo.Epoch(1, 0.5, 0.8, 0.1)]
    different = demo.Outcome(epochs, [50, 50], 418, is_bit_equal=False, difference=0.0)
    inexact = demo.Outcome(epochs, [50, 50], 418, is_bit_equal=True, difference=0.01)
    assert not different.is_as_promised
    assert not inexact.is_as_promised
    assert "NOT EQUAL" in demo.report(different)
    assert "OTHER parameters" in demo.report(inexact)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "--workers is 0"),
        (["--workers", "101"], "1 to 100"),
        (["--epochs", "0"], "--epochs is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--worker", "2"], "did you mean --workers?"),
    ],
)
def test_a_mistake_is_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err
