"""A `Run` on Ray Train: two workers, checkpoints in Ray's storage, a restart when one dies.

python examples/frameworks/ray_train.py
"""

import os
import sys

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.ray import RayRun


def train(config: dict) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    dataset = TensorDataset(x, (x.sum(dim=1) > 0).long())
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    run = RayRun(net, optimizer, dataset, global_batch=64, epochs=3, seed=0)
    for step in run:
        with step:
            for inputs, targets in step.batches():
                step.backward(F.cross_entropy(run.model(inputs), targets))


def main() -> None:
    storage = sys.argv[1] if len(sys.argv) > 1 else os.path.abspath("runs")
    # A cluster on this machine only; ray.init() without arguments joins an existing one.
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="plane", storage_path=storage, failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['epoch/loss']:.6f} after step {result.metrics['step']}")
    print(f"saved in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
