"""What every step of a run works with, put together once: who computes, loads, checks, commits."""

from __future__ import annotations

import atexit
import json
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from paceline import comm, env
from paceline.comm import tree
from paceline.comm.collectives import gather_bytes
from paceline.comm.membership import Membership, NoGroup
from paceline.comm.sockets import CONNECTIONS
from paceline.comm.world import World, connect, current_world, init_process_group
from paceline.data.files import Files
from paceline.data.foreign import Generators
from paceline.ddp import DDPOptions, DistributedDataParallel
from paceline.ddp.wrapper import Wrapper, bare
from paceline.errors import DesyncError, UsageError
from paceline.observe.run_folder import RunFolder, last_recorded_step
from paceline.observe.units import count_text, name_steps
from paceline.policy import NoiseMeter
from paceline.run.buffers import Buffers
from paceline.run.config import RunConfig
from paceline.run.continuity import Continuity
from paceline.run.loader import MapLoader, StreamLoader
from paceline.run.metrics import Metrics
from paceline.run.own_loader import OwnLoader, find_global_batch, length_of, make_own_loader
from paceline.run.plan import Plan, Position, check_batch
from paceline.run.precision import Precision
from paceline.run.rating import Rating
from paceline.run.sinks import FolderSink, Sink, Sinks, TerminalSink
from paceline.run.state import RunState, Saving
from paceline.run.stop import LoaderSignals, StopRequest, Vote
from paceline.run.watching import Watching
from paceline.survive.groups import Groups, can_form_anew
from paceline.survive.link import Link
from paceline.survive.member import Survival
from paceline.update import (
    FiniteCheck,
    WeightAverage,
    choose_update,
    describe_sharing,
    is_worth_gathering,
    make_update,
    shard_update,
    step_in_pieces,
)

_REPEATED = (
    "Epoch {} begins anew: its batches were those of the loaders of {}, so nobody knows which "
    "samples the {} steps so far had. They are trained on again."
)
GROUP_TIMEOUT = timedelta(minutes=30)


class StepContext:
    """The parts of a run on one worker."""

    def __init__(self, config: RunConfig) -> None:
        """Check the arguments, find a checkpoint, wrap the model and load."""
        self.config, options = config, config.options
        self.world = world = config.world or find_world()
        self.membership = members = Membership.of(world.group)
        if config.loader is not None:
            config.loader = make_own_loader(config.loader, world)
            if options.steps_per_epoch is None:
                length_of(config.loader)
            config.global_batch = config.global_batch or find_global_batch(
                config.loader, world.size
            )
        link = None
        is_formed_anew = members.group is dist.group.WORLD and can_form_anew(dist.get_backend())
        can_survive = is_formed_anew and env.read_survival() is not None
        can_survive = can_survive and not _has_sync_batch_norm(config.model)
        can_survive = can_survive and config.loader is None  # which cannot be dealt anew
        shares_out = choose_update(
            options.update, config.optimizer, size=members.size, can_survive=can_survive
        )
        if (found := Link.find()) is not None:
            link = found if can_survive and (config.is_saved or not shares_out) else None
            found.tell("building", survives=link is not None)
        self.is_replacement = link is not None and link.is_replacement
        """Whether this worker joins a training that is under way."""
        if self.is_replacement:
            members.move_on(NoGroup())
        self.size = members.size
        """Of the current generation, as a plain number because every step asks for it."""
        model = _unwrapped(config.model)
        self.module = module = bare(model)
        named = list(module.named_parameters())
        self.device = device = named[0][1].device if named else torch.device("cpu")
        members.word_device = comm.word_device(world.group, device)
        params = [param for _, param in named]
        self.precision = Precision(options.precision, device, params)
        finite = None
        if options.check_finite != "off":
            finite = FiniteCheck(
                named, members, is_complete=options.check_finite == "all", is_saved=config.is_saved
            )
        self.average = None if options.ema is None else WeightAverage(module, options.ema)
        self.update = make_update(
            params,
            config.optimizer,
            scheduler=config.scheduler,
            scaler=self.precision.find_scaler(config.scaler),
            clip_norm=options.clip_norm,
            finite=finite,
            average=self.average,
        )
        self.rating = Rating(options, config.scheduler, self.update)
        self.state = RunState(module, self.update, self.rating, config.state or {})
        folder = config.open_folder(world.rank)
        self.saving = Saving(folder, config, members)
        state, before = self.saving.find() or (None, None)
        known = (before or {}) if link is None or not link.is_replacement else link.facts
        self.shards = shards = config.shards or known.get("shards") or world.size
        check_batch(config.global_batch, shards)
        if isinstance(config.dataset, Files) and not self.is_replacement:
            _count_together(config.dataset, members)
        plan = config.plan(shards, known.get("order"))
        workers = known["workers"] if self.is_replacement else world.size
        _check_batch_norm(model, workers, shards, plan)
        self.facts = config.facts(module, plan, shards=shards, workers=workers)
        """What identifies the run, and what else a checkpoint says of it."""
        self.saving.refuse_other_run(self.facts, before)
        self.watching = Watching(config, folder)
        agreed = {**self.facts, **config.to_agree_on(), "trace_step": self.watching.trace_step}
        _refuse_different_facts(members, agreed)
        if link is not None and link.is_replacement:
            ours = json.loads(json.dumps(agreed))
            _refuse_difference(link.facts, ours, "in the run", "in a worker that would join it")
        if self.saving.is_on:
            self.state.check_savable()
        with ExitStack() as undo:
            undo.callback(self.watching.end)
            self.watching.start_timeline(world.rank)
            self.model = _wrap(model, config.ddp, members)
            if shares_out and options.update == "auto":
                shares_out = is_worth_gathering(self.model)
            if shares_out:
                shard_update(self.model, config.optimizer)
            elif options.update == "auto":
                step_in_pieces(config.optimizer)
            position, sums = self.state.give_back(state) if state else (Position(), {})
            undo.pop_all()
        other_size = config.loader is not None and (before or {}).get("workers") != world.size
        repeated = position.step_of_epoch if other_size else 0
        if repeated:
            position, sums = replace(position, step_of_epoch=0), {}
        self.position = position
        """How far the run is."""
        self.agreed = agreed
        self.stopping = 0
        """What the workers have agreed to stop for: a signal, `BY_SCRIPT` or `BY_RATING`."""
        self.has_left = False
        """Whether this worker alone has stopped, and the others continue."""
        self.info = config.describe(folder, plan, module, self.facts)
        sinks: list[Sink] = []
        if folder is not None:
            sinks.append(FolderSink(folder, world.rank, self.info, members))
        terminal = None
        if members.leads:
            sinks += config.sinks
        if members.leads or link is not None:
            terminal = TerminalSink(options.progress, folder, draws=members.leads)
        self.sinks = Sinks(sinks, terminal)
        self.metrics = Metrics(self.sinks.tell_step)
        if members.leads:
            self.metrics.epoch = sums
        self.generators = Generators(device)
        self.generators.seed(config.seed, "between", position.step)
        self.loader_signals = LoaderSignals()
        loading = self.loading(config.workers)
        self.loader: MapLoader | StreamLoader | OwnLoader
        if config.loader is not None:
            self.loader = OwnLoader(
                config.loader,
                members,
                epochs=config.epochs,
                seed=config.seed,
                steps_per_epoch=options.steps_per_epoch,
                states=(state or {}).get("loader"),
            )
        elif plan is None:
            self.loader = StreamLoader(config, shards, members, loading)
        else:
            self.loader = MapLoader(config, plan, members, loading)
        has_buffers = next(module.buffers(), None) is not None
        self.buffers = Buffers(module, members) if has_buffers else None
        self.stop = StopRequest(self.sinks.say)
        self.stop.hears_of_failures = world.size == 1 or env.hears_of_failures()
        self.step_note = env.open_step_note()
        self.vote = Vote(members, self.stop, self.buffers)
        self.vote.is_asked_to_record = self.watching.is_asked
        self.noise: NoiseMeter | None = None
        if options.noise_every and config.passes(shards, world.size) > 1:
            self.noise = NoiseMeter(module.parameters(), every=options.noise_every)
        self.watching.note_progress(position.step, None if plan is None else plan.steps)
        self.lines = config.opening_lines(world, device, shards, plan, position)
        """What is said when the loop begins."""
        self.shares_out = shares_out
        if shares_out:
            self.lines += describe_sharing(
                config.optimizer, world.size, can_survive=can_survive, is_saved=config.is_saved
            )
        if repeated:
            epoch, workers = position.epoch + 1, (before or {})["workers"]
            self.lines.append(_REPEATED.format(epoch, count_text(workers, "worker"), repeated))
        self.lines += self.watching.lines
        self.lines += _lines_on_repeated_steps(folder, position.step)
        members.follow(self.on_generation)
        self.survival: Survival | None = None
        self.continuity = Continuity(self)
        if link is not None:
            place = env.read_placement()
            assert place is not None
            store, backend = connect(place, None), link.backend or dist.get_backend()
            groups = Groups(store, CONNECTIONS, backend, GROUP_TIMEOUT)
            comm.refuse_aborted(lambda: groups.is_broken)
            self.survival = Survival(link, members, groups, self.continuity.heal)

    def to_device(self, batch: Any) -> Any:
        """The batch with its tensors on the model's device."""
        return tree.map_tensors(lambda t: t.to(self.device, non_blocking=True), batch)

    def on_generation(self) -> None:
        self.size = self.membership.size
        self.watching.on_generation()
        if not isinstance(self.membership.group, NoGroup):
            self.membership.word_device = comm.word_device(self.membership.group, self.device)

    def take_over(self) -> None:
        """From now on this worker speaks, draws and writes for all."""
        self.sinks.take_over(self.config.sinks, self.info, self.position.step, [])

    def loading(self, workers: int) -> dict[str, Any]:
        """The arguments of a `DataLoader` that say how it loads, and not what."""
        options = self.config.options
        pin = self.device.type == "cuda" if options.pin_memory is None else options.pin_memory
        loading: dict[str, Any] = {"num_workers": workers, "pin_memory": pin}
        if workers > 0:
            loading["prefetch_factor"] = options.prefetch
            loading["worker_init_fn"] = self.loader_signals.on_start
        return loading


def find_world() -> World:
    """torch's default group if there is one, else what a launcher says, else this one process."""
    if dist.is_available() and dist.is_initialized():
        return current_world()
    if env.read_placement() is None:
        # A group of its own, so that being alone leaves no trace in torch.
        return World(rank=0, size=1, group=dist.ProcessGroup(HashStore(), 0, 1))
    if env.read_survival() is not None:
        env.leave_nccl_to_us()
    world = init_process_group()
    atexit.register(world.close)
    return world


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model without wrappers that a run replaces by its own; our engine's stays."""
    while isinstance(model, Wrapper | nn.DataParallel):
        if isinstance(model, DistributedDataParallel):
            return model
        model = model.module
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "The model is wrapped in torch's DistributedDataParallel, which would average its "
            "gradients a second time.",
            advice="Pass the module inside: a run wraps it itself.",
        )
    return model


def _wrap(
    model: nn.Module, options: DDPOptions | None, members: Membership
) -> DistributedDataParallel:
    """The model as the engine keeps it equal; one that is wrapped keeps its wrapper and options."""
    if not isinstance(model, DistributedDataParallel):
        options = options or DDPOptions()
        return DistributedDataParallel(
            model, process_group=members, forward_sync_buffers=False, options=options
        )
    if options is not None:
        raise UsageError(
            "The model is wrapped in DistributedDataParallel with options of its own, and ddp= has "
            "others.",
            advice="Pass the module inside with ddp=, or the wrapped one without.",
        )
    if model.membership is not members:
        raise UsageError(
            "The model is wrapped in DistributedDataParallel over another process group than the "
            "run's.",
            advice="Pass the module inside: a run wraps it itself.",
        )
    model.broadcast_buffers = False  # a run looks after buffers shard by shard
    return model


def _lines_on_repeated_steps(folder: RunFolder | None, step: int) -> list[str]:
    """Which steps are done again, because the run ended before they were in a checkpoint."""
    last = 0 if folder is None else last_recorded_step(folder)
    if last > step:
        they = "it was" if last == step + 1 else "they were"
        which = name_steps(step + 1, last).capitalize()
        return [f"{which} done again: the last start ended before {they} saved."]
    if folder is None and env.read_attempt() > 0:
        return ["All steps are done again: without a folder nothing was saved before the restart."]
    return []


def _has_sync_batch_norm(model: nn.Module) -> bool:
    """Whether layers need every worker in every pass, and so exactly one shard on each."""
    return any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())


def _check_batch_norm(model: nn.Module, size: int, shards: int, plan: Plan | None) -> None:
    """Refuse layers that talk to all workers in every pass where some would not be there."""
    if size == 1 or not _has_sync_batch_norm(model):
        return
    if shards != size:
        raise UsageError(
            f"SyncBatchNorm needs one shard per worker, not {shards} shards on {size} workers.",
            advice="Use shards equal to the number of workers, or BatchNorm, whose statistics are "
            "those of a shard at any number of workers.",
        )
    if plan is None or plan.shortest_batch < size:
        raise UsageError(
            "SyncBatchNorm needs samples on every worker, and the last batch of an epoch has too "
            "few.",
            advice="Pass drop_last=True in RunOptions, or choose another global_batch.",
        )


def _count_together(dataset: Files, members: Membership) -> None:
    """Every worker counts the samples of some files, and tells the others."""
    if dataset.is_counted or members.size == 1:
        return
    mine, problem = [], None
    try:
        mine = dataset.count(range(members.rank, len(dataset.files), members.size))
    except Exception as error:
        problem = error
    word = [mine, None if problem is None else str(problem)]
    sent = gather_bytes(
        members.group, json.dumps(word).encode(), members.word_device, "Counting samples"
    )
    everyone = [json.loads(each) for each in sent]
    for rank, (_, why) in enumerate(everyone):
        if why is not None:
            raise problem or UsageError(f"Rank {rank} could not count its files: {why}")
    counts = [0] * len(dataset.files)
    for rank, (theirs, _) in enumerate(everyone):
        counts[rank :: members.size] = theirs
    dataset.counts = tuple(counts)


def _refuse_different_facts(members: Membership, facts: dict[str, Any]) -> None:
    """All workers must have been started with the same arguments."""
    if members.size == 1:
        return
    everyone = comm.exchange(members.group, facts, members.word_device, "Comparing the runs")
    for rank, theirs in enumerate(everyone):
        _refuse_difference(everyone[0], theirs, "on rank 0", f"on rank {rank}")


def _refuse_difference(
    facts: dict[str, Any], others: dict[str, Any], where: str, elsewhere: str
) -> None:
    for key, value in facts.items():
        if others[key] != value:
            raise DesyncError(
                "The workers were started with different arguments.",
                f"First difference: {key} is {value!r} {where}, {others[key]!r} {elsewhere}.",
                "Pass the same to Run on every worker.",
            )
