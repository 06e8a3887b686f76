"""Puts the parts of a run together: checks the arguments, finds a checkpoint, wraps the model."""

from __future__ import annotations

import os
from collections.abc import Sized
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from paceline import comm
from paceline.comm.world import World
from paceline.ddp import DistributedDataParallel
from paceline.ddp.wrapper import bare
from paceline.errors import DesyncError, UsageError
from paceline.observe.run_folder import RunFolder
from paceline.policy import NoiseMeter
from paceline.run.buffers import Buffers
from paceline.run.config import Wanted, describe, opening_lines, to_agree_on
from paceline.run.context import Workshop
from paceline.run.loader import MapLoader, Position, loading_options
from paceline.run.loader_signals import Lifeline
from paceline.run.metrics import Metrics
from paceline.run.options import RunOptions
from paceline.run.place import check_batch_norm, find_world, unwrapped
from paceline.run.plan import Plan, check_batch
from paceline.run.record import Record, versions
from paceline.run.recorder import StepRecorder
from paceline.run.saving import Saving
from paceline.run.seeds import Generators, derive
from paceline.run.state import RunState, describe_model
from paceline.run.stream import StreamLoader
from paceline.run.vote import Vote, word_device
from paceline.run.watching import Watching
from paceline.update.finite import FiniteCheck
from paceline.update.whole import Update

NO_NOISE = (
    "The gradient noise scale cannot be measured: the whole batch goes through the model at once, "
    "so there is nothing to compare. Pass shards=2 or more to a new run."
)


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run consists of."""

    world: World
    group: Any
    word_device: torch.device
    dataset: Any
    pin_memory: bool
    lifeline: Lifeline
    shop: Workshop
    state: RunState
    saving: Saving
    facts: dict[str, Any]
    record: Record
    vote: Vote
    watching: Watching
    position: Position
    lines: list[str]
    """What is said when the loop begins."""


def build(wanted: Wanted) -> Parts:
    options, seed = wanted.options, wanted.seed
    world = wanted.world or find_world()
    group = world.group
    model = unwrapped(wanted.model)
    module = bare(model)
    named = list(module.named_parameters())
    device = named[0][1].device if named else torch.device("cpu")
    words = word_device(group, device)
    update = Update(
        named,
        wanted.optimizer,
        scheduler=wanted.scheduler,
        scaler=wanted.scaler,
        clip_norm=options.clip_norm,
    )
    state = RunState(module, update, wanted.state)
    folder = _open_folder(wanted.folder, world.rank)
    saving = Saving(folder, options, group=group, word_device=words)
    found = saving.find()
    shards = wanted.shards or (found[1].get("shards") if found else None) or world.size
    check_batch(wanted.global_batch, shards)
    plan = _plan(wanted, shards)
    check_batch_norm(model, world.size, shards, plan)
    facts = {
        "model": describe_model(module),
        "seed": seed,
        "global_batch": wanted.global_batch,
        "shards": shards,
        "shuffle": options.shuffle,
        "drop_last": options.drop_last,
        "dataset_size": None if plan is None else plan.samples,
        "workers": world.size,
        "optimizer": type(wanted.optimizer).__name__,
        "scheduler": None if wanted.scheduler is None else type(wanted.scheduler).__name__,
        "versions": versions(),
    }
    saving.refuse_other_run(facts, found[1] if found else None)
    watching = Watching(options, folder, world.rank)
    agreed = {**facts, **to_agree_on(wanted), "trace_step": watching.trace_step}
    _refuse_different_facts(group, agreed, words)
    if saving.is_on:
        state.check_savable()
    with ExitStack() as undo:
        undo.callback(watching.end)
        watching.start_timeline()
        ddp = DistributedDataParallel(model, process_group=group, forward_sync_buffers=False)
        position, sums = state.give_back(found[0]) if found else (Position(), {})
        undo.pop_all()
    pin_memory = device.type == "cuda" if options.pin_memory is None else options.pin_memory
    loading = loading_options(
        workers=wanted.workers,
        pin_memory=pin_memory,
        prefetch=options.prefetch,
        lifeline=(lifeline := Lifeline()),
    )
    info = describe(wanted, folder, world, plan, facts=facts, module=module, device=device)
    record = Record(folder, world.rank, options.progress, info)
    metrics = Metrics(record.step_event)
    if world.rank == 0:
        metrics.epoch = sums
    passes = min(world.size, shards) if options.merge_shards else shards
    generators = Generators(device)
    generators.seed(derive(seed, "between", position.step))
    shop = Workshop(
        model=ddp,
        module=module,
        device=device,
        size=world.size,
        seed=seed,
        shards=shards,
        loader=_loader(wanted, group, words, plan, shards, loading),
        update=update,
        buffers=Buffers(module, group, words),
        finite=FiniteCheck(
            named, mode=options.check_finite, group=group, device=device, word_device=words
        ),
        generators=generators,
        metrics=metrics,
        noise=_noise_meter(module, options) if passes > 1 else None,
        recorder=_recorder(wanted, folder, watching, ddp, plan, record),
    )
    watching.note_progress(position.step, None if plan is None else plan.steps)
    lines = opening_lines(world, device, shards, plan, position)
    if options.noise_every and passes == 1:
        lines.append(NO_NOISE)
    return Parts(
        world=world,
        group=group,
        word_device=words,
        dataset=wanted.dataset,
        pin_memory=pin_memory,
        lifeline=lifeline,
        shop=shop,
        state=state,
        saving=saving,
        facts=facts,
        record=record,
        vote=Vote(group, words),
        watching=watching,
        position=position,
        lines=[*lines, *watching.lines],
    )


def _open_folder(path: str | os.PathLike[str] | None, rank: int) -> RunFolder | None:
    if path is None:
        return None
    folder = RunFolder(path)
    try:
        folder.create()
    except OSError as error:
        raise UsageError(
            f"Rank {rank} cannot make the run folder {folder.path}: {error}.",
            advice="Choose a folder that this user may write to.",
        ) from error
    return folder


def _plan(wanted: Wanted, shards: int) -> Plan | None:
    """The plan; None for a dataset whose samples cannot be asked for by number."""
    dataset = wanted.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__"):
            raise UsageError(
                f"A {type(dataset).__name__} is no dataset.",
                advice="Pass an object with __len__ and __getitem__, or an iterable one.",
            )
        return None
    if not isinstance(dataset, Sized):
        raise UsageError(
            f"The dataset is a {type(dataset).__name__}, which has no length.",
            advice="Give it __len__, or make it an IterableDataset.",
        )
    return Plan(
        samples=len(dataset),
        global_batch=wanted.global_batch,
        shards=shards,
        epochs=wanted.epochs,
        drop_last=wanted.options.drop_last,
    )


def _loader(
    wanted: Wanted,
    group: Any,
    word_device: torch.device,
    plan: Plan | None,
    shards: int,
    loading: dict[str, Any],
) -> MapLoader | StreamLoader:
    options = wanted.options
    both: dict[str, Any] = {"seed": wanted.seed, "collate_fn": options.collate_fn}
    both |= {"loading": loading}
    if plan is None:
        return StreamLoader(
            wanted.dataset,
            group=group,
            word_device=word_device,
            global_batch=wanted.global_batch,
            shards=shards,
            epochs=wanted.epochs,
            drop_last=options.drop_last,
            **both,
        )
    return MapLoader(
        wanted.dataset,
        plan,
        rank=group.rank(),
        size=group.size(),
        shuffle=options.shuffle,
        merge_shards=options.merge_shards,
        **both,
    )


def _noise_meter(module: nn.Module, options: RunOptions) -> NoiseMeter | None:
    if not options.noise_every:
        return None
    return NoiseMeter(module.parameters(), every=options.noise_every)


def _recorder(
    wanted: Wanted,
    folder: RunFolder | None,
    watching: Watching,
    model: DistributedDataParallel,
    plan: Plan | None,
    record: Record,
) -> StepRecorder | None:
    if folder is None or not watching.trace_step:
        return None
    return StepRecorder(
        watching.trace_step,
        folder,
        model,
        wanted.optimizer,
        None if plan is None else wanted.dataset,
        say=record.message,
    )


def _refuse_different_facts(group: Any, facts: dict[str, Any], words: torch.device) -> None:
    """All workers must have been started with the same arguments."""
    if group.size() == 1:
        return
    everyone = comm.exchange(group, facts, words, "Comparing the runs")
    for rank, theirs in enumerate(everyone):
        for key, value in everyone[0].items():
            if theirs[key] != value:
                raise DesyncError(
                    "The workers were started with different arguments.",
                    f"First difference: {key} is {value!r} on rank 0, {theirs[key]!r} on rank "
                    f"{rank}.",
                    "Pass the same to Run on every worker.",
                )
