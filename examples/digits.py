"""Digits with a small convolutional network, trained and evaluated on any number of workers.

    paceline run --workers 2 examples/digits.py

The digits are generated at random positions with noise, so nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

FONT = """
 ###    #    ###   ###     #  #####   ##  #####  ###   ###
#   #  ##   #   # #   #   ##  #      #        # #   # #   #
#  ##   #       #     #  # #  ####  #        #  #   # #   #
# # #   #      #    ##  #  #      # ####    #    ###   ####
##  #   #     #       # #####     # #   #  #    #   #     #
#   #   #    #    #   #    #  #   # #   #  #    #   #    #
 ###   ###  #####  ###     #   ###   ###   #     ###   ##
"""


def glyphs() -> Tensor:
    """Ten pictures of 7 by 5 pixels."""
    rows = [line.ljust(60) for line in FONT.strip("\n").splitlines()]
    points = torch.tensor([[float(point == "#") for point in row] for row in rows])
    by_digit: Tensor = points.unflatten(1, (10, 6)).transpose(0, 1)
    return by_digit[:, :, :5]


def digits(count: int, seed: int) -> TensorDataset:
    """Digits at random positions of a 10 by 8 picture, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    tops = torch.randint(4, (count,), generator=generator)
    lefts = torch.randint(4, (count,), generator=generator)
    pictures = 0.2 * torch.randn(count, 1, 10, 8, generator=generator)
    for picture, digit, top, left in zip(pictures, glyphs()[labels], tops, lefts, strict=True):
        picture[0, top : top + 7, left : left + 5] += digit
    return TensorDataset(pictures, labels)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(),
        nn.Conv2d(16, 32, (3, 1)), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def main() -> None:
    with paceline.init_process_group() as world:
        net = build().to(world.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        run = paceline.Run(net, optimizer, digits(2_000, seed=1), global_batch=50, epochs=3)

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            x, y = batch
            return {"accuracy": (run.model(x).argmax(dim=1) == y).float().mean()}

        for step in run:
            with step:
                for x, y in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            if step.ends_epoch:
                run.evaluate(score, digits(500, seed=2))


if __name__ == "__main__":
    main()
