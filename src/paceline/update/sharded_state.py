"""The state of an optimizer whose work is shared out: of whole parameters, and of pieces.

Checkpoints and `optimizer.state_dict()` know whole parameters only. A tensor of the state that has
its parameter's shape is cut as the parameter is; everything else belongs to all of its pieces.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.files import dtype_name
from paceline.update.cut import ParamSlice, Piece

State = dict[str, Any]
"""Of one parameter or piece, by the optimizer's own names."""
Layout = tuple[torch.Size, tuple[int, ...]]
NUMBERS = ("step", "mu_product", "eta", "mu")
"""What optimizers of torch keep one of for a whole parameter."""
PLAIN = (int, float, bool, str, type(None))


def is_cut(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a value of the state has an element for each of a parameter of this shape.

    A count of steps has the shape of a parameter without dimensions, but is none.
    """
    return isinstance(value, Tensor) and value.shape == shape and key not in NUMBERS


def likeness(state: Mapping[str, Any], shape: torch.Size) -> Hashable:
    """Equal for parameters that can be stepped as one: they are cut alike and agree on the rest."""
    return tuple(
        (key, "cut" if is_cut(key, value, shape) else repr(_exact(value)))
        for key, value in sorted(state.items())
    )


def _exact(value: Any) -> Any:
    """A value whose text tells it from any other; that of a tensor is rounded."""
    return (value.dtype, value.shape, value.tolist()) if isinstance(value, Tensor) else value


def cut_state(piece: Piece, wholes: Sequence[State], layouts: Sequence[Layout]) -> State:
    """The state of a piece, from that of its parameters; both by part of the piece."""
    found: State = {}
    for key, value in wholes[0].items():
        if not is_cut(key, value, layouts[0][0]):
            found[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        found[key] = cut = value.new_zeros(piece.stop - piece.start)
        for whole, part, layout in zip(wholes, piece.parts, layouts, strict=True):
            begin = part.at - piece.start
            flat = in_memory_order(whole[key], layout)[part.start : part.stop]
            cut[begin : begin + flat.numel()] = flat
    return found


def in_memory_order(tensor: Tensor, layout: Layout) -> Tensor:
    """The elements as they lie in a tensor of that layout."""
    if tensor.stride() == layout[1]:
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(*layout).copy_(tensor)
    return flat


def split_state(state: State, piece: Piece, smaller: Piece) -> State:
    """The state of a piece inside another one."""
    start, stop = smaller.start - piece.start, smaller.stop - piece.start
    inside = Piece(0, 0, stop - start, (ParamSlice(0, start, stop, 0),))
    return cut_state(inside, [state], [(torch.Size([piece.stop - piece.start]), (1,))])


def describe(state: Mapping[str, Any], shape: torch.Size) -> dict[str, list[Any]]:
    """A state in words that travel: what is cut by its dtype, the rest by its value."""
    words: dict[str, list[Any]] = {}
    for key, value in state.items():
        if is_cut(key, value, shape):
            words[key] = ["cut", dtype_name(value)]
        elif isinstance(value, Tensor) and value.numel() == 1:
            facts = [dtype_name(value), list(value.shape), value.item(), value.device.type]
            words[key] = ["number", *facts]
        elif isinstance(value, PLAIN):
            words[key] = ["plain", value]
        else:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise UsageError(
                f"The optimizer keeps {key!r} {what:.80}, which cannot be put together from what "
                "single ranks keep.",
                advice='Do not share the update of this optimizer out: use update="whole".',
            )
    return words


def value_of(words: Sequence[Any], like: Tensor) -> Any:
    """What `describe` has said of a value that is not cut."""
    if words[0] == "plain":
        return words[1]
    _, dtype, shape, number, device = words
    where = like.device if device != "cpu" else torch.device("cpu")
    return torch.full(shape, number, dtype=getattr(torch, dtype), device=where)
