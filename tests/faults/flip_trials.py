"""Planned flips of bits against the audit: `python -m tests.faults.flip_trials --flips 100`.

Each trial is a training of a few steps in which one bit flips on one rank, once or for good. It
holds where nothing wrong is applied, and the rank is named: what was flipped once is done again,
and what stays wrong ends the training with the model of the step before, on all other ranks. Of two
whose gradients stay different nobody is named. `--calm 10000` is as many steps without a flip.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.errors import AuditError, PeerError
from paceline.group import World
from paceline.run import Run, RunOptions, hash_state
from paceline.testing import run_processes, run_ranks, seeded
from tests.faults.flips import WHERE, Flip, Where
from tests.runs import CLASSES, WIDTH, Rows, Told, mlp

STEPS = 6


def normed() -> nn.Module:
    layers = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)
    return seeded(nn.Sequential(*layers))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "normed": normed}


@dataclass
class Left:
    """What a training left on one worker."""

    state: dict[str, Tensor] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)
    """Of the model, before the first step and after each."""
    told: Told = field(default_factory=Told)
    error: Exception | None = None
    steps: int = 0
    flips: int = 0

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [each.facts for each in self.told.of("message") if each.kind == "audit"]


def train(
    world: World | None,
    build: Callable[[], nn.Module] = mlp,
    *,
    flip: tuple[int, Where, dict[str, Any]] | None = None,
    audit: float = 1.0,
    breaks: bool = False,
    layer: int = 0,
    **options: Any,
) -> Left:
    left, net = Left(), build()
    rank = 0 if world is None else world.rank
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    how = RunOptions(progress="quiet", same_bits=True, audit=audit, **options)
    run = Run(net, sgd, Rows(70), global_batch=24, epochs=2, shards=8, world=world, options=how,
              sinks=[left.told])  # fmt: skip
    planned = None
    if flip is not None and flip[0] == rank:
        planned = Flip(net[layer], flip[1], **flip[2])  # type: ignore[index]
    left.hashes.append(hash_state(net.state_dict())["all"])
    try:
        for step in run:
            if planned is not None:
                planned.begin(step.number)
            with step:
                for number, (x, y, _) in enumerate(step.batches()):
                    step.backward(cross_entropy(run.model(x), y))
                    run.log("rows", float(len(y)))
                    if breaks and number + 1 == len(step._shards) + len(step._audited):
                        break
            left.steps = run.step
            left.hashes.append(hash_state(net.state_dict())["all"])
    except Exception as error:
        left.error = error
    left.state = {name: value.clone() for name, value in net.state_dict().items()}
    left.hashes.append(hash_state(net.state_dict())["all"])
    left.flips = planned.count if planned is not None else 0
    return left


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One planned flip."""

    model: str
    layer: int
    size: int
    rank: int
    where: Where
    stays: bool
    step: int
    element: int
    bit: int


def plan(count: int, seed: int = 0) -> list[Trial]:
    """Every kind of flip as often as any other; the rest is drawn."""
    draw = random.Random(seed)
    kinds = [
        (where, stays, size) for where in WHERE for stays in (False, True) for size in (2, 3, 4)
    ]
    trials = []
    for number in range(count):
        where, stays, size = kinds[number % len(kinds)]
        model = draw.choice(sorted(MODELS))
        trials.append(
            Trial(
                model=model,
                layer=draw.choice((0, 2 if model == "mlp" else 3)),
                size=size,
                rank=draw.randrange(size),
                where=where,
                stays=stays,
                step=draw.randint(1, STEPS),
                element=draw.randrange(48),
                bit=draw.randrange(32),
            )
        )
    return trials


def judge(trial: Trial, expected: Left) -> str:
    """How a trial ended: "named", "open", "without effect"; raises where it did not hold."""
    at = {"step": trial.step, "stays": trial.stays, "element": trial.element, "bit": trial.bit}
    flip = trial.rank, trial.where, at

    def body(world: World) -> Left:
        return train(world, MODELS[trial.model], flip=flip, layer=trial.layer)

    ranks = run_ranks(trial.size, body)
    assert ranks[trial.rank].flips, f"{trial}: nothing was flipped"
    findings = ranks[0].findings
    culprits = {each["culprit"] for each in findings}
    for rank, left in enumerate(ranks):
        if rank != trial.rank or left.error is None:  # the one that is wrong may keep its weights
            assert left.hashes[-1] == expected.hashes[left.steps], f"{trial}: rank {rank} is wrong"
    if all(left.error is None for left in ranks):
        assert all(left.steps == STEPS for left in ranks)
        assert culprits in ({trial.rank}, set()), f"{trial}: named {culprits}"
        # An activation whose last bits are rounded away, or that is multiplied with zero.
        assert findings or trial.where == "activation", f"{trial}: not found"
        return "named" if findings else "without effect"
    assert all(left.steps < STEPS for left in ranks), f"{trial}: {[left.steps for left in ranks]}"
    if trial.size == 2 and trial.where != "weight":
        assert culprits == {None}
        assert all(isinstance(left.error, AuditError) for left in ranks)
        return "open"
    for rank, left in enumerate(ranks):
        kind = AuditError if rank == trial.rank else PeerError
        assert isinstance(left.error, kind), f"{trial}: {left.error!r} on rank {rank}"
        assert f"rank {trial.rank} " in str(left.error), f"{trial}: {left.error}"
    assert culprits == {trial.rank}
    return "named"


def run_trials(trials: list[Trial]) -> Counter[tuple[str, str, str, str]]:
    """By kind of flip, whether it stays, workers and how it ended: how often."""
    expected = {name: train(None, build, audit=0.0) for name, build in MODELS.items()}
    found: Counter[tuple[str, str, str, str]] = Counter()
    for trial in trials:
        end = judge(trial, expected[trial.model])
        stays = "stays" if trial.stays else "once"
        found[trial.where, stays, "2" if trial.size == 2 else "3 or 4", end] += 1
    return found


CALM: list[dict[str, Any]] = [
    {},
    {"precision": "bf16", "clip_norm": 0.5},
    {"precision": "fp16", "ema": 0.9},
    {"update": "sharded", "clip_norm": 1.0},
]


def stay_calm(world: World, number: int, steps: int) -> tuple[int, int]:
    """Train so many steps with an audit of all of them: how many there were, and findings."""
    layers = [nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU()]
    net = seeded(nn.Sequential(*layers, nn.Linear(32, CLASSES)))
    optimizer, told = torch.optim.AdamW(net.parameters(), lr=1e-3), Told()
    how = RunOptions(progress="quiet", same_bits=True, audit=1.0, drop_last=True, **CALM[number])
    run = Run(net, optimizer, Rows(2400), global_batch=24, epochs=-(-steps // 100), shards=3,
              world=world, options=how, sinks=[told])  # fmt: skip
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(cross_entropy(run.model(x), y))
    return run.step, sum(each.kind == "audit" for each in told.of("message"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--calm", type=int, default=0, help="steps in which nothing flips")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="a file for what was found")
    args = parser.parse_args()
    found = run_trials(plan(args.flips, args.seed)) if args.flips else Counter()
    for kind, count in sorted(found.items()):
        print(*kind, count, sep="\t")
    alarms = steps = 0
    for number in range(len(CALM)) if args.calm else ():
        for size in (2, 3):
            each = -(-args.calm // (2 * len(CALM)))
            done, wrong = run_processes(size, stay_calm, number, each, timeout_s=3600)[0]
            steps, alarms = steps + done, alarms + wrong
            print(f"{CALM[number]}, {size} workers: {done} steps, {wrong} alarms", flush=True)
    if args.json:
        rows = [[*kind, count] for kind, count in sorted(found.items())]
        result = {"flips": rows, "calm_steps": steps, "false_alarms": alarms}
        result["trials"] = [asdict(trial) for trial in plan(args.flips, args.seed)]
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
