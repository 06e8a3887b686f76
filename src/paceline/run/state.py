"""What a checkpoint of a run holds, and whether it belongs to this run.

The state is everything a step depends on. Random numbers are not in it: they are a function of
the seed and the step. `Facts` identify the run: what must be equal for the next step to be the
one that would have come.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from paceline import comm
from paceline.checkpoint import Saved
from paceline.comm.codec import put_together, take_apart
from paceline.errors import CheckpointError, UsageError
from paceline.run.broadcast import copy_from_rank_0
from paceline.run.loader import Position
from paceline.run.metrics import Sums
from paceline.update.whole import Update

MUST_BE_EQUAL = {
    "model": "the model",
    "seed": "seed",
    "global_batch": "global_batch",
    "shards": "shards",
    "shuffle": "shuffle",
    "drop_last": "drop_last",
    "dataset_size": "the number of samples",
    "optimizer": "the optimizer",
    "scheduler": "the scheduler",
}
"""The facts that identify a run, by the words that a person has for them."""

_DTYPE_BY_NAME = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class RunState:
    """Everything a step depends on, gathered from the objects of a run and given back to them."""

    def __init__(self, module: nn.Module, update: Update, others: Mapping[str, Any]) -> None:
        for name, each in others.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UsageError(
                    f"state[{name!r}] is a {type(each).__name__}, which has no state_dict() and "
                    "load_state_dict().",
                    advice="Give it both, so that it can be saved and go on.",
                )
        self._module = module
        self._parts: dict[str, Any] = {"optimizer": update.optimizer}
        if update.scheduler is not None:
            self._parts["scheduler"] = update.scheduler
        if update.scaler is not None:
            self._parts["scaler"] = update.scaler
        self._others = dict(others)

    def gather(self, position: Position, epoch_sums: Sums) -> dict[str, Any]:
        return {
            "model": self._module.state_dict(),
            **{name: part.state_dict() for name, part in self._parts.items()},
            "state": {name: each.state_dict() for name, each in self._others.items()},
            "position": [position.step, position.epoch, position.step_of_epoch],
            "metrics": epoch_sums,
        }

    def give_back(self, state: Mapping[str, Any]) -> tuple[Position, Sums]:
        """Load the state into the objects; how far it is, and the sums of its epoch."""
        self._check_parts(state)
        self._module.load_state_dict(state["model"])
        for name, part in self._parts.items():
            _load(part, state[name], f"the {name}")
        for name, each in self._others.items():
            _load(each, state["state"][name], f"state[{name!r}]")
        return position_in(state), dict(state["metrics"])

    def check_savable(self) -> None:
        """Raise now if something can never be saved, and not after hours of training."""
        take_apart(self.gather(Position(), {}), "state", UsageError)

    def _check_parts(self, state: Mapping[str, Any]) -> None:
        kept = {"model", "state", "position", "metrics"}
        there = (set(state) - kept) | {f"state[{name!r}]" for name in state.get("state", {})}
        here = set(self._parts) | {f"state[{name!r}]" for name in self._others}
        if there != here:
            odd = sorted(there ^ here)[0]
            where = "in the checkpoint only" if odd in there else "not in the checkpoint"
            raise UsageError(
                f"The checkpoint does not hold what this run consists of: {odd} is {where}.",
                advice="Pass the same optimizer, scheduler, scaler and state= as before, or "
                "choose another folder.",
            )


def position_in(state: Any) -> Position:
    """How far the run in a checkpoint is."""
    match state:
        case {"model": _, "position": [int(), int(), int()] as numbers, "state": _, "metrics": _}:
            return Position(*numbers)
    raise UsageError(
        "The checkpoint in this folder was not written by a Run.",
        advice="Choose another folder, and take the weights over with load_weights().",
    )


def _load(part: Any, state: Any, words: str) -> None:
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise UsageError(
            f"The checkpoint does not fit {words} of this run: {error}.",
            advice="Build it as it was when the checkpoint was written, or choose another folder.",
        ) from error


def describe_model(module: nn.Module) -> str:
    """A short name for the shapes of a model: equal for models that can share a checkpoint."""
    tensors = [(name, t) for name, t in module.state_dict().items() if isinstance(t, Tensor)]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:12]
    return f"{type(module).__name__} with {len(lines)} tensors, {digest}"


def refuse_other_run(here: Mapping[str, Any], there: Mapping[str, Any], folder: object) -> None:
    """Raise if what is in the folder was written by a run with other facts."""
    for key, words in MUST_BE_EQUAL.items():
        if key in there and there[key] != here[key]:
            if key == "dataset_size":
                raise UsageError(
                    f"The dataset has {here[key]} samples, but had {there[key]} when the run in "
                    f"{folder} was saved.",
                    "Its order and its steps would be others, and samples lost or repeated.",
                    "Bring the dataset back to what it was, or choose another folder and begin "
                    "with load_weights().",
                )
            raise UsageError(
                f"The folder {folder} belongs to another run.",
                f"First difference: {words} is {there[key]!r} there, {here[key]!r} here.",
                "Choose another folder, or the arguments of that run to go on with it.",
            )


def hand_out(
    group: Any, saved: Saved | None, problem: str, word_device: torch.device
) -> tuple[Any, dict[str, Any]] | None:
    """Rank 0's checkpoint, or None, on every worker: the folder may be on rank 0's disk alone.

    `problem` says why rank 0 could not load one; then every other worker raises.
    """
    if group.size() == 1:
        return None if saved is None else (saved.state, saved.facts)
    what = "Handing out the checkpoint"
    tensors, skeleton = take_apart(saved.state) if saved is not None else ({}, b"")
    shapes = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    text = skeleton.decode("utf-8", "surrogatepass")
    mine = None if saved is None else [text, shapes, saved.facts]
    first, problem = comm.exchange(group, [mine, problem], word_device, what)[0]
    if problem and group.rank() != 0:
        raise CheckpointError(f"Rank 0 cannot begin: {problem}")
    if first is None:
        return None
    text, shapes, facts = first
    if saved is None:
        tensors = {
            name: torch.empty(shape, dtype=_DTYPE_BY_NAME[dtype])
            for name, (dtype, shape) in shapes.items()
        }
    copy_from_rank_0(group, list(tensors.values()), word_device, what)
    if saved is not None:
        return saved.state, facts
    return put_together(text.encode("utf-8", "surrogatepass"), tensors, what), facts
