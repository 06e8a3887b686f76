"""Gradient accumulation over sentences of different lengths, weighted by tokens: exact.

    paceline run --workers 2 examples/accumulation.py

The mean losses of a long and a short micro-batch must not have the same weight. So losses are
sums, every block passes its number of tokens, and Paceline divides by the number of tokens
of all micro-batches on all workers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline import DistributedDataParallel

VOCABULARY, PADDING = 50, -100
SENTENCES, LONGEST, MICRO_BATCH = 24, 12, 4


def sentences() -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, padded after the end of each sentence."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (SENTENCES, LONGEST + 1), generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (SENTENCES, 1), generator=generator)
    is_padding = torch.arange(LONGEST) >= lengths
    return tokens[:, :-1], tokens[:, 1:].masked_fill(is_padding, PADDING)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))


def sum_of_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x).flatten(0, 1)
    return F.cross_entropy(scores, y.flatten(), ignore_index=PADDING, reduction="sum")


def main() -> None:
    with paceline.init_process_group() as world:
        x, y = sentences()
        model = DistributedDataParallel(build())
        mine = torch.stack([x, y], dim=1)[world.rank :: world.size].split(MICRO_BATCH)
        for number, micro_batch in enumerate(mine):
            x_part, y_part = micro_batch.unbind(dim=1)
            is_last = number == len(mine) - 1
            tokens = int((y_part != PADDING).sum())
            with model.no_sync(enabled=not is_last), model.weighted(tokens):
                sum_of_losses(model, x_part, y_part).backward()

        whole = build()
        (sum_of_losses(whole, x, y) / (y != PADDING).sum()).backward()
        difference = max(
            (p.grad - q.grad).abs().max().item()
            for p, q in zip(model.parameters(), whole.parameters(), strict=True)
            if p.grad is not None and q.grad is not None
        )
        if world.is_main:
            print(f"{len(mine)} micro-batches a worker, world size {world.size}")
            print(f"difference to one process on all sentences: {difference:.0e}")


if __name__ == "__main__":
    main()
