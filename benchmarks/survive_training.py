"""The training of `benchmarks survive`: with a `Run`, or with plain torch and its own checkpoints.

The second is what a careful user of torchrun writes: the whole state is saved to a file every few
steps, and every start continues from it. Both compute the same steps.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH, FEATURES = 2400, 120, 32
FINISHED = "finished"
"""What the files begin with in which each process of the plain training notes its steps."""


def make_dataset() -> TensorDataset:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 2))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


class Reader(nn.Module):
    """A transformer of 13 million parameters that reads rows of numbers, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.first, self.last = nn.Linear(1, 512), nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            answer: torch.Tensor = self.last(self.layers(self.first(x[:, :, None])).mean(1))
        return answer.float()


def make_reader() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Reader().cuda()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def train_with_run(args: argparse.Namespace) -> None:
    import paceline

    net, optimizer = make_reader() if args.large else make_model()
    dataset, more, options = make_dataset(), dict[str, Any](), dict[str, Any]()
    if args.everything:
        net.double()  # so that a difference shows
        dataset = TensorDataset(dataset.tensors[0].double(), dataset.tensors[1])
        more = {"folder": args.everything, "loader_workers": 1, "trackers": ["csv"]}
        options = {"timeline": True, "trace_step": 50, "noise_every": 10, "ema": 0.99}
    run = paceline.Run(
        net,
        optimizer,
        dataset,
        global_batch=BATCH,
        epochs=args.epochs,
        shards=12,  # divides evenly among 2, 3 and 4 workers
        options=paceline.RunOptions(progress="quiet", merge_shards=not options, **options),
        **more,
    )
    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(cross_entropy(run.model(x), y))
            time.sleep(args.pause)


def train_plainly(args: argparse.Namespace) -> None:
    """DistributedDataParallel, a sampler, and a checkpoint every `args.every` steps."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    saved, notes = args.folder / "state.pt", args.folder / f"{FINISHED}.{rank}.{os.getpid()}"
    net, optimizer = make_model()
    done = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    model = nn.parallel.DistributedDataParallel(net)
    dataset = make_dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, size, rank, seed=0)
    step, per_epoch = 0, SAMPLES // BATCH
    with open(notes, "w", buffering=1) as file:
        for epoch in range(args.epochs):
            if step + per_epoch <= done:
                step += per_epoch
                continue
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, BATCH // size, sampler=sampler):
                step += 1
                if step <= done:
                    continue
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                time.sleep(args.pause)
                optimizer.step()
                file.write(f"{step} {time.monotonic()}\n")
                if rank == 0 and step % args.every == 0:
                    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "step": step}, saved.with_suffix(".new"))
                    os.replace(saved.with_suffix(".new"), saved)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds per step")
    parser.add_argument("--large", action="store_true", help="a larger model, on a GPU")
    parser.add_argument("--everything", metavar="FOLDER", help="in float64, with all options")
    parser.add_argument("--folder", type=Path, help="train with plain torch, and save here")
    parser.add_argument("--every", type=int, default=1, help="steps between two saves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.folder is None:
        train_with_run(args)
    else:
        train_plainly(args)


if __name__ == "__main__":
    main()
