"""A whole update in pieces: the default forms of torch's optimizers, on CPUs, at the cache's speed.

A loop over tensors goes over each of them several times, so a large one comes from memory every
time. Parts of it that fit the cache come from memory once; the result has the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.ddp import Slot
from paceline.transport import dense_layout
from paceline.update.cut import PIECE_NUMEL, Piece, cut_pieces, cut_state, in_memory_order, is_cut
from paceline.update.exchange import ExchangedStep, Shares, States, find_exchanged
from paceline.update.kind import ELEMENTWISE, merges, params_of


def step_in_pieces(optimizer: Optimizer) -> bool:
    """Have an optimizer step its large parameters piece by piece, if that is faster; whether so."""
    groups = optimizer.param_groups
    is_loop = not any(group.get("foreach") or group.get("fused") for group in groups)
    if type(optimizer) not in ELEMENTWISE or not is_loop or find_exchanged(optimizer) is not None:
        return False
    if not any(map(_is_large, params_of(optimizer))):
        return False
    PiecewiseUpdate(optimizer)
    return True


class PiecewiseUpdate(ExchangedStep):
    """Has an optimizer step pieces of large parameters."""

    def make_shares(self, states: States) -> Pieces:
        return Pieces(self._large(), states)

    def basis(self) -> Any:
        """Also which parameters are large, and how they lie in memory."""
        large = [(id(param), param.dtype, param.stride()) for param in self._large()]
        return large, super().basis()

    def _large(self) -> list[Parameter]:
        return [param for param in params_of(self.optimizer) if _is_large(param)]


class Pieces(Shares):
    """Large parameters, each as several tensors that share its memory."""

    def __init__(self, params: list[Parameter], states: States) -> None:
        self._params = {id(param): param for param in params}
        self._layouts = {id(param): dense_layout(param) for param in params}
        self._cut: dict[int, list[tuple[Piece, Parameter]]] = {}
        for param in params:
            whole = (0, param.numel())
            pieces = cut_pieces(0, [Slot(0, *whole)], whole, [0], merges=False)
            flat = in_memory_order(param, self._layouts[id(param)])
            self._cut[id(param)] = [(p, Parameter(flat[p.start : p.stop])) for p in pieces]
        self.states: States = {}
        self.adopt(states)

    def adopt(self, states: States) -> None:
        self.states = defaultdict(dict)
        for key, state in states.items():
            if id(key) not in self._cut:
                self.states[key] = state
            elif state:
                layout = [self._layouts[id(key)]]
                for piece, tensor in self._cut[id(key)]:
                    self.states[tensor] = cut_state(piece, [state], layout)

    def begin(self) -> None:
        for number, param in self._params.items():
            flat = in_memory_order(param, self._layouts[number])
            grad = None if param.grad is None else in_memory_order(param.grad, dense_layout(param))
            for piece, tensor in self._cut[number]:
                # The parameter may have been given other memory since.
                if tensor.data_ptr() != flat.data_ptr() + piece.start * flat.element_size():
                    tensor.data = flat[piece.start : piece.stop]
                tensor.grad = None if grad is None else grad[piece.start : piece.stop]

    def tensors(self, _group: int, params: list[Parameter]) -> list[Parameter]:
        return [
            tensor
            for param in params
            for tensor in ([t for _, t in self._cut.get(id(param), [])] or [param])
        ]

    def drop_grads(self) -> None:
        for cut in self._cut.values():
            for _, tensor in cut:
                tensor.grad = None

    def gather(self) -> None:
        # Pieces have the memory of a parameter, but not its version, which autograd looks at.
        increment_version(list(self._params.values()))

    def collect(self, *, keeps: bool = True) -> States:
        states = self.states
        mine = {id(tensor) for pieces in self._cut.values() for _, tensor in pieces}
        whole = {key: state for key, state in states.items() if id(key) not in mine}
        for number, param in self._params.items():
            (_, first), *_ = cut = self._cut[number]
            for key, value in states.get(first, {}).items():
                whole.setdefault(param, {})[key] = value
                if is_cut(key, value, first.shape):
                    flat = torch.cat([states[tensor][key] for _, tensor in cut])
                    whole[param][key] = flat.as_strided(*self._layouts[number])
        return whole if keeps else {}


def _is_large(param: Tensor) -> bool:
    """Whether a parameter is stepped faster in pieces, to the same bits."""
    if param.numel() <= PIECE_NUMEL:
        return False
    is_dense = dense_layout(param)[1] == param.stride()
    is_plain = param.device.type == "cpu" and merges(param.dtype, is_fused=False)
    has_dense = param.grad is None or param.grad.layout is torch.strided
    return is_plain and is_dense and has_dense
