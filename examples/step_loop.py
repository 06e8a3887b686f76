"""The training loop of a `Run`, which divides the batch, saves checkpoints and resumes.

    paceline run --workers 2 examples/step_loop.py
    python examples/step_loop.py                    the same training on one worker

You keep the loop. `global_batch` alone sets the size of a step; the number of workers changes only
the training time. With `folder="runs/plane"` the run would keep its events and checkpoints there,
and resume from the newest checkpoint when started again.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def main() -> None:
    with paceline.init_process_group() as world:
        torch.manual_seed(0)
        x = torch.randn(512, 8)
        dataset = TensorDataset(x, (x.sum(dim=1) > 0).long())
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(world.device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

        run = paceline.Run(net, optimizer, dataset, global_batch=64, epochs=3, seed=0)
        for step in run:
            with step:
                for x, y in step.batches():
                    scores = run.model(x)
                    step.backward(F.cross_entropy(scores, y))
                    run.log("accuracy", (scores.argmax(dim=1) == y).float().mean(), weight=len(y))


if __name__ == "__main__":
    main()
