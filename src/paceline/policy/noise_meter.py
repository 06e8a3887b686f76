"""Takes the norms that the gradient noise scale is made of, in every so many steps of a training.

Each shard's own gradient is seen on its way to the parameter, by a hook that is there only in
the steps that are measured; the whole batch's gradient is what the optimizer gets. No copy of a
gradient is kept, and no number is read from the device until somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline import comm
from paceline.comm import Group
from paceline.errors import UsageError
from paceline.policy.noise import NoiseEstimate, NoiseScale, from_shards

_SLOTS = 32
"""So many measurements are kept until the next reading; older ones are forgotten."""
_WORDS = 5
_SMALL = 2**14
"""Gradients of at most so many elements are measured together."""


class NoiseMeter:
    """Measures the noise scale of one model on all ranks of a group.

        idle --begin (every so many steps)--> measuring --add, once per shard--> --end--> idle

    All ranks call `begin` with the same steps, so they measure in the same ones, and all call
    `read` together. In between nobody communicates.
    """

    def __init__(self, parameters: Iterable[Parameter], *, every: int = 20) -> None:
        if every < 1:
            raise UsageError(f"every is {every}.", advice="Measure every step, or every n-th.")
        self.every = every
        self.scale = NoiseScale()
        self._parameters: Sequence[Parameter] = list(parameters)
        self._measured: list[Parameter] = []
        self._handles: list[Any] = []
        self._small: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._rows: list[float | Tensor] = []
        self._seen: set[int] = set()
        self._is_spoiled = False
        self._step = 0
        self._measured_by_slot: dict[int, Tensor] = {}

    @property
    def is_measuring(self) -> bool:
        return bool(self._handles)

    def begin(self, step: int) -> None:
        """A step begins; whether it is measured depends on its number alone."""
        self.cancel()
        if step % self.every:
            return
        self._step = step
        self._measured = [p for p in self._parameters if p.requires_grad]
        for number, parameter in enumerate(self._measured):
            hook = partial(self._on_grad, number)
            handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def add(self, rows: float | Tensor, *, is_mean: bool = False) -> None:
        """One shard's backward is over; its loss was a sum over `rows`, or their mean.

        Between two calls there is one backward pass.
        """
        if not self.is_measuring:
            return
        norms = [*self._norms, *_norms(self._small)]
        self._norms, self._small, self._seen = [], [], set()
        if not norms or (not isinstance(rows, Tensor) and rows <= 0):
            return
        squared = _squared(norms)
        self._squares.append(squared * rows if is_mean else squared / rows)
        self._rows.append(rows)

    @torch.no_grad()
    def end(self, *, scale: float = 1.0) -> None:
        """All gradients are averaged, and the optimizer has not yet seen them.

        `scale` is what a `GradScaler` has multiplied the losses with.
        """
        if not self.is_measuring:
            return
        squares, rows = self._squares, self._rows
        grads = [p.grad for p in self._measured if p.grad is not None]
        is_usable = not self._is_spoiled
        self.cancel()
        if not grads or not is_usable:
            return
        whole = _squared(_norms(grads))
        device = whole.device
        if squares:
            weighted = torch.stack([squared.to(device) for squared in squares]).sum()
        else:
            weighted = torch.zeros_like(whole)
        counted = sum(count for count in rows if not isinstance(count, Tensor))
        total = torch.full_like(whole, counted)
        for count in rows:
            if isinstance(count, Tensor):
                total = total + count.to(device)
        # Built on the device: a copy from the host would wait for everything before it.
        ranks, shards = torch.ones_like(whole), torch.full_like(whole, len(squares))
        words = torch.stack([ranks, whole / scale**2, shards, total, weighted / scale**2])
        self._measured_by_slot[self._step // self.every % _SLOTS] = words

    def cancel(self) -> None:
        """The step will not be finished: forget it."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._measured = [], []
        self._seen, self._is_spoiled = set(), False
        self._small, self._norms, self._squares, self._rows = [], [], [], []

    def read(self, group: Group | None) -> NoiseEstimate | None:
        """Put together what all ranks have measured; None while that is too little.

        A collective: every rank calls it, at the same point. `None` is a world of one.
        """
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        table = torch.zeros(_SLOTS, _WORDS, dtype=torch.float64, device=device)
        for slot, words in self._measured_by_slot.items():
            table[slot] = words
        self._measured_by_slot = {}
        size = 1
        if group is not None and group.size() > 1:
            size = group.size()
            comm.all_reduce(group, table, "Adding up the gradient noise")
        for ranks, whole, shards, rows, squares in table.tolist():
            # A rank that joined later was not there for some of it.
            if ranks == size and shards >= 2 and rows > 0:
                self.scale.add(*from_shards(int(shards), rows, squares, whole / size), batch=rows)
        return self.scale.estimate()

    def _on_grad(self, number: int, grad: Tensor) -> None:
        # In pieces, as a weight gets it that several reentrant checkpoints share, a gradient's
        # length cannot be told.
        self._is_spoiled |= number in self._seen
        self._seen.add(number)
        if grad.numel() <= _SMALL and not grad.is_sparse:
            # Keeping a gradient costs autograd a copy of it; measuring each alone costs more.
            self._small.append(grad)
        else:
            self._norms += _norms([grad])


@torch.no_grad()
def _norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The lengths of gradients, in a precision in which squares do not overflow."""
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    wide = [value.float() if value.dtype in _NARROW else value for value in values]
    return list(torch._foreach_norm(wide)) if wide else []


def _squared(norms: Sequence[Tensor]) -> Tensor:
    """The squared length of all of them together."""
    kinds = {(norm.device, norm.dtype) for norm in norms}
    if len(kinds) > 1:
        norms = [norm.to(norms[0].device, torch.float64) for norm in norms]
    return torch.stack(list(norms)).double().square().sum()


_NARROW = {torch.float16, torch.bfloat16}
