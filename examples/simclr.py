"""SimCLR: a contrastive loss over the whole batch.

    paceline run --workers 3 examples/simclr.py

Every worker encodes its part of the batch, and the loss uses all of it, so the result does not
depend on the number of workers. A loss per worker would use a third of the negatives only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

import paceline


def contrastive_loss(one: Tensor, other: Tensor) -> Tensor:
    """Each row of `one` has its pair in the same row of `other`, and no other row is its pair."""
    return cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def main() -> None:
    paceline.seed_everything(0)
    images = TensorDataset(torch.randn(96, 16, dtype=torch.float64))
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    run = paceline.Run(net, optimizer, images, global_batch=24, epochs=5, seed=0, shards=6)

    def encode(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        views = [batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2)]
        one, other = (normalize(run.model(view), dim=1) for view in views)
        return one, other

    for step in run:
        with step:
            step.joint(encode, contrastive_loss)
    if run.world.is_main:
        total = sum(param.detach().abs().sum().item() for param in net.parameters())
        print(f"sum of all |weights| {total:.9f}, world size {run.world.size}")


if __name__ == "__main__":
    main()
