"""Cost of observers: none, blame, and a timeline, alternating step by step.

    python -m benchmarks observing

The cost is some ten microseconds in steps of milliseconds, and neighbouring steps differ by more
than that. So every round takes one step of each kind in quick succession, differences are taken
inside a round, and the result is the median of many of them with its standard error. "Blame" and
"timeline" are the same model, whose recording is switched on and off. "Nobody", "still nobody" and
"blame" are copies of one model: the first two differ only by chance and memory layout.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.models import MODELS, Model
from benchmarks.spread import rotated
from paceline import DistributedDataParallel, World
from paceline.telemetry import spans
from paceline.testing import run_processes

TINY = "tiny"
TINY_BUCKET_MB = 0.015
OBSERVED_MODELS = MODELS | {
    TINY: Model(
        lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))),
        lambda generator: (torch.randn(4, 64, generator=generator), torch.zeros(4, 64)),
        lambda module, batch: nn.functional.mse_loss(module(batch[0]), batch[1]),
    )
}
"""The tiny one has a bucket for each of its eight layers and next to nothing to compute: what is
added is the same, and stands out."""
KINDS = ("nobody", "still nobody", "blame", "timeline")
BASE_BY_KIND = {"still nobody": "nobody", "blame": "nobody", "timeline": "blame"}
"""What each kind adds something to."""
WARM_UP_ROUNDS = 10
_MAD_TO_SIGMA = 1.4826
_MEDIAN_ERROR = 1.2533
"""How much less certain a median is than a mean, where differences are normal."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The time that a kind adds to its base, in microseconds per step."""

    cpu_us: float
    cpu_error_us: float
    """On the training thread; the error is one standard error."""
    wall_us: float
    wall_error_us: float


def median_and_error(differences: Sequence[float]) -> tuple[float, float]:
    """The median of the differences, and its standard error."""
    middle = statistics.median(differences)
    mad = statistics.median(abs(each - middle) for each in differences)
    return middle, _MEDIAN_ERROR * _MAD_TO_SIGMA * mad / math.sqrt(len(differences))


def costs(ns_by_kind: dict[str, list[tuple[int, int]]]) -> dict[str, Cost]:
    """By kind, from the CPU and wall time of each round's step."""
    found = {}
    for kind, base in BASE_BY_KIND.items():
        pairs = list(zip(ns_by_kind[kind], ns_by_kind[base], strict=True))
        cpu = median_and_error([(mine[0] - other[0]) / 1e3 for mine, other in pairs])
        wall = median_and_error([(mine[1] - other[1]) / 1e3 for mine, other in pairs])
        found[kind] = Cost(*cpu, *wall)
    return found


def measure(world: World, name: str, rounds: int) -> dict[str, Any]:
    """CPU and wall time of every step by kind, in ns; and the CPU time of the writer's thread."""
    torch.set_num_threads(1)
    model = OBSERVED_MODELS[name]
    capacity_mb = TINY_BUCKET_MB if name == TINY else None
    batch = model.batch(torch.Generator().manual_seed(world.rank))

    def prepare(blames: bool) -> Callable[[], None]:
        os.environ["PACELINE_BLAME"] = "1" if blames else "0"
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(
            model.build(), process_group=world.group, bucket_cap_mb=capacity_mb
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.001)

        def step() -> None:
            optimizer.zero_grad()
            model.loss(wrapped, batch).backward()
            optimizer.step()

        return step

    # Without blame there is no observer at all, so those are wrapped first.
    step_by_kind = {kind: prepare(kind == "blame") for kind in KINDS[:3]}
    step_by_kind["timeline"] = step_by_kind["blame"]
    ns_by_kind: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        spans.start(folder, world.rank)
        recorder = spans.current
        assert recorder is not None
        for number in range(rounds + WARM_UP_ROUNDS):
            for kind in rotated(KINDS, number):
                step = step_by_kind[kind]
                # Starting and stopping would open a file and a thread for every step.
                spans.current = recorder if kind == "timeline" else None
                world.barrier()
                before = time.thread_time_ns(), time.perf_counter_ns()
                step()
                after = time.thread_time_ns(), time.perf_counter_ns()
                if number >= WARM_UP_ROUNDS:
                    ns_by_kind[kind].append((after[0] - before[0], after[1] - before[1]))
        spans.current = recorder
        spans.stop()
    recorded = rounds + WARM_UP_ROUNDS
    cost = recorder.cost()
    return {
        "ns_by_kind": ns_by_kind,
        "writer_us": cost["writer_ns"] / 1e3 / recorded,
        "spans": cost["spans"] / recorded,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="tiny,mlp-8.4M", help="comma-separated names")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--rounds", type=int, default=400, help="rounds, with one step of each kind"
    )


def main(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in args.models.split(","):
        measured = run_processes(args.ranks, measure, name, args.rounds, timeout_s=600.0)[0]
        found = costs(measured["ns_by_kind"])
        step_us = statistics.median(wall for _, wall in measured["ns_by_kind"]["nobody"]) / 1e3
        results[name] = {
            "step_us": step_us,
            "added": {kind: asdict(cost) for kind, cost in found.items()},
            "writer_us": measured["writer_us"],
            "spans": measured["spans"],
        }
        _show(name, step_us, found, measured["writer_us"], measured["spans"])
    return results


def _show(
    name: str, step_us: float, found: dict[str, Cost], writer_us: float, recorded: float
) -> None:
    print(f"{name}: {step_us / 1e3:.2f} ms a step that nobody observes")
    print(f"  {'microseconds a step':<26}{'CPU, training thread':>24}{'wall':>22}")
    for kind, base in BASE_BY_KIND.items():
        cost = found[kind]
        cpu = f"{cost.cpu_us:+.1f} ± {cost.cpu_error_us:.1f}"
        share = f"{cost.cpu_us / step_us:+.2%}"
        wall = f"{cost.wall_us:+.0f} ± {cost.wall_error_us:.0f}"
        print(f"  {kind + ' - ' + base:<26}{cpu:>16}{share:>8}{wall:>22}")
    print(
        f"  the writer's thread: {writer_us:.1f} a step of {recorded:.0f} spans, "
        f"{writer_us / step_us:.2%}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    main(parser.parse_args())
