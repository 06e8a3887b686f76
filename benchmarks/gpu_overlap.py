"""Overlap on one GPU with an emulated network: the part of the sums that each engine hides.

Summing a bucket occupies a side stream for latency + bytes / bandwidth, with a kernel that does
nothing but wait. Both engines get it as the same communication hook in a world of one, so they
differ only in when buckets start and what happens around them. An engine exposes the time of a step
beyond the bare model's, and hides the rest of the time that the sums take. A real network also
takes memory bandwidth and processors from the model, which this one does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.models import GPT
from benchmarks.single_gpu import build, step
from benchmarks.spread import Spread, ratio, rotated, spread
from benchmarks.tables import print_table
from paceline import DistributedDataParallel, init_process_group

BANDWIDTHS_GB_S = [100.0, 50.0, 25.0, 12.5]
LATENCY_US = 20.0
CASES = {"batch 8": (8, True), "batch 8, untied embeddings": (8, False), "batch 32": (32, True)}
"""Samples, and whether the last layer's weight is that of the first. With 8 the host has hardly
time enough to launch all kernels, with 32 it has plenty."""


class PretendedNetwork:
    """A hook whose sums take a given time, one after the other on a separate stream."""

    def __init__(self, cycles_per_us: float) -> None:
        self._cycles_per_us = cycles_per_us
        self._stream: torch.cuda.Stream = torch.cuda.Stream()
        self.gb_s = BANDWIDTHS_GB_S[0]
        self.busy_us = 0.0
        """What all sums together took since this was set to 0."""
        self.messages = 0

    def sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """What the hook does."""
        buffer: Tensor = bucket.buffer()
        microseconds = LATENCY_US + buffer.numel() * buffer.element_size() / self.gb_s / 1e3
        self.busy_us += microseconds
        self.messages += 1
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(microseconds * self._cycles_per_us))
            future.set_result(buffer)
        return future


def calibrate() -> float:
    """Cycles of the waiting kernel per microsecond, on a warm GPU."""
    cycles = 20_000_000
    rates = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        stop.record()
        torch.cuda.synchronize()
        rates.append(cycles / (start.elapsed_time(stop) * 1e3))
    return spread(rates).median


CONTESTANTS: dict[str, Callable[[nn.Module], Any]] = {
    "paceline": DistributedDataParallel,
    "torch default": TorchDDP,
    "torch views, static": lambda m: TorchDDP(m, gradient_as_bucket_view=True, static_graph=True),
}
BARE = "bare model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--case", default="", help="only contestants whose name begins with this")


def main(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {}
    with init_process_group():
        network = PretendedNetwork(calibrate())
        for case, (batch, is_tied) in CASES.items():
            if not case.startswith(args.case):
                continue
            entries = enter(network, is_tied=is_tied)
            tokens = torch.randint(50257, (batch, 1025), device="cuda")
            for gb_s in BANDWIDTHS_GB_S:
                network.gb_s = gb_s
                title = f"GPT-2 124M, {case}, network of {gb_s:g} GB/s and {LATENCY_US:g} us"
                taken = measure(entries, network, tokens, args.rounds, args.steps)
                results[title] = rows_of(*taken)
                print_table(title, results[title])
    return results


Entries = dict[str, tuple[nn.Module, torch.optim.Optimizer]]


def enter(network: PretendedNetwork, *, is_tied: bool) -> Entries:
    entries: Entries = {}
    for name, wrap in {BARE: lambda m: m, **CONTESTANTS}.items():
        module = build()
        if not is_tied:
            assert isinstance(module, GPT)
            module.head.weight = nn.Parameter(module.head.weight.detach().clone())
        model = wrap(module)
        if name != BARE:
            # torch refuses a hook whose annotations are not its own; this one has none.
            model.register_comm_hook(None, lambda _state, bucket: network.sum(bucket))
        entries[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    return entries


def measure(
    entries: Entries, network: PretendedNetwork, tokens: Tensor, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, tuple[float, float]]]:
    """Milliseconds of a step by contestant and round; and the time and number of its sums."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    sums: dict[str, tuple[float, float]] = {}
    for number in range(rounds + 1):
        for name in rotated(list(entries), number):
            model, optimizer = entries[name]
            step(model, optimizer, tokens)
            torch.cuda.synchronize()
            network.busy_us, network.messages = 0.0, 0
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(steps):
                step(model, optimizer, tokens)
            stop.record()
            torch.cuda.synchronize()
            sums[name] = network.busy_us / 1e3 / steps, network.messages / steps
            if number:
                times[name].append(start.elapsed_time(stop) / steps)
    return times, sums


def rows_of(
    times: dict[str, list[float]], sums: dict[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    bare = times[BARE]
    others = [values for name, values in times.items() if name.startswith("torch")]
    best = min(others, key=lambda values: spread(values).median)
    rows = []
    for name, values in times.items():
        taken: Spread = spread(values)
        busy, messages = sums[name]
        exposed = spread([mine - alone for mine, alone in zip(values, bare, strict=True)]).median
        rows.append(
            {
                "contestant": name,
                "ms": round(taken.median, 3),
                "quartiles": f"{taken.low:.2f} to {taken.high:.2f}",
                "/ bare": round(ratio(values, bare).median, 3),
                "/ best torch": round(ratio(values, best).median, 3),
                "sums": round(messages, 1),
                "sums, ms": round(busy, 3),
                "exposed, ms": round(exposed, 3),
                "hidden": f"{100 * (1 - exposed / busy):.0f} %" if busy else "",
            }
        )
    return rows
