"""What a run was asked for: its arguments and options, checked, and in words for people."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate

import paceline
from paceline import env
from paceline.data import Files, Plan, check_seed
from paceline.ddp import DDPOptions, has_sync_batch_norm
from paceline.errors import (
    UsageError,
    check_choice,
    check_kind,
    check_members,
    check_number,
    check_whole,
    refuse_unknown_arguments,
    shown,
)
from paceline.files import RunFolder, RunInfo, find_info
from paceline.group import World, flatten
from paceline.islands import Islands
from paceline.run.fit import check_fit
from paceline.run.models import DECAY_ADVICE, ByName, Models, take_models
from paceline.run.same_bits import check_same_bits, describe_arithmetic
from paceline.run.updates import DTYPE_BY_PRECISION, Better, find_better
from paceline.telemetry import Sink, check_sinks, count_text, make_trackers
from paceline.update import Update, check_update

Collate = Callable[[list[Any]], Any]

_GROUPS_SHOWN = 16
_OWN_SHOWN, _WIDTH_SHOWN = 200, 200
_AGREED_OPTIONS = (
    *("clip_norm", "ema", "merge_shards", "check_finite", "update", "noise_every", "audit", "fit"),
    *("checkpoint_every", "best_metric", "better", "patience"),
)
"""Those that decide what a commit does, or when the workers talk to each other."""
_SEVERAL = (
    "Pass one, with a group of parameters for each part of the model; or several models, which "
    'take turns: Run({"generator": (g, g_optimizer), "critic": (d, d_optimizer)}, dataset).'
)


@refuse_unknown_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings that most runs leave alone."""

    shuffle: bool = True
    """Whether every epoch has an order of its own; False takes the samples as they stand."""
    order: Literal["auto", "torch", "keyed"] = "auto"
    """How an order is made: `torch`, as torch's DistributedSampler does, in 8 bytes per sample on
    every worker; `keyed`, another one in no memory and no time; `auto`, torch's up to 4,194,304
    samples, and what a run began with when it continues. See docs/data.md."""
    steps_per_epoch: int | None = None
    """How many batches of each worker are an epoch of `Run(loader=)`; None: the loader's length."""
    drop_last: bool = False
    """Whether samples that do not fill the last global batch of an epoch are left out of it."""
    clip_norm: float | Mapping[str, float] | None = None
    """Shorten gradients to this length where they are longer; of several models, by name."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """In which precision forward passes and losses compute where that is safe: torch's autocast,
    and for `fp16` its `GradScaler`. `fp32` changes nothing."""
    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, for
    `run.evaluate(ema=True)`."""
    collate_fn: Collate | None = None
    """Makes a batch of a list of samples; None: as a `DataLoader` does."""
    pin_memory: bool | None = None
    """Whether batches are loaded into page-locked memory; None: when the model is on a GPU."""
    prefetch: int = 2
    """How many shards every DataLoader worker loads ahead."""
    merge_shards: bool = False
    """Whether a worker's shards go through the model together. Exact only for a model that draws
    no random numbers and computes nothing over a batch, such as dropout and BatchNorm do."""
    checkpoint_every: int | None = None
    """Save after every so many steps. In any case a run saves after every epoch and when a signal
    stops it; 0 means never at all."""
    keep: int = 3
    """How many of the newest checkpoints are kept; at least 2, in case one is damaged."""
    keep_best: int = 1
    """How many of the best ones are kept besides, by `best_metric`."""
    best_metric: str | None = None
    """A metric of `run.evaluate()`, or of training, that says which checkpoints are best, and on
    which `patience` and a scheduler such as `ReduceLROnPlateau` look."""
    better: Better | None = None
    """Whether a lower or a higher `best_metric` is better; None: as its name says, if that is one
    of the usual ones, such as `val_loss` and `ema_accuracy`."""
    patience: int | None = None
    """Stop when `best_metric` was measured so many times in a row without being better than ever
    before; None: never."""
    check_finite: Literal["sample", "all", "off"] = "sample"
    """How closely gradients are searched for NaN and infinity on CPUs; see docs/run.md. On GPUs,
    and with `clip_norm`, all of them are, because it costs next to nothing there."""
    update: Literal["whole", "sharded", "auto"] | Update = "whole"
    """Who steps what: `whole`, every worker all parameters; `sharded`, each its share, with as much
    of the optimizer's state; `auto`, sharded where that is faster; or an `Update` of your own,
    which decides about optimizer, scheduler, scaler and clipping. See docs/run.md."""
    elementwise: bool | None = None
    """Your word on an optimizer that Paceline does not know, so that its update can be shared out:
    see `shard_update`."""
    same_bits: bool | Literal["here"] = False
    """Whether the result has the same bits at any number of workers, through deaths, resizes and
    resumes: each worker computes with one thread, by deterministic algorithms, and gradients are
    added in an order of their own. `here` continues with a run of another processor or another
    version of torch. See docs/same_bits.md."""
    audit: float = 0.0
    """The share of steps, from 0 to 1, whose shards are computed by a second worker each as well.
    Where bits differ, the step is not applied, and the worker that is wrong is named and replaced.
    Needs `same_bits`. See docs/same_bits.md."""
    fit: Literal["auto", "off"] | int | None = None
    """What happens when a worker runs out of memory in a step, or in an evaluation: `off`, an
    error; `auto`, it is done again with every shard in smaller pieces; or a number, the samples of
    a piece to begin with. None: `auto` where the model is on an accelerator. See docs/memory.md."""
    islands: Islands | None = None
    """Train on islands, of `paceline run --island`, that average rarely. See docs/islands.md."""
    noise_every: int = 0
    """Measure the gradient noise scale in every so many steps; 0 means never."""
    trace_step: int = 0
    """Record this step stage by stage into the folder, for `paceline trace` and the report; 0: what
    `paceline run --trace-step` says, or none."""
    timeline: bool = False
    """Whether every worker records into the folder what it does when; `paceline run --timeline`
    goes before."""
    handle_signals: bool = True
    """Whether the first Ctrl-C or SIGTERM lets the step end and saves, and the second kills."""
    exit_on_signal: bool = True
    """Whether the process then exits, with 128 + the signal's number; False only ends the loop."""
    progress: str = "auto"
    """How rank 0 shows the run: `auto`, `bar`, `plain`, `json` or `quiet`."""
    policy: Sequence[str] = ()
    """What was decided about batch size and learning rate and why, to be shown and kept; empty: how
    the global batch is cut among the workers."""

    def __post_init__(self) -> None:
        check_whole("checkpoint_every", self.checkpoint_every, 0, or_none=True)
        check_whole("patience", self.patience, or_none=True)
        if self.patience is not None and self.best_metric is None:
            raise UsageError(
                f"patience is {self.patience}, but best_metric is not set.",
                advice='Pass best_metric="loss", or another name that run.evaluate() returns.',
            )
        check_whole("steps_per_epoch", self.steps_per_epoch, or_none=True)
        leasts = {"prefetch": 1, "keep": 2, "keep_best": 0, "noise_every": 0, "trace_step": 0}
        for name, least in leasts.items():
            check_whole(name, getattr(self, name), least)
        check_choice("better", self.better, ("lower", "higher", None))
        find_better(self.best_metric, self.better)
        check_choice("check_finite", self.check_finite, ("sample", "all", "off"))
        check_choice("order", self.order, ("auto", "torch", "keyed"))
        if isinstance(self.update, str):
            check_choice("update", self.update, ("whole", "sharded", "auto"))
        else:
            check_update(self.update)
        if self.ema is not None:
            check_number("ema", self.ema, 0, 1, DECAY_ADVICE)
        check_choice("same_bits", self.same_bits, (False, True, "here"))
        advice = "Pass the share of steps that are computed twice, from 0 to 1, such as 0.01."
        check_number("audit", self.audit, 0, 1, advice, ends=True)
        if self.audit and not self.same_bits:
            raise UsageError(
                f"audit is {self.audit}, and without same_bits two workers may compute different "
                "bits of the same shard without being wrong.",
                advice="Pass same_bits=True as well.",
            )
        check_fit(self.fit)
        check_choice("precision", self.precision, tuple(DTYPE_BY_PRECISION))


@dataclass(slots=True, kw_only=True)
class RunConfig:
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
    state: Mapping[str, Any] | None
    loader_workers: int
    world: World | None
    ddp: DDPOptions | None
    engine: Any
    sinks: Sequence[Sink]
    trackers: Sequence[str | Sink]
    loader: Any
    config: Mapping[str, Any] | None
    options: RunOptions
    collate_fn: Collate = field(init=False)
    is_saved: bool = field(init=False)
    """Whether there are checkpoints."""
    has_sync_norm: bool = field(init=False)
    """Whether layers of the model need every worker in every pass."""
    models: Models | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.state = self.state or {}
        if isinstance(self.model, Mapping):
            take_models(self)
        for name, (kind, advice) in _KINDS.items():
            check_kind(name, getattr(self, name), kind, f"Pass {advice}.")
        self.has_sync_norm = has_sync_batch_norm(self.model)
        if isinstance(self.optimizer, list | tuple):
            raise UsageError(f"optimizer is {len(self.optimizer)} of them.", advice=_SEVERAL)
        for kind, members in _MEMBERS.items():
            for name, value in self._parts_of(kind).items():
                if value is not None or kind == "optimizer":
                    advice = f"Pass one of torch's kind, with {', '.join(members)}."
                    check_members(name, value, members, advice, methods=members[1:])
        if self.folder is not None and (runs := env.read(env.RUNS_VARIABLE)):
            # `paceline replay` and `paceline scale` run the script beside the runs that it has
            # written itself.
            self.folder = os.path.join(runs, os.path.basename(os.path.abspath(self.folder)))
        if self.folder is not None:  # the script may change its working directory later
            self.folder = str(Path(self.folder).absolute())
        self._check_loader()
        self._check_engine()
        if self.options.same_bits:
            check_same_bits(self)
        check_whole("global_batch", self.global_batch, or_none=self.loader is not None)
        check_whole("epochs", self.epochs)
        check_whole("shards", self.shards, or_none=True)
        check_whole("loader_workers", self.loader_workers, 0)
        check_seed(self.seed)
        check_sinks("sinks", self.sinks)
        if self.trackers:
            trackers = make_trackers(self.trackers, self.folder)
            check_sinks("trackers", trackers)
            self.sinks = [*self.sinks, *trackers]
        self.collate_fn = self.options.collate_fn or default_collate
        self.is_saved = self.folder is not None and self.options.checkpoint_every != 0

    def _parts_of(self, kind: str) -> dict[str, Any]:
        """The optimizer, or whatever it is; those of several models under their names."""
        if self.models is None:
            return {kind: getattr(self, kind)}
        given: Mapping[str, Any] = {
            "optimizer": self.models.optimizers.parts,
            "scheduler": self.models.schedulers,
            "scaler": self.models.scalers,
        }[kind]
        return {f"{kind} of {name!r}": each for name, each in given.items()}

    @property
    def schedulers(self) -> dict[str, Any]:
        """Those there are, by the names of several models; that of a single one has none."""
        given = self.models.schedulers if self.models else {"": self.scheduler}
        return {name: each for name, each in given.items() if each is not None}

    def _check_loader(self) -> None:
        """A run has either a dataset or a loader."""
        if (self.loader is None) == (self.dataset is None):
            what = "neither a dataset nor" if self.loader is None else "both a dataset and"
            raise UsageError(f"There is {what} a loader.", advice="Pass one of them to Run.")
        if self.loader is None and self.options.steps_per_epoch is not None:
            raise UsageError(
                "steps_per_epoch is for Run(loader=), and this run has a dataset.",
                advice="Leave it out: an epoch is a pass over the dataset.",
            )
        check_dataset(
            self.dataset,
            "Pass loader= for batches that are made already, or what the loader reads for samples.",
        )
        given = {"shards": self.shards, "loader_workers": self.loader_workers or None}
        for name, value in given.items():
            if self.loader is not None and value is not None:
                raise UsageError(
                    f"{name} is {value!r}, and the run has a loader of its own.",
                    advice=f"Leave {name} out: a worker's batch is a shard, and the loader loads.",
                )

    def _check_engine(self) -> None:
        if self.engine is None:
            return
        if not callable(self.engine):
            raise UsageError(
                f"engine is {shown(self.engine)}, which cannot be called.",
                advice="Pass a function of a module and a World that returns an Engine, such as "
                "paceline.ddp.NaiveEngine.",
            )
        if self.ddp is not None:
            raise UsageError(
                "Both engine= and ddp= were passed, and ddp= are options of the usual engine.",
                advice="Pass one of them.",
            )

    def open_folder(self, path: str | os.PathLike[str], rank: int) -> RunFolder:
        """The folder at `path`, made if it is not there."""
        folder = RunFolder(path)
        try:
            folder.create()
        except OSError as error:
            raise UsageError(
                f"Rank {rank} cannot make the run folder {folder.path}: {error.strerror or error}.",
                advice="Choose a folder that this user may write to.",
            ) from error
        return folder

    def facts(
        self, module: nn.Module, plan: Plan | None, *, shards: int, workers: int
    ) -> dict[str, Any]:
        """What a checkpoint says of the run that wrote it."""
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        return {
            "model": describe_model(module),
            "seed": self.seed,
            "global_batch": self.global_batch,
            "shards": shards if self.loader is None else None,
            "shuffle": self.options.shuffle,
            "order": self._describe_order(plan),
            "drop_last": self.options.drop_last,
            "precision": self.options.precision,
            "same_bits": describe_arithmetic(device) if self.options.same_bits else None,
            "dataset_size": None if plan is None else plan.samples,
            "workers": workers,
            "optimizer": _name_part(self.optimizer),
            "scheduler": _name_part(
                ByName(self.models.schedulers) if self.models else self.scheduler
            ),
            "versions": {
                "paceline": paceline.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        }

    def _describe_order(self, plan: Plan | None) -> str | None:
        """What decides about the order of the samples, besides the seed."""
        if isinstance(self.dataset, Files):
            return self.dataset.describe()
        if self.loader is not None:
            return "the loader's"
        return None if plan is None or not plan.shuffle else plan.order

    def to_agree_on(self) -> dict[str, Any]:
        """What all workers must be given alike, besides the facts, by words for it."""
        settings = [
            {name: repr(value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            "epochs": self.epochs,
            # Machines may reach it by different paths; whether there is one decides about saves.
            "folder": "None" if self.folder is None else "given",
            **{name: getattr(self.options, name) for name in _AGREED_OPTIONS},
            "the scaler": None if self.scaler is None else type(self.scaler).__name__,
            "settings of the optimizer": settings,
            "names in state": sorted(self.state or {}),
            "shards=": self.shards,
            "islands=": repr(self.options.islands and replace(self.options.islands, at="")),
        }

    def describe(
        self, folder: RunFolder | None, plan: Plan | None, module: nn.Module, facts: dict[str, Any]
    ) -> RunInfo:
        """What `run.json` says of the run."""
        now = time.time()
        before = None if folder is None else find_info(folder)
        shards = facts["shards"] or facts["workers"]
        sentence = batch_sentence(self.global_batch, facts["workers"], shards)
        same = ("seed", "global_batch", "workers", "dataset_size", "versions")
        return RunInfo(
            **{name: facts[name] for name in same},
            shards=shards,
            name=folder.name if folder else type(module).__name__,
            created=now if before is None else before.created,
            updated=now,
            epochs=self.epochs,
            steps_per_epoch=plan.steps_per_epoch if plan else None,
            steps=plan.steps if plan else None,
            model=type(module).__name__,
            parameters=sum(param.numel() for param in module.parameters()),
            device=str(next((param.device for param in module.parameters()), "cpu")),
            host=socket.gethostname(),
            settings=self._settings(facts["optimizer"]),
            policy=list(self.options.policy) or [sentence],
            command=env.read_command(sys.argv),
        )

    def _settings(self, optimizer: str) -> dict[str, str]:
        """For readers, so only of the first groups and not at any length."""
        first, *others = self.optimizer.param_groups
        found: dict[str, Any] = {"optimizer": optimizer, **first}
        for number, group in enumerate(others[:_GROUPS_SHOWN], start=1):
            names = (name for name in group if name != "params")
            differs = (name for name in names if repr(group[name]) != repr(first.get(name)))
            found |= {f"{name} of group {number}": group[name] for name in differs}
        for option in fields(self.options):
            value = getattr(self.options, option.name)
            if value != option.default and option.name != "policy":
                found[option.name] = value
        kinds = (str, int, float, tuple, Islands)
        shown = {
            k: str(value)[:_WIDTH_SHOWN] for k, value in found.items() if isinstance(value, kinds)
        }
        return shown | self._own_settings(self.config, shown) if self.config else shown

    def _own_settings(self, config: Mapping[str, Any], shown: Mapping[str, str]) -> dict[str, str]:
        """The user's hyperparameters; one that has a name of ours, and says otherwise, has both."""
        taken = {each.name: "" for each in fields(RunInfo)} | dict(shown)
        found = {}
        for name, value in islice(flatten(config), _OWN_SHOWN):
            text = str(value)[:_WIDTH_SHOWN]
            name = name[:_WIDTH_SHOWN]
            found[name if taken.get(name, text) == text else f"config.{name}"] = text
        return found


_KINDS: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "folder": (str | os.PathLike | None, "a path"),
    "state": (Mapping, "a dictionary of objects that have a state_dict()"),
    "world": (World | None, "what paceline.init_process_group() returned, or nothing"),
    "ddp": (DDPOptions | None, "paceline.DDPOptions(...)"),
    "sinks": (list | tuple, "a list of sinks; see docs/run.md"),
    "trackers": (list | tuple, 'a list such as ["tensorboard", "wandb:project"]'),
    "config": (Mapping | None, "a dictionary, such as vars(args)"),
    "options": (RunOptions, "paceline.RunOptions(...)"),
}
"""What an argument of `Run` must be, and how to say so."""
_MEMBERS = {
    "optimizer": ("param_groups", "step", "zero_grad", "state_dict"),
    "scheduler": ("step", "state_dict", "load_state_dict"),
    "scaler": ("is_enabled", "scale", "unscale_", "step", "update", "state_dict"),
}
"""What an argument of `Run` must have, whatever its class."""


def check_dataset(dataset: Any, advice: str) -> None:
    """Refuse what has items that are not samples; `advice` is about loaders."""
    if isinstance(dataset, DataLoader):
        problem = "whose items are batches"
    elif isinstance(dataset, str | bytes | os.PathLike | Mapping):
        problem, advice = "which has no samples", "Pass what was read from there: samples by index."
    elif isinstance(dataset, tuple) and all(isinstance(each, Tensor) for each in dataset):
        problem = f"of {len(dataset)} tensors, so it has {len(dataset)} samples"
        advice = "Pass torch.utils.data.TensorDataset(*tensors), whose samples are their rows."
    elif isinstance(dataset, Iterator):
        problem = "which can be read once, and is read again in every epoch and after a death"
        advice = "Pass a list, or an object whose __iter__ begins anew."
    else:
        return
    raise UsageError(f"dataset is a {type(dataset).__name__}, {problem}.", advice=advice)


def _name_part(part: Any) -> str | None:
    """The class of an optimizer or a scheduler, or those of several by name; None without one."""
    if isinstance(part, ByName):
        return ", ".join(f"{name}: {type(p).__name__}" for name, p in part.parts.items()) or None
    return None if part is None else type(part).__name__


def describe_model(module: nn.Module) -> str:
    """A short name for the shapes of a model: equal for models that can share a checkpoint."""
    tensors = [(name, t) for name, t in module.state_dict().items() if isinstance(t, Tensor)]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:12]
    return f"{type(module).__name__} with {len(lines)} tensors, {digest}"


def batch_sentence(global_batch: int, workers: int, shards: int) -> str:
    """How the global batch is cut."""
    return (
        f"Global batch {global_batch:,} on {count_text(workers, 'worker')}, in "
        f"{count_text(shards, 'shard')} of at most {-(-global_batch // shards):,} rows."
    )
