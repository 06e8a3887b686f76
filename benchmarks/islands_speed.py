"""Step time with two islands of one worker, compared with the bare model on the same device.

Both islands compute, on one GPU if there is only one, and exchange through the launcher's
meeting place. Each launch measures the bare model before and after the run, in the same processes,
and the run over whole rounds, from the end of its first one on.

    python -m benchmarks islands_speed                  a GPT of 34M parameters, on a GPU
    python -m benchmarks islands_speed --small          a model that a CPU can train
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline
from benchmarks.models import GPT
from benchmarks.tables import print_table
from paceline.telemetry import Sink

ROOT = Path(__file__).parents[1]
SETTINGS: list[dict[str, Any]] = [
    {"bits": 16},
    {"bits": 16, "delay": 15},
    {"bits": 8, "delay": 15},
    {"bits": 16, "fragments": 3, "delay": 5},
]
ROWS = 8
"""Of a batch, on each island."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", type=int, default=30, help="steps between two rounds")
    parser.add_argument("--periods", type=int, default=6, help="rounds that are measured")
    parser.add_argument("--launches", type=int, default=2, help="of each setting, in turns")
    parser.add_argument("--settings", default="", help="numbers of settings, such as 0,2")
    parser.add_argument("--small", action="store_true", help="a model that a CPU can train")


def main(args: argparse.Namespace) -> dict[str, Any]:
    chosen = [SETTINGS[int(each)] for each in args.settings.split(",") if each] or SETTINGS
    found: list[list[dict[str, float]]] = [[] for _ in chosen]
    for _ in range(args.launches):
        for setting, entries in zip(chosen, found, strict=True):
            entries.append(launch(args, {"every": args.every, **setting}))
    rows = [row(*each) for each in zip(chosen, found, strict=True)]
    size = found[0][0]["parameters"] / 1e6
    title = f"Two islands of one worker, a round every {args.every} steps: GPT of {size:.0f}M"
    print_table(title, rows)
    return {title: rows}


def row(setting: dict[str, Any], entries: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "islands": ", ".join(f"{key} {value}" for key, value in setting.items()),
        "bare model, ms": round(1e3 * median(each["bare_s"] for each in entries), 2),
        "a step, ms": round(1e3 * median(each["step_s"] for each in entries), 2),
        "/ bare model": round(median(each["step_s"] / each["bare_s"] for each in entries), 3),
        "a round waits, ms": round(1e3 * median(each["round_s"] for each in entries), 1),
    }


def launch(args: argparse.Namespace, islands: dict[str, Any]) -> dict[str, float]:
    """The slower island's times."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--island", "1"]
        command += ["--quiet", *(["--share-gpus"] if torch.cuda.is_available() else [])]
        command += ["-m", "benchmarks.islands_speed", folder, json.dumps(islands)]
        command += [str(args.periods), *(["--small"] if args.small else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        subprocess.run(command, env=environ, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        ends = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    slower: dict[str, float] = max(ends, key=lambda each: each["step_s"])
    print(islands, {key: round(value, 5) for key, value in slower.items()}, flush=True)
    return slower


class Rounds(Sink):
    """Records the waiting time of each round."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def step(self, step: Any) -> None:
        if (waited_s := step.metrics.get("island_round_s")) is not None:
            self.waited_s.append(waited_s)


def worker() -> None:
    """One island: the bare model, the run, and the bare model again."""
    folder, islands, periods = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    vocabulary, length, shape = 30000, 256, (512, 6, 8)
    if "--small" in sys.argv:
        vocabulary, length, shape = 300, 32, (64, 2, 4)
        torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    island = env_island()
    torch.set_float32_matmul_precision("high")
    # From the landing of the first round on, when both are at the same place, and not to the last
    # step, which waits for the other island and ends the run.
    first = islands["every"] + islands.get("delay", 0)
    steps = first + islands["every"] * periods + 1
    tokens = torch.randint(vocabulary, (2 * ROWS * steps, length + 1))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = GPT(vocabulary, *shape, length).to(device)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda")

    def loss_of(net: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = net(batch[:, :-1])
            return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def time_bare(name: str) -> float:
        net, optimizer = build()
        batch = tokens[:ROWS].to(device)
        meet(folder, name, island)
        for number in range(10 + islands["every"]):
            if number == 10:
                begin_s = now_s()
            optimizer.zero_grad(set_to_none=True)
            loss_of(net, batch).backward()
            optimizer.step()
        return (now_s() - begin_s) / float(islands["every"])

    before_s = time_bare("before")
    net, optimizer = build()
    sink = Rounds()
    run = paceline.Run(
        net,
        optimizer,
        TensorDataset(tokens),
        global_batch=2 * ROWS,
        epochs=1,
        sinks=[sink],
        options=paceline.RunOptions(islands=paceline.Islands(**islands), progress="quiet"),
    )
    times_s: list[float] = []
    for step in run:
        if run.step in (first, steps - 1):
            times_s.append(now_s())
        with step:
            for (batch,) in step.batches():
                step.backward(loss_of(run.model, batch))
    step_s = (times_s[1] - times_s[0]) / (steps - 1 - first)
    bare_s = (before_s + time_bare("after")) / 2
    found = {"bare_s": bare_s, "step_s": step_s, "round_s": median(sink.waited_s[1:])}
    found["parameters"] = sum(param.numel() for param in net.parameters())
    (folder / f"{island}.json").write_text(json.dumps(found))


def env_island() -> str:
    return os.environ["PACELINE_ISLAND"].partition("/")[0]


def meet(folder: Path, name: str, island: str) -> None:
    """Wait until the other island has arrived."""
    (folder / f"{name}-{island}").touch()
    while len(list(folder.glob(f"{name}-*"))) < 2:
        time.sleep(0.01)


if __name__ == "__main__":
    worker()
