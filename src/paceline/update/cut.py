"""Which elements a rank steps: flat buffers, cut among the ranks and into pieces.

Plain arithmetic without tensors. An elementwise optimizer does not care where one parameter ends
and the next begins, so neighbours that are treated alike are stepped as one tensor; and a tensor
larger than the cache is stepped part by part. A rank's slice of a buffer is `transport.flat`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from paceline.gradients.plan import Slot
from paceline.transport.flat import ALIGNMENT, round_up

PIECE_NUMEL = 2**18
"""A piece and its state fit a core's cache."""


Stretch = tuple[Slot, int, int]
"""Elements [first, last) of a buffer, which belong to a slot."""


@dataclass(frozen=True, slots=True)
class Part:
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
    parts: tuple[Part, ...]


def cut_pieces(
    flat: int,
    slots: Sequence[Slot],
    own: tuple[int, int],
    kinds: Sequence[Hashable],
    *,
    merges: bool,
) -> list[Piece]:
    """Cut the slice `own` of a buffer into pieces of parameters of one kind.

    `kinds` is by parameter; one of kind None is not stepped. With `merges` neighbours of one kind
    are in one piece, with what lies between them. All borders are multiples of `ALIGNMENT` from the
    start of a parameter, if those are.
    """
    runs: list[list[Stretch]] = []
    before: Hashable = None
    for slot in slots:
        first, last = max(slot.start, own[0]), min(slot.stop, own[1])
        kind = kinds[slot.param]
        if first >= last:
            continue
        if kind is not None:
            if not merges or kind != before:
                runs.append([])
            runs[-1].append((slot, first, last))
        before = kind
    return [piece for run in runs for piece in _cut_run(flat, run)]


def _cut_run(flat: int, run: Sequence[Stretch]) -> list[Piece]:
    """A run of neighbours in pieces of about one size, none above `PIECE_NUMEL`."""
    start, stop = run[0][1], run[-1][2]
    count = -(-(stop - start) // PIECE_NUMEL)
    step = round_up(-(-(stop - start) // count), ALIGNMENT)
    pieces = []
    for begin in range(start, stop, step):
        end = min(stop, begin + step)
        parts = tuple(
            Part(slot.param, a - slot.start, b - slot.start, a)
            for slot, first, last in run
            if (a := max(first, begin)) < (b := min(last, end))
        )
        if parts:
            pieces.append(Piece(flat, begin, end, parts))
    return pieces


def split_piece(piece: Piece, flags: Sequence[bool]) -> list[Piece]:
    """A piece as several, each of parts with one flag."""
    runs: list[list[Part]] = []
    before: bool | None = None
    for part, flag in zip(piece.parts, flags, strict=True):
        if flag != before:
            runs.append([])
        runs[-1].append(part)
        before = flag
    return [
        Piece(piece.flat, run[0].at, run[-1].at + run[-1].stop - run[-1].start, tuple(run))
        for run in runs
    ]


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
