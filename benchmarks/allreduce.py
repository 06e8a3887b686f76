"""Time to sum one bucket, from 4 KiB to 64 MiB: shared memory against Gloo.

Both alternate in the same processes. A time is that of one sum among many in a row, on the slowest
rank; the speed is the bucket's bytes divided by it. In a real step gradients are computed in
between, which hides a part of each sum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contestants import has_transports
from benchmarks.spread import ratio, rotated, slowest, spread
from benchmarks.tables import print_table
from paceline import World
from paceline import group as comm
from paceline.group import Membership
from paceline.testing import run_processes
from paceline.transport import TransportChoice, place
from paceline.transport.interface import Flat

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
"""Bytes of a bucket of float32."""

Sum = Callable[[], None]


def measure(world: World, sizes: list[int], rounds: int, block_ms: float) -> Any:
    """Seconds of one sum on this rank, by size, transport and round."""
    torch.set_num_threads(1)
    seconds: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        ways = _ways(world, size)
        counts = {}
        for name, run in ways.items():
            run()
            alone = torch.tensor([_time(world, run, 3)], dtype=torch.float64)
            comm.all_reduce(world.group, alone, "Agreeing on a count")
            counts[name] = max(2, min(500, int(block_ms / 1e3 * world.size / alone.item())))
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in rotated(list(ways), number):
                times[name].append(_time(world, ways[name], counts[name]))
        seconds[str(size)] = times
    return seconds


def _time(world: World, run: Sum, count: int) -> float:
    world.barrier()
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def _ways(world: World, size: int) -> dict[str, Sum]:
    numel = size // 4
    group = world.group
    plain = torch.zeros(numel)
    ways: dict[str, Sum] = {"Gloo": lambda: comm.all_reduce(group, plain, "A sum")}
    if has_transports():
        cpu = torch.device("cpu")
        transport = TransportChoice(Membership.of(group), [cpu], "auto").get()
        plan = Flat(numel, torch.float32, cpu)
        buckets = place(transport, [plan], "Making room")
        (home,) = buckets.homes
        if home is not None:
            home.zero_()
            bucket = home
            ways["shared memory"] = lambda: buckets.start(0, bucket, 1.0, "A sum").wait()
    return ways


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-ms", type=float, default=60, help="approximate time of a turn")
    parser.add_argument("--quick", action="store_true", help="2 rounds, up to 1 MiB")


def main(args: argparse.Namespace) -> dict[str, Any]:
    if not has_transports():
        print("shared memory: left out, as this version does not have it")
    sizes = [size for size in SIZES if size <= 1 << 20] if args.quick else SIZES
    rounds, block_ms = (2, 10.0) if args.quick else (args.rounds, args.block_ms)
    ranks = run_processes(args.ranks, measure, sizes, rounds, block_ms, timeout_s=600)
    title = f"the sum of one bucket, {args.ranks} ranks"
    rows = rows_of(ranks, sizes)
    print_table(title, rows)
    return {title: rows}


def rows_of(
    ranks: list[dict[str, dict[str, list[float]]]], sizes: list[int]
) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        times = {
            name: slowest([rank[str(size)][name] for rank in ranks]) for name in ranks[0][str(size)]
        }
        row: dict[str, Any] = {"bucket": _size(size)}
        for name, values in times.items():
            time_s = spread(values)
            row[f"{name}, us"] = round(time_s.median * 1e6, 1)
            row[f"{name}, quartiles"] = f"{time_s.low * 1e6:.0f} to {time_s.high * 1e6:.0f}"
            row[f"{name}, GB/s"] = round(size / time_s.median / 1e9, 2)
        if len(times) > 1:
            of_gloo = ratio(times["shared memory"], times["Gloo"])
            row["shared memory / Gloo"] = round(of_gloo.median, 3)
        rows.append(row)
    return rows


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
