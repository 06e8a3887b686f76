"""A GAN with an averaged generator and statistics, whose workers `test_models` kills."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline
from tests.faults import wait_for_replacements

parser = argparse.ArgumentParser()
parser.add_argument("--folder")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--break-after", type=int, default=0)
parser.add_argument("--kill-in-last-turn", type=int, default=0, help="worker 1, in this step; once")
parser.add_argument("--leave-last-turn", type=int, default=0, help="worker 1, in this step; once")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
first = nn.Linear(2, 8, bias=False)
generator = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
critic = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(generator.parameters(), lr=0.02)
critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=0.02)
run = paceline.Run(
    {
        "generator": (generator, optimizer),
        "critic": (critic, critic_optimizer),
        "average": paceline.EMA("generator", 0.9),
    },
    TensorDataset(rows),
    global_batch=6,
    epochs=args.epochs,
    shards=3,
    folder=args.folder,
    scheduler={"generator": StepLR(optimizer, 5, 0.9), "critic": StepLR(critic_optimizer, 1, 0.99)},
    options=paceline.RunOptions(progress="plain", clip_norm={"critic": 1.0}),
)
draw, judge = run.models["generator"], run.models["critic"]
for step in run:
    with step:
        for _ in range(2):
            with step.turn("critic"):
                for (real,) in step.batches():
                    drawn = draw(torch.randn(len(real), 2, dtype=real.dtype)).detach()
                    of_real, of_drawn = judge(real), judge(drawn)
                    run.log("gap", (of_real - of_drawn).mean().detach(), len(real))
                    step.backward((softplus(-of_real) + softplus(of_drawn)).mean())
        with step.turn("generator"):
            if step.number == args.leave_last_turn and run.world.rank == 1:
                args.leave_last_turn = 0
                raise paceline.errors.PeerError("as in a collective of the script")
            for (real,) in step.batches():
                if step.number == args.kill_in_last_turn and os.environ.get("RANK") == "1":
                    mark = Path(args.folder) / "killed"
                    if not mark.exists():
                        mark.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                drawn = draw(torch.randn(len(real), 2, dtype=real.dtype))
                step.backward(softplus(-judge(drawn)).mean())
    if step.number == args.break_after:
        run.save()
        break
    wait_for_replacements(run)
