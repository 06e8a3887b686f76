"""Every example runs, on several workers and on one, and shows what it says."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.data import Generators

FOLDER = Path(__file__).parents[2] / "examples"

# What each prints on the workers of a launcher, whatever their number.
ON_WORKERS = {
    "actor_critic.py": r"sum of all \|weights\| 35\.313002059, world size [123]",
    "accumulation.py": r"difference to one process on all sentences: \d+e-0[789]\b|: 0e\+00",
    "char_gpt.py": r"until step 80\..*\n +4 +2\.[0-5]\d{3} .*runs/char_gpt\nShall [^\n]{60,}\n",
    "checkpoint_clean_keys.py": r"saved under the wrapper: 0\.weight, .*loaded into the bare model",
    "clip.py": r"sum of all \|weights\| 179\.289635133, world size [123]",
    "comm_hook.py": r"8,320 bytes .* difference [1-9]e-0[45]",
    "ddp_plain.py": r"epoch 2: loss 0\.[01]\d\d ",
    "distillation.py": r"sum of all \|weights\| 176\.009240805, world size [123]",
    "digits.py": r"eval accuracy .*\n +3 +0\.[0-2]\d{3} +9\d\.\d%",
    "evaluation.py": r"52 of 101 right: accuracy 0\.5149",
    "gan.py": r"sum of all \|weights\| 104\.988823501, world size [123]",
    "simclr.py": r"sum of all \|weights\| 93\.488086661, world size [123]",
    "step_loop.py": r"24 steps, 1,536 samples.*\n +3 +0\.[12]\d{3} +9\d\.\d%",
}
# What those print that need no launcher, or have one inside.
BY_THEMSELVES = {
    "data_parallel.py": r" (9[6-9]|10\d) of 101 right.*two loops' weights: (\d+e-0[5-9]|0e\+00)"
    r".*loaded into the bare model: 0\.weight, 0\.bias",
    "module_prefix.py": r"Missing key.*2 tensors loaded.*saved: True\n.*under ours: weight, bias",
    "output_shape.py": r"split    \(8, 10\) \+ \(8, 10\)\n.*gather   \(16, 5\)\n.*it: True",
    "notebook_launch.py": r"rank 1: loss \d+\.\d\d -> 0\.0\d+",
    "resume.py": r"three workers: steps 1 to 13.*steps 11 to 32\n.* 1 to 32, difference \de-0[678]",
}
# Seconds of computing, and the same at every number of workers: once is enough.
LONG = {"char_gpt.py", "digits.py"}


def assert_shown(output: str, name: str) -> None:
    assert re.search({**ON_WORKERS, **BY_THEMSELVES}[name], output, re.S), output


def run_examples(names: list[str]) -> None:
    """On a worker: one example after the other, in a world that they share."""
    with paceline.init_process_group() as world:
        for name in names:
            if world.is_main:
                print(f"=== {name}", flush=True)
            runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_every_example_is_tested_and_short() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    assert sorted(found) == sorted([*ON_WORKERS, *BY_THEMSELVES])
    assert max(len(text.splitlines()) for text in found.values()) <= 80


@pytest.mark.usefixtures("_half_of_torch")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_examples_run_on_any_number_of_workers(
    workers: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # some have a folder
    names = sorted(name for name in ON_WORKERS if workers == 2 or name not in LONG)
    paceline.launch(run_examples, names, workers=workers, label=False)
    outputs = capsys.readouterr().out.split("=== ")[1:]
    assert [output.partition("\n")[0] for output in outputs] == names
    for name, output in zip(names, outputs, strict=True):
        assert_shown(output, name)


@pytest.mark.parametrize("name", sorted(BY_THEMSELVES))
def test_an_example_that_needs_no_launcher_runs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert_shown(capsys.readouterr().out, name)


class PlainTorch:
    """Stands for a run and its steps: a loop in plain torch with the whole batch in one graph.

    Of a `Run` it has the order of samples, and the random numbers of each shard.
    """

    world = paceline.World(rank=0, size=1, group=None)

    def __init__(self, net: Any, optimizer: Any, data: Any, **given: Any) -> None:
        self.model, self._optimizer, self._data, self._given = net, optimizer, data, given

    def __iter__(self) -> Iterator[PlainTorch]:
        size, given = len(self._data), self._given
        self._step = 0
        for epoch in range(given["epochs"]):
            source = torch.Generator().manual_seed(given["seed"] + epoch)
            for rows in torch.randperm(size, generator=source).split(given["global_batch"]):
                self._step, self._rows = self._step + 1, rows
                yield self

    def __enter__(self) -> None:
        self._optimizer.zero_grad()

    def __exit__(self, *_: object) -> None:
        self._optimizer.step()

    def joint(self, encode: Callable[[Any], Any], loss: Callable[..., Tensor]) -> None:
        found, shards = [], self._given["shards"]
        for shard in range(shards):
            batch = list(self._data[self._rows[shard::shards]])
            Generators().seed(self._given["seed"], "model", self._step, shard)
            found.append(encode(batch))
        loss(*map(torch.cat, zip(*found, strict=True))).backward()


@pytest.mark.parametrize("name", ["simclr", "clip"])
def test_a_loss_over_the_batch_trains_what_plain_torch_does_on_all_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for kind in (paceline.Run, PlainTorch):
        runs: list[Any] = []

        def make(*args: Any, kind: Any = kind, runs: list[Any] = runs, **given: Any) -> Any:
            runs.append(kind(*args, **given))
            return runs[0]

        monkeypatch.setattr(paceline, "Run", make)
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        weights.append([param.detach() for param in runs[0].model.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-10, atol=1e-12)
