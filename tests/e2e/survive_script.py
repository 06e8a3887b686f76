"""A training with everything that has a state, whose workers `test_survive` kills."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from tests.faults import wait_for_replacements

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) * 2).long() % 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Average:
    """The mean of some weights over the steps: an object that belongs to the run."""

    def __init__(self) -> None:
        self.mean, self.steps = torch.zeros(16, 6, dtype=torch.float64), 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.steps = state["mean"].clone(), state["steps"]


parser = argparse.ArgumentParser()
parser.add_argument("--folder")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--update", default="whole")
parser.add_argument("--spans", action="store_true")
parser.add_argument("--record", type=int, default=0)
parser.add_argument("--noise", type=int, default=0)
parser.add_argument("--keep", type=int, default=3)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
first = nn.Linear(6, 16, bias=False)
net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
average = Average()
paceline.init_process_group()
run = paceline.Run(
    paceline.DistributedDataParallel(net, bucket_cap_mb=0.0001),
    optimizer,
    Stream() if args.stream else TensorDataset(X, Y),
    global_batch=12,
    epochs=args.epochs,
    shards=4,
    folder=args.folder,
    loader_workers=int(os.environ["WORLD_SIZE"] != "1"),
    scheduler=ReduceLROnPlateau(optimizer, mode="max", factor=0.9, patience=0),
    scaler=torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7),
    state={"average": average},
    options=paceline.RunOptions(
        progress="plain",
        checkpoint_every=5 if args.folder else 0,
        keep=args.keep,
        clip_norm=5.0,
        ema=0.9,
        best_metric="hits",
        better="higher",
        patience=100,
        update=args.update,
        timeline=args.spans,
        trace_step=args.record,
        noise_every=args.noise,
    ),
)


def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"hits": (run.model(batch[0]).argmax(1) == batch[1]).double().mean()}


for step in run:
    with step:
        for x, y in step.batches():
            loss = cross_entropy(run.model(x), y)
            run.log("twice", 2 * loss.detach(), len(x))
            step.backward(loss)
            time.sleep(0.003)
    average.steps += 1
    average.mean.lerp_(first.weight.detach(), 0.1)
    if step.ends_epoch:
        run.evaluate(score, ema=step.epoch % 2 == 0)
    elif step.number % 7 == 0:
        run.save()
    wait_for_replacements(run)
os.write(1, f"worker {os.environ['RANK']} is done\n".encode())
