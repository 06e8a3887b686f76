"""CLIP: two towers and a temperature, with a loss over the whole batch.

    paceline run --workers 3 examples/clip.py

Both towers are one model with one optimizer. The loss reads the temperature, which gets its
gradient once, at any number of workers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

import paceline


class Towers(nn.Module):
    """One for images, one for texts."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1)


def main() -> None:
    paceline.seed_everything(0)
    images = torch.randn(96, 16, dtype=torch.float64)
    pairs = TensorDataset(images, images[:, :12] + 0.1 * torch.randn(96, 12, dtype=torch.float64))
    net = Towers().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    run = paceline.Run(net, optimizer, pairs, global_batch=24, epochs=5, seed=0, shards=6)

    def match(image: Tensor, text: Tensor) -> Tensor:
        """Each image has its text in the same row, and each text its image."""
        scores, rows = net.log_scale.exp() * image @ text.T, torch.arange(len(image))
        return (cross_entropy(scores, rows) + cross_entropy(scores.T, rows)) / 2

    for step in run:
        with step:
            step.joint(lambda batch: run.model(*batch), match)
    if run.world.is_main:
        total = sum(param.detach().abs().sum().item() for param in net.parameters())
        print(f"sum of all |weights| {total:.9f}, world size {run.world.size}")


if __name__ == "__main__":
    main()
