"""Copying tensors from one rank to the others of its host, through two slots of shared memory.

The root writes a piece into a slot and goes on; it waits only when both slots are still being
read. So a rank that has something to tell does not wait for those that listen late.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.transport.flat import Flat
from paceline.transport.peers import Peers
from paceline.transport.segment import ALIVE, FAILED, Segment

SLOT_BYTES = 2**20
SLOTS = 2

_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
"""All of this process: a model has one, and ranks can be threads."""
_lock = threading.Lock()


class Channel:
    """The slots of all ranks of a host; every rank writes into its own only."""

    def __init__(
        self, group: Group, segment: Segment, ranks: Sequence[int], position: int, peers: Peers
    ) -> None:
        places, positions = segment.places, range(len(ranks))
        flat = Flat(SLOT_BYTES, torch.uint8, torch.device("cpu"))
        self._slots = [[segment.bucket(p, slot, flat) for slot in range(SLOTS)] for p in positions]
        self._ranks = ranks
        self._position = position
        self._peers = peers
        self._words = segment.words
        self._status = [places.status_word(p) for p in positions]
        self._written = [places.ready_word(p) for p in positions]
        self._read = [places.copied_word(p) for p in positions]
        self._met = [places.summed_word(p) for p in positions]
        self._others = [p for p in positions if p != position]
        self._meetings = 0
        self._turn = 0
        self._last_written = [0] * SLOTS
        """By slot, the turn in which this rank wrote into it."""
        segment.leave_with(self, position)
        self._group = group
        with _lock:
            _channels.add(self)

    def copy(self, tensor: Tensor, root: int, what: str) -> None:
        """Overwrite `tensor`, flat bytes, with that of rank `root` of this host."""
        source = self._ranks.index(root)
        for start in range(0, tensor.numel(), SLOT_BYTES):
            piece = tensor[start : start + SLOT_BYTES]
            self._turn += 1
            slot = self._turn % SLOTS
            if source == self._position:
                self._write(piece, slot, what)
            else:
                self._take(piece, source, slot, what)

    def meet(self, what: str) -> None:
        """Wait until all ranks of this host have met as often as this one has, for any model.

        Ranks that are at different models must not wait for each other here: they find out next.
        To be called before waiting in a process group, which does not notice a stopped rank.
        """
        with _lock:
            ours = [channel for channel in _channels if channel._group is self._group]
        for channel in ours:
            channel._meetings += 1
            channel._words[channel._met[channel._position]] = channel._meetings
        self._wait([(p, self._met[p], self._meetings) for p in self._others], what)

    def _write(self, piece: Tensor, slot: int, what: str) -> None:
        turn = self._last_written[slot]
        self._wait([(p, self._read[p] + slot, turn) for p in self._others], what)
        self._slots[self._position][slot][: piece.numel()].copy_(piece)
        self._last_written[slot] = self._turn
        self._words[self._written[self._position] + slot] = self._turn

    def _take(self, piece: Tensor, source: int, slot: int, what: str) -> None:
        self._wait([(source, self._written[source] + slot, self._turn)], what)
        piece.copy_(self._slots[source][slot][: piece.numel()])
        self._words[self._read[self._position] + slot] = self._turn

    def _wait(self, wanted: Sequence[tuple[int, int, int]], what: str) -> None:
        """Wait until each of the words (of a rank's position) has reached its turn."""
        words = self._words

        def missing() -> list[int]:
            return [self._ranks[p] for p, index, turn in wanted if words[index] < turn]

        def has_left(rank: int) -> bool:
            return bool(words[self._status[self._ranks.index(rank)]] != ALIVE)

        if not missing():
            return
        try:
            self._peers.wait(lambda: not missing(), missing, has_left, what)
        except BaseException:
            words[self._status[self._position]] = FAILED
            raise
