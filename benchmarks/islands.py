"""Quality loss and saved bytes of islands: a small GPT, two islands of one worker.

Every setting trains on the same tokens as one training of both workers, with several seeds.
Quality and bytes do not depend on the load of the machine; times are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.tables import print_table

ROOT = Path(__file__).parents[1]
SETTINGS: list[dict[str, Any]] = [
    {"lr": 1.0, "momentum": 0.5, "bits": 16},
    {"lr": 1.0, "momentum": 0.5, "bits": 8},
    {"outer": "sgd", "bits": 16},
    {"lr": 1.0, "momentum": 0.5, "bits": 16, "fragments": 3, "delay": 5},
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=30, help="steps between two rounds")
    parser.add_argument("--rate", type=float, default=5e-4, help="the learning rate of AdamW")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent trainings")
    parser.add_argument("--quick", action="store_true", help="a short test that it runs")


def main(args: argparse.Namespace) -> dict[str, Any]:
    settings = SETTINGS
    if args.quick:
        args.steps, args.every, args.seeds, settings = 12, 6, 1, SETTINGS[:1]
    planned = [None, *({"every": args.every, **setting} for setting in settings)]
    with ThreadPoolExecutor(args.jobs) as pool:
        begun = [
            [pool.submit(train, args, seed, options) for seed in range(args.seeds)]
            for options in planned
        ]
        plain, *others = [[each.result() for each in seeds] for seeds in begun]
    loss, moved = mean(each["loss"] for each in plain), plain[0]["bytes"]
    rows = [row("one training of both workers", loss, moved, plain, plain)]
    for setting, found in zip(settings, others, strict=True):
        name = ", ".join(f"{key} {value}" for key, value in setting.items())
        rows.append(row(name, loss, moved, found, plain))
    size = f"{plain[0]['parameters'] / 1e6:.2f}M parameters, {args.steps} steps at {args.rate:g}"
    title = f"Two islands, a round every {args.every} steps: GPT of {size}, {args.seeds} seeds"
    print_table(title, rows)
    return {title: rows}


def row(
    name: str, loss: float, moved: int, found: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    ratios = [one["loss"] / other["loss"] for one, other in zip(found, plain, strict=True)]
    return {
        "training": name,
        "validation loss": round(mean(each["loss"] for each in found), 4),
        "of one training": round(mean(each["loss"] for each in found) / loss, 4),
        "worst seed": round(max(ratios), 4),
        "kB per step": round(found[0]["bytes"] / 1e3 / (moved / 4 / plain[0]["parameters"]), 2),
        "times fewer bytes": round(moved / found[0]["bytes"], 1),
    }


def train(args: argparse.Namespace, seed: int, islands: dict[str, Any] | None) -> dict[str, Any]:
    """Loss and bytes of one training on two workers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--quiet"]
        command += ["--island", "1"] if islands is not None else []
        command += ["-m", "benchmarks.islands_training", "--out", str(out)]
        command += ["--steps", str(args.steps), "--seed", str(seed), "--rate", str(args.rate)]
        command += ["--islands", json.dumps(islands)] if islands is not None else []
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environ, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        print(f"seed {seed}, {islands or 'one training'}: {found['loss']:.4f}", flush=True)
        return found
