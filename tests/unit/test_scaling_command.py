"""`paceline scale`: its flags, and how it sets up the runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from paceline.cli import Parser, main
from paceline.errors import SettingError
from paceline.explain.scaling.command import (
    add_arguments,
    choose_threads,
    read_networks,
    read_sizes,
    take_flags_behind,
)
from paceline.explain.scaling.measure import Script, order, read_run_options, steps_made
from paceline.observe.spans import SpanRecorder


def test_sizes_take_turns_forth_and_back() -> None:
    assert list(order([1, 2, 4], 3)) == [
        *[(0, 1), (0, 2), (0, 4)],
        *[(1, 4), (1, 2), (1, 1)],
        *[(2, 1), (2, 2), (2, 4)],
    ]


def test_a_run_is_what_paceline_run_would_start(tmp_path: Path) -> None:
    script = Script(program="train.py", arguments=("--batch", "{workers}00", "{folder}"), threads=2)
    options = read_run_options(script, 3, tmp_path)

    assert (options.nproc_per_node, options.threads, options.kind) == ("3", 2, "script")
    assert options.arguments == ("--batch", "300", str(tmp_path / "job"))
    assert options.timeline == str(tmp_path / "timeline")
    assert options.redirects == {-1: 3}
    assert options.signals_to_handle


def test_a_worker_is_the_same_thing_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose_threads(None, cores=16, most_workers=4) == 4
    assert choose_threads(None, cores=2, most_workers=4) == 1
    assert choose_threads(3, cores=2, most_workers=4) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(None, cores=16, most_workers=4) is None


def test_steps_are_counted_where_the_slowest_rank_is(tmp_path: Path) -> None:
    assert steps_made(tmp_path, 2) == 0
    for rank, steps in enumerate((7, 5)):
        recorder = SpanRecorder(tmp_path, rank)
        for step in range(steps + 1):
            recorder.add("wait", 0, 1, {"step": step, "last": True})
        recorder.close()
    assert steps_made(tmp_path, 2) == 5
    assert steps_made(tmp_path, 3) == 0


def test_sizes_and_networks_are_read() -> None:
    assert read_sizes("--workers", "1, 2,4") == [1, 2, 4]
    assert [network.name for network in read_networks("1g, NVLink,1g", None, None)] == [
        "1g",
        "nvlink",
    ]
    (own,) = read_networks("100g", 5.0, 8.0)
    assert (own.latency_s, own.bytes_per_s) == pytest.approx((5e-6, 1e9))


def parse(*arguments: str) -> Namespace:
    parser = Parser(prog="paceline scale")
    add_arguments(parser)
    return take_flags_behind(parser.parse_args(list(arguments)))


@pytest.mark.parametrize(
    ("arguments", "workers", "steps", "own"),
    [
        (["train.py"], "1,2", 200, []),
        (["--workers", "4", "train.py", "--steps", "7"], "4", 200, ["--steps", "7"]),
        (["train.py", "--workers", "4", "--epochs", "3"], "4", 200, ["--epochs", "3"]),
        (["train.py", "--workers=4", "--steps", "7", "x"], "4", 7, ["x"]),
        (["train.py", "--workers", "4", "--", "--steps", "7"], "4", 200, ["--steps", "7"]),
        (["train.py", "x", "--workers", "4"], "1,2", 200, ["x", "--workers", "4"]),
        (["train.py", "--help"], "1,2", 200, ["--help"]),
    ],
)
def test_flags_stand_before_the_script_or_directly_behind_it(
    arguments: list[str], workers: str, steps: int, own: list[str]
) -> None:
    found = parse(*arguments)
    assert (found.script, found.workers, found.steps) == ("train.py", workers, steps)
    assert found.script_args == own


@pytest.mark.parametrize("text", ["", "0", "1,", "2-4", "a", "-1", "1,9999999", "\u00b2"])
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(SettingError, match="--workers"):
        read_sizes("--workers", text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "two"], "--workers is 'two'"),
        (["--predict", "8;9"], "--predict is '8;9'"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--steps", "-1"], "--steps is -1"),
        (["--threads", "0"], "--threads is 0"),
        (["--fail-under", "0"], "--fail-under is 0.0"),
        (["--fail-under", "nan"], "--fail-under is nan"),
        (["--network", "infiniband"], "no network 'infiniband'"),
        (["--latency-us", "5"], "both a latency and a bandwidth"),
        (["--latency-us", "-5", "--bandwidth-gbps", "1"], "impossible"),
        (["--mode", "medium"], "medium"),
        ([], "no script"),
    ],
)
def test_mistakes_are_explained_before_anything_runs(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", *flags, "none.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("paceline scale: ")
    assert words in said
