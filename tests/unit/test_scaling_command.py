"""`paceline scale`: its flags, the study as text and JSON, and the one thing it suggests."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentences import says

from paceline.cli import Parser, main
from paceline.errors import SettingError
from paceline.show import report
from paceline.show.scaling.attribution import PARTS
from paceline.show.scaling.command import (
    Study,
    add_arguments,
    choose_threads,
    lines,
    make_study,
    read_networks,
    read_sizes,
    write,
)
from paceline.show.scaling.measure import BucketTiming, Profile
from paceline.show.scaling.prediction import NETWORKS
from paceline.telemetry import Blame
from paceline.telemetry.phases import Phase


def test_sizes_and_networks_are_read() -> None:
    assert read_sizes("--workers", "1, 2,4") == [1, 2, 4]
    assert [network.name for network in read_networks("1g, NVLink,1g", None, None)] == [
        "1g",
        "nvlink",
    ]
    (own,) = read_networks("100g", 5.0, 8.0)
    assert (own.latency_s, own.bytes_per_s) == pytest.approx((5e-6, 1e9))


def test_a_worker_is_the_same_thing_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose_threads(None, cores=16, most_workers=4) == 4
    assert choose_threads(None, cores=2, most_workers=4) == 1
    assert choose_threads(3, cores=2, most_workers=4) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(None, cores=16, most_workers=4) is None


def parse(*arguments: str) -> Namespace:
    parser = Parser(prog="paceline scale")
    add_arguments(parser)
    return parser.parse_args(list(arguments))


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


@pytest.mark.parametrize(
    "text", ["", "0", "1,", "2-4", "a", "-1", "1,9999999", "\u00b2", "1" * 5000]
)
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(SettingError, match="--workers"):
        read_sizes("--workers", text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "two"], "--workers.* 'two'"),
        (["--predict", "8;9"], "--predict.* '8;9'"),
        (["--workers", "1", "--predict", "8"], "predicted"),
        (["--repeats", "0"], "--repeats.* 0"),
        (["--steps", "-1"], "--steps.* -1"),
        (["--threads", "0"], "--threads.* 0"),
        (["--fail-under", "0"], "--fail-under.* 0.0"),
        (["--fail-under", "nan"], "--fail-under.* nan"),
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
    assert re.search(words, said)


JOB = {"data": 0.001, "forward": 0.02, "backward": 0.04, "optimizer": 0.001, "other": 0.001}


def profile(workers: int, **changes: float) -> Profile:
    """A job that shares its batch well, with some phases changed."""
    seconds = dict.fromkeys(Phase, 0.0)
    seconds |= {Phase(phase): value / workers for phase, value in JOB.items()}
    seconds |= {Phase.OPTIMIZER: JOB["optimizer"], Phase.TRANSFER: 0.001 * (workers > 1)}
    seconds |= {Phase(phase): value for phase, value in changes.items()}
    return Profile(
        workers=workers,
        seconds=seconds,
        samples=64,
        steps=100,
        runs_s=(sum(seconds.values()), 1.02 * sum(seconds.values())),
        buckets=(BucketTiming(seconds[Phase.BACKWARD], 10**6),) if workers > 1 else (),
    )


def study(*profiles: Profile, **options: Any) -> Study:
    return make_study(profiles, name="train.py", cores=4, repeats=2, **options)


GOOD = [profile(workers) for workers in (1, 2, 4)]


def test_a_slow_worker_is_named_below_what_was_lost() -> None:
    times = {"slower_by_s": 0.02, "phase_s": 0.03, "others_phase_s": 0.01}
    slow = Blame(rank=1, phase=Phase.DATA, steps=80, **times)
    found = study(GOOD[0], replace(GOOD[1], slow=slow))
    assert "With 2 workers: Worker 1 is slow: its data takes 30 ms" in "\n".join(lines(found))
    assert [size["slow"] for size in found["sizes"]] == ["", str(slow)]


def test_the_text_fits_eighty_columns_of_plain_letters() -> None:
    crowded = [*GOOD, profile(16, forward=0.01, wait=0.003, data=0.002, other=0.004)]
    found = study(*crowded, predict=[8, 1024], networks=list(NETWORKS.values()))
    text_lines = list(lines({**found, "name": "tr\N{SNOWMAN}in.py"}))

    assert max(map(len, text_lines)) <= 80
    assert all(line.isascii() for line in text_lines)
    text = "\n".join(text_lines)
    for expected in (
        "Strong scaling (found: 64 samples a step with 1 worker, 64 with 16).",
        "4.0 per core",
        "Predicted, not measured",
        "home",
        "Try: ",
        ": 4 workers: predicted",
    ):
        assert expected in text


def test_the_shares_of_every_row_add_up_to_a_hundred() -> None:
    said = list(lines(study(*GOOD, profile(3, wait=0.00333, data=0.00111))))
    begin = next(number for number, line in enumerate(said) if "lost ms" in line)
    rows = [line.split() for line in said[begin + 1 : begin + 4]]
    for row in rows:
        assert row[-1] == "100"
        assert sum(map(int, row[2:-1])) == 100


def test_workers_that_the_batch_is_too_small_for_are_counted() -> None:
    found = study(*GOOD, predict=[64, 65, 128], networks=[NETWORKS["nvlink"]])
    enough, *too_many = found["predicted"]
    assert [each["without_rows"] for each in found["predicted"]] == [0, 1, 64]
    assert all(each["speedup"] <= 1.01 * enough["speedup"] for each in too_many)
    text = "\n".join(lines(found))
    assert says(text, "64 samples", "128 workers", 64, "no rows")
    weak = study(*GOOD, mode="weak", predict=[128], networks=[NETWORKS["nvlink"]])
    assert weak["predicted"][0]["without_rows"] == 0


def test_islands_pay_on_slow_networks_and_not_on_this_machine() -> None:
    here = study(*GOOD)["islands"]
    assert [(each["network"], each["pays"]) for each in here] == [("this machine", False)]
    assert says(here[0]["text"], "Islands do not pay", "below about", "MB/s")
    chosen = [NETWORKS["nvlink"], NETWORKS["home"]]
    found = study(*GOOD, predict=[4, 8], networks=chosen)["islands"]
    assert [(e["network"], e["islands"], e["pays"]) for e in found] == [
        ("nvlink", 8, False),
        ("home", 8, True),
    ]


def test_json_has_what_the_report_reads() -> None:
    found = study(*GOOD, predict=[8], networks=[NETWORKS["1g"]])

    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["schema"] == 1
    assert found["mode"] == "strong"
    assert [size["workers"] for size in found["sizes"]] == [1, 2, 4]
    assert found["sizes"][0]["speedup"] == 1.0
    assert set(found["sizes"][1]["lost"]) == set(PARTS)
    for size in found["sizes"]:
        assert sum(size["lost"].values()) == pytest.approx(size["step_s"] - size["ideal_s"])
    assert [(each["workers"], each["network"]) for each in found["predicted"]] == [(8, "1g")]
    assert found["check"]["fitted"] == [1, 2]
    assert abs(found["check"]["sizes"][0]["error"]) < 0.15


def test_the_report_draws_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found = study(*GOOD, predict=[8], networks=[NETWORKS["100g"]])

    path = write(found, folder)
    page = report.write(folder, None).read_text()

    assert path.stat().st_mode & 0o777 == 0o600
    assert '"network":"100g"' in page.replace(" ", "")
    assert "take longer for each sample than on one worker" in page
    assert found["check"]["text"] in page
    write(found, folder)  # a second time replaces it
    assert {each.name for each in folder.iterdir()} == {"scaling.json", "report.html"}


@pytest.mark.parametrize(
    ("changes", "words_of_it"),
    [
        ({"data": 0.02}, "Load samples ahead"),
        ({"optimizer": 0.012, "transfer": 0.0}, "fused=True"),
        ({"forward": 0.4, "wait": 0.4}, "Use 2 workers here: "),
    ],
)
def test_what_costs_most_is_what_to_try(changes: dict[str, float], words_of_it: str) -> None:
    slow = profile(4, **changes)
    found = study(profile(1), profile(2), slow)["suggestion"]
    assert found is not None
    assert words_of_it in found["text"]
    assert found["gain"] > 0.03


def test_workers_that_share_cores_are_advised_to_be_fewer() -> None:
    crowded = profile(8, forward=0.02, backward=0.04)
    found = study(*GOOD, crowded)
    assert found["sizes"][-1]["crowding"] == 2
    assert found["suggestion"]["text"].startswith("Use 4 workers here: ")
    faster = found["sizes"][2]["speedup"] / found["sizes"][3]["speedup"]
    assert found["suggestion"]["gain"] == pytest.approx(faster - 1)


def test_a_job_that_scales_well_needs_no_advice() -> None:
    ideal = [profile(workers, transfer=0.0, optimizer=0.0, data=0.0) for workers in (1, 2, 4)]
    assert study(*ideal)["suggestion"] is None


def test_the_mode_can_be_told() -> None:
    found = study(*GOOD, mode="weak")
    assert (found["mode"], found["mode_why"]) == ("weak", "as given by --mode")


def test_one_size_alone_is_no_study_of_scaling_but_no_error_either() -> None:
    found = study(GOOD[0])
    assert found["suggestion"] is None
    assert found["check"]["text"] == ""
    assert len(list(lines(found))) >= 4
