"""What a script changes besides the numbers of a step: objects in `state=`, groups, and modes.

Objects are put back where what a block did to them is done again.

A step that is lost begins again with the first line of its block, or, inside the loop over
batches, with the first batch. Whatever the lines in between have counted would count twice.
Only what is small is copied in every step; of the rest a change is noticed, and told.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.files import encode
from paceline.group import children_of, find_tensors, is_container
from paceline.telemetry import Message
from paceline.update import load_state

MOST_BYTES, MOST_LEAVES = 2**20, 2000
"""What is larger is not copied in every step."""
Kept = dict[str, tuple[bool, Any]]
"""By name, whether an object's state was copied, and the copy; or what tells of a change."""


class StateObjects:
    """Those of one run, by name."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        self._large: set[str] = set()
        self._said: set[str] = set()
        self.tell: Callable[[Message], None] = lambda _: None
        self.looks_at_large = False
        """Whether steps may be done again unseen, because another worker has died."""

    def keep(self) -> Kept:
        """What there is now."""
        kept: Kept = {}
        for name, each in self._objects.items():
            if name not in self._large:
                state = each.state_dict()
                if _is_small(state):
                    kept[name] = True, copy.deepcopy(state)
                    continue
                self._large.add(name)
            if self.looks_at_large:
                kept[name] = False, _look(each.state_dict())
        return kept

    def put_back(self, kept: Kept, step: int) -> None:
        """Have all that has changed since as it was then."""
        for name, (is_copy, before) in kept.items():
            each = self._objects[name]
            if is_copy:
                if not _are_equal(before, each.state_dict()):
                    load_state(each, copy.deepcopy(before))
            elif _look(each.state_dict()) != before and name not in self._said:
                self._said.add(name)
                text = (
                    f"state[{name!r}] was changed inside the block of step {step}, which begins "
                    "again, and it is too large to be put back: the change is made twice. Make it "
                    "behind the block."
                )
                self.tell(Message(text, "warning"))


class Modes:
    """Which parameters are frozen, and which layers are in evaluation mode.

    A script may set them once, in a step that a worker which joins later has not lived through, nor
    one that continues from a checkpoint. They are taken over where the script began with the same.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._begun = self._find_frozen()

    def state_dict(self) -> dict[str, list[str]]:
        layers = [name for name, each in self._module.named_modules() if not each.training]
        return {"begun": self._begun, "frozen": self._find_frozen(), "evaluating": layers}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        """Freeze the same; layers stay in their mode, which a save may see in an evaluation."""
        frozen = set(state["frozen"])
        if state["begun"] == self._begun and frozen != set(self._find_frozen()):
            for name, param in self._module.named_parameters():
                param.requires_grad_(name not in frozen)

    def join(self, state: Mapping[str, list[str]]) -> None:
        """Have the modes of workers that are between two steps."""
        self.load_state_dict(state)
        self.set_evaluating(state["evaluating"])

    def set_evaluating(self, names: Sequence[str]) -> None:
        """Have these layers in evaluation mode, and the others train."""
        for name, layer in self._module.named_modules():
            layer.training = name not in names

    def _find_frozen(self) -> list[str]:
        return [n for n, param in self._module.named_parameters() if not param.requires_grad]


def keep_model(
    module: nn.Module, optimizers: Sequence[Any], modes: Modes, *, with_frozen: bool
) -> Callable[[], None]:
    """What puts back tensors, groups of parameters and modes as they are now.

    Other workers may still be in the block of the step, so nothing here waits for them.
    """
    tensors = [*module.parameters(), *module.buffers()]
    values = [each.detach().to("cpu", copy=True) for each in tensors]
    groups = [list(map(_settings_of, _groups_of(each))) for each in optimizers]
    kept = modes.state_dict()

    @torch.no_grad()
    def put_back() -> None:
        for each, value in zip(tensors, values, strict=True):
            each.copy_(value)
        for optimizer, settings in zip(optimizers, groups, strict=True):
            drop_groups(optimizer, len(settings))
            for group, before in zip(_groups_of(optimizer), settings, strict=True):
                group.update(_settings_of(before))
        if with_frozen:
            modes.load_state_dict(kept)
        modes.set_evaluating(kept["evaluating"])

    return put_back


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """None of an object that stands for an optimizer and has none."""
    return getattr(optimizer, "param_groups", [])


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """All of a group but its parameters; tensors, which are changed in place, are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def drop_groups(optimizer: Any, first: int) -> None:
    """Take away groups that the script has added since; it does so again, in the same step."""
    for group in (groups := _groups_of(optimizer))[first:]:
        for param in group["params"]:
            optimizer.state.pop(param, None)
    del groups[first:]


def _is_small(state: Any) -> bool:
    tensors = islice(find_tensors(state), MOST_LEAVES)
    return sum(each.nbytes for each in tensors) <= MOST_BYTES and _count(state) <= MOST_LEAVES


def _count(value: Any, so_far: int = 0) -> int:
    """How many leaves it has, or a larger number than is asked for."""
    if not is_container(value):
        return so_far + 1
    for _, child in children_of(value):
        if so_far > MOST_LEAVES:
            break
        so_far = _count(child, so_far)
    return so_far


def _look(state: Any) -> list[Any]:
    """What tells of a change, mostly, without a look at every number."""
    tensors: list[Tensor] = list(find_tensors(state))
    return [(each.data_ptr(), each._version) for each in tensors]


def _are_equal(before: Any, now: Any) -> bool:
    try:
        return encode(before) == encode(now)
    except PacelineError:  # of something that can be neither saved nor compared
        return False
