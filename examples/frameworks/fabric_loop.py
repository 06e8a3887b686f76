"""A script for Lightning Fabric, which starts its own workers, with two lines for Paceline.

python examples/frameworks/fabric_loop.py
"""

import paceline

paceline.enable()  # before libraries that use torch's classes are imported

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    strategy = sys.argv[1] if len(sys.argv) > 1 else "ddp"
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    fabric.print(f"engine: {type(model._forward_module).__module__.partition('.')[0]}")
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = F.cross_entropy(model(inputs), targets)
                fabric.backward(loss / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
        fabric.print(f"epoch {epoch}: loss {mean:.8f}")


if __name__ == "__main__":
    main()
