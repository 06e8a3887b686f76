"""Memory of training: each contestant alone in fresh processes, against the bare model.

Resident memory counts a page that ranks share once for each of them. The proportional size divides
it by the number of processes that have it mapped, so that the sum over the ranks is the memory
that the machine provides. Both are read while gradients exist, and counted from just before the
model is built, with everything imported. The peak is the kernel's, which has no proportional
value; so the memory that ranks share after the last step, and count twice, is subtracted.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants import FLOOR, build, enter, load, present
from benchmarks.models import MODELS
from benchmarks.tables import print_table, read_names
from paceline import World
from paceline.testing import run_processes

MIB = 2**20
_SHARE = "/proc/self/smaps_rollup", "Pss"


def measure(world: World, name: str, contestant: str, steps: int) -> Any:
    """Bytes of this rank: the peak, the proportional size, and the gradients."""
    enter(world)
    model = MODELS[name]
    batch = model.batch(torch.Generator().manual_seed(world.rank))

    def loss(module: nn.Module) -> Tensor:
        return model.loss(module, batch)

    load(contestant)
    build(FLOOR, model.build).step(loss)  # imports what a first step imports, for every contestant
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    peak, share = _read_kib("/proc/self/status", "VmRSS"), _read_kib(*_SHARE)
    world.barrier()
    trainer = build(contestant, model.build)
    for _ in range(steps):
        trainer.step(loss)
    world.barrier()
    share = _read_kib(*_SHARE) - share
    twice = _read_kib("/proc/self/status", "RssShmem") - _read_kib(_SHARE[0], "Pss_Shmem")
    world.barrier()  # a rank that has exited no longer shares memory
    return {
        "peak": _read_kib("/proc/self/status", "VmHWM") - peak - twice,
        "share": share,
        "gradients": sum(p.numel() * p.element_size() for p in trainer.module.parameters()),
    }


def _read_kib(path: str, key: str) -> int:
    """A value reported by the kernel, in bytes."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no {key}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", "--models", default="mlp-8.4M", help="comma-separated names, or all"
    )
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--steps", type=int, default=6, help="steps before memory is read")
    parser.add_argument("--quick", action="store_true", help="the first four contestants only")


def main(args: argparse.Namespace) -> dict[str, Any]:
    names, absent = present()
    for line in absent:
        print(line)
    names.append("torch tuned: static, 25 MB")
    results: dict[str, Any] = {}
    for model in read_names(args.model, MODELS):
        ranks = {
            name: run_processes(args.ranks, measure, model, name, args.steps, timeout_s=300)
            for name in (names[:4] if args.quick else names)
        }
        title = f"{model}, {args.ranks} ranks"
        results[title] = rows_of(ranks)
        print_table(title, results[title])
    return results


def rows_of(ranks_by_name: dict[str, list[dict[str, int]]]) -> list[dict[str, Any]]:
    """One row per contestant; memory above the bare model is in multiples of the gradients."""
    floor = ranks_by_name[FLOOR]
    rows = []
    for name, ranks in ranks_by_name.items():
        gradients = ranks[0]["gradients"]
        over_peak = max(r["peak"] for r in ranks) - max(r["peak"] for r in floor)
        over_share = sum(r["share"] for r in ranks) - sum(r["share"] for r in floor)
        rows.append(
            {
                "contestant": name,
                "peak MiB a rank": round(max(r["peak"] for r in ranks) / MIB, 1),
                "over bare / gradients": round(over_peak / gradients, 2),
                "all ranks MiB, shared once": round(sum(r["share"] for r in ranks) / MIB, 1),
                "over bare / all gradients": round(over_share / gradients / len(ranks), 2),
            }
        )
    return rows
