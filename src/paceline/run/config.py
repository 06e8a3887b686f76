"""What a run was asked for: its arguments, checked, and how they are described to people."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.world import World
from paceline.errors import UsageError
from paceline.observe.run_folder import RunFolder, RunInfo, read_info
from paceline.policy import plan_global_batch
from paceline.run.loader import Position
from paceline.run.options import RunOptions
from paceline.run.plan import Plan
from paceline.run.record import host
from paceline.run.stream import STATEMENT

_AGREED_OPTIONS = (
    "clip_norm",
    "merge_shards",
    "check_finite",
    "noise_every",
    "checkpoint_every",
    "best_metric",
)
"""Those that decide what a commit does, or when the workers talk to each other."""


@dataclass(slots=True, kw_only=True)
class Wanted:
    """The arguments of `Run`."""

    model: nn.Module
    optimizer: Optimizer
    dataset: Any
    global_batch: int
    epochs: int
    seed: int
    folder: str | os.PathLike[str] | None
    shards: int | None
    scheduler: Any
    scaler: Any
    state: Mapping[str, Any]
    workers: int
    world: World | None
    options: RunOptions

    def __post_init__(self) -> None:
        for name, least in (("global_batch", 1), ("epochs", 1), ("shards", 1), ("workers", 0)):
            value = getattr(self, name)
            is_left_out = name == "shards" and value is None
            if not is_left_out and (type(value) is not int or value < least):
                raise UsageError(
                    f"{name} is {value!r}.", advice=f"Pass a whole number from {least} up."
                )
        if type(self.seed) is not int:
            raise UsageError(f"seed is {self.seed!r}.", advice="Pass a whole number.")


def to_agree_on(wanted: Wanted) -> dict[str, Any]:
    """What all workers must be given alike, besides what identifies the run, by words for it."""
    settings = [
        {name: repr(value) for name, value in group.items() if name != "params"}
        for group in wanted.optimizer.param_groups
    ]
    return {
        "epochs": wanted.epochs,
        "folder": "None" if wanted.folder is None else "given",
        **{name: getattr(wanted.options, name) for name in _AGREED_OPTIONS},
        "the scaler": None if wanted.scaler is None else type(wanted.scaler).__name__,
        "settings of the optimizer": settings,
        "names in state": sorted(wanted.state),
    }


def describe(
    wanted: Wanted,
    folder: RunFolder | None,
    world: World,
    plan: Plan | None,
    *,
    facts: Mapping[str, Any],
    module: nn.Module,
    device: torch.device,
) -> RunInfo:
    """What `run.json` says of a run."""
    now = time.time()
    before = read_info(folder) if folder is not None and world.rank == 0 else None
    return RunInfo(
        name=folder.name if folder else type(module).__name__,
        created=now if before is None else before.created,
        updated=now,
        seed=wanted.seed,
        epochs=wanted.epochs,
        global_batch=wanted.global_batch,
        shards=facts["shards"],
        workers=world.size,
        dataset_size=facts["dataset_size"],
        steps_per_epoch=plan.steps_per_epoch if plan else None,
        steps=plan.steps if plan else None,
        model=type(module).__name__,
        parameters=sum(param.numel() for param in module.parameters()),
        device=str(device),
        host=host(),
        versions=facts["versions"],
        policy=list(wanted.options.policy)
        or [
            batch_sentence(
                wanted.global_batch,
                workers=world.size,
                shards=facts["shards"],
                merges=wanted.options.merge_shards,
            )
        ],
    )


def batch_sentence(global_batch: int, *, workers: int, shards: int, merges: bool) -> str:
    """Which global batch it is, and what each worker gets of it and in how many passes."""
    busy = min(workers, shards)
    if shards % busy:
        sizes = [len(range(shard, global_batch, shards)) for shard in range(shards)]
        rows = [sum(sizes[worker::busy]) for worker in range(busy)]
        return (
            f"Global batch {global_batch:,} on {busy:,} workers, in {shards:,} shards: "
            f"{min(rows):,} to {max(rows):,} rows each."
        )
    passes = 1 if merges else shards // busy
    return replace(plan_global_batch(global_batch, busy), accumulation=passes).sentence


def opening_lines(
    world: World, device: torch.device, shards: int, plan: Plan | None, position: Position
) -> list[str]:
    """What is said when the loop begins."""
    lines = []
    if plan is None:
        lines.append(STATEMENT)
    if world.size > shards:
        lines.append(
            f"{world.size} workers share {shards} shards: {world.size - shards} of them have "
            "nothing to compute. Pass shards= to a new run to use them."
        )
    if world.device.type == "cuda" and device.type == "cpu":
        lines.append(f"The model is on the CPU, although this worker has {world.device}.")
    if plan is not None and position.step >= plan.steps:
        lines.append(f"Nothing is left to do: all {plan.steps} steps are applied.")
    elif position.step:
        lines.append(f"Going on after step {position.step}, in epoch {position.epoch + 1}.")
    return lines
