"""Exact evaluation: every sample counts once, also if samples do not divide evenly.

    paceline run --workers 3 examples/evaluation.py

torch's sampler repeats samples until all workers have the same number, which falsifies the
metric. Ours does that only for training; see docs/sampler.md.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedSampler

SAMPLES = 101


def main() -> None:
    with paceline.init_process_group() as world:
        torch.manual_seed(0)
        x = torch.randn(SAMPLES, 8)
        dataset = TensorDataset(x, (x.sum(dim=1) > 0).long())
        net = nn.Linear(8, 2)

        mine = DistributedSampler(dataset, shuffle=False)
        counts = torch.zeros(2, dtype=torch.long)
        with torch.no_grad():
            for x, y in DataLoader(dataset, batch_size=16, sampler=mine):
                counts += torch.tensor([(net(x).argmax(dim=1) == y).sum(), len(y)])
        # Workers may have different numbers of batches: sum after the loop, then divide once.
        dist.all_reduce(counts)
        if world.is_main:
            hits, seen = counts.tolist()
            print(f"{hits} of {seen} right: accuracy {hits / seen:.4f}, world size {world.size}")


if __name__ == "__main__":
    main()
