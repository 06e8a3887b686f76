"""`paceline trace`: real engines, real workers, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says

from paceline import record
from paceline.cli import main
from paceline.show.trace import task

pytestmark = pytest.mark.usefixtures("_half_of_torch")

USERS_FILE = """
import torch
from torch import nn
from torch.nn import functional as F
from sizes import CLASSES

def make():
    x = torch.randn(60, 1, 8, 8)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    return {
        "model": net,
        "dataset": (x, torch.randint(CLASSES, (60,))),
        "loss_fn": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    }

def pair():
    return nn.Linear(3, 1), (torch.randn(9, 3), torch.randn(9, 1)), F.mse_loss

def nothing(): return 3
def unknown(): return {"model": nn.Linear(1, 1), "data": None}
def no_model(): return "net", (torch.zeros(2), torch.zeros(2)), F.mse_loss
def uneven(): return nn.Linear(1, 1), (torch.zeros(2), torch.zeros(3)), F.mse_loss
def rows(): return nn.Linear(1, 1), [torch.zeros(1)] * 9, F.mse_loss
def frozen(): return nn.ReLU(), (torch.zeros(9), torch.zeros(9)), F.mse_loss
def needs(size): return None
def raises(): return {}["rows"]
def loops(): return nn.Linear(1, 1), iter([]), F.mse_loss
def strange(): return {"model": nn.Linear(1, 1), "dataset": (torch.zeros(9, 1),) * 2,
                       "loss_fn": F.mse_loss, "kind": "odd"}
"""


@pytest.fixture
def users_file(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "sizes.py").write_text("CLASSES = 5\n")
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    yield str(path)
    sys.modules.pop("sizes", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def trace(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["trace", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    record.from_json(document)
    return document


@pytest.mark.parametrize("engine", ["dp", "ddp"])
def test_a_step_a_training_and_a_prediction_are_traced_on_the_real_engine(
    engine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--sample", "17", "--weight", "2.weight[0,3]", "--epochs", "3", "--predict", "5"]
    folder = tmp_path / "run"
    document = trace(capsys, "--engine", engine, "--folder", str(folder), *flags)
    shapes = {
        stage["name"]: [part["tensors"][0]["shape"] for part in stage["parts"] if part["tensors"]]
        for stage in document["stages"]
    }
    assert shapes["data"] == [[1_000, 10]]
    assert shapes["forward"] == [[50, 1], [50, 1]]
    if engine == "dp":
        assert shapes["batch"] == [[100, 10]]
        assert shapes["split"] == [[50, 10], [50, 10]]
        assert shapes["gather"] == [[100, 1]]
    else:
        assert shapes["sampler"] == [[50], [50]]
        assert shapes["batch"] == [[50, 10], [50, 10]]
        assert shapes["all-reduce"] == [[385], [385]]
    names = [stage["name"] for stage in document["stages"]]
    way = {stop["stage"]: (stop["worker"], stop["row"]) for stop in document["prediction"]["stops"]}
    stages = {stage["name"]: stage for stage in document["stages"]}
    if engine == "dp":
        assert names[:3] == ["data", "place", "batch"]
        assert way == {"batch": (None, 5), "split": (0, 5)} | {
            "forward": (0, 5), "gather": (None, 5),
        }  # fmt: skip
        # 50 of the rows, the weights, 50 outputs and the gradients, 4 bytes a number.
        through = 4 * (50 * 10 + 385 + 50 + 385)
        assert stages["main"]["parts"][0]["text"] == f"{through / 1000:.1f} kB through this device"
        assert stages["main"]["bytes_moved"] == 0
    else:
        assert names[:4] == ["data", "meet", "place", "sampler"]
        assert way == {"sampler": (1, 2), "batch": (1, 2), "forward": (1, 2)}
        before, after = (
            [part["tensors"][number]["first"] for part in stages["place"]["parts"]]
            for number in (0, 1)
        )
        assert before[0] != before[1]
        assert after == [before[0]] * 2  # rank 0's weights, on all
        assert stages["place"]["bytes_moved"] == 4 * 385
        assert stages["sampler"]["text"].endswith("1,000: overlap 0, left over 0.")
    by_worker = {stop["what"]: stop["by_worker"] for stop in document["weight"]["stops"]}
    own, combined = by_worker["gradient"], by_worker.get("summed gradient")
    combined = combined or [2 * each for each in by_worker["averaged gradient"]]
    assert sum(own) == pytest.approx(combined[0], rel=1e-3)
    check = document["check"]
    assert (check["how"], check["is_same"]) == ("whole batch", True)
    assert check["difference"] < 1e-5
    epochs = document["training"]["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2, 3]
    losses = [epoch["loss"] for epoch in epochs]
    assert losses == sorted(losses, reverse=True)
    assert epochs[0]["accuracy"] < 0.65 < 0.8 < epochs[3]["accuracy"]
    assert document["training"]["epochs"][-1]["observation"].startswith("falling")
    kinds = [layer["kind"] for layer in document["prediction"]["layers"]]
    assert kinds == ["Linear", "ReLU", "Linear"]
    assert document["prediction"]["answer"]["kind"] == "class"
    recorded = record.read(folder / "pipeline" / f"step{document['step']}.json")
    assert record.to_json(recorded) == document
    assert main(["trace", str(folder), "--ascii"]) == 0
    assert says(capsys.readouterr().out, "ok same as one process on", "whole batch")


def test_both_engines_train_to_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    tables = [
        trace(capsys, "--engine", engine, "--workers", workers, "--epochs", "2")["training"]
        for engine, workers in (("dp", "1"), ("dp", "3"), ("ddp", "3"))
    ]
    for table in tables[1:]:
        for one, two in zip(tables[0]["epochs"], table["epochs"], strict=True):
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert two["evaluation_loss"] == pytest.approx(one["evaluation_loss"], abs=1e-5)
            assert two["accuracy"] == one["accuracy"]


@pytest.mark.parametrize("engine", ["dp", "ddp"])
def test_no_values_leaks_no_value(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = trace(capsys, "--engine", engine, "--no-values", "--predict", "5", "--epochs", "1")
    built = task.built_in(seed=0)
    secrets = {float(v) for v in built.dataset.tensors[0].flatten().tolist()}
    secrets |= {float(v) for param in built.model.parameters() for v in param.flatten().tolist()}
    assert not document["has_values"]
    found = set(numbers(document)) & secrets
    assert not found
    assert document["prediction"]["answer"] is None


def numbers(value: Any, key: str = "") -> Iterator[float]:
    """Every number that is neither a count nor a statistic."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name != "stats":
                yield from numbers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, key)
    elif type(value) is float:
        yield value


def test_the_scan_for_values_finds_them(capsys: pytest.CaptureFixture[str]) -> None:
    document = trace(capsys, "--engine", "dp", "--values")
    secrets = {float(v) for v in task.built_in(seed=0).dataset.tensors[0].flatten().tolist()}
    assert len(set(numbers(document)) & secrets) > 5


@pytest.mark.parametrize("engine", ["dp", "ddp"])
def test_a_users_own_model_is_traced_without_values(
    engine: str, users_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch", "20", "--workers", "3", "--epochs", "2", "--predict", "0"]
    document = trace(capsys, "--engine", engine, "--model", f"{users_file}:make", *flags)
    assert not document["has_values"]
    assert document["check"]["is_same"]
    assert document["prediction"]["layers"][-1]["output"]["shape"] == [1, 5]
    assert document["training"]["epochs"][0]["accuracy"] is not None
    assert document["training"]["epochs"][0]["evaluation_loss"] is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("engine", ["dp", "ddp"])
def test_a_gpu_that_is_not_there_is_not_replaced_by_the_cpu(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--engine", engine, "--device", "cuda"]) == 2
    assert "this machine has none" in capsys.readouterr().err


PLAIN_SCRIPT = """
import torch, paceline
from torch import nn
with paceline.init_process_group():
    model = paceline.DistributedDataParallel(nn.Linear(3, 1))
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
"""


def test_a_script_without_run_is_told_that_its_step_was_not_recorded(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--trace-step", "2"]
    ended = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0
    assert ended.stderr.count("Step 2 was not recorded: --trace-step is for scripts with") == 1


def test_values_of_a_users_model_are_kept_when_asked(
    users_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch", "9", "--predict", "4", "--values", "--engine", "dp"]
    document = trace(capsys, "--model", f"{users_file}:pair", *flags)
    assert document["prediction"]["answer"]["kind"] == "value"
    assert document["prediction"]["answer"]["value"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "--workers is 0"),
        (["--batch", "1"], "cannot be shared among --workers 2"),
        (["--batch", "1001"], "more than the dataset has: 1,000 rows"),
        (["--epochs", "-1"], "--epochs is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--sample", "1000"], "the dataset has rows 0 to 999"),
        (["--predict", "-1"], "--predict is -1"),
        (["--weight", "0.wieght"], "Did you mean '0.weight'?"),
        (["--weight", "0.weight[99,0]"], "whose shape is (32, 10)"),
        (["--engine", "horovod"], "--engine is 'horovod': use one of"),
        (["--device", "tpu"], "--device is 'tpu': use one of"),
        (["--enigne", "dp"], "Did you mean '--engine'?"),
        (["--step", "2"], "Name a run folder"),
        (["--model", "mine"], "Write it as FILE:function"),
        (["--model", "no/such.py:make"], "There is no file 'no/such.py'"),
        (["--model", "no.such:make"], "cannot be imported"),
        (["--folder", "a b"], "cannot be named"),
        (["--folder", "/dev/null/x"], "/dev/null/x"),
        (["no-such-run"], "cannot be read"),
    ],
)
def test_nonsense_is_explained_and_exits_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.rstrip().splitlines()) <= 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("absent", "no function 'absent'"),
        ("lops", "Did you mean 'loops'?"),
        ("raises", "KeyError: 'rows'.\nIt was raised at "),
        ("nothing", "returned int"),
        ("unknown", "'dataset'"),
        ("no_model", "The model of"),
        ("uneven", "2 inputs and 3 targets"),
        ("rows", "not a pair of input and target"),
        ("frozen", "nothing to train"),
        ("needs", "needs arguments"),
        ("loops", "without rows to pick from"),
        ("strange", "kind of"),
    ],
)
def test_a_users_mistake_is_explained(
    function: str, words: str, users_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--batch", "2", "--model", f"{users_file}:{function}"]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_recorded_steps_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "no recorded step" in capsys.readouterr().err
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "step4.json").write_text("{}")
    assert main(["trace", str(tmp_path), "--step", "5"]) == 2
    assert "It has 1, from 4 to 4." in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    assert says(capsys.readouterr().err, "not a recorded step")


@pytest.mark.parametrize(
    "text",
    [
        f'{{"schema": 1, "step": {"9" * 400}}}',
        f'{{"schema": {"9" * 5000}}}',
        "[" * 100_000,
        '{"schema": 1, "engine": NaN}',
        '{"schema": 1, "engine": "DataParallel", "engine": 1}',
        f'{{"schema": 1, "{"x" * 2_000_000}": 1}}',
        f'{{"schema": 1, "workers": [{"1," * 2_000_000}1]}}',
        "{}\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
    ids=range(8),
)
def test_a_file_that_nobody_of_ours_wrote_is_refused_in_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step1.json"
    path.write_text(text)
    assert main(["trace", str(path)]) == 2
    assert says(capsys.readouterr().err, "not a recorded step")


def test_a_terminal_without_unicode_gets_ascii() -> None:
    path = Path(__file__).parents[1] / "data" / "pipeline-ddp.json"
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "trace", str(path)],
        capture_output=True,
        timeout=60,
        check=False,
        env={"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines())) <= 80
