"""Time of a training step: ours, torch's, libraries built on torch's, and no communication.

Every contestant runs in separate processes, as in a script that uses it alone. All exist at the
same time and take turns in every round, in rotating order, while the others wait without using the
CPU. So noise of the machine affects all alike; results are ratios, taken round by round. A step is
zero_grad, forward, backward and an SGD update, started together after a barrier, and ends when the
slowest rank ends it. Every rank has one thread. The options of torch's class are screened first,
and the best of them take part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants import FLOOR, FLOORS, build, choose_tuned, enter, present, tuned_options
from benchmarks.models import MODELS
from benchmarks.spread import rotated, rows_of, slowest
from benchmarks.tables import print_table, read_names
from benchmarks.teams import Team, standing
from paceline import World

SCREENED = 3
"""So many of torch's tuned variants run with the rest."""
WARM_STEPS = 6
"""Enough for every engine to have learned the order of gradients."""
TURN_STEPS = 1
"""So many steps at the beginning of a turn do not count: the caches are another contestant's."""
MAX_STEPS = 40
MIN_ROUNDS = 3
SLOW_S = 0.1
"""A model whose steps take longer than this is screened with fewer of them."""
SAMPLED = 64
"""So many elements of each parameter are compared between contestants."""
ROUNDING = 1e-5
"""Of a parameter's size: a tenth of it is what the order of sums may change in the first steps."""
MAX_DEVIATION = 0.1

Sample = list[list[float]]
"""Some elements of each parameter."""


class Member:
    """One rank of one contestant, in a separate process; `Team.ask` calls its methods."""

    def __init__(self, world: World, model: str, contestant: str) -> None:
        enter(world)
        self._world, self._model = world, MODELS[model]
        self._batch = self._model.batch(torch.Generator().manual_seed(world.rank))
        self._trainer = build(contestant, self._model.build)

    def train(self, steps: int, warm: int = 0) -> list[float]:
        """The seconds of each step on this rank, without the first `warm`."""
        times = []
        for _ in range(warm + steps):
            self._world.barrier()
            start = time.perf_counter()
            self._trainer.step(self._loss)
            times.append(time.perf_counter() - start)
        return times[warm:]

    def transport(self) -> str:
        return str(getattr(self._trainer.module, "transport", ""))

    def sample(self) -> Sample:
        params = [param.detach().flatten() for param in self._trainer.module.parameters()]
        return [param[:: -(-param.numel() // SAMPLED)].tolist() for param in params]

    def _loss(self, module: nn.Module) -> Tensor:
        return self._model.loss(module, self._batch)


def measure(
    model: str,
    names: list[str],
    size: int,
    *,
    rounds: int,
    block_ms: float,
    budget_s: float,
    screens: bool,
) -> dict[str, Any]:
    """One model: a row for each contestant, and the conditions of the measurement."""
    screened = _screen(model, size) if screens else {}
    names = [*names, *choose_tuned(screened, SCREENED)]
    with standing(size, names, Member, model) as teams:
        _settle(teams, model, WARM_STEPS if screens else 2)
        alone = statistics.median(slowest(teams[FLOOR].ask("train", steps=5)))
        steps = max(1, min(MAX_STEPS, int(block_ms / 1e3 / alone)))
        seconds = take_turns(teams, steps, rounds, budget_s)
        transport = teams["paceline"].ask("transport")[0]
    return {
        "rows": rows_of(seconds, floors=FLOORS, rival="torch"),
        "ranks": size,
        "threads": 1,
        "rounds": len(seconds[FLOOR]),
        "steps": steps,
        "transport": transport or "c10d",
        "screened ms": {name: round(value * 1e3, 2) for name, value in screened.items()},
    }


def _screen(model: str, size: int) -> dict[str, float]:
    """A short test of each of torch's options, one after the other: the best step of a few."""
    best = {}
    for name in tuned_options():
        with standing(size, [name], Member, model) as teams:
            (first,) = slowest(teams[name].ask("train", steps=1, warm=1))
            steps = 2 if first > SLOW_S else 4
            best[name] = min(slowest(teams[name].ask("train", steps=steps)))
    return best


def _settle(teams: dict[str, Team], model: str, steps: int) -> None:
    """The first steps, after which all that communicate must have the same parameters."""
    reference = teams["paceline"].ask("sample")[0]
    ends = {}
    for name, team in teams.items():
        team.ask("train", steps=steps)
        if name not in FLOORS:
            ends[name] = team.ask("sample")
    for name, ranks in ends.items():
        for rank, end in enumerate(ranks):
            if deviation(end, ends["paceline"][0], reference) > MAX_DEVIATION:
                raise RuntimeError(
                    f"{model}: {name!r} on rank {rank} has not trained the same model as Paceline."
                )


def deviation(end: Sample, expected: Sample, begin: Sample) -> float:
    """The difference of two training results, relative to the change made by training."""
    return max(
        _largest(a, b) / max(_largest(b, start) + ROUNDING * max(map(abs, b)), 1e-12)
        for a, b, start in zip(end, expected, begin, strict=True)
    )


def _largest(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def take_turns(
    teams: Mapping[str, Team], steps: int, rounds: int, budget_s: float
) -> dict[str, list[float]]:
    """For each contestant and round the median of its steps, in seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    start = time.monotonic()
    for number in range(rounds):
        elapsed = time.monotonic() - start
        if number >= MIN_ROUNDS and elapsed * (number + 1) / number > budget_s:
            break
        for name in rotated(list(teams), number):
            ranks = teams[name].ask("train", steps=steps, warm=TURN_STEPS)
            seconds[name].append(statistics.median(slowest(ranks)))
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--models", default="all", help="comma-separated names, or all")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds after the warm-up")
    parser.add_argument(
        "--block-ms", type=float, default=300, help="approximate time of a contestant's turn"
    )
    parser.add_argument(
        "--budget-s", type=float, default=60, help="no new round of a model after this time"
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds of few steps, torch's options not screened"
    )


def main(args: argparse.Namespace) -> dict[str, Any]:
    names, absent = present(FLOORS)
    for line in absent:
        print(line)
    print(f"{args.ranks} ranks with 1 thread each, in processes of its own for each contestant")
    rounds, block_ms = (2, 20.0) if args.quick else (args.rounds, args.block_ms)
    if args.quick:
        names = [*names, list(tuned_options())[-2]]
    results: dict[str, Any] = {}
    for model in read_names(args.model, MODELS):
        print(f"measuring {model} ...", file=sys.stderr, flush=True)
        results[model] = measure(
            model,
            names,
            args.ranks,
            rounds=rounds,
            block_ms=block_ms,
            budget_s=args.budget_s,
            screens=not args.quick,
        )
        print_table(f"{model}, {args.ranks} ranks", results[model]["rows"])
    return results
