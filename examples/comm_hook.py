"""Communication hooks: your own way of reducing a bucket, or one of torch's.

    paceline run --workers 2 examples/comm_hook.py

A hook gets this worker's gradients and returns a future with the averaged gradients. `GradBucket`
has the methods of torch's class of that name, so hooks written for torch work here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
from paceline import DistributedDataParallel
from paceline.ddp.hooks import GradBucket, Hook


class Traffic:
    """The number of bytes sent so far."""

    def __init__(self) -> None:
        self.bytes = 0


def counting_hook(traffic: Traffic, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average as usual, and count bytes."""
    traffic.bytes += bucket.buffer().nbytes
    averaged = bucket.buffer() / dist.get_world_size()
    work = dist.all_reduce(averaged, async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


def gradient(hook: Hook, state: object) -> Tensor:
    """The gradient of one small model, averaged by the hook."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 32))
    model.register_comm_hook(state, hook)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(16, 64)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    with paceline.init_process_group() as world:
        traffic = Traffic()
        exact = gradient(counting_hook, traffic)
        rounded = gradient(default_hooks.bf16_compress_hook, None)
        if world.is_main:
            print(f"{traffic.bytes:,} bytes from each worker, {world.size} in all")
            print(f"bfloat16 halves that; difference {(exact - rounded).abs().max():.0e}")


if __name__ == "__main__":
    main()
