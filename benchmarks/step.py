"""How long one training step takes: ours, torch's, those built on torch's, and no communication.

All contestants live in the same processes and take turns in every round, in an order that
rotates, so that noise of the machine hits them alike; what counts are ratios, taken round by round.
A step is zero_grad, forward, backward and an SGD update, begun together after a barrier, and has
ended when the slowest rank has ended it. Every rank has one thread. The options of torch's class
are screened first, and the best of them take part.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants import (
    FLOOR,
    Trainer,
    build,
    choose_tuned,
    enter,
    present,
    tuned_options,
)
from benchmarks.models import MODELS
from benchmarks.spread import rotated, rows_of, slowest
from benchmarks.tables import print_table, read_names
from paceline import World, comm
from paceline.testing import run_processes

SCREENED = 3
"""So many of torch's tuned variants run with the rest."""
WARM_STEPS = 6
"""Enough for every engine to have learned the order of gradients."""
TUNING_STEPS = 40
"""An engine that searches for its bucket size is given so many more, at most."""
MAX_STEPS = 40
MIN_ROUNDS = 3
SLOW_S = 0.1
"""A model whose steps take longer than this is screened with fewer of them."""

Loss = Callable[[nn.Module], Tensor]


def measure(
    world: World,
    models: list[str],
    names: list[str],
    rounds: int,
    block_ms: float,
    budget_s: float,
    screens: bool,
) -> Any:
    """For each model the seconds of each step, by contestant and round, on this rank.

    One set of processes for all models, as importing some contestants takes seconds.
    """
    enter(world)
    measured = {}
    for name in models:
        if world.rank == 0:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
        measured[name] = _measure_model(world, name, names, rounds, block_ms, budget_s, screens)
        gc.collect()
    return measured


def _measure_model(
    world: World,
    name: str,
    names: list[str],
    rounds: int,
    block_ms: float,
    budget_s: float,
    screens: bool,
) -> dict[str, Any]:
    model = MODELS[name]
    batch = model.batch(torch.Generator().manual_seed(world.rank))

    def loss(module: nn.Module) -> Tensor:
        return model.loss(module, batch)

    floor = build(FLOOR, model.build)
    (alone,) = _agree(world, [statistics.median(_times(world, floor, loss, 5))])
    steps = max(1, min(MAX_STEPS, int(block_ms / 1e3 / alone)))
    del floor
    screened = _screen(world, model.build, loss, 2 if alone > SLOW_S else 4) if screens else {}
    names = [*names, *choose_tuned(screened, SCREENED)]
    trainers = {each: build(each, model.build) for each in names}
    for trainer in trainers.values():
        _times(world, trainer, loss, WARM_STEPS if screens else 2)
    differ = _differ(trainers)  # all have made the same number of steps until now
    for trainer in trainers.values():
        for _ in range(TUNING_STEPS if screens else 0):
            if not _is_tuning(trainer):
                break
            _times(world, trainer, loss, 1)
    seconds: dict[str, list[list[float]]] = {each: [] for each in names}
    start = time.monotonic()
    for number in range(rounds):
        (elapsed,) = _agree(world, [time.monotonic() - start])
        if number >= MIN_ROUNDS and elapsed * (number + 1) / number > budget_s:
            break
        for each in rotated(names, number):
            _times(world, trainers[each], loss, 1)  # the caches are another contestant's
            seconds[each].append(_times(world, trainers[each], loss, steps))
    return {
        "seconds": seconds,
        "steps": steps,
        "screened": screened,
        "transport": str(getattr(trainers["paceline"].module, "transport", "c10d")),
        "tuning": str(getattr(trainers["paceline"].module, "bucket_tuning", "")),
        "differ": differ,
    }


def _times(world: World, trainer: Trainer, loss: Loss, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        world.barrier()
        start = time.perf_counter()
        trainer.step(loss)
        times.append(time.perf_counter() - start)
    return times


def _agree(world: World, numbers: list[float]) -> list[float]:
    """The means over the ranks, so that all decide alike."""
    mine = torch.tensor(numbers, dtype=torch.float64) / world.size
    comm.all_reduce(world.group, mine, "Agreeing on numbers")
    return mine.tolist()


def _screen(
    world: World, make: Callable[[], nn.Module], loss: Loss, steps: int
) -> dict[str, float]:
    """A short look at each of torch's options: the best step of a few."""
    best = []
    for name in tuned_options():
        trainer = build(name, make)
        _times(world, trainer, loss, steps // 2)
        best.append(min(_times(world, trainer, loss, steps)))
        del trainer
        gc.collect()
    return dict(zip(tuned_options(), _agree(world, best), strict=True))


def _is_tuning(trainer: Trainer) -> bool:
    """Whether the engine still tries bucket sizes; the same on all ranks."""
    return "still" in str(getattr(trainer.module, "bucket_tuning", ""))


def _differ(trainers: dict[str, Trainer]) -> float:
    """By how much parameters differ between those that communicate: they trained the same."""
    states = [
        [param.detach() for param in trainer.module.parameters()]
        for name, trainer in trainers.items()
        if name != FLOOR
    ]
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()
        for state in states
        for a, b in zip(state, states[0], strict=True)
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--models", default="all", help="names with commas, or all")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after the warm-up")
    parser.add_argument(
        "--block-ms", type=float, default=100, help="about so long a contestant is in turn"
    )
    parser.add_argument(
        "--budget-s", type=float, default=30, help="no new round of a model after so long"
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds of few steps, torch's options not screened"
    )


def main(args: argparse.Namespace) -> dict[str, Any]:
    names, absent = present()
    for line in absent:
        print(line)
    print(f"{args.ranks} ranks with 1 thread each, in the same processes for all contestants")
    rounds, block_ms = (2, 20.0) if args.quick else (args.rounds, args.block_ms)
    if args.quick:
        names = [*names, list(tuned_options())[-2]]
    models = read_names(args.model, MODELS)
    ranks = run_processes(
        args.ranks,
        measure,
        models,
        names,
        rounds,
        block_ms,
        args.budget_s,
        not args.quick,
        timeout_s=1800,
    )
    results: dict[str, Any] = {}
    for name in models:
        results[name] = summarise([rank[name] for rank in ranks], name)
        print_table(f"{name}, {args.ranks} ranks", results[name]["rows"])
    return results


def summarise(ranks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    if max(rank["differ"] for rank in ranks) > 1e-2:
        raise RuntimeError(f"{name}: the contestants have not trained the same model")
    seconds = medians_by_round([rank["seconds"] for rank in ranks])
    return {
        "rows": rows_of(seconds, floor=FLOOR, rival="torch"),
        "ranks": len(ranks),
        "threads": 1,
        "rounds": len(seconds[FLOOR]),
        "steps": ranks[0]["steps"],
        "transport": ranks[0]["transport"],
        "tuning": ranks[0]["tuning"],
        "screened ms": {k: round(v * 1e3, 2) for k, v in ranks[0]["screened"].items()},
    }


def medians_by_round(ranks: list[dict[str, list[list[float]]]]) -> dict[str, list[float]]:
    """For each contestant and round the median step, a step being as long as its slowest rank's."""
    return {
        name: [
            statistics.median(slowest(of_ranks))
            for of_ranks in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }
