"""A GAN: two models that are trained in turns, each with its own optimizer.

    paceline run --workers 3 examples/gan.py

The generator learns to generate points on a circle. In every step the critic has two turns and the
generator one, all on the same global batch; the result does not depend on the number of workers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import paceline


def main() -> None:
    paceline.seed_everything(0)
    angles = torch.linspace(0, 6.28, 97, dtype=torch.float64)[:96]
    circle = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))
    first = nn.Linear(4, 32, bias=False)
    generator = nn.Sequential(first, nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    generator.double()
    critic.double()
    betas = (0.5, 0.9)
    models = {
        "generator": (generator, torch.optim.Adam(generator.parameters(), lr=2e-3, betas=betas)),
        "critic": (critic, torch.optim.Adam(critic.parameters(), lr=2e-3, betas=betas)),
    }
    run = paceline.Run(models, circle, global_batch=24, epochs=5, seed=0, shards=6)
    draw, judge = run.models["generator"], run.models["critic"]
    for step in run:
        with step:
            for _ in range(2):
                with step.turn("critic"):
                    for (real,) in step.batches():
                        drawn = draw(torch.randn(len(real), 4, dtype=real.dtype))
                        step.backward((softplus(-judge(real)) + softplus(judge(drawn))).mean())
            with step.turn("generator"):
                for (real,) in step.batches():
                    drawn = draw(torch.randn(len(real), 4, dtype=real.dtype))
                    step.backward(softplus(-judge(drawn)).mean())
    if run.world.is_main:
        params = [*generator.parameters(), *critic.parameters()]
        total = sum(param.detach().abs().sum().item() for param in params)
        print(f"sum of all |weights| {total:.9f}, world size {run.world.size}")


if __name__ == "__main__":
    main()
