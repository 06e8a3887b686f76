"""A plain torch training loop with Paceline's DistributedDataParallel.

paceline run --workers 2 examples/ddp_plain.py
python examples/ddp_plain.py                    the same script on one worker
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import DistributedDataParallel, DistributedSampler


def main() -> None:
    with paceline.init_process_group() as world:
        torch.manual_seed(0)
        x = torch.randn(512, 8)
        dataset = TensorDataset(x, (x.sum(dim=1) > 0).long())
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

        model = DistributedDataParallel(net.to(world.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sampler = DistributedSampler(dataset, seed=0)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, batch_size=64 // world.size, sampler=sampler):
                loss = F.cross_entropy(model(x.to(world.device)), y.to(world.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if world.is_main:
                print(f"epoch {epoch}: loss {loss.item():.3f} on worker 0 of {world.size}")


if __name__ == "__main__":
    main()
