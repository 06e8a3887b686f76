"""Check that trainings with same_bits have equal hashes, with any workers, update and transport.

Every model is trained by one worker, and again by 2, 3, 4 and 8 workers, each time with a whole
and a sharded update, and gradients in shared memory and over sockets. Compared is the SHA-256 of
the complete state: parameters, buffers, optimizer, scheduler, scaler, averaged weights.

    python -m benchmarks hashes --kills 20         3 workers under `paceline run`, killed 20 times
    python -m benchmarks hashes --chain 3,2,1,4    resumed by these numbers of workers in turn
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.tables import print_table, read_names
from paceline import DDPOptions, Run, RunOptions, World
from paceline.files import RunFolder, read_events
from paceline.show.compare import read_hashes
from paceline.telemetry import Message
from paceline.testing import run_processes, seeded
from tests.faults import TrainingFaults, run_training, wait_for_replacements

SHARDS, CLASSES, PER_EPOCH = 8, 10, 10
PRECISIONS = ("fp32", "bf16", "fp16")
WAYS = ("whole", "sharded", "whole over c10d", "sharded over c10d")
KILLED = ("step", "forward", "between steps", "at the vote", "")
"""Moments of a step at which workers are killed; "": a few milliseconds after its beginning."""


class GPT(nn.Module):
    """Dropout, tied embeddings, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 48)
        make = nn.TransformerEncoderLayer
        layer = make(48, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last, self.unused = nn.Linear(48, 32, bias=False), nn.Linear(7, 7)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :24] * 8).long().clamp(-16, 15) + 16
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        out: Tensor = self.last(self.blocks(self.table(tokens), mask=mask, is_causal=True))
        return out[:, -1, :CLASSES]


class Twice(nn.Module):
    """A layer that is used twice for some shards, once for others, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(75, 75), nn.Linear(75, CLASSES)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh() if x.sum() > 0 else x
        out: Tensor = self.last(self.first(hidden))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(75, 130), nn.GELU(), nn.Linear(130, CLASSES))


def conv() -> nn.Module:
    first = nn.Unflatten(1, (3, 5, 5)), nn.Conv2d(3, 18, 3, padding=1), nn.BatchNorm2d(18)
    second = nn.ReLU(), nn.Conv2d(18, 9, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(81, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": mlp,
    "conv with BatchNorm": conv,
    "GPT with dropout, tied and unused": GPT,
    "layers used twice, once or never": Twice,
}


class Hashes:
    """A sink that keeps the hashes that a run reports, by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, str] = {}

    def message(self, message: Message) -> None:
        if message.kind == "hashes":
            self.by_step[message.facts["step"]] = message.facts["hashes"]["all"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None


def train(
    world: World | None,
    model: str,
    precision: str,
    way: str,
    steps: int,
    until: int | None = None,
    folder: str | None = None,
) -> dict[int, str]:
    """The hashes of one training, on rank 0; without a world, as a worker of `paceline run`."""
    update, _, transport = way.partition(" over ")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48 * PER_EPOCH, 75, generator=generator)
    data = torch.utils.data.TensorDataset(x, torch.randint(CLASSES, (480,), generator=generator))
    net, told = seeded(MODELS[model]()), Hashes()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    options: Any = {"precision": precision, "update": update, "clip_norm": 1.0, "ema": 0.95}
    options["handle_signals"] = world is None
    run = Run(
        net,
        optimizer,
        data,
        global_batch=48,
        epochs=-(-(until or steps) // PER_EPOCH),
        shards=SHARDS,
        scheduler=scheduler,
        world=world,
        folder=folder,
        ddp=DDPOptions(transport=transport or "auto"),
        options=RunOptions(progress="quiet", same_bits=True, **options),
        sinks=[told],
    )
    for step in run:
        with step:
            for rows, labels in step.batches():
                step.backward(cross_entropy(run.model(rows).float(), labels))
        if world is None:
            wait_for_replacements(run)
    return told.by_step


def plan_kills(count: int, steps: int, workers: int, seed: str) -> TrainingFaults:
    """Kills in evenly spaced steps, of random workers, at each kind of moment in turn."""
    draw, plan = random.Random(seed), TrainingFaults()
    for number in range(count):
        at: Any = {"rank": draw.randrange(workers), "step": 2 + number * (steps - 20) // count}
        where = KILLED[number % len(KILLED)]
        if where:
            plan = plan.kill(**at, where=where)
        else:
            plan = plan.kill_later(**at, seconds=draw.uniform(0.001, 0.02))
    return plan


def launch(
    model: str, precision: str, way: str, steps: int, sizes: Sequence[int], kills: int
) -> tuple[dict[int, str], int]:
    """The hashes of a training under `paceline run`, and its deaths according to the run's events.

    Each number of workers resumes the run of the one before.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-hashes-") as name:
        for number, size in enumerate(sizes, 1):
            until = steps * number // len(sizes)
            call = json.dumps([model, precision, way, steps, until, f"{name}/run"])
            plan = plan_kills(kills, steps, size, call)
            done = run_training(__file__, call, workers=size, faults=plan, timeout_s=1800)
            if done.exit_code or len(done.strikes) != kills:
                sys.exit(f"{len(done.strikes)} of {kills} kills struck:\n{done.output}")
        events = read_events(RunFolder(Path(name, "run")))
        deaths = sum(len(each["died"]) for each in events if each["kind"] == "generation")
        hashes = read_hashes(Path(name, "run"))
        return {step: found["all"] for step, found in hashes.items()}, deaths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="all", help="comma-separated names")
    parser.add_argument("--precision", default="all", help="fp32, bf16, fp16")
    parser.add_argument("--ways", default="all", help=", ".join(WAYS))
    parser.add_argument("--workers", default="2,3,4,8", help="besides 1")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--kills", type=int, default=0, help="instead: this many kills, of 3 workers"
    )
    parser.add_argument("--chain", help="instead: numbers of workers, each resuming the last")
    parser.add_argument("--quick", action="store_true", help="a short test that it runs")


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    steps = 10 if args.quick else args.steps
    sizes = [2] if args.quick else [int(size) for size in args.workers.split(",")]
    chain = [int(size) for size in args.chain.split(",")] if args.chain else [3] * bool(args.kills)
    sizes = chain[:1] or sizes
    ways, rows = read_names(args.ways, WAYS), []
    names = [name for name in MODELS if args.model == "all" or name.split()[0] in args.model]
    for model in names:
        for precision in read_names(args.precision, PRECISIONS):
            call = model, precision
            [expected] = run_processes(1, train, *call, "whole", steps, timeout_s=3600)
            different, deaths, count = [], [], 1
            for way in ways:
                for size in sizes:
                    if chain:
                        found, died = launch(*call, way, steps, chain, args.kills)
                        found = {step: found[step] for step in expected}
                        deaths.append(died)
                    else:
                        found = run_processes(size, train, *call, way, steps, timeout_s=3600)[0]
                    different += [f"{way}, {size}"] * (found != expected)
                    count += 1
            row = {"model": model, "precision": precision, "SHA-256": expected[steps][:16]}
            row |= {"trainings": count, "equal": count - len(different)}
            row |= {"deaths": ", ".join(map(str, deaths))} if args.kills else {}
            rows.append(row | ({"different": "; ".join(different)} if different else {}))
            print(*rows[-1].values(), flush=True)
    print_table(f"{steps} steps, {SHARDS} shards, workers 1, {chain or args.workers}", rows)
    return rows


if __name__ == "__main__":  # as a worker, see `launch`
    train(None, *json.loads(sys.argv[1]))
