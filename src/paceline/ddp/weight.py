"""What a rank's loss weighs: how many items the gradients that are there are sums over.

Gradients of a weighted step are divided by the items of all ranks. So it has to be known which
gradients are this step's: neither an average of an earlier one, nor what the caller has zeroed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError


class LossWeight:
    """The weight of one rank's loss, collected over the micro-batches of a step.

        none --(enter)--> inside a block --(local backward, leave)--> accumulated --(enter)--> ...
        any of these --(averaged, or zeroed by the caller)--> none, or the block it is inside

    Without any `weighted()` block the weight is 1, and sums become torch's plain averages.
    Invariant: what weighs is what the gradients that are there were accumulated from.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self.is_set = False
        """Whether any micro-batch of this step had a weight."""
        self.was_used = False
        """Whether any step was weighted: then a rank without inputs weighs nothing."""
        self.is_clean = True
        """Whether there is nothing to reset."""
        self._block: float | None = None
        """How many items the block has that we are inside of."""
        self._block_counts = False
        """Whether a backward inside it was accumulated."""
        self._earlier = 0.0
        """How many items the accumulated micro-batches of earlier blocks had."""
        self._accumulated: dict[int, tuple[int, int]] = {}
        """By the id of a parameter that these have reached: its gradient, and version."""
        self._averaged: dict[int, tuple[int, int]] = {}
        """The same of averages that may still be there when a backward has begun unannounced."""
        self._zeros: set[int] = set()
        """The ids of parameters whose gradient was zero when the last backward began."""
        self._is_partly_zeroed = False
        self._has_unweighted = False

    def enter(self, count: float) -> tuple[float | None, bool]:
        """Begin a block of `count` items; returns what `leave` needs."""
        if not count >= 0 or count == float("inf"):
            raise UsageError(
                f"weighted({count}): the count of items must be a number from 0 up.",
                advice="Pass how many samples or tokens this rank's loss is a sum over.",
            )
        before = self._block, self._block_counts
        self._block, self._block_counts = count + (self._block or 0.0), False
        self._sum_up()
        self.is_clean = False
        return before

    def leave(self, before: tuple[float | None, bool]) -> None:
        """End a block; without an accumulated backward inside, nothing of it weighs."""
        block, counts = before
        if self._block_counts and block is None:
            self._earlier = self.value
        if not self._block_counts or block is None:
            self._block = block
        self._block_counts = block is not None and (self._block_counts or counts)
        self._sum_up()

    def _sum_up(self) -> None:
        self.is_set = self._block is not None or bool(self._accumulated)
        self.value = self._earlier + (self._block or 0.0) if self.is_set else 1.0

    def set(self, weight: float) -> None:
        self.value, self.is_set, self.is_clean = weight, True, False

    def on_backward(
        self, params: Iterable[Parameter], first: Tensor | None
    ) -> list[tuple[Parameter, Tensor]]:
        """A backward begins: forget the micro-batches whose gradients the caller has zeroed, and
        take away gradients that are none of this step's, such as an earlier average.

        The gradient of `first` has come already.
        """
        others: list[tuple[Parameter, Tensor]] = []
        changed: list[tuple[Parameter, Tensor]] = []
        zeroed, kept, scaled = 0, 0, 0
        self._zeros.clear()
        for param in params:
            grad, is_first = param.grad, param is first
            # This backward has written to the gradient of `first` once: compared is what was
            # before.
            now = (id(grad), -1 if grad is None else grad._version - is_first)
            noted = self._accumulated.get(id(param))
            if noted == now:
                kept += 1
            elif grad is None or is_first:
                zeroed += noted is not None
                if grad is not None:
                    self._zeros.add(id(param))
                    if noted is None and self._averaged.get(id(param)) == now:
                        others.append((param, grad))
            else:
                changed.append((param, grad))
        for (param, grad), is_zero in zip(changed, _find_zeros(changed), strict=True):
            is_noted = id(param) in self._accumulated
            if is_zero:
                self._zeros.add(id(param))
                zeroed += is_noted
            elif is_noted:
                scaled += 1
            else:
                others.append((param, grad))
        self._is_partly_zeroed |= zeroed > 0 and kept > 0
        if not (others or kept or scaled or first is not None):
            self._has_unweighted = False
        if zeroed and not kept and not scaled:
            self._earlier, self._accumulated, self._block_counts = 0.0, {}, False
            self._sum_up()
        return others

    def on_local_backward(self, reached: Iterable[Tensor]) -> None:
        """A micro-batch was accumulated without being averaged yet."""
        self.is_clean = False
        if self._block is None:
            self._has_unweighted = True
            return
        self._block_counts = True
        self._accumulated |= _note(reached)

    def refuse_misuse(self, step: int, params: Iterable[Parameter]) -> None:
        """Raise if the gradients of this step's micro-batches cannot be divided by one weight."""
        if self.is_set and any(p.grad is not None and p.grad.requires_grad for p in params):
            raise UsageError(
                f"Step {step}: weighted gradients have a graph, through which nothing knows how to "
                "divide by the items of all ranks.",
                advice="Leave create_graph=True out, or model.weighted(); torch.autograd.grad() "
                "computes gradients of this rank's loss for a penalty.",
            )
        if self.is_set and (self._has_unweighted or self._block is None):
            raise UsageError(
                f"Step {step}: some of the accumulated backward passes had a weight and some had "
                "none, so their sum means nothing.",
                advice="Put every micro-batch of a step into a weighted() block, or none.",
            )
        if self._is_partly_zeroed:
            raise UsageError(
                f"Step {step}: some of the gradients that weighted backward passes have "
                "accumulated were zeroed and some were not, so they have no common weight.",
                advice="Zero the gradients of all parameters, or of none.",
            )

    def reset(self, params: Iterable[Tensor] = (), reached: Iterable[Tensor] = ()) -> None:
        """The step is over: these parameters have averages, unless all ranks have reached none."""
        self.was_used |= self._block is not None
        dropped, params = self._zeros.difference(map(id, reached)), list(params)
        asked = [(p, p.grad) for p in params if id(p) in dropped and p.grad is not None]
        zeros = {
            id(p) for (p, _), is_zero in zip(asked, _find_zeros(asked), strict=True) if is_zero
        }
        self._averaged = _note(param for param in params if id(param) not in zeros)
        self._earlier, self._accumulated = 0.0, {}
        self._block_counts = self._has_unweighted = self._is_partly_zeroed = False
        self._sum_up()
        self.is_clean = self._block is None


def _note(params: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """By the id of a parameter, which gradient it has, and how often that was changed in place."""
    found = ((id(param), param.grad) for param in params)
    return {key: (id(grad), grad._version) for key, grad in found if grad is not None}


def _find_zeros(grads: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Of parameters with their gradients, whether these are zero; a device is waited for once."""
    found = [(grad.coalesce().values() if grad.is_sparse else grad).any() for _, grad in grads]
    return (
        [not each for each in torch.stack([f.to(found[0].device) for f in found]).tolist()]
        if found
        else []
    )
