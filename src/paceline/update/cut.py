"""Which elements a rank steps: flat buffers, cut among the ranks and into pieces.

Plain arithmetic without tensors. An elementwise optimizer does not care where one parameter ends
and the next begins, so neighbours that are treated alike are stepped as one tensor; and a tensor
larger than the cache is stepped part by part. A rank's slice of a buffer is `transport.flat`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from paceline.ddp import Slot
from paceline.transport import ALIGNMENT, round_up

PIECE_NUMEL = 2**18
"""A piece and its state fit a core's cache."""


Stretch = tuple[Slot, int, int]
"""Elements [first, last) of a buffer, which belong to a slot."""


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
