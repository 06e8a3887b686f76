"""What every step of a run works with, put together once: who computes, loads, checks, commits."""

from __future__ import annotations

import atexit
import platform
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import paceline
from paceline import comm, env
from paceline.comm.membership import Membership
from paceline.comm.world import World, current_world, init_process_group
from paceline.ddp import DDPOptions, DistributedDataParallel
from paceline.ddp.wrapper import Wrapper, bare
from paceline.errors import DesyncError, UsageError
from paceline.observe.run_folder import RunFolder, RunInfo
from paceline.policy import NoiseMeter
from paceline.run.buffers import Buffers
from paceline.run.config import RunConfig, opening_lines
from paceline.run.loader import MapLoader
from paceline.run.metrics import Metrics
from paceline.run.plan import Generators, Plan, Position, check_batch
from paceline.run.sinks import FolderSink, Sink, Sinks, TerminalSink
from paceline.run.state import RunState, Saving, describe_model
from paceline.run.stop import LoaderSignals, StopRequest, Vote
from paceline.run.stream import StreamLoader
from paceline.run.watching import StepRecorder, Watching
from paceline.update import FiniteCheck, Update, make_update

NO_NOISE = (
    "The gradient noise scale cannot be measured: the whole batch goes through the model at once, "
    "so there is nothing to compare. Pass shards=2 or more to a new run."
)


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class StepContext:
    """The parts of a run on one worker."""

    config: RunConfig
    world: World
    membership: Membership
    size: int
    """Of the current generation, as a plain number because every step asks for it."""
    word_device: torch.device
    """Where small messages travel."""
    device: torch.device
    """The model's."""
    shards: int
    model: DistributedDataParallel
    module: nn.Module
    """The model without wrappers."""
    loader: MapLoader | StreamLoader
    loading: dict[str, Any]
    """What a `DataLoader` of this run is told about how to load."""
    loader_signals: LoaderSignals
    update: Update
    buffers: Buffers | None
    generators: Generators
    metrics: Metrics
    noise: NoiseMeter | None
    recorder: StepRecorder | None
    stop: StopRequest
    vote: Vote
    sinks: Sinks
    state: RunState
    saving: Saving
    watching: Watching
    facts: dict[str, Any]
    """What identifies the run, and what else a checkpoint says of it."""
    info: RunInfo
    position: Position
    """Where the run begins."""
    lines: list[str]
    """What is said when the loop begins."""

    def on_generation(self) -> None:
        self.size = self.membership.size


def build(config: RunConfig) -> StepContext:
    """Check the arguments, find a checkpoint, wrap the model and load."""
    options = config.options
    world = config.world or find_world()
    membership = Membership(world.group)
    model = _unwrapped(config.model)
    module = bare(model)
    named = list(module.named_parameters())
    device = named[0][1].device if named else torch.device("cpu")
    words = _word_device(world.group, device)
    finite = None
    if options.check_finite != "off":
        is_complete = options.check_finite == "all"
        finite = FiniteCheck(
            named, is_complete=is_complete, membership=membership, word_device=words
        )
    update = make_update(
        named,
        config.optimizer,
        scheduler=config.scheduler,
        scaler=config.scaler,
        clip_norm=options.clip_norm,
        finite=finite,
    )
    state = RunState(module, update, config.state)
    folder = _open_folder(config, world.rank)
    saving = Saving(folder, options, membership, words)
    found = saving.find()
    shards = config.shards or (found[1].get("shards") if found else None) or world.size
    check_batch(config.global_batch, shards)
    plan = config.plan(shards)
    _check_batch_norm(model, world.size, shards, plan)
    facts = _facts(config, module, plan, shards=shards, workers=world.size)
    saving.refuse_other_run(facts, found[1] if found else None)
    watching = Watching(options, folder, world.rank)
    agreed = {**facts, **config.to_agree_on(), "trace_step": watching.trace_step}
    _refuse_different_facts(membership, agreed, words)
    if saving.is_on:
        state.check_savable()
    with ExitStack() as undo:
        undo.callback(watching.end)
        watching.start_timeline()
        ddp = _wrap(model, config, membership)
        position, sums = state.give_back(found[0]) if found else (Position(), {})
        undo.pop_all()
    info = config.describe(folder, plan, module, facts)
    sinks = _make_sinks(config, folder, world.rank, info)
    metrics = Metrics(lambda facts, sums: sinks.tell("step", facts._replace(sums=sums)))
    if world.rank == 0:
        metrics.epoch = sums
    generators = Generators(device)
    generators.seed(config.seed, "between", position.step)
    signals = LoaderSignals()
    loading = loading_options(config, device, config.workers, signals)
    buffers = (
        Buffers(module, membership, words) if next(module.buffers(), None) is not None else None
    )
    stop = StopRequest(sinks.say)
    passes = min(world.size, shards) if options.merge_shards else shards
    noise = None
    if options.noise_every and passes > 1:
        noise = NoiseMeter(module.parameters(), every=options.noise_every)
    recorder = None
    if folder is not None and watching.trace_step:
        dataset = None if plan is None else config.dataset
        recorder = StepRecorder(watching.trace_step, folder, ddp, config.optimizer, dataset, sinks)
    watching.note_progress(position.step, None if plan is None else plan.steps)
    lines = opening_lines(world, device, shards, plan, position)
    if options.noise_every and noise is None:
        lines.append(NO_NOISE)
    context = StepContext(
        config=config,
        world=world,
        membership=membership,
        size=world.size,
        word_device=words,
        device=device,
        shards=shards,
        model=ddp,
        module=module,
        loader=_make_loader(config, plan, membership, words, shards, loading),
        loading=loading,
        loader_signals=signals,
        update=update,
        buffers=buffers,
        generators=generators,
        metrics=metrics,
        noise=noise,
        recorder=recorder,
        stop=stop,
        vote=Vote(membership, words, stop, buffers),
        sinks=sinks,
        state=state,
        saving=saving,
        watching=watching,
        facts=facts,
        info=info,
        position=position,
        lines=[*lines, *watching.lines],
    )
    membership.follow(context.on_generation)
    return context


def find_world() -> World:
    """torch's default group if there is one, else what a launcher says, else this one process."""
    if dist.is_available() and dist.is_initialized():
        return current_world()
    if env.read_placement() is None:
        # A group of its own, so that being alone leaves no trace in torch.
        return World(rank=0, size=1, group=dist.ProcessGroup(HashStore(), 0, 1))
    world = init_process_group()
    atexit.register(world.close)
    return world


def loading_options(
    config: RunConfig, device: torch.device, workers: int, signals: LoaderSignals
) -> dict[str, Any]:
    """The arguments of a `DataLoader` that say how it loads, and not what."""
    pin = config.options.pin_memory
    loading: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": device.type == "cuda" if pin is None else pin,
    }
    if workers > 0:
        loading |= {"prefetch_factor": config.options.prefetch, "worker_init_fn": signals.on_start}
    return loading


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model without wrappers that a run replaces by its own; our engine's stays."""
    while isinstance(model, Wrapper | nn.DataParallel):
        if isinstance(model, DistributedDataParallel):
            break
        model = model.module
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "The model is wrapped in torch's DistributedDataParallel, which would average its "
            "gradients a second time.",
            advice="Pass the module inside: a run wraps it itself.",
        )
    return model


def _wrap(model: nn.Module, config: RunConfig, membership: Membership) -> DistributedDataParallel:
    """The model as the engine keeps it equal; one that is wrapped keeps its wrapper and options."""
    if not isinstance(model, DistributedDataParallel):
        return DistributedDataParallel(
            model,
            process_group=membership.group,
            forward_sync_buffers=False,
            options=config.ddp or DDPOptions(),
        )
    if config.ddp is not None:
        raise UsageError(
            "The model is wrapped in DistributedDataParallel with options of its own, and ddp= has "
            "others.",
            advice="Pass the module inside with ddp=, or the wrapped one without.",
        )
    if model.process_group is not membership.group:
        raise UsageError(
            "The model is wrapped in DistributedDataParallel over another process group than the "
            "run's.",
            advice="Pass the module inside: a run wraps it itself.",
        )
    model.broadcast_buffers = False  # a run looks after buffers shard by shard
    return model


def _open_folder(config: RunConfig, rank: int) -> RunFolder | None:
    if config.folder is None:
        return None
    folder = RunFolder(config.folder)
    try:
        folder.create()
    except OSError as error:
        raise UsageError(
            f"Rank {rank} cannot make the run folder {folder.path}: {error}.",
            advice="Choose a folder that this user may write to.",
        ) from error
    return folder


def _facts(
    config: RunConfig, module: nn.Module, plan: Plan | None, *, shards: int, workers: int
) -> dict[str, Any]:
    scheduler = config.scheduler
    return {
        "model": describe_model(module),
        "seed": config.seed,
        "global_batch": config.global_batch,
        "shards": shards,
        "shuffle": config.options.shuffle,
        "drop_last": config.options.drop_last,
        "dataset_size": None if plan is None else plan.samples,
        "workers": workers,
        "optimizer": type(config.optimizer).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "versions": {
            "paceline": paceline.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def _make_sinks(config: RunConfig, folder: RunFolder | None, rank: int, info: RunInfo) -> Sinks:
    sinks: list[Sink] = [] if folder is None else [FolderSink(folder, rank, info)]
    if rank != 0:
        return Sinks(sinks, None)
    return Sinks([*sinks, *config.sinks], TerminalSink(config.options.progress))


def _make_loader(
    config: RunConfig,
    plan: Plan | None,
    membership: Membership,
    word_device: torch.device,
    shards: int,
    loading: dict[str, Any],
) -> MapLoader | StreamLoader:
    if plan is not None:
        return MapLoader(
            config.dataset, plan, membership, collate_fn=config.collate_fn, loading=loading
        )
    return StreamLoader(
        config.dataset,
        membership,
        seed=config.seed,
        word_device=word_device,
        global_batch=config.global_batch,
        shards=shards,
        epochs=config.epochs,
        drop_last=config.options.drop_last,
        collate_fn=config.collate_fn,
        loading=loading,
    )


def _check_batch_norm(model: nn.Module, size: int, shards: int, plan: Plan | None) -> None:
    """Refuse layers that talk to all workers in every pass where some would not be there."""
    if size == 1 or not any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        return
    advice = "Use shards equal to the number of workers, or BatchNorm, whose statistics are those "
    advice += "of a shard at any number of workers."
    if shards != size:
        raise UsageError(
            f"SyncBatchNorm needs one shard per worker, not {shards} shards on {size} workers.",
            advice=advice,
        )
    if plan is None or plan.shortest_batch < size:
        raise UsageError(
            "SyncBatchNorm needs samples on every worker, and the last batch of an epoch has too "
            "few.",
            advice="Pass drop_last=True in RunOptions, or choose another global_batch.",
        )


def _refuse_different_facts(
    membership: Membership, facts: dict[str, Any], words: torch.device
) -> None:
    """All workers must have been started with the same arguments."""
    if membership.size == 1:
        return
    everyone = comm.exchange(membership.group, facts, words, "Comparing the runs")
    for rank, theirs in enumerate(everyone):
        for key, value in everyone[0].items():
            if theirs[key] != value:
                raise DesyncError(
                    "The workers were started with different arguments.",
                    f"First difference: {key} is {value!r} on rank 0, {theirs[key]!r} on rank "
                    f"{rank}.",
                    "Pass the same to Run on every worker.",
                )


def _word_device(group: Any, device: torch.device) -> torch.device:
    """Where small messages of the group travel: on the host where it can, so that nobody waits."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return device
    return torch.device("cpu")
