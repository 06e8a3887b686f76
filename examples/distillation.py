"""Distillation from a teacher that is an average of its student, as in DINO and Mean Teacher.

    paceline run --workers 3 examples/distillation.py

The teacher has no optimizer: the run moves it towards the student in every commit, identically on
all workers. A third, frozen model computes the features that both use.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import paceline


def main() -> None:
    paceline.seed_everything(0)
    x = torch.randn(96, 16, dtype=torch.float64)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    features = nn.Sequential(nn.Linear(16, 24), nn.Tanh()).double()
    student = nn.Sequential(
        nn.Linear(24, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2)
    ).double()
    models = {
        "student": (student, torch.optim.AdamW(student.parameters(), lr=3e-3)),
        "teacher": paceline.EMA("student", decay=0.9),
        "features": features,
    }
    run = paceline.Run(models, data, global_batch=24, epochs=5, seed=0, shards=6)

    def noisy(batch: Tensor) -> Tensor:
        seen: Tensor = run.models["features"](batch + 0.1 * torch.randn_like(batch))
        return seen

    for step in run:
        with step, step.turn("student"):
            for inputs, labels in step.batches():
                with torch.no_grad():
                    wanted = run.models["teacher"](noisy(inputs))
                found = run.models["student"](noisy(inputs))
                step.backward(cross_entropy(found, labels) + mse_loss(found, wanted))
    if run.world.is_main:
        params = [*student.parameters(), *run.models["teacher"].parameters()]
        total = sum(param.detach().abs().sum().item() for param in params)
        print(f"sum of all |weights| {total:.9f}, world size {run.world.size}")


if __name__ == "__main__":
    main()
