"""Time until the first step is finished: creating the group, wrapping, one step.

In fresh processes each time, with alternating contestants; imports and building the model do not
count. Each contestant creates the group in its usual way, over Gloo on loopback.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contestants import FLOOR, enter, load, present, wrap
from benchmarks.models import MODELS
from benchmarks.spread import ratio, rotated, slowest, spread
from benchmarks.tables import print_table, read_names
from paceline import World, init_process_group
from paceline import group as comm
from paceline.testing import run_processes

PARTS = ["group", "wrap", "first step"]


def measure(world: World, name: str, contestant: str) -> Any:
    """Seconds of each part on this rank."""
    port = torch.tensor([_free_port()])
    comm.broadcast(world.group, port, 0, "Agreeing on a port")
    enter(world, int(port.item()))
    model = MODELS[name]
    batch = model.batch(torch.Generator().manual_seed(world.rank))
    load(contestant)
    torch.manual_seed(0)
    module = model.build()
    model.loss(module, batch).backward()  # imports what a first backward imports, for all
    module.zero_grad()

    def loss(module: nn.Module) -> Tensor:
        return model.loss(module, batch)

    world.barrier()
    dist.destroy_process_group()
    start = time.perf_counter()
    if contestant.startswith("paceline"):
        init_process_group()
    elif contestant not in (
        FLOOR,
        "Accelerate",
        "Lightning Fabric",
    ):  # these create the group themselves
        dist.init_process_group("gloo")
    has_group = time.perf_counter()
    trainer = wrap(contestant, module)
    is_wrapped = time.perf_counter()
    trainer.step(loss)
    ended = time.perf_counter()
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # the parent process expects one
    return [has_group - start, is_wrapped - has_group, ended - is_wrapped]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="mlp-8.4M", help="one name")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round, four contestants")


def main(args: argparse.Namespace) -> dict[str, Any]:
    names, absent = present()
    for line in absent:
        print(line)
    if args.quick:
        names = names[:4]
    (model,) = read_names(args.model, MODELS)
    os.environ["OMP_NUM_THREADS"] = "1"
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(1 if args.quick else args.rounds):
        for name in rotated(names, number):
            ranks = run_processes(args.ranks, measure, model, name, timeout_s=120)
            seconds[name].append(slowest(ranks))
    title = f"{model}, {args.ranks} ranks"
    rows = rows_of(seconds)
    print_table(title, rows)
    return {title: rows}


def rows_of(seconds: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """One row per contestant: the parts and their sum, in milliseconds."""
    totals = {name: [sum(parts) for parts in rounds] for name, rounds in seconds.items()}
    rows = []
    for name, rounds in seconds.items():
        total = spread(totals[name])
        row: dict[str, Any] = {"contestant": name}
        for part, times in zip(PARTS, zip(*rounds, strict=True), strict=True):
            row[f"{part}, ms"] = round(spread(times).median * 1e3, 1)
        row["in all, ms"] = round(total.median * 1e3, 1)
        row["quartiles"] = f"{total.low * 1e3:.0f} to {total.high * 1e3:.0f}"
        row["/ torch default"] = round(ratio(totals[name], totals["torch default"]).median, 3)
        rows.append(row)
    return rows
