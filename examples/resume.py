"""Resuming: stopped in the middle of an epoch on three workers, finished on two, same result.

    python examples/resume.py

A run keeps its checkpoints in its folder, and `for step in run` resumes from the newest good one.
The model has dropout to show that random numbers depend on the step, not on the worker.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

SAMPLES, SHARDS = 300, 4


def train(folder: str | None, stop_after: int | None) -> tuple[list[int], dict[str, Tensor]]:
    """Train until the end, or stop early; return the steps taken and the parameters."""
    with paceline.init_process_group(device_id=torch.device("cpu")):
        torch.manual_seed(0)
        x = torch.randn(SAMPLES, 6)
        dataset = TensorDataset(x, x[:, :3].argmax(dim=1))
        net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        run = paceline.Run(
            net, optimizer, dataset, global_batch=40, epochs=4, shards=SHARDS, folder=folder,
            options=paceline.RunOptions(checkpoint_every=5, progress="quiet"),
        )  # fmt: skip
        taken = []
        for step in run:
            with step:
                for x, y in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            taken.append(step.number)
            if step.number == stop_after:
                break
        return taken, net.state_dict()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, _ = paceline.launch(train, folder, 13, workers=3)[0]
        print(f"three workers: steps {first[0]} to {first[-1]}, then stopped")
        second, resumed = paceline.launch(train, folder, None, workers=2)[0]
        print(f"two workers: steps {second[0]} to {second[-1]}")
    whole, undisturbed = paceline.launch(train, None, None, workers=1)[0]
    gap = max((resumed[name] - undisturbed[name]).abs().max().item() for name in resumed)
    print(f"one worker without a stop: steps {whole[0]} to {whole[-1]}, difference {gap:.0e}")


if __name__ == "__main__":
    main()
