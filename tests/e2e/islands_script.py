"""A training on islands whose workers kill themselves as `test_islands_launched` wants."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--delay", type=int, default=0)
parser.add_argument("--fragments", type=int, default=1)
parser.add_argument("--die-in-update", default="{}", help="by island and rank, a step")
parser.add_argument("--all-die-at", type=int, default=0, help="a step of island 1")
parser.add_argument("--raise-at", type=int, default=0, help="a step of rank 1 of island 1")
parser.add_argument("--late", action="store_true", help="it comes back when the other has ended")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
island = int(os.environ["PACELINE_ISLAND"].partition("/")[0])
while args.late and (args.out / "island 1 died").exists() and island == 1:
    if (args.out / "result.0").exists():
        break
    time.sleep(0.01)
islands = paceline.Islands(every=args.every, delay=args.delay, fragments=args.fragments)
run = paceline.Run(
    net,
    optimizer,
    TensorDataset(X, (X.sum(1) > 0).long()),
    global_batch=16,
    epochs=args.epochs,
    shards=2,
    folder=args.out / "run" if args.raise_at else None,
    options=paceline.RunOptions(islands=islands, progress="quiet"),
)
deaths: dict[str, int] = json.loads(args.die_in_update)
back = args.out / "island 1 is back"
dead = args.out / "island 1 died"


def die_once(name: str) -> None:
    """End without a word, the first time."""
    try:
        (args.out / name).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def after_update(*_: Any) -> None:
    """The optimizer has stepped, and a round may come."""
    who = f"{island}.{run.world.rank}"
    if deaths.get(who) == run.step + 1:
        die_once(f"{who} died")


optimizer.register_step_post_hook(after_update)
for step in run:
    with step:
        for x, y in step.batches():
            step.backward(cross_entropy(run.model(x), y))
        if (island, run.world.rank, step.number) == (1, 1, args.raise_at):
            raise KeyError("missing")
    if step.number == 1:
        (args.out / f"{island} trains").touch()
    if island == 1 and step.number == args.all_die_at:
        dead.touch()
        die_once(f"all died, {run.world.rank}")
    if island == 1 and step.number > args.all_die_at and dead.exists():
        back.touch()
    if island == 0 and dead.exists() and not back.exists() and not args.late:
        time.sleep(0.1)  # steps are left when the other one has started again
if run.membership.leads:
    weights = [value.tolist() for value in net.state_dict().values()]
    (args.out / f"result.{island}").write_text(json.dumps([run.step, weights]))
