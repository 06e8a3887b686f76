"""Everything known of a recorded step when it is over, and what both engines make of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.ddp.wrapper import bare
from paceline.record.facts import bytes_of, facts_of
from paceline.record.follow import WeightRef
from paceline.record.reference import Outcome, Piece, Reference, Task, check_step, not_computed
from paceline.record.stages import Check, Model, TensorFacts
from paceline.record.watch import Call, Watch

INDIRECT = "the loss is computed from gradients, which are not recorded"
OLDER = "gradients of an earlier backward pass were still there; call zero_grad() first"


@dataclass(slots=True)
class Notes:
    """What the caller has said about the step."""

    indices: list[int] | None = None
    """Which rows of the dataset this process had."""
    loss: Tensor | None = None
    """The sum of all losses."""
    loss_weight: float | None = None
    """Over how many items it is a sum; None where nobody said."""
    targets: list[Any] = field(default_factory=list)
    """One for each loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One step of one process: what was wished for, what was said, what was seen."""

    model: Any
    watch: Watch
    notes: Notes
    reference: Reference | None
    """Model and optimizer before the step, on the process that computes the check."""
    trouble: str
    """Why there is no reference where there should be one."""
    wants_check: bool
    followed: WeightRef | None
    before: float | None
    """The followed weight's value before the step."""
    sample: int | None
    values: bool
    dataset: Any
    step: int
    step_s: float
    loss_fn: Callable[[Any, Any], Tensor] | None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """As they are now, after the step."""
        return {name: param.detach() for name, param in self.watch.named}

    @property
    def has_update(self) -> bool:
        return self.watch.times.update_end > 0

    def heading(self) -> dict[str, Any]:
        """What a trace says of the step as a whole."""
        whole = bare(self.model)
        parameters = list(whole.parameters())
        return {
            "step": self.step,
            "created": time.time(),
            "has_values": self.values,
            "model": Model(
                name=type(whole).__name__,
                parameters=sum(p.numel() for p in parameters),
                bytes=bytes_of(parameters),
            ),
        }

    def backward_s(self, end_ns: int) -> float | None:
        """From the beginning of backward to `end_ns`, without the time that watching took."""
        took = span(self.watch.times.backward_begin, end_ns)
        return None if took is None else max(0.0, took - self.watch.times.watching / 1e9)

    @property
    def loss_weight(self) -> float | None:
        told = self.notes.loss_weight
        return self.watch.loss_weight if told is None else told

    def loss_facts(self) -> TensorFacts | None:
        loss, weight = self.notes.loss, self.loss_weight
        if loss is None:
            return None
        mean = loss / weight if weight else loss
        return facts_of("loss", mean, values=self.values, is_number=True)

    def flat_facts(self, name: str, tensors: Mapping[str, Tensor]) -> TensorFacts | None:
        """All tensors as one row of numbers, in the order of the parameters."""
        parts = [tensors[n].detach().reshape(-1) for n in self.parameters if n in tensors]
        parts = [part for part in parts if not part.is_complex()]
        if not parts:
            return None
        home, kind = parts[0].device, parts[0].dtype
        flat = torch.cat([part.to(home, kind) for part in parts])
        return facts_of(name, flat, values=self.values)

    def data_facts(self, like: Sequence[TensorFacts]) -> tuple[TensorFacts | None, int | None]:
        """The dataset as one tensor, and its length; neither where there is none to look at."""
        try:
            rows = None if self.dataset is None else len(self.dataset)
        except TypeError:
            rows = None
        if rows is None:
            return None, None
        tensors = getattr(self.dataset, "tensors", None)
        if isinstance(tensors, (tuple, list)) and tensors and isinstance(tensors[0], Tensor):
            return facts_of("inputs", tensors[0], values=self.values), rows
        if like and like[0].shape:
            shape = [rows, *like[0].shape[1:]]
            per_row = like[0].bytes // max(1, like[0].shape[0])
            kind = like[0].dtype
            return TensorFacts(
                name="inputs", shape=shape, dtype=kind, device="", bytes=per_row * rows
            ), rows
        return None, rows

    def task(self, pieces: Sequence[Piece], call: Call, factor: float) -> Task:
        """What the reference has to compute."""
        targets = self.notes.targets[0] if self.notes.targets else None
        template = (call.args, call.kwargs)
        return Task(pieces, template, factor, self.watch.autocast, self.loss_fn, targets)

    def compute_check(self, task: Task, loss: float | None) -> Check:
        """Compare with the reference; `loss` is the engine's, a mean over all rows."""
        assert self.reference is not None
        outcome = Outcome(
            gradients=self.watch.averaged,
            applied=self.watch.applied,
            parameters=self.parameters if self.has_update else {},
            loss=loss,
        )
        try:
            return check_step(self.reference, task, outcome)
        except Exception as error:  # the step is done and right; only its check is missing
            return not_computed(f"computing it again failed: {first_line(error)}")


def piece_of(call: Call) -> Piece:
    """A forward pass as the reference wants to have it."""
    return Piece(
        inputs=call.inputs,
        outputs=call.outputs,
        grads=[call.grads.get(number) for number in range(len(call.outputs))],
        random_state=call.random_state if call.is_random else [],
    )


def span(begin_ns: int, end_ns: int) -> float | None:
    """Seconds between two times, None where one of them was not seen."""
    return (end_ns - begin_ns) / 1e9 if begin_ns and end_ns >= begin_ns else None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
