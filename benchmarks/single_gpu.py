"""Cost of wrapping in time and memory on one GPU at world size 1: ours against torch's.

GPT-2 (124M parameters) in bfloat16 autocast, batch 8 x 1024, AdamW fused; contestants alternate.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.models import GPT
from benchmarks.tables import print_table
from paceline import DistributedDataParallel, init_process_group

CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare model": lambda m: m,
    "paceline": DistributedDataParallel,
    "torch default": TorchDDP,
    "torch views": lambda m: TorchDDP(m, gradient_as_bucket_view=True, static_graph=True),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT(50304, 768, 12, 12, 1024).cuda()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)


def main(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    with init_process_group():
        memory = {name: measure_memory(wrap) for name, wrap in CONTESTANTS.items()}
        times = measure_time(args.rounds, args.steps)
    bare_ms, bare_mb = times["bare model"], memory["bare model"]
    rows = [
        {
            "contestant": name,
            "ms": round(statistics.median(times[name]), 3),
            "min": round(min(times[name]), 3),
            "/ bare": round(
                statistics.median(t / b for t, b in zip(times[name], bare_ms, strict=True)), 4
            ),
            "peak MiB": memory[name],
            "over bare MiB": memory[name] - bare_mb,
        }
        for name in CONTESTANTS
    ]
    print_table("GPT-2 124M, batch 8 x 1024, world size 1", rows)
    return {"gpt2-124M": rows}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()


def measure_memory(wrap: Callable[[nn.Module], nn.Module]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = wrap(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(50257, (8, 1025), device="cuda")
    for _ in range(4):
        step(model, optimizer, tokens)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() // 2**20
    del model, optimizer
    return peak


def measure_time(rounds: int, steps: int) -> dict[str, list[float]]:
    entries = {}
    for name, wrap in CONTESTANTS.items():
        model = wrap(build())
        entries[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    tokens = torch.randint(50257, (8, 1025), device="cuda")
    times: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, (model, optimizer) in entries.items():
            start, stop = _timer(), _timer()
            torch.cuda.synchronize()
            start.record()
            for _ in range(steps):
                step(model, optimizer, tokens)
            stop.record()
            torch.cuda.synchronize()
            if number:
                times[name].append(start.elapsed_time(stop) / steps)
    return times


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
