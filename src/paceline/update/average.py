"""The average of the weights over the steps, kept beside them: often the better model to use.

It is exponential, by torch's own arithmetic, and moves when a step is committed, on every worker
alike. It is a state dict with the names of the model, and so can be loaded into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.errors import UsageError
from paceline.torch_private import foreach_copy_


class WeightAverage:
    """`decay` times what it was, and the rest the weights of now, after every step.

    After the first step it is the weights, and at first it keeps less, (1 + step) / (10 + step):
    with a decay of 0.999 the weights of the first steps would be most of it for 1,000 steps.
    Parameters are averaged, and buffers of floating point, as running statistics, which must fit
    them; of other buffers it has the newest. At least float32 is kept: in 16 bits a small change
    would be rounded away.
    """

    def __init__(self, module: nn.Module, decay: float, into: nn.Module | None = None) -> None:
        """`into` is a copy of the module that has the average, where it is to be called."""
        self._module, self._decay = module, decay
        self._saved = set(module.state_dict())
        self._averages = {name: _wide(now).clone() for name, now in self._weights().items()}
        if into is not None:
            there = dict([*into.named_parameters(), *into.named_buffers()])
            self._averages = {name: there[name].detach() for name in self._averages}

    @torch.no_grad()
    def update(self, step: int) -> None:
        weights = self._weights()
        now = [_wide(each) for each in weights.values()]
        for name, each in zip(weights, now, strict=True):
            if self._averages[name].shape != each.shape:  # a buffer that was made anew
                self._averages[name] = each.clone()
        averages = [self._averages[name] for name in weights]
        if step == 1:
            foreach_copy_(averages, now)
        else:
            decay = min(self._decay, (1 + step) / (10 + step))
            blend: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            blend(averages, now, step)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the model has the averaged weights, and afterwards its own, bit for bit."""
        weights = self._weights()
        own = {name: each.detach().clone() for name, each in weights.items()}
        _copy(self._averages, weights)
        try:
            yield
        finally:
            _copy(own, weights)

    def state_dict(self) -> dict[str, Any]:
        names = {id(each): name for name, each in self._weights().items()}
        state = self._module.state_dict(keep_vars=True)
        for name, each in state.items():
            if id(each) in names:  # also under its second name, where a weight has two
                state[name] = self._averages[names[id(each)]]
            elif isinstance(each, Tensor):
                state[name] = each.detach()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if missing := [name for name in self._averages if name not in state]:
            raise UsageError(f"It has no average of {missing[0]!r}.")
        _copy(state, self._averages)

    def _weights(self) -> dict[str, Tensor]:
        """What is averaged, by name, as it is now: a buffer may be another tensor by then."""
        named: list[tuple[str, Tensor]] = [*self._module.named_parameters()]
        named += self._module.named_buffers()
        saved = [(name, each) for name, each in named if name in self._saved]
        return {n: each for n, each in saved if each.is_floating_point() or each.is_complex()}


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _copy(source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Overwrite the values where they lie: who shares the memory sees the new values."""
    for name, tensor in into.items():
        tensor.data.copy_(source[name])
