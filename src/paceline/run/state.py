"""Checkpoints of a run: what they hold, whether they belong to it, and when they are written.

The state is everything a step depends on. Random numbers are not in it: they are a function of
the seed and the step. Facts identify the run: what must be equal for the next step to be the one
that would have come. Rank 0 reads and writes; the folder may be on its disk alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import Checkpoints, Saved
from paceline.data import Position
from paceline.errors import PeerError, UsageError, check_members
from paceline.files import RunFolder, find_info, separate_tensors
from paceline.group import Membership, exchange, waiting
from paceline.policy import NoiseMeter
from paceline.run.broadcast import broadcast_state
from paceline.run.config import RunConfig
from paceline.run.fit import Fit
from paceline.run.folder_lock import FolderLock
from paceline.run.metrics import ExactSums
from paceline.run.models import ByName, TurnUpdate
from paceline.run.objects import Modes, drop_groups, keep_model
from paceline.run.resume import Resume
from paceline.run.updates import Rating, find_better
from paceline.telemetry import Written
from paceline.update import ExchangedStep, Update, WholeUpdate, find_exchanged, load_state

MUST_BE_EQUAL = (
    *("model", "seed", "global_batch", "shards", "shuffle", "order", "drop_last", "dataset_size"),
    *("optimizer", "scheduler", "precision", "same_bits"),
)
"""The facts that identify a run."""

_ADVICE = "Give it state_dict() and load_state_dict(), so that it can be saved and loaded."


class RunState:
    """Everything a step depends on, gathered from the objects of a run and given back to them."""

    def __init__(
        self,
        module: nn.Module,
        update: Update | TurnUpdate,
        rating: Rating,
        fit: Fit,
        others: Mapping[str, Any],
        weights: Any = None,
    ) -> None:
        """`weights` has the state of the module, where that is saved in another form."""
        for name, each in others.items():
            check_members(f"state[{name!r}]", each, ("state_dict", "load_state_dict"), _ADVICE)
        self._module = module
        self._weights = module if weights is None else weights
        self._update, self._parts, self._rating, self._fit = update, update.parts, rating, fit
        self._others = dict(others)
        self._guard: Any = None
        self._exchanged: ExchangedStep | None = None
        self.noise: NoiseMeter | None = None
        self.modes = Modes(module)
        self.loaders: list[Any] | None = None
        """The states of all workers' loaders, where they have any."""
        self.resume: Resume | None = None
        self._goes_back = False
        """Whether what is loaded may be from before the script has added groups."""

    def begin(self) -> list[str]:
        """The loop begins: what else steps the model, and is in no checkpoint, is refused; what to
        say of weights that the script has changed."""
        if isinstance(self._update, WholeUpdate | TurnUpdate):
            self._guard = self._update.refuse_others(list(self._others.values()))
        return [] if self.resume is None else self.resume.find_overwritten()

    def end(self) -> None:
        """The loop is over."""
        if self._guard is not None:
            self._guard()

    def gather(
        self, position: Position, epoch_sums: ExactSums, *, with_parts: bool = True
    ) -> dict[str, Any]:
        """The state as it is saved; without parts, that of the model and how far it is."""
        parts, others = (self._parts, self._others) if with_parts else ({}, {})
        return {
            "model": self._weights.state_dict(),
            **{name: part.state_dict() for name, part in parts.items()},
            "state": {name: each.state_dict() for name, each in others.items()},
            "position": _numbers_of(position),
            "metrics": epoch_sums,
            "rating": self._rating.state_dict(),
            "optimizer_params": self._param_names(),
            "modes": self.modes.state_dict(),
            **({} if self._fit.size is None else {"fit": self._fit.state_dict()}),
            **({} if self.loaders is None else {"loader": self.loaders}),
            **({} if self.noise is None else {"noise": self.noise.scale.state_dict()}),
        }

    def take_part(self) -> None:
        """Bring this worker's share of the state to the one that gathers it."""
        if self._exchanged is not None:
            self._exchanged.take_part_in_saving()

    @property
    def is_whole(self) -> bool:
        """Whether this worker has all of it, and the others no part that would be lost."""
        return self._exchanged is None or self._exchanged.is_whole

    def make_whole(self) -> None:
        """Have all of it on every worker, until the next step; all of them call this."""
        if self._exchanged is not None:
            self._exchanged.make_whole()

    def note_sharing(self, *, is_kept: bool) -> None:
        """Whether the update is shared out is settled; a share that is kept outlives its worker."""
        self._exchanged = find_exchanged(self._parts["optimizer"])
        if self._exchanged is not None:
            self._exchanged.is_kept = is_kept

    def rescue(self) -> None:
        """Have all of it here, if it can be had without workers that are gone."""
        if not self.is_whole and self._exchanged is not None:
            self._exchanged.rescue()

    def withdraw(self) -> None:
        """Take part in no step any more, until the next generation."""
        if self._exchanged is not None:
            self._exchanged.withdraw()

    def forget(self) -> None:
        """An earlier state is about to be loaded, whatever has become of this one."""
        self._goes_back = True
        if self._exchanged is not None:
            self._exchanged.forget()
        self._update.abandon()

    def load(
        self, state: Mapping[str, Any], *, with_objects: bool = True, with_parts: bool = True
    ) -> tuple[Position, ExactSums]:
        """Load the state; how far it is, and the sums of its epoch.

        Without objects, those of `state=` stay as they are, and without parts all but the model.
        """
        if with_parts:
            self.load_numbers(state, is_behind=not with_objects)
        else:
            self._weights.load_state_dict(state["model"])
        for name, each in self._others.items() if with_objects and with_parts else ():
            _load(each, state["state"][name], f"state[{name!r}]")
        _load(self._rating, state["rating"], "the rating")
        if "fit" in state:
            _load(self._fit, state["fit"], "fit=")
        if "noise" in state and self.noise is not None and with_objects:
            _load(self.noise.scale, state["noise"], "the noise scale")
        return position_in(state), dict(state["metrics"])

    def load_numbers(self, state: Mapping[str, Any], *, is_behind: bool = False) -> None:
        """Load the model and what steps it. If this worker `is_behind`, its script is about to
        freeze what the others have frozen, and to add groups of parameters as they have."""
        self._check_parts(state)
        groups = len(self._param_names())
        state = {**state, "optimizer": self._in_order(state)}
        self._weights.load_state_dict(state["model"])
        for name, part in self._parts.items():
            _load(part, state[name], f"the {name}")
        if is_behind and groups:
            drop_groups(self._parts["optimizer"], groups)
        elif not is_behind:
            _load(self.modes, state["modes"], "the parameters that are frozen")

    def keep(self) -> Callable[[], None]:
        """What puts back all that the script may change in the model and its optimizers."""
        given, in_turn = self._parts["optimizer"], isinstance(self._update, TurnUpdate)
        optimizers = list(given.parts.values()) if isinstance(given, ByName) else [given]
        # In a turn other models are frozen just now, and not by the script.
        return keep_model(self._module, optimizers, self.modes, with_frozen=not in_turn)

    def _param_names(self) -> list[list[str]]:
        """Of the optimizer's parameters, by group: its own state numbers them."""
        names = {id(param): name for name, param in self._module.named_parameters()}
        groups = getattr(self._parts["optimizer"], "param_groups", ())
        return [[names.get(id(param), "") for param in group["params"]] for group in groups]

    def _in_order(self, state: Mapping[str, Any]) -> Any:
        """The optimizer's state in a checkpoint, its parameters in their order of now."""
        saved, there, here = state["optimizer"], state["optimizer_params"], self._param_names()
        if there[: len(here)] == here and self._add_groups(saved, there[len(here) :]):
            return saved
        if self._goes_back and here[: len(there)] == there:
            drop_groups(self._parts["optimizer"], len(there))
            return saved
        if list(map(sorted, there)) != list(map(sorted, here)):
            counts = [[len(group) for group in groups] for groups in (there, here)]
            raise UsageError(
                "The checkpoint does not fit the optimizer of this run: its groups have other "
                f"parameters, {counts[0]} of them there and {counts[1]} here.",
                advice="Build it as it was when the checkpoint was written, or choose another "
                "folder.",
            )
        if "param_groups" not in saved:
            raise UsageError(
                "The optimizers of this run have their parameters in another order than in the "
                "checkpoint.",
                advice="Build them as they were when it was written, or choose another folder.",
            )
        groups = []
        for group, theirs, ours in zip(saved["param_groups"], there, here, strict=True):
            place = dict(zip(theirs, group["params"], strict=True))
            groups.append({**group, "params": [place[name] for name in ours]})
        return {**saved, "param_groups": groups}

    def _add_groups(self, saved: Mapping[str, Any], names: list[list[str]]) -> bool:
        """Have the optimizer take groups that the script adds in mid-run; whether it can."""
        if not names:
            return True
        optimizer, param_by_name = self._parts["optimizer"], dict(self._module.named_parameters())
        known = {name for group in self._param_names() for name in group}
        if not isinstance(optimizer, Optimizer) or any(
            name in known or name not in param_by_name for group in names for name in group
        ):
            return False
        for group, settings in zip(names, saved["param_groups"][-len(names) :], strict=True):
            params = [param_by_name[name] for name in group]
            optimizer.add_param_group({**settings, "params": params})
        return True

    def check_savable(self) -> None:
        """Raise now if something can never be saved, and not after hours of training."""
        separate_tensors(self.gather(Position(), {}), "state", UsageError)

    def _check_parts(self, state: Mapping[str, Any]) -> None:
        kept = "loader model state position metrics rating optimizer_params fit noise modes"
        there = set(state) - set(kept.split())
        there |= {f"state[{name!r}]" for name in state.get("state", {})}
        here = set(self._parts) | {f"state[{name!r}]" for name in self._others}
        if there != here:
            odd = sorted(there ^ here)[0]
            where = "in the checkpoint only" if odd in there else "not in the checkpoint"
            raise UsageError(
                f"The checkpoint does not hold what this run consists of: {odd} is {where}.",
                advice="Pass the same optimizer, scheduler, scaler, state= and ema= as before, or "
                "choose another folder.",
            )


def _numbers_of(position: Position) -> list[int]:
    numbers = [position.step, position.epoch, position.step_of_epoch, position.turn]
    return numbers if position.turn else numbers[:3]


def position_in(state: Any) -> Position:
    """How far the run in a checkpoint is."""
    match state:
        case {"model": _, "position": [*numbers], "state": _, "metrics": _} if len(numbers) in (
            3,
            4,
        ) and all(isinstance(each, int) for each in numbers):
            return Position(*numbers)
    raise UsageError(
        "The checkpoint in this folder was not written by a Run.",
        advice="Choose another folder, and take the weights over with load_weights().",
    )


def _load(part: Any, state: Any, words: str) -> None:
    try:
        load_state(part, state)
    except Exception as error:
        raise UsageError(
            f"The checkpoint does not fit {words} of this run: {error}.",
            advice="Build it as it was when the checkpoint was written, or choose another folder.",
        ) from error


class Saving:
    """The checkpoints of one run, seen by one worker."""

    def __init__(self, folder: RunFolder | None, config: RunConfig, membership: Membership) -> None:
        self.is_on = config.is_saved
        self.saved_step: int | None = None
        """The step of the last save, known to every worker, whether it reached the disk or not."""
        self.tried_step = 0
        """The last one after which this worker took part in a save."""
        self.is_under_way = False
        """Whether it does now, and tries again if another worker is gone."""
        self._folder, self._options, self._membership = folder, config.options, membership
        self._has_metric = False
        self._facts: Mapping[str, Any] = {}
        self._lock: FolderLock | None = None
        self._checkpoints: Checkpoints | None = None
        self._open()

    def _open(self) -> None:
        folder, options = self._folder, self._options
        if folder is not None and self._checkpoints is None and self._membership.leads:
            self._lock = FolderLock(folder)
            self._checkpoints = Checkpoints(
                folder.checkpoints,
                keep=options.keep,
                keep_best=options.keep_best,
                better=find_better(options.best_metric, options.better),
            )

    def on_generation(self) -> None:
        """Rank 0 writes, whichever worker that is now."""
        before = self._checkpoints
        self._open()
        if self._checkpoints is not None and self._checkpoints is not before:
            self._checkpoints.take_over()
        self.begin()

    def find(self) -> tuple[Any, dict[str, Any]] | None:
        """State and facts of the newest good checkpoint, on every worker; None without one."""
        saved: Saved | None = None
        problem: Exception | None = None
        if self._checkpoints is not None:
            try:
                self.begin()
                saved = self._checkpoints.load()
            except Exception as error:
                problem = error
        # The folder may be on rank 0's disk alone.
        members, what = self._membership, "Handing out the checkpoint"
        found = None if saved is None else (saved.state, saved.facts)
        word = problem or found is not None
        if exchange(members.group, word, members.word_device, what)[0]:
            found = broadcast_state(members, found, 0, what)
        if found is not None:
            self.saved_step = position_in(found[0]).step
        return found

    def begin(self) -> None:
        """Have the folder to ourselves until `end`."""
        if self._lock is not None:
            with waiting(self._membership.group, elsewhere=True):
                self._lock.take()

    def end(self) -> None:
        if self._lock is not None:
            self._lock.give_up()

    def identify(self, here: Mapping[str, Any], there: Mapping[str, Any] | None) -> None:
        """Note what identifies the run, and raise if the folder is another one's.

        That is known from its checkpoint, or else from its `run.json`.
        """
        self._facts = here
        if self._folder is None:
            return
        folder = self._folder.path
        if there is None:
            info = find_info(self._folder) if self._membership.leads else None
            keys = ("seed", "global_batch", "dataset_size")
            there = {} if info is None else {key: getattr(info, key) for key in keys}
        differences = [key for key in MUST_BE_EQUAL if key in there and there[key] != here[key]]
        if self._options.same_bits == "here" and "same_bits" in differences:
            differences.remove("same_bits")
        if not differences:
            return
        key = differences[0]
        if key == "same_bits" and here[key] and there[key]:
            raise UsageError(
                f"The bits of the run in {folder} were computed elsewhere.",
                f"There: {there[key]!r}. Here: {here[key]!r}.",
                'Continue it there, or pass same_bits="here" in RunOptions: from this step on the '
                "bits are then those of this machine.",
            )
        raise UsageError(
            f"The folder {folder} belongs to another run.",
            f"First difference: {key} is {there[key]!r} there, {here[key]!r} here.",
            "Choose another folder and begin with load_weights(), or use the arguments and the "
            "data of that run to continue it.",
        )

    def note_shards(self, shards: int) -> None:
        """From now on checkpoints are of a run with so many."""
        self._facts = {**self._facts, "shards": shards}

    def is_due(self, step: int, ends_epoch: bool, scores: Mapping[str, float]) -> bool:
        """Whether to save after this step; a `best_metric` that is known of it is not lost."""
        every = self._options.checkpoint_every
        is_rated = self._options.best_metric in scores
        return self.is_on and (ends_epoch or is_rated or bool(every and step % every == 0))

    def save(
        self,
        state: RunState,
        position: Position,
        add_up: Callable[[], ExactSums],
        scores: Mapping[str, float],
        *,
        can_save: Callable[[], bool],
    ) -> None:
        """Save, unless this very step has been; a collective: every worker calls it.

        `add_up` gives the sums of the epoch of all workers. `can_save` is asked when they have met:
        without a worker that died there may be no state.
        """
        best = self._options.best_metric
        metric = scores.get(best) if best is not None else None
        # The same step once more, if it was saved before it was evaluated: its rank among the best.
        is_news = metric is not None and not self._has_metric
        if not self.is_on or (self.saved_step == position.step and not is_news):
            return
        sums = add_up()
        self.is_under_way = can_save()
        if not self.is_under_way:
            return
        self.tried_step = position.step
        before = self.saved_step, self._has_metric
        self.saved_step, self._has_metric = position.step, metric is not None
        try:
            if self._checkpoints is not None and self._membership.leads:
                gathered = state.gather(position, sums)
                self._checkpoints.save(position.step, gathered, facts=self._facts, metric=metric)
            else:
                state.take_part()
        except PeerError:  # of a worker's share of the state: it is tried again
            self.saved_step, self._has_metric = before
            raise
        self.is_under_way = False

    def take_finished(self, *, wait: bool = False) -> list[Written]:
        """What has reached the disk since."""
        if self._checkpoints is None:
            return []
        if wait:
            self._checkpoints.close()
        return self._checkpoints.take_finished()

    @property
    def written_step(self) -> int:
        """How far the run in the newest checkpoint is, as rank 0 knows it; 0 without one."""
        return (self._checkpoints and self._checkpoints.saved_step) or 0

    def find_kept(self, *, was_written_here: bool) -> int:
        """The last step of which rank 0 has a save, or is about to: what another one that died was
        writing is on the disk, or nowhere."""
        if self.is_under_way:
            return self.tried_step
        return (self.saved_step or 0) if was_written_here else self.written_step

    @property
    def problem(self) -> str:
        """Why the last save is not on the disk, as rank 0 knows it; empty where it is."""
        if self._checkpoints is None or (self.saved_step or 0) <= self.written_step:
            return ""
        return self._checkpoints.problem or ""

    def find_lost(self, step: int) -> str:
        """What to say of steps that no checkpoint holds, although the last save was to hold all.

        Rank 0 knows; empty where nothing is lost.
        """
        if not self.is_on or self._checkpoints is None or not self._membership.leads:
            return ""
        lost = step - self.written_step
        return f"the last {lost} steps are not saved. {self._checkpoints.problem}" * (lost > 0)
