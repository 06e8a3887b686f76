"""Several workers from a notebook cell, or from any Python program, without a launcher.

    python examples/notebook_launch.py

Each worker calls the function; the return values come back as a list, by rank.
"""

from __future__ import annotations

import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel


def train(steps: int) -> tuple[float, float]:
    """Fit a line to this worker's points; return the loss before and after."""
    with paceline.init_process_group() as world:
        x = torch.linspace(world.rank, world.rank + 1, 20).unsqueeze(1)
        y = 3 * x - 1
        model = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"worker {world.rank} has {tuple(x.shape)} points")
        return losses[0], losses[-1]


if __name__ == "__main__":
    for rank, (before, after) in enumerate(paceline.launch(train, 100, workers=2)):
        print(f"rank {rank}: loss {before:.2f} -> {after:.4f}")
