"""Cost of synchronising besides communication: hooks, copies and bookkeeping, per step.

Every contestant reduces over a Gloo group of one rank, so the time over the bare model is the
engine's own. Paceline does nothing in a world of one; here it is told that there are two ranks, and
does its full work. Contestants alternate in one process.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.tables import print_table
from paceline import DDPOptions, DistributedDataParallel, init_process_group
from paceline.ddp.trailer import CONTROL_WORDS


class Given(torch.autograd.Function):
    """A backward that costs almost nothing, so that only the hooks are measured."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.shapes = [param.shape for param in params]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(torch.ones(shape) for shape in ctx.shapes)


class PretendTwo:
    """A group of one rank that says it has two."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor]) -> Any:
        words = tensors[0][-CONTROL_WORDS:]
        words[0] += 1  # what the other rank's trailer would add: its weight, the same label and
        words[3:] *= 2  # the same fingerprint
        return self._group.allreduce(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any:
        for output in outputs[0]:
            output.copy_(inputs[0])  # the other rank has the same value
        return self._group.allreduce([torch.zeros(1)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class ManyParameters(nn.Module):
    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(numel) for _ in range(count))

    def forward(self) -> Tensor:
        total: Tensor = Given.apply(*self.all)
        return total


def contestants(count: int, numel: int) -> dict[str, nn.Module]:
    def build() -> nn.Module:
        return ManyParameters(count, numel)

    two = PretendTwo(dist.group.WORLD)
    tuned: dict[str, Any] = {"gradient_as_bucket_view": True}
    if "batched_grad_copy" in inspect.signature(TorchDDP).parameters:  # from torch 2.13 on
        tuned["batched_grad_copy"] = True
    return {
        "bare": build(),
        "paceline": DistributedDataParallel(
            build(), init_sync=False, process_group=two, options=DDPOptions(transport="c10d")
        ),
        "torch default": TorchDDP(build(), init_sync=False),
        "torch views": TorchDDP(build(), init_sync=False, gradient_as_bucket_view=True),
        "torch tuned": TorchDDP(build(), init_sync=False, **tuned),
        "torch tuned, static": TorchDDP(build(), init_sync=False, static_graph=True, **tuned),
        "torch unused flag": TorchDDP(build(), init_sync=False, find_unused_parameters=True),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)


def main(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    with init_process_group("gloo"):
        results = {}
        for count, numel in [(600, 32), (600, 1024), (60, 100_000)]:
            name = f"{count} parameters of {numel}"
            results[name] = measure(contestants(count, numel), args.rounds, args.steps)
            print_table(name, results[name])
    return results


def measure(modules: dict[str, nn.Module], rounds: int, steps: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for number in range(rounds + 1):
        for name, module in modules.items():
            best = float("inf")
            for _ in range(steps):
                start = time.perf_counter()
                module.zero_grad()
                module().backward()
                best = min(best, time.perf_counter() - start)
            if number:
                seconds[name].append(best)
    bare = seconds["bare"]
    reference = min(
        (name for name in modules if name.startswith("torch")),
        key=lambda name: statistics.median(seconds[name]),
    )
    over = {n: [t - b for t, b in zip(seconds[n], bare, strict=True)] for n in modules}
    return [
        {
            "contestant": name + (" (best torch)" if name == reference else ""),
            "step, us": round(statistics.median(seconds[name]) * 1e6, 1),
            "over bare, us": round(statistics.median(over[name]) * 1e6, 1),
            "/ best torch": round(
                statistics.median(over[name]) / statistics.median(over[reference]), 3
            ),
        }
        for name in modules
    ]
