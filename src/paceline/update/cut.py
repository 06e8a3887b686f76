"""Which elements a rank steps: flat buffers, cut among the ranks and into pieces, with their state.

An elementwise optimizer does not care where one parameter ends and the next begins, so neighbours
that are treated alike are stepped as one tensor; and a tensor larger than the cache is stepped part
by part. A rank's slice of a buffer is `transport.slices`.

Checkpoints and `optimizer.state_dict()` know whole parameters only. A tensor of the state that has
its parameter's shape is cut as the parameter is; everything else belongs to all of its pieces.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from paceline.ddp import Slot
from paceline.errors import UsageError
from paceline.files import dtype_name
from paceline.transport import ALIGNMENT, round_up

PIECE_NUMEL = 2**18
"""A piece and its state fit a core's cache."""
Stretch = tuple[Slot, int, int]
"""Elements [first, last) of a buffer, which belong to a slot."""
State = dict[str, Any]
"""Of one parameter or piece, by the optimizer's own names."""
Layout = tuple[torch.Size, tuple[int, ...]]
NUMBERS = ("step", "mu_product", "eta", "mu")
"""What optimizers of torch keep one of for a whole parameter."""
PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """Elements [start, stop) of a parameter, in the order in which they lie in memory."""

    param: int
    start: int
    stop: int
    at: int
    """Where they begin in the buffer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of buffer `flat`, stepped as one tensor."""

    flat: int
    start: int
    stop: int
    parts: tuple[ParamSlice, ...]


def cut_pieces(
    flat: int,
    slots: Sequence[Slot],
    own: tuple[int, int],
    kinds: Sequence[Hashable],
    *,
    merges: bool,
    most: int = PIECE_NUMEL,
) -> list[Piece]:
    """Cut the slice `own` of a buffer into pieces of parameters of one kind.

    `kinds` is by parameter; one of kind None is not stepped. With `merges` neighbours of one kind
    are in one piece, with what lies between them. All borders are multiples of `ALIGNMENT` from the
    start of a parameter, if those are.
    """
    inside = [(slot, max(slot.start, own[0]), min(slot.stop, own[1])) for slot in slots]
    inside = [(slot, first, last) for slot, first, last in inside if first < last]
    by_kind = groupby(inside, key=lambda stretch: kinds[stretch[0].param])
    runs: list[list[Stretch]] = [list(run) for kind, run in by_kind if kind is not None]
    if not merges:
        runs = [[stretch] for run in runs for stretch in run]
    return [piece for run in runs for piece in _cut_run(flat, run, most)]


def _cut_run(flat: int, run: Sequence[Stretch], most: int) -> list[Piece]:
    """A run of neighbours in pieces of about one size, none above `most` elements."""
    start, stop = run[0][1], run[-1][2]
    count = -(-(stop - start) // most)
    step = round_up(-(-(stop - start) // count), ALIGNMENT)
    slots = [slot for slot, _, _ in run]
    pieces = (
        piece_at(flat, slots, begin, min(stop, begin + step)) for begin in range(start, stop, step)
    )
    return [piece for piece in pieces if piece.parts]


def piece_at(flat: int, slots: Sequence[Slot], start: int, stop: int) -> Piece:
    """Elements [start, stop) of a buffer, with what they are of which parameter."""
    parts = tuple(
        ParamSlice(slot.param, first - slot.start, last - slot.start, first)
        for slot in slots
        if (first := max(slot.start, start)) < (last := min(slot.stop, stop))
    )
    return Piece(flat, start, stop, parts)


def split_piece(piece: Piece, flags: Sequence[bool]) -> list[Piece]:
    """A piece as several, each of parts with one flag."""
    pieces = []
    for _, run in groupby(zip(piece.parts, flags, strict=True), key=itemgetter(1)):
        parts = tuple(part for part, _ in run)
        stop = parts[-1].at + parts[-1].stop - parts[-1].start
        pieces.append(Piece(piece.flat, parts[0].at, stop, parts))
    return pieces


def deal_tensors(numels: Sequence[int], size: int) -> tuple[int, list[Slot]]:
    """Give whole tensors to ranks: a buffer's length, and places in it, in their rank's slices.

    The largest go first, each to the rank that has least, so that shares come out about equal.
    """
    loads = [0] * size
    places: list[tuple[int, int]] = [(0, 0)] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        owner = loads.index(min(loads))
        places[index] = owner, loads[owner]
        loads[owner] += round_up(numels[index], ALIGNMENT)
    share = max(loads)
    slots = [
        Slot(index, owner * share + start, owner * share + start + numels[index])
        for index, (owner, start) in enumerate(places)
    ]
    return size * share, slots


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
            # A copy for each piece: torch counts steps in place.
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
    # torch may keep counts of steps on the CPU, wherever the parameter is.
    where = like.device if device != "cpu" else torch.device("cpu")
    return torch.full(shape, number, dtype=getattr(torch, dtype), device=where)
