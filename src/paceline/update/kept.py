"""The optimizer's state in memory that outlives a rank, so that a death loses nothing of it.

All ranks of a host map one piece of memory. Each keeps the state of its share there, and the
optimizer steps it where it lies, some pieces at a time, which are a lot:

    entered --(all have)--> lot 0: copied aside, stepped, counted --> lot 1 --> ... --> all counted

Whenever a rank is killed, the others find its state: of the lots that are counted as it is after
the step, of the one under way as it was before, in the copy, and of the rest untouched. Only who
has all gradients enters, and no rank begins before all have: so the ranks left can finish the step.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.torch_private import foreach_copy_
from paceline.transport import ALIGNMENT, Flat, SharedMemory, Transport, round_up
from paceline.update.cut import NUMBERS, PIECE_NUMEL, Piece, State
from paceline.update.kind import ELEMENTWISE

LOT_NUMEL = 2**16
"""Of a lot, at least: each costs a call."""
LOTS = 20
"""So the copy of one is a twentieth of a rank's state, in large models."""
_DTYPES = (None, torch.float32, torch.float64)
"""Of numbers, by their code."""
_WORDS, _COLUMNS, _NUMBER_BYTES, _ALIGN_BYTES = 8, 5, 8, 64
_ENTERED, _PROGRESS, _COPIED, _LOTS, _PIECES, _LOADED, _IS_WHOLE = range(7)
_TURN = 2**24
"""Progress and copies are counted in one word, which is written at once: turn and lots of it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A piece as its rank has left it."""

    flat: int
    start: int
    stop: int
    is_stepped: bool
    state: State
    """Where it lies."""


class KeptMap:
    """Where things lie: plain arithmetic, the same on every rank."""

    def __init__(self, size: int, flats: Sequence[Flat], keys: Sequence[str], count: int) -> None:
        """`count` is the number of parameters."""
        numel = sum(flat.numel for flat in flats)
        self.lot_numel = max(LOT_NUMEL, round_up(numel // size // LOTS, ALIGNMENT))
        self.piece_numel = min(PIECE_NUMEL, self.lot_numel)
        # Each parameter may begin a piece, and each border between pieces cut one.
        self.most_pieces = most_pieces = 2 * count + numel // self.piece_numel + 4 * len(flats)
        self.size = size
        self._end = _ALIGN_BYTES  # after the line that proves which memory it is
        wide = max((flat.dtype.itemsize for flat in flats), default=8)
        self.words = self._take(size * _WORDS * 8)
        self.tables = [self._take(most_pieces * _COLUMNS * 8) for _ in range(size)]
        rows = most_pieces * len(NUMBERS) * _NUMBER_BYTES
        self.numbers = [(self._take(rows), self._take(rows)) for _ in range(size)]
        """Of every rank, as they are and as they were before the step."""
        copy_bytes = 2 * self.lot_numel * wide * len(keys)
        self.copies = [self._take(copy_bytes) for _ in range(size)]
        self.arrays = [
            [self._take(flat.numel * flat.dtype.itemsize) for _ in keys] for flat in flats
        ]
        """By buffer and key; every rank touches its slice alone."""
        self.total_bytes = self._end

    def _take(self, count: int) -> int:
        begin, self._end = self._end, self._end + round_up(count, _ALIGN_BYTES)
        return begin


class KeptState:
    """The state of all ranks, seen from one."""

    def __init__(
        self,
        memory: mmap.mmap,
        places: KeptMap,
        rank: int,
        flats: Sequence[Flat],
        keys: Sequence[str],
    ) -> None:
        self.turn = 0
        """How many steps all ranks have made together."""
        self.lots: list[list[Piece]] = []
        self.places, self._rank, self._keys = places, rank, list(keys)
        self._words = memoryview(memory)[
            places.words : places.words + places.size * _WORDS * 8
        ].cast("Q")
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._flats = flats
        self._arrays = [
            [self._view(at, flat.numel, flat.dtype) for at in row]
            for flat, row in zip(flats, places.arrays, strict=True)
        ]
        self._copied: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        """By lot, where its state lies and where it is copied to."""
        self._states: list[State] = []
        self._kept: list[State] = []

    def hold(self, lots: Sequence[Sequence[tuple[Piece, State]]]) -> None:
        """From now on these pieces are stepped: keep their state."""
        # First: a rank that reads this one's state from here on finds it half written.
        self._note(_IS_WHOLE, 0)
        self.lots = [[piece for piece, _ in several] for several in lots]
        self._states = [state for several in lots for _, state in several]
        self._kept = [{} for _ in self._states]
        for state in self._states:  # numbers lie by the row of their piece, which may be another's
            state.update({key: state[key].clone() for key in NUMBERS if key in state})
        rows = [
            [piece.flat, piece.start, piece.stop, lot, 0]
            for lot, pieces in enumerate(self.lots)
            for piece in pieces
        ]
        self._table(self._rank)[: len(rows)] = torch.tensor(rows).view(-1, _COLUMNS)
        self._note(_PIECES, len(rows))
        self._note(_LOTS, len(lots))
        self._note(_PROGRESS, self.turn * _TURN + len(lots))
        self._copied = {}
        self._note(_IS_WHOLE, all(self._keep(lot) for lot in range(len(lots))))

    def load(self) -> None:
        """Another state is about to be held, loaded by every rank."""
        self._note(_LOADED, self._word(self._rank, _LOADED) + 1)

    def enter(self) -> None:
        """This rank has all that it needs for the step."""
        self._note(_ENTERED, self.turn + 1)

    def leave(self) -> None:
        """This rank does not step, after all."""
        self._note(_ENTERED, self.turn)

    def outside(self) -> list[int]:
        """The ranks that have not entered."""
        return [r for r in range(self.places.size) if self._word(r, _ENTERED) <= self.turn]

    def behind(self) -> list[int]:
        """The ranks that have not stepped all of their pieces in this turn."""
        done = (self.turn + 1) * _TURN
        ranks = range(self.places.size)
        return [r for r in ranks if self._word(r, _PROGRESS) < done + self._word(r, _LOTS)]

    def begin(self) -> None:
        now, before = (self._numbers(self._rank, when) for when in (0, 1))
        # Before the turn is noted: from then on these are read where a lot is torn.
        before.copy_(now)
        self._note(_PROGRESS, (self.turn + 1) * _TURN)

    def open(self, lot: int) -> None:
        """The pieces of this lot are about to be stepped."""
        if lot in self._copied:
            live, copies = self._copied[lot]
            # Noted below when it is complete: only then may the lot be stepped where it lies.
            foreach_copy_(copies, live)
        self._note(_COPIED, (self.turn + 1) * _TURN + lot + 1)

    def close(self, lot: int) -> None:
        """They are stepped."""
        if not self._keep(lot):
            self._note(_IS_WHOLE, 0)  # it has no place here, and would be lost
        self._note(_PROGRESS, (self.turn + 1) * _TURN + lot + 1)

    def read(self, rank: int, turn: int) -> list[Kept] | None:
        """A rank's pieces, on their way to this turn; None if their state is not to be had."""
        is_whole = self._word(rank, _IS_WHOLE)
        if not is_whole or self._word(rank, _LOADED) != self._word(self._rank, _LOADED):
            return None
        progress, lots = self._word(rank, _PROGRESS), self._word(rank, _LOTS)
        if progress == (turn - 1) * _TURN + lots:
            progress = turn * _TURN  # not begun
        done = progress - turn * _TURN
        if not 0 <= done <= lots:
            return None
        is_torn = self._word(rank, _COPIED) == turn * _TURN + done + 1
        found, copied = [], self.places.copies[rank]
        rows = self._table(rank)[: self._word(rank, _PIECES)].tolist()
        for row, (flat, start, stop, lot, what) in enumerate(rows):
            from_copy = is_torn and lot == done
            state: State = {}
            for index, key, dtype in self._present(what):
                if dtype is not None:
                    state[key] = self._number(rank, row, index, dtype, before=from_copy)
                elif from_copy:
                    state[key], copied = self._copy_at(copied, flat, stop - start)
                else:
                    state[key] = self._arrays[flat][index][start:stop]
            found.append(Kept(flat, start, stop, lot < done, state))
        return found

    def _keep(self, lot: int) -> bool:
        """Have the state of a lot's pieces lie here, if it can; looks at what is new only."""
        is_new, first = False, sum(map(len, self.lots[:lot]))
        for row, piece in enumerate(self.lots[lot], first):
            state, kept = self._states[row], self._kept[row]
            if len(state) == len(kept) and all(state[key] is kept[key] for key in kept):
                continue
            is_new, what = True, 0
            for key, value in state.items():
                index, code, place = self._find_place(row, piece, key, value)
                if place is None:
                    return False
                what |= code << 2 * index if code else 1 << 2 * len(NUMBERS) + index
                if value is not kept.get(key):
                    place.copy_(value)
                    state[key] = kept[key] = place
            self._table(self._rank)[row, 4] = what
        if is_new:
            self._plan_copy(lot, first)
        return True

    def _find_place(
        self, row: int, piece: Piece, key: str, value: Any
    ) -> tuple[int, int, Tensor | None]:
        """Which key it is, the code of its dtype if it is a number, and where it goes."""
        if isinstance(value, Tensor) and value.device.type == "cpu":
            if key in NUMBERS and value.shape == () and value.dtype in _DTYPES:
                index = NUMBERS.index(key)
                place = self._number(self._rank, row, index, value.dtype)
                return index, _DTYPES.index(value.dtype), place
            length, dtype = piece.stop - piece.start, self._flats[piece.flat].dtype
            if key in self._keys and value.shape == (length,) and value.dtype == dtype:
                index = self._keys.index(key)
                return index, 0, self._arrays[piece.flat][index][piece.start : piece.stop]
        return 0, 0, None

    def _plan_copy(self, lot: int, first: int) -> None:
        live, copies, at = [], [], self.places.copies[self._rank]
        what = self._table(self._rank)[first : first + len(self.lots[lot]), 4].tolist()
        for piece, present in zip(self.lots[lot], what, strict=True):
            for index, _, dtype in self._present(present):
                if dtype is None:
                    live.append(self._arrays[piece.flat][index][piece.start : piece.stop])
                    copy, at = self._copy_at(at, piece.flat, piece.stop - piece.start)
                    copies.append(copy)
        self._copied[lot] = live, copies

    def _present(self, what: int) -> Iterator[tuple[int, str, torch.dtype | None]]:
        """What a state has, in order: a number with its dtype, or something of every element."""
        for index, key in enumerate(NUMBERS):
            if code := what >> 2 * index & 3:
                yield index, key, _DTYPES[code]
        for index, key in enumerate(self._keys):
            if what >> 2 * len(NUMBERS) + index & 1:
                yield index, key, None

    def _copy_at(self, at: int, flat: int, numel: int) -> tuple[Tensor, int]:
        dtype = self._flats[flat].dtype
        return self._view(at, numel, dtype), at + round_up(numel * dtype.itemsize, _ALIGN_BYTES)

    def _number(
        self, rank: int, row: int, index: int, dtype: torch.dtype, *, before: bool = False
    ) -> Tensor:
        at = self.places.numbers[rank][before] + (row * len(NUMBERS) + index) * _NUMBER_BYTES
        return self._view(at, 1, dtype)[0]

    def _numbers(self, rank: int, when: int) -> Tensor:
        count = self._word(rank, _PIECES) * len(NUMBERS) * _NUMBER_BYTES
        return self._view(self.places.numbers[rank][when], count, torch.uint8)

    def _table(self, rank: int) -> Tensor:
        count = self.places.most_pieces * _COLUMNS
        return self._view(self.places.tables[rank], count, torch.int64).view(-1, _COLUMNS)

    def _view(self, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[at : at + numel * dtype.itemsize].view(dtype)

    def _word(self, rank: int, which: int) -> int:
        return self._words[rank * _WORDS + which]

    def _note(self, which: int, value: int) -> None:
        self._words[self._rank * _WORDS + which] = value


def can_be_kept(optimizer: Optimizer) -> bool:
    """Whether it is known what this optimizer keeps, and that it may step lot by lot."""
    return type(optimizer) in ELEMENTWISE


def has_common_memory(transport: Transport) -> TypeGuard[SharedMemory]:
    """Whether all ranks are on one host, and map memory together."""
    return type(transport) is SharedMemory


def cut_lots(numels: Sequence[int], most: int) -> list[list[int]]:
    """Pieces by their number, in lots of at most so many elements; at least one lot."""
    lots: list[list[int]] = [[]]
    held = 0
    for number, numel in enumerate(numels):
        if lots[-1] and held + numel > most:
            lots.append([])
            held = 0
        lots[-1].append(number)
        held += round_up(numel, ALIGNMENT)
    return lots
