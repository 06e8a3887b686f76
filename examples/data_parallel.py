"""DataParallel: one process, no launcher; here two replicas on two parts of the CPU.

    python examples/data_parallel.py

The loop is plain torch. The second loop computes the loss on the replicas, so that outputs are
never gathered on one device. Both loops train to the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import DataParallel

ROWS, FEATURES, CLASSES = 101, 10, 3
DEVICES = ["cpu:0", "cpu:1"]  # or [0, 1] for two GPUs


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def main() -> None:
    x, y = data()
    gathered = DataParallel(build(), device_ids=DEVICES)
    optimizer = torch.optim.SGD(gathered.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        loss = F.cross_entropy(gathered(x), y)
        loss.backward()
        optimizer.step()

    on_replicas = DataParallel(build(), device_ids=DEVICES)
    optimizer = torch.optim.SGD(on_replicas.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        loss = on_replicas.backward(F.cross_entropy, x, y)
        optimizer.step()

    right = (on_replicas(x).argmax(1) == y).sum()
    pairs = zip(gathered.parameters(), on_replicas.parameters(), strict=True)
    gap = max((a - b).abs().max().item() for a, b in pairs)
    print(f"loss {loss:.3f}, {right} of {ROWS} right")
    print(f"difference between the two loops' weights: {gap:.0e}")

    bare = build()
    bare.load_state_dict(on_replicas.state_dict())
    print(f"saved under the wrapper, loaded into the bare model: {', '.join(bare.state_dict())}")


if __name__ == "__main__":
    main()
