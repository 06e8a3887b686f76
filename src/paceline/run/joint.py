"""A loss over the whole global batch: what `step.joint()` computes besides the passes of a shard.

    first pass     the embeddings of every shard, without a graph; all workers get all of them
    the loss       of all embeddings, on every worker, and its gradient with respect to each
    second pass    a shard's embeddings with a graph; its part is their product with that gradient

The parts of all shards have the gradient of the loss, and none depends on who computes it. What the
loss itself reads of the model, such as a temperature, gets its gradient with the part of shard 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.data import Shard
from paceline.errors import UsageError, shown
from paceline.files import decode, encode
from paceline.group import find_tensors, gather_bytes, map_tensors
from paceline.run.evaluation import call, check_rows, join
from paceline.run.parts import Cut, Place, Training
from paceline.telemetry import Message, Sinks

_SHORT = (torch.float16, torch.bfloat16)
_SHORT_OF_MEMORY = -1
_MOST_PIECES = 2**24


class JointLoss:
    """The loss of one step, on one worker.

    encode, for all shards here --> exchange --> compute --> part_of, for each shard
    """

    value: Tensor

    def __init__(self, loss: Callable[..., Tensor], place: Place, training: Training) -> None:
        if training.noise is not None or training.audit.share:
            _refuse("audit" if training.audit.share else "noise_every")
        self._loss, self._place, self._training = loss, place, training
        self._found: dict[int, Any] = {}
        self._all: Any = None
        self._grads: dict[int, list[Tensor | None]] = {}
        self._seed: tuple[Any, ...] = ()

    def encode(
        self,
        encode: Callable[[Any], Any],
        shards: Sequence[Shard],
        batches: Iterable[Any],
        key: Sequence[int],
        cut: Cut,
    ) -> list[Any]:
        """Take the embeddings of this worker's shards, without a graph; the batches, loaded."""
        (seed, *step), training, loaded = key, self._training, []
        try:
            for shard, batch in zip(shards, batches, strict=True):
                loaded.append(batch)
                training.generators.seed(seed, "model", *step, *shard.key)
                with torch.no_grad(), training.precision.forward:
                    embeddings = encode(batch)
                check_rows(embeddings, len(shard.indices), "step.joint(): encode")
                self._found[_place_of(shard)] = map_tensors(_widened, embeddings)
                if cut.is_open:
                    cut.look(*step, *shard.key)
                if training.buffers is not None:
                    training.buffers.restore()  # they change in the second pass
        except RuntimeError as error:
            if not training.fit.takes(error):
                raise
            training.fit.release(error)
            self._found = {_SHORT_OF_MEMORY: None}  # told in place of embeddings
        return loaded

    def exchange(self, step: int) -> None:
        """Tell the others, and hear of theirs."""
        members, found = self._place.membership, self._found
        if members.size > 1:
            mine = map_tensors(lambda tensor: tensor.detach().cpu(), found)
            what = f"Step {step}: the embeddings of all shards"
            everyone = gather_bytes(members.group, encode(mine), members.word_device, what)
            found = {number: each for data in everyone for number, each in decode(data).items()}
        self._found = found
        self._training.fit.is_short = _SHORT_OF_MEMORY in found

    def compute(self, seed: int, step: int) -> None:
        """Compute the loss and its gradients."""
        found = self._place.to_device(self._found)
        parts = [found[number] for number in sorted(found)]
        rows = [next(len(each) for each in find_tensors(part)) for part in parts]
        self._all, self._seed = join(parts), (seed, "joint", step)
        leaves = map_tensors(_as_leaf, self._all)
        with self._training.precision.forward:
            self.value = self._call(leaves)
        inputs = [leaf for leaf in find_tensors(leaves) if leaf.requires_grad]
        if not self.value.requires_grad:
            raise UsageError(
                f"Step {step}: the loss of step.joint() does not depend on the embeddings.",
                advice="Compute it from what it is called with, without .item() and detach().",
            )
        grads = torch.autograd.grad(self.value, inputs, allow_unused=True)
        pieces = [[None] * len(rows) if g is None else torch.split(g, rows) for g in grads]
        for number, grads_of_shard in zip(sorted(found), zip(*pieces, strict=True), strict=True):
            self._grads[number] = list(grads_of_shard)
        self.value = self.value.detach()

    def part_of(self, shard: Shard, embeddings: Any) -> Tensor:
        """A number whose gradient is the shard's part of that of the loss."""
        leaves = [_widened(each) for each in find_tensors(embeddings) if each.is_floating_point()]
        pairs = zip(leaves, self._grads[_place_of(shard)], strict=True)
        part = torch.stack([(e * g).sum() for e, g in pairs if g is not None]).sum()
        if _place_of(shard) == 0:
            direct = self._call(self._all)
            if direct.requires_grad:
                part = part + direct
        return part

    def _call(self, embeddings: Any) -> Tensor:
        self._training.generators.seed(*self._seed)
        value = call(self._loss, embeddings)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(
                f"The loss of step.joint() is {shown(value)}, and not a tensor of one element.",
                advice="Return the loss of the whole batch.",
            )
        return value


def _place_of(shard: Shard) -> int:
    """Where a shard, or a piece of one, stands among all of the batch."""
    number, *piece = shard.key
    return number * _MOST_PIECES + sum(piece)


def _refuse(option: str) -> NoReturn:
    """Raise in a run that measures the gradient noise scale, or audits shards."""
    raise UsageError(
        f"step.joint() was called in a run with {option}: shards of a loss over the whole batch "
        "are not independent, so one alone cannot be measured or computed again.",
        advice=f"Leave {option} out of RunOptions.",
    )


def say_not_recorded(sinks: Sinks, step: int) -> UsageError:
    """Say why there will be no picture of the step; the reason as an error, to leave it by."""
    text = f"Step {step} is not recorded: its loss is over the whole batch."
    sinks.tell("message", Message(text))
    return UsageError(text)


def _widened(tensor: Tensor) -> Tensor:
    """Gradients of embeddings in 16 bits would underflow: no scaler knows of them."""
    return tensor.float() if tensor.dtype in _SHORT else tensor


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
