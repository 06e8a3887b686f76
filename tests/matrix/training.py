"""The training of every case: `training.py OPTIONS FOLDER`, the options as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.data import Files
from paceline.ddp import NaiveEngine, bare
from tests.faults import wait_for_replacements
from tests.faults.memory import Full
from tests.matrix.factors import MIDDLE

ROWS, BATCH, EPOCHS = 44, 12, 4
X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) * 2).long() % 3
OPTIONS: dict[str, str] = json.loads(sys.argv[1])
IS_AUDITED = OPTIONS["engine"] == "audited"
FOLDER = Path(sys.argv[2])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Lines:
    """A format of files: each has the rows from its number on."""

    def count(self, file: int) -> int:
        return 11

    def read(self, file: int, start: int) -> Iterator[Any]:
        first = 11 * file
        yield from zip(X[first + start : first + 11], Y[first + start : first + 11], strict=True)


class OwnLoader:
    """Each worker's rows of the same global batches, at any number of workers."""

    def __init__(self, world: Any) -> None:
        self.world, self.epoch = world, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch))
        for start in range(0, ROWS, BATCH):
            mine = order[start : start + BATCH][self.world.rank :: self.world.size]
            yield X[mine], Y[mine]


class ShortLinear(nn.Linear):
    """Parameters and gradients in float64, so that no order of a sum is seen; autocast computes."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return linear(x.float(), weight, bias).double()


class Counter(nn.Module):
    """A buffer that changes in some steps only, and enters the output."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = x * (1 + self.seen * 1e-3)
        if self.training:
            self.seen += (x.detach()[0, 0] > 0.5).double()
        return output


def spend(out: Tensor, step: int, rank: int) -> Tensor:
    """Run out of memory on the first worker: in step 2 with 3 rows, and in the middle with 2.

    Whoever comes after a death is the first then, so all trainings have the same sizes.
    """
    limit = {2: 2, MIDDLE: 1}.get(step, ROWS)
    if OPTIONS["memory"] == "plentiful" or rank or len(out) <= limit:
        return out
    if step == 2:
        raise torch.OutOfMemoryError("planned")
    return Full.apply(out)  # type: ignore[no-any-return, no-untyped-call]


class Broken:
    """A sink that always fails."""

    def step(self, *_: Any) -> None:
        raise OSError("this sink is broken")

    start = epoch = evaluation = message = checkpoint = stop = step


def make_model() -> nn.Module:
    torch.manual_seed(0)
    kind: Any = nn.Linear if OPTIONS["precision"] == "fp32" else ShortLinear
    middle: list[nn.Module] = [nn.Tanh()]
    if OPTIONS["model"] == "norm":
        middle = [nn.BatchNorm1d(16), nn.Dropout(0.2)]
    elif OPTIONS["model"] == "counter":
        middle = [Counter(), nn.Tanh()]
    # A bias before a normalisation has no gradient but rounding, of which AdamW would make a step.
    first = kind(6, 16)
    if OPTIONS["model"] == "norm":
        nn.init.zeros_(first.bias).requires_grad_(False)
    return nn.Sequential(first, *middle, kind(16, 16), nn.Tanh(), kind(16, 3)).double()


def make_run() -> paceline.Run:
    net: Any = make_model()
    if OPTIONS["groups"] == "added":
        net[-3].requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad or OPTIONS["groups"] == "all"]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.02)
    if OPTIONS["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    scheduler: Any = {
        "no": lambda: None,
        "step": lambda: StepLR(optimizer, 3, gamma=0.9),
        "plateau": lambda: ReduceLROnPlateau(optimizer, factor=0.9, patience=0),
    }[OPTIONS["scheduler"]]()
    is_rated = OPTIONS["scheduler"] == "plateau" or OPTIONS["stopping"] == "early"
    has_folder = OPTIONS["checkpoints"] != "no"
    dataset = {
        "map": TensorDataset(X, Y),
        "stream": Stream(),
        "files": Files(range(4), Lines(), window=8, lanes=2),
        "own loader": None,
    }[OPTIONS["data"]]
    arguments: dict[str, Any] = {
        "shards": 2 if OPTIONS["shards"] == "two" else 4,
        "loader_workers": int(OPTIONS["loading"] == "in a process"),
        "global_batch": BATCH,
    }
    if dataset is None:
        arguments = {"loader": OwnLoader, "global_batch": BATCH}
    if OPTIONS["engine"] == "naive":
        arguments["engine"] = NaiveEngine
    elif not IS_AUDITED:
        paceline.init_process_group()
        every = int(OPTIONS["engine"] == "checked")
        options = paceline.DDPOptions(check_every=every)
        net = paceline.DistributedDataParallel(net, bucket_cap_mb=0.0001, options=options)
    trackers: list[Any] = ["csv"] if OPTIONS["tracker"] == "csv" else []
    return paceline.Run(
        net,
        optimizer,
        dataset,
        epochs=EPOCHS,
        folder=FOLDER / "run" if has_folder else None,
        scheduler=scheduler,
        trackers=trackers,
        sinks=[Broken()] if OPTIONS["tracker"] == "broken" else [],
        options=paceline.RunOptions(
            progress="auto",
            checkpoint_every={"no": 0, "epochs": None, "steps": 3}[OPTIONS["checkpoints"]],
            clip_norm=0.5 if OPTIONS["clipping"] == "yes" else None,
            ema=0.9 if OPTIONS["ema"] == "yes" else None,
            precision=OPTIONS["precision"],  # type: ignore[arg-type]
            merge_shards=OPTIONS["shards"] == "merged",
            best_metric="flat" if is_rated else None,
            better="lower" if is_rated else None,
            patience=2 if OPTIONS["stopping"] == "early" else None,
            update=OPTIONS["update"],  # type: ignore[arg-type]
            timeline=OPTIONS["timeline"] == "timeline=",
            trace_step=7 if OPTIONS["trace"] == "trace_step=" else 0,
            noise_every=3 if OPTIONS["noise"] == "yes" else 0,
            fit="auto" if OPTIONS["memory"] == "short" else None,
            same_bits=IS_AUDITED,
            audit=float(IS_AUDITED),
            islands=paceline.Islands(every=3, outer="sgd") if OPTIONS["islands"] == "one" else None,
        ),
        **arguments,
    )


def add_group(run: paceline.Run) -> None:
    """Train the middle layer, too."""
    layer: Any = bare(run.model)[-3]
    layer.requires_grad_(True)
    run._parts.config.optimizer.add_param_group({"params": layer.parameters()})


def contrast(out: Tensor, y: Tensor) -> Tensor:
    """Is not a mean over samples: every one is compared with the mean of all."""
    return cross_entropy(out - out.mean(0), y)


def train() -> None:
    torch.set_num_threads(1)
    run = make_run()

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        hits = (run.model(batch[0]).argmax(1) == batch[1]).double().mean()
        return {"accuracy": hits, "flat": 1.0}

    def predict(x: Tensor) -> Tensor:
        return spend(run.model(x), run.step + 1, run._parts.place.membership.rank)

    for step in run:
        with step:
            if OPTIONS["loss"] == "whole batch":
                step.joint(lambda batch: (predict(batch[0]), batch[1]), contrast)
                run.log("flat", 1.0)
            else:
                for x, y in step.batches():
                    loss = cross_entropy(predict(x), y)
                    run.log("flat", 1.0, len(x))
                    step.backward(loss)
        if step.number == MIDDLE - 1 and OPTIONS["groups"] == "added":
            add_group(run)
        if step.ends_epoch and OPTIONS["evaluation"] == "yes":
            run.evaluate(score, TensorDataset(X, Y))
            if OPTIONS["ema"] == "yes":
                run.evaluate(score, TensorDataset(X, Y), ema=True)
        elif step.number == 10 and OPTIONS["checkpoints"] == "steps":
            run.save()
        wait_for_replacements(run)


if __name__ == "__main__":
    train()
