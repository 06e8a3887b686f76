"""A run is put together: who computes, loads, checks, commits and tells. `parts` is the result."""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import env
from paceline.data import Files, Generators, Plan, Position
from paceline.ddp import (
    DEFAULT_OPTIONS,
    Audit,
    DistributedDataParallel,
    Engine,
    OrderedEngine,
    Wrapper,
    bare,
    check_engine,
)
from paceline.env import Launched
from paceline.errors import DesyncError, UsageError
from paceline.files import RunFolder, RunInfo, last_recorded_step
from paceline.group import (
    Link,
    Membership,
    World,
    current_world,
    exchange,
    init_process_group,
    runs_ahead,
    word_device,
)
from paceline.policy import NoiseMeter
from paceline.run import broadcast, islands
from paceline.run.buffers import Buffers, check_sync_norm
from paceline.run.code import refuse_other_code
from paceline.run.config import RunConfig
from paceline.run.fit import make_fit
from paceline.run.loader import (
    MapLoader,
    StreamLoader,
    loading,
    make_plan,
    refuse_other_samples,
    sum_up_samples,
)
from paceline.run.loader_signals import LoaderSignals
from paceline.run.member import can_form_anew
from paceline.run.metrics import Metrics
from paceline.run.models import ByName, TurnEngine
from paceline.run.objects import StateObjects
from paceline.run.parts import (
    Dealing,
    Feed,
    Loader,
    Outlets,
    Place,
    RunParts,
    RunProgress,
    Training,
    opening_lines,
)
from paceline.run.recovery import Exchanges, Survival
from paceline.run.resume import Resume
from paceline.run.same_bits import refuse_other_arithmetic
from paceline.run.state import RunState, Saving
from paceline.run.stop import StopRequest, Vote
from paceline.run.updates import Precision, Rating, make_update
from paceline.run.user_loader import UserLoader, find_global_batch, length_of, make_user_loader
from paceline.run.watching import Watching
from paceline.telemetry import (
    FolderSink,
    Sink,
    Sinks,
    TerminalSink,
    count_text,
    name_steps,
    note_waits,
)
from paceline.torch_private import HashStore
from paceline.update import (
    Update,
    WeightAverage,
    WholeUpdate,
    can_be_kept,
    describe_sharing,
    is_worth_gathering,
    is_worth_sharing,
    shard_update,
    step_in_pieces,
)

_REPEATED = (
    "Epoch {} begins anew: its batches were those of the loaders of {}, so it is not known which "
    "samples the {} steps so far had. They are trained on again."
)
SAMPLES = "samples"
"""The fact that is compared as `loader` says, and not for equality."""


def build_run(config: RunConfig) -> RunParts:
    """Check the arguments, find a checkpoint, wrap the model and load."""
    options = config.options
    launched = env.read_launched()
    world = config.world or find_world(launched)
    members = Membership.of(world.group)
    if config.loader is not None:
        _take_loader(config, world)
    island = None
    if options.islands is not None or launched.island:
        island = islands.find_own(config)
    link, shares_out, can_survive = _find_link(config, members, launched)
    is_replacement = link is not None and link.is_replacement
    if is_replacement:
        members.leave()  # alone, and without rank 0's duties, until it is let in
    model = _unwrapped(config.model)
    module = bare(model)
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    place = Place(world, members, device, is_replacement)
    members.word_device = word_device(world.group, device)
    precision = Precision(options.precision, device, list(module.parameters()))
    average = None if options.ema is None else WeightAverage(module, options.ema)
    make: Callable[..., Update] = WholeUpdate
    if island is not None and options.islands is not None:
        make = partial(islands.OuterUpdate, module, options.islands, island)
    update = make_update(config, module, precision, members, average, make)
    rating = Rating(options, config.schedulers.values(), update)
    weights = None if config.models is None else ByName(dict(config.models.modules.items()))
    fit = make_fit(config, launched.fit_folder, module, members, device)
    state = RunState(module, update, rating, fit, config.state or {}, weights)
    folder = None
    if config.folder is not None:
        folder = config.open_folder(config.folder, world.rank)
    saving = Saving(folder, config, members)
    saved, before = saving.find() or (None, None)
    known = link.facts if link is not None and is_replacement else before or {}
    shards = config.shards or known.get("shards") or world.size
    if isinstance(config.dataset, Files) and not is_replacement:
        # A replacement counts alone: the others are in the middle of a step.
        _count_together(config.dataset, members)
    audit = Audit(share=options.audit, seed=config.seed, shards=shards, replaces=link is not None)
    plan = make_plan(config, shards, known.get("order"), audit.seconds_of)
    plan = plan if island is None else islands.deal(plan, island)
    workers = known["workers"] if is_replacement else world.size
    if config.has_sync_norm:
        check_sync_norm(workers, shards, plan)
    facts = config.facts(module, plan, shards=shards, workers=workers)
    if island is not None:
        facts["islands"] = island.count
        # Not before: the plan and the facts are made with the seed that all islands share.
        config.seed = island.seed(config.seed)
    agreed = {**facts, **config.to_agree_on()}
    saving.identify(facts, before)
    watching = Watching(config, folder, members)
    agreed["trace_step"] = watching.trace_step
    if plan is not None and plan.lanes is None and (members.size > 1 or link is not None):
        note_waits(members, device)  # a dataset may hang where it is read, as in every step
        agreed[SAMPLES] = facts[SAMPLES] = sum_up_samples(
            config.dataset, plan.samples, config.seed, config.loader_workers
        )
    _refuse_different_facts(members, agreed)
    if link is not None and is_replacement:
        # The link's facts have come as JSON, in which a tuple is a list.
        ours = json.loads(json.dumps(agreed))
        _refuse_difference(link.facts, ours, "in the run", "in a worker that would join it")
        refuse_other_code(link.code)
    if saving.is_on:
        state.check_savable()
    if options.noise_every:  # whatever the shards are now, all workers exchange it
        state.noise = NoiseMeter(module.parameters(), every=options.noise_every)
    with ExitStack() as undo:
        undo.callback(watching.end)
        watching.start_timeline(world.rank)  # the engine looks whether there is one when it is made
        engine = _make_engine(model, config, place, shards, audit)
        if fit.is_on:
            fit.attach(engine)
        shares_out = _share_out(engine, config, shares_out, can_survive=can_survive)
        state.note_sharing(is_kept=shares_out and link is not None)
        resume = Resume(config)
        position, sums = state.load(saved) if saved else (Position(), {})
        if saved and not is_replacement:
            state.resume = resume.note_loaded(module)
        undo.pop_all()
    other_size = config.loader is not None and (before or {}).get("workers") != world.size
    repeated = position.step_of_epoch if other_size else 0
    if repeated:
        position, sums = replace(position, step_of_epoch=0), {}
    has_buffers = next(module.buffers(), None) is not None
    training = Training(
        engine,
        module,
        update,
        shares_out,
        precision,
        average,
        Buffers(module, members, is_ordered=bool(options.same_bits)) if has_buffers else None,
        state.noise,
        Generators(device),
        rating,
        state,
        audit,
        fit,
        StateObjects(config.state) if config.state else None,
    )
    training.generators.seed(config.seed, "between", position.step)
    signals = LoaderSignals()
    pins = runs_ahead(device) if options.pin_memory is None else options.pin_memory
    settings = partial(loading, pins, options.prefetch, signals)
    shortest_batch = math.inf if plan is None else plan.shortest_batch
    may_cut = _may_cut(config, plan)
    made = _make_loader(config, plan, shards, members, signals, settings, saved)
    feed = Feed(made, shortest_batch, signals, settings)
    watching.note(engine, position.step, None if plan is None else plan.steps)
    lines = opening_lines(config, world, device, shards, plan, position, may_cut=may_cut)
    if shares_out:
        lines += describe_sharing(
            engine, config.optimizer, can_survive=can_survive, is_saved=config.is_saved
        )
    if state.resume is not None:
        lines += resume.lines(facts.get(SAMPLES), (before or {}).get(SAMPLES))
    if repeated:
        count = count_text((before or {})["workers"], "worker")
        lines.append(_REPEATED.format(position.epoch + 1, count, repeated))
    if island is not None and options.islands is not None:
        lines += islands.describe(island, options.islands, before)
    lines += [*watching.lines, *_lines_on_repeated_steps(folder, position.step, launched)]
    info = config.describe(folder, plan, module, facts)
    sinks = _make_sinks(config, folder, info, place, link)
    metrics = Metrics(sinks.report_step, members)
    # The sums in a checkpoint are those of all workers: one of them continues with them.
    metrics.begin_at(position.epoch, sums if members.leads else {}, position.step)
    outlets = Outlets(sinks, metrics, saving, watching, info, lines)
    stop = StopRequest(sinks.say)
    stop.hears_of_failures = world.size == 1 or launched.hears_of_failures
    vote = Vote(members, stop)
    vote.is_asked_to_record = watching.is_asked
    progress = RunProgress(position, members.size, shards)
    parts = RunParts(
        config=config,
        place=place,
        training=training,
        feed=feed,
        outlets=outlets,
        progress=progress,
        dealing=Dealing(feed.loader, members, progress),
        exchanges=Exchanges(members),
        stop=stop,
        vote=vote,
        agreed=agreed,
        step_note=env.open_step_note(),
        may_cut=may_cut,
    )
    if link is not None:
        assert launched.place is not None
        parts.recover_with(Survival(link, launched.place, parts))
    if isinstance(update, islands.OuterUpdate):
        update.attach(parts, plan)
    return parts


def _may_cut(config: RunConfig, plan: Plan | None) -> bool:
    """Whether the shards may become more: not where they are the user's choice, or decide about
    which samples a batch has, about bits, or about what several models have each."""
    options, is_given = config.options, config.shards or config.loader is not None
    is_bound = options.same_bits or options.islands is not None or config.models is not None
    has_lanes = plan is not None and plan.lanes is not None
    return not (is_given or is_bound or has_lanes or config.has_sync_norm)


def _take_loader(config: RunConfig, world: World) -> None:
    """Make the user's loader for this worker, and learn what it says of itself."""
    config.loader = make_user_loader(config.loader, world)
    if config.options.steps_per_epoch is None:
        length_of(config.loader)
    config.global_batch = config.global_batch or find_global_batch(config.loader, world.size)


def _find_link(
    config: RunConfig, members: Membership, launched: Launched
) -> tuple[Link | None, bool, bool]:
    """The line to a launcher that keeps the run alive; whether the update is shared out; and
    whether the run could outlive a worker."""
    is_formed_anew = members.group is dist.group.WORLD and can_form_anew(dist.get_backend())
    can_survive = (
        is_formed_anew
        and launched.survives
        and not config.has_sync_norm
        and config.loader is None  # which cannot be dealt anew
    )
    shares_out = config.options.update == "sharded"
    word = None if config.options.same_bits else config.options.elementwise  # it is not about bits
    if config.options.update == "auto":
        shares_out = is_worth_sharing(
            config.optimizer, size=members.size, can_survive=can_survive, elementwise=word
        )
    found = Link.find()
    # A share that dies with its worker must be in kept memory, or in a checkpoint to go back to.
    goes_on = config.is_saved or not shares_out or can_be_kept(config.optimizer)
    link = found if can_survive and goes_on else None
    if found is not None:
        found.tell("building", survives=link is not None)
    return link, shares_out, can_survive


def _share_out(engine: Engine, config: RunConfig, shares_out: bool, *, can_survive: bool) -> bool:
    """Share the update out if it was asked for, or is faster; whether it is."""
    wanted = config.options.update
    if shares_out and wanted == "auto":
        shares_out = is_worth_gathering(engine, can_survive=can_survive)
    if shares_out:
        word = config.options.elementwise
        shard_update(engine, config.optimizer, elementwise=word)  # type: ignore[arg-type]
    elif wanted == "auto":
        step_in_pieces(config.optimizer)
    return shares_out


def _make_loader(
    config: RunConfig,
    plan: Plan | None,
    shards: int,
    members: Membership,
    signals: LoaderSignals,
    settings: Callable[[int], dict[str, Any]],
    saved: Any,
) -> Loader:
    if config.loader is not None:
        return UserLoader(
            config.loader,
            members,
            on_start=signals.on_start,
            epochs=config.epochs,
            seed=config.seed,
            steps_per_epoch=config.options.steps_per_epoch,
            states=(saved or {}).get("loader"),
        )
    if plan is None:
        return StreamLoader(config, shards, members, settings(config.loader_workers))
    return MapLoader(config, plan, members, settings(config.loader_workers))


def _make_sinks(
    config: RunConfig, folder: RunFolder | None, info: RunInfo, place: Place, link: Link | None
) -> Sinks:
    """Who is told on this worker; the lowest rank tells the user's own and draws."""
    members = place.membership
    sinks: list[Sink] = []
    if folder is not None:
        sinks.append(FolderSink(folder, place.world.rank, info, members))
    if members.leads:
        sinks += config.sinks
    terminal = None
    if members.leads or link is not None:
        began = None if link is None else link.began
        # The folder of a replay is removed before anyone could look at it.
        shown = None if env.read(env.REPLAY_VARIABLE) else folder
        terminal = TerminalSink(config.options.progress, shown, draws=members.leads, began=began)
    return Sinks(sinks, terminal)


def find_world(launched: Launched) -> World:
    """torch's default group if there is one, else what a launcher says, else this one process."""
    if dist.is_available() and dist.is_initialized():
        return current_world()
    if launched.place is None:
        # A group of its own, so that being alone leaves no trace in torch.
        return World(rank=0, size=1, group=dist.ProcessGroup(HashStore(), 0, 1))
    if launched.survives:
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


def _make_engine(
    model: nn.Module, config: RunConfig, place: Place, shards: int, audit: Audit
) -> Any:
    """What keeps the model equal; one that is wrapped keeps its wrapper and options."""
    members, models = place.membership, config.models
    if models is not None and model is config.model:
        if (tensors := models.untrained()) and members.size > 1:
            broadcast.copy_from(members, 0, tensors, "Copying rank 0's models")
        trained = {name: models.modules[name] for name in models.optimizers.parts}
        make = partial(_make_engine, config=config, place=place, shards=shards, audit=audit)
        engines = {name: make(module) for name, module in trained.items()}
        return TurnEngine(models, engines, members)
    if config.options.same_bits or config.engine is not None:
        # The launcher tells by it who hangs from who waits; DDP has an observer of its own.
        note_waits(members, place.device)
    if config.options.same_bits:
        transport = config.ddp.transport if config.ddp is not None else "auto"
        return OrderedEngine(
            bare(model), members, shards, transport, audit if audit.share else None
        )
    if config.engine is not None:
        return check_engine(config.engine(model, place.world))
    if not isinstance(model, DistributedDataParallel):
        options = config.ddp or DEFAULT_OPTIONS
        return DistributedDataParallel(
            model, process_group=members, forward_sync_buffers=False, options=options
        )
    if config.ddp is not None:
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


def _lines_on_repeated_steps(folder: RunFolder | None, step: int, launched: Launched) -> list[str]:
    """Which steps are done again, because the run ended before they were in a checkpoint."""
    last = 0 if folder is None else last_recorded_step(folder)
    if last > step:
        they = "it was" if last == step + 1 else "they were"
        which = name_steps(step + 1, last).capitalize()
        return [f"{which} done again: the last start ended before {they} saved."]
    if folder is None and launched.attempt > 0:
        return ["All steps are done again: without a folder nothing was saved before the restart."]
    return []


def _count_together(dataset: Files, members: Membership) -> None:
    """Every worker counts the samples of some files, and tells the others."""
    if dataset.is_counted or members.size == 1:
        return
    mine: Any
    try:
        mine = dataset.count(range(members.rank, len(dataset.files), members.size))
    except Exception as error:
        mine = error
    everyone = exchange(members.group, mine, members.word_device, "Counting samples")
    counts = [0] * len(dataset.files)
    for rank, theirs in enumerate(everyone):
        counts[rank :: members.size] = theirs
    dataset.counts = tuple(counts)


def _refuse_different_facts(members: Membership, facts: dict[str, Any]) -> None:
    """All workers must have been started with the same arguments."""
    if members.size == 1:
        return
    everyone = exchange(members.group, facts, members.word_device, "Comparing the runs")
    for rank, theirs in enumerate(everyone[1:], start=1):
        _refuse_difference(everyone[0], theirs, "on rank 0", f"on rank {rank}")


def _refuse_difference(
    facts: dict[str, Any], others: dict[str, Any], where: str, elsewhere: str
) -> None:
    if facts["same_bits"]:
        refuse_other_arithmetic(facts["same_bits"], others["same_bits"], where, elsewhere)
    for key, value in facts.items():
        if key == SAMPLES:
            refuse_other_samples(value, others[key], where, elsewhere)
        elif others[key] != value:
            raise DesyncError(
                "The workers were started with different arguments.",
                f"First difference: {key} is {value!r} {where}, {others[key]!r} {elsewhere}.",
                "Pass the same to Run on every worker.",
            )
