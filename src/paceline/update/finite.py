"""NaN and infinity: found before they reach the parameters, on every worker in the same step.

A loss that is not finite makes its gradients NaN, and those reach every worker with the sum. So
each looks at the averaged gradients alone, all see the same, and only when something is wrong do
they ask each other whose shard it was. See Note [What is looked at].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline import comm
from paceline.comm.membership import Membership
from paceline.errors import NotFiniteError

_MOST_LOOKED_AT = 128
"""So many gradients at most are looked at in a step, spread over the model."""
_SAMPLES_SHOWN = 8


class Loss(NamedTuple):
    """The loss of one shard as it was computed."""

    value: Tensor
    shard: int
    samples: Sequence[int]
    """Their numbers; of a stream, -1."""


class HostCopy:
    """One tensor's values as of now, on the host later.

    Reading a number at once would make the host wait until a GPU has caught up, and then the GPU
    for the host; a few steps later the number is there for nothing.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: Any = None
        if tensor.device.type == "cpu":
            self._tensor = tensor.clone()
            return
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._event = torch.get_device_module(tensor.device).Event()
        self._event.record()

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """The values; waits for the device where it has not come that far yet."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensor


class FiniteCheck:
    """Looks at the gradients of every step, or, on a GPU, has the device look and asks later.

    CPU:   averaged gradients --look--> raise, before the optimizer has seen them
    GPU:   averaged gradients --(device: all zero if one is not finite)--> optimizer
           the next step --ask--> raise
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        membership: Membership,
        *,
        is_complete: bool,
        is_saved: bool,
    ) -> None:
        """`is_complete` looks at every element; see Note [What is looked at]."""
        self._is_saved = is_saved
        self._named, self._membership, self._is_complete = named, membership, is_complete
        self._is_late = bool(named) and named[0][1].device.type != "cpu"
        self._pending: tuple[HostCopy, int, Sequence[Loss]] | None = None

    @torch.no_grad()
    def check(self, step: int, losses: Sequence[Loss], norm: Tensor | None) -> None:
        """Look at the gradients of `step`; `norm` is their length where somebody knows it."""
        grads = [param.grad for _, param in self._named if param.grad is not None]
        if not grads:
            return
        if self._is_late:
            self.ask()
            self._look_later(step, grads, losses, norm)
        elif not self._looks_finite(grads, norm):
            self._raise(step, losses)

    def ask(self) -> None:
        """Raise if the last step that was looked at was not finite."""
        if self._pending is None:
            return
        (is_bad, step, losses), self._pending = self._pending, None
        if bool(is_bad.read()):
            self._raise(step, losses)

    def forget(self) -> None:
        self._pending = None

    def _looks_finite(self, grads: list[Tensor], norm: Tensor | None) -> bool:
        if norm is not None:
            return math.isfinite(norm.item())
        if self._is_complete:
            return all(bool(torch.isfinite(_dense(grad)).all()) for grad in grads)
        samples = []
        for grad in grads[:: -(-len(grads) // _MOST_LOOKED_AT)]:
            values = grad._values() if grad.is_sparse else grad
            samples.append((values if values.dim() < 2 else values.select(-1, 0)).reshape(-1))
        return bool(torch.isfinite(torch.cat(samples)).all())

    def _look_later(
        self, step: int, grads: list[Tensor], losses: Sequence[Loss], norm: Tensor | None
    ) -> None:
        if norm is None:
            norms = torch._foreach_norm([_dense(grad) for grad in grads])
            norm = torch.stack([each.float() for each in norms]).sum()
        is_bad = torch.isfinite(norm).logical_not()
        for grad in grads:
            _dense(grad).masked_fill_(is_bad, 0)
        self._pending = HostCopy(is_bad), step, losses

    def _raise(self, step: int, losses: Sequence[Loss]) -> None:
        mine = [
            [loss.shard, str(value), list(loss.samples[:_SAMPLES_SHOWN])]
            for loss in losses
            if not math.isfinite(value := loss.value.item())
        ]
        everyone: list[Any] = [mine]
        if (members := self._membership).size > 1:
            what = "Asking whose loss is not finite"
            everyone = comm.exchange(members.group, mine, members.word_device, what)
        before = "one of the steps before" if self._is_late else f"step {step - 1}"
        state = f"The model is as it was after {before}"
        state += "; the last checkpoint is good." if self._is_saved else "."
        for rank, theirs in enumerate(everyone):
            if theirs:
                number, value, samples = theirs[0]
                text = f"Step {step}: the loss of shard {number}, on rank {rank}, is {value}."
                if samples and samples[0] >= 0:
                    more = "…" * (len(samples) == _SAMPLES_SHOWN)
                    text += f" Its samples are {', '.join(map(str, samples))}{more}."
                raise NotFiniteError(
                    text,
                    state,
                    "Look at these samples; if they are good, lower the learning rate or set "
                    "clip_norm.",
                )
        grads = [(name, p.grad.to_dense()) for name, p in self._named if p.grad is not None]
        bad = [f" of {name!r}" for name, grad in grads if not torch.isfinite(grad).all()]
        raise NotFiniteError(
            f"Step {step}: the losses are finite, but the gradient{''.join(bad[:1])} is not.",
            state,
            "Look for a square root, a logarithm or a division near zero, or set clip_norm.",
        )


def _dense(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


# Note [What is looked at]
# Reading every gradient costs a few percent of a step on a CPU, where memory is slow. The gradient
# of a weight matrix is a product with the gradient that came from above, so one NaN there makes
# a whole row of it NaN, and one element of every row tells. What has fewer than two dimensions is
# read completely. A NaN that is born in single elements of an embedding, in a layer with nothing
# below it, is found a step later by its loss; `check_finite="all"` finds it at once.
