"""Step time over NCCL with several ranks on one GPU: ours and torch's, 32 bits, 16 bits, sharded.

Each rank presents itself as a separate host, so NCCL communicates over sockets on loopback: a slow
network, where what an engine sends, and when, dominates a step. A GPT of 34 million parameters in
bfloat16 autocast, AdamW fused; contestants alternate in the same processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.contestants import FLOOR
from benchmarks.models import GPT
from benchmarks.single_gpu import step
from benchmarks.spread import rotated, rows_of, slowest
from benchmarks.tables import print_table
from paceline import DDPOptions, DistributedDataParallel, World, shard_update
from paceline.testing import run_processes

NCCL = "cpu:gloo,cuda:nccl"
BATCH, LENGTH, VOCABULARY = 8, 256, 30000


def _compressed(module: nn.Module) -> nn.Module:
    model = TorchDDP(module, gradient_as_bucket_view=True)
    model.register_comm_hook(None, bf16_compress_hook)
    return model


CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    FLOOR: lambda module: module,
    "torch": TorchDDP,
    "torch views, static": lambda m: TorchDDP(m, gradient_as_bucket_view=True, static_graph=True),
    "paceline": DistributedDataParallel,
    "16 bits, torch": _compressed,
    "16 bits, paceline": lambda m: DistributedDataParallel(
        m, options=DDPOptions(compression="bf16")
    ),
    "paceline, sharded": DistributedDataParallel,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)


def main(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for size in map(int, args.ranks.split(",")):
        how = (args.rounds, args.steps)
        ranks = run_processes(size, measure, *how, backend=NCCL, timeout_s=280)
        seconds = {name: slowest([rank[0][name] for rank in ranks]) for name in CONTESTANTS}
        title = f"GPT of 34M parameters, {size} ranks on one GPU, NCCL over sockets"
        rows = rows_of(seconds, floors=[FLOOR], rival="torch")
        for row, name in zip(rows, CONTESTANTS, strict=True):
            row["optimizer's state, MiB"] = ranks[0][1][name] >> 20
        results[title] = rows
        print_table(title, rows)
    return results


def measure(world: World, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of a step on this rank, by contestant and round; and bytes of optimizer state."""
    torch.set_float32_matmul_precision("high")
    entries = {}
    for name, wrap in CONTESTANTS.items():
        torch.manual_seed(0)
        model = wrap(GPT(VOCABULARY, 512, 6, 8, LENGTH).cuda())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if name.endswith("sharded"):
            shard_update(model, optimizer)
        entries[name] = model, optimizer
    generator = torch.Generator(device="cuda").manual_seed(world.rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device="cuda", generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name in rotated(list(entries), number):
            model, optimizer = entries[name]
            for _ in range(1 if number else 3):
                step(model, optimizer, tokens)
            torch.cuda.synchronize()
            torch.distributed.barrier()
            begin_s = time.perf_counter()
            for _ in range(steps):
                step(model, optimizer, tokens)
            torch.cuda.synchronize()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - begin_s) / steps)
    state = {name: count_state(optimizer) for name, (_, optimizer) in entries.items()}
    return seconds, state


def count_state(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
