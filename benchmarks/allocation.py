"""Gain from the memory settings of `paceline run`, with the bare model alone.

glibc returns large blocks to the system when they are freed, and the next step has to map and
clear their pages again, 4 KiB at a time. The launcher sets it to keep them, and torch to request
huge pages. Every measurement is a new process with one thread; rounds alternate. There is no
communication.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.models import GPT, MODELS, Model
from benchmarks.tables import print_table, read_names
from paceline import env

SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "freed memory kept": env.KEEP_FREED_MEMORY,
    "huge pages": env.HUGE_PAGES,
    "both (paceline run)": env.KEEP_FREED_MEMORY | env.HUGE_PAGES,
}
WIDE = "gpt2-embedding-39M"
"""GPT-2's tied embedding with one layer: its gradient is one block of 154 MB."""
WARM_STEPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=f"mlp-8.4M,gpt-17M,{WIDE}", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)


def main(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for name in read_names(args.models, [*MODELS, WIDE]):
        rounds = [
            {setting: _measure(name, args.steps, setting) for setting in SETTINGS}
            for _ in range(args.rounds)
        ]
        results[name] = [_row(setting, rounds) for setting in SETTINGS]
        print_table(name, results[name])
    return results


def _measure(name: str, steps: int, setting: str) -> dict[str, float]:
    """One model in a new process."""
    unset = {"OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES"}
    plain = {
        key: value
        for key, value in os.environ.items()
        if key not in unset and not key.startswith("MALLOC_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.allocation", name, str(steps)],
        env={**plain, "OMP_NUM_THREADS": "1", **SETTINGS[setting]},
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _row(setting: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    mine = [measured[setting] for measured in rounds]
    ratios = [measured[setting]["ms"] / measured["as it is"]["ms"] for measured in rounds]
    return {
        "worker": setting,
        "ms": round(statistics.median(one["ms"] for one in mine), 2),
        "/ as it is": round(statistics.median(ratios), 3),
        "from": round(min(ratios), 3),
        "to": round(max(ratios), 3),
        "page faults a step": round(statistics.median(one["faults"] for one in mine)),
        "peak MiB": round(statistics.median(one["peak_mib"] for one in mine)),
    }


def _train(name: str, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = MODELS[name] if name != WIDE else _wide()
    module, batch = model.build(), model.batch(torch.Generator().manual_seed(0))
    params = list(module.parameters())
    seconds = []
    for step in range(WARM_STEPS + steps):
        if step == WARM_STEPS:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        model.loss(module, batch).backward()
        with (
            torch.no_grad()
        ):  # torch's optimizers import the compiler, which takes seconds in every process
            for param in params:
                assert param.grad is not None
                param.sub_(param.grad, alpha=1e-3)
                param.grad = None
        seconds.append(time.perf_counter() - start)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms": statistics.median(seconds[WARM_STEPS:]) * 1e3,
        "faults": (usage.ru_minflt - faults) / steps,
        "peak_mib": usage.ru_maxrss / 1024,
    }


def _wide() -> Model:
    small = MODELS["gpt-17M"]
    return Model(lambda: GPT(50_257, 768, 1, 12, 128), small.batch, small.loss)


if __name__ == "__main__":
    print(json.dumps(_train(sys.argv[1], int(sys.argv[2]))))
