"""The demo's data and model, and the same training with plain torch to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import DistributedSampler
from paceline.demo.options import (
    BATCH_ROWS,
    CLASSES,
    FEATURES,
    HELD_OUT_ROWS,
    HIDDEN,
    LEARNING_RATE,
    ROWS,
    Options,
)

NOISE = 0.1


def make_data(seed: int) -> TensorDataset:
    """Rows of random features; a plane divides the classes, with some rows on the wrong side."""
    return TensorDataset(*(part[:ROWS] for part in _rows(seed)))


def make_held_out_data(seed: int) -> TensorDataset:
    """More rows of the same kind, which are not trained on."""
    return TensorDataset(*(part[ROWS:] for part in _rows(seed)))


def _rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    direction = F.normalize(torch.randn(FEATURES, generator=generator), dim=0)
    x = torch.randn(ROWS + HELD_OUT_ROWS, FEATURES, generator=generator)
    noise = NOISE * torch.randn(ROWS + HELD_OUT_ROWS, generator=generator)
    return x, (x @ direction + noise > 0).long()


def make_model(seed: int) -> nn.Module:
    """Two layers, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def train_alone(options: Options) -> dict[str, Tensor]:
    """In one process, on whole batches in the same order, without a Run; the parameters."""
    data, model = make_data(options.seed), make_model(options.seed)
    optimizer = make_optimizer(model)
    order = DistributedSampler(data, 1, 0, seed=options.seed)
    for epoch in range(options.epochs):
        order.set_epoch(epoch)
        for x, y in DataLoader(data, BATCH_ROWS, sampler=order):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()
