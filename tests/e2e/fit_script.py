"""A training whose workers run out of memory again and again, as `test_fit` has planned.

Which of them do so in a step, how often and where is drawn from its number, so that all of them
know. After every step memory is plentiful again, as if the step after it were another training's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline
from tests.faults import wait_for_replacements

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--count", type=Path, help="has a file for every time that memory ran out")
parser.add_argument(
    "--kill",
    type=int,
    default=0,
    help="kill a worker in the first step from here on that is done again",
)
parser.add_argument("--update", default="whole")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) * 2).long() % 3
WHOLE = 4
RANK = int(os.environ.get("RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def trouble(step: int, rows: int) -> str:
    """Where in a step this worker runs out of memory with so many rows; "" if it does not."""
    drawn = random.Random(f"{step}/{rows}")
    where = drawn.choice(["forward", "backward", "first backward", ""])
    who = drawn.choice([*range(SIZE), None])
    return where if args.count is not None and rows > 1 and who in (RANK, None) else ""


def run_out() -> None:
    (args.count / f"{os.getpid()}-{random.SystemRandom().random()}").touch()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")


class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        run_out()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.planned = nn.Linear(6, 16), nn.Linear(16, 3), ""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        if self.planned == "forward":
            run_out()
        return self.above(Full.apply(x) if self.planned else x)  # type: ignore


net = Net().double()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
paceline.init_process_group()
run = paceline.Run(
    paceline.DistributedDataParallel(net, bucket_cap_mb=0.0001),
    optimizer,
    TensorDataset(X, Y),
    global_batch=4 * WHOLE,
    epochs=args.epochs,
    shards=4,
    folder=args.folder,
    scheduler=StepLR(optimizer, step_size=3, gamma=0.9),
    scaler=torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7),
    options=paceline.RunOptions(
        progress="plain", clip_norm=5.0, ema=0.9, update=args.update, fit="auto"
    ),
)


def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    net.planned = "forward" if trouble(run.step, len(batch[0])) else ""
    return {"loss": cross_entropy(run.model(batch[0]), batch[1])}


fit = run._parts.training.fit
for step in run:
    fit.load_state_dict({"size": fit.size, "since": 0, "trial": 0, "ceiling": 0, "failed": []})
    with step:
        for number, (x, y) in enumerate(step.batches()):
            is_cut = fit.size is not None
            if is_cut and 0 < args.kill <= step.number and RANK == SIZE - 1:
                args.kill, mark = 0, args.count / "killed"
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            where = trouble(step.number, min(fit.size or WHOLE, WHOLE))
            is_planned = where != "first backward" or number == 0
            net.planned = where if is_planned else ""
            step.backward(cross_entropy(run.model(x), y))
    net.planned = ""
    if step.is_applied:
        fit.size = fit.of_evaluation = None
    run.evaluate(score, batch=WHOLE)
    wait_for_replacements(run)
    fit.of_evaluation = None
print(f"{sum(p.sum().item() for p in net.parameters()):.12f}", file=sys.stderr)
