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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.tables import print_table

ROOT = Path(__file__).parents[1]
RATES: tuple[float, ...] = (0.002, 0.003, 0.004)
"""Learning rates of one training; it is measured with each, and the best is what islands are
compared with."""
SETTINGS: list[dict[str, Any]] = [
    {"rate": 0.002, "bits": 16},
    {"rate": 0.002, "bits": 8},
    {"rate": 0.003, "bits": 16},
    {"rate": 0.003, "bits": 8},
    {"rate": 0.003, "bits": 16, "fragments": 3, "delay": 5},
    {"rate": 0.003, "bits": 16, "outer": "sgd"},
    {"rate": 0.003, "bits": 16, "momentum": 0.5},
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=30, help="steps between two rounds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="concurrent trainings")
    parser.add_argument("--quick", action="store_true", help="a short test that it runs")


def main(args: argparse.Namespace) -> dict[str, Any]:
    rates, settings = RATES, SETTINGS
    if args.quick:
        args.steps, args.every, args.seeds = 12, 6, 1
        rates, settings = RATES[:1], SETTINGS[:1]
    with ThreadPoolExecutor(args.jobs) as pool:

        def begin(rate: float, islands: dict[str, Any] | None) -> list[Future[dict[str, Any]]]:
            return [pool.submit(train, args, seed, rate, islands) for seed in range(args.seeds)]

        together = {rate: begin(rate, None) for rate in rates}
        apart = [
            begin(rate, {"every": args.every, **rest})
            for rate, rest in [(each["rate"], without_rate(each)) for each in settings]
        ]
        plain = {rate: [each.result() for each in begun] for rate, begun in together.items()}
        others = [[each.result() for each in begun] for begun in apart]
    best = min(plain.values(), key=lambda found: mean(each["loss"] for each in found))
    rows = [
        row(f"one training of both workers, rate {rate:g}", found, best, found)
        for rate, found in plain.items()
    ]
    for setting, found in zip(settings, others, strict=True):
        name = ", ".join(f"{key} {value}" for key, value in setting.items())
        rows.append(row(f"islands, {name}", found, best, plain[setting["rate"]]))
    size = f"{best[0]['parameters'] / 1e6:.2f}M parameters, {args.steps} steps"
    title = f"Two islands, a round every {args.every} steps: GPT of {size}, {args.seeds} seeds"
    print_table(title, rows)
    return {title: rows}


def without_rate(setting: dict[str, Any]) -> dict[str, Any]:
    """The options of Islands in a setting."""
    return {key: value for key, value in setting.items() if key != "rate"}


def row(
    name: str,
    found: list[dict[str, Any]],
    best: list[dict[str, Any]],
    same: list[dict[str, Any]],
) -> dict[str, Any]:
    """`best`: one training at its best rate; `same`: at the rate of `found`."""
    ratios = [one["loss"] / other["loss"] for one, other in zip(found, best, strict=True)]
    loss, moved = mean(each["loss"] for each in found), best[0]["bytes"]
    return {
        "training": name,
        "validation loss": round(loss, 4),
        "of the best training": round(loss / mean(each["loss"] for each in best), 4),
        "worst seed": round(max(ratios), 4),
        "of one at this rate": round(loss / mean(each["loss"] for each in same), 4),
        "kB per step": round(found[0]["bytes"] / 1e3 / (moved / 4 / best[0]["parameters"]), 2),
        "times fewer bytes": round(moved / found[0]["bytes"], 1),
    }


def train(
    args: argparse.Namespace, seed: int, rate: float, islands: dict[str, Any] | None
) -> dict[str, Any]:
    """Loss and bytes of one training on two workers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--quiet"]
        command += ["--island", "1"] if islands is not None else []
        command += ["-m", "benchmarks.islands_training", "--out", str(out)]
        command += ["--steps", str(args.steps), "--seed", str(seed), "--rate", str(rate)]
        command += ["--islands", json.dumps(islands)] if islands is not None else []
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        subprocess.run(command, env=environ, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        name = f"seed {seed}, rate {rate:g}, {islands or 'one training'}"
        print(f"{name}: {found['loss']:.4f}", flush=True)
        return found
