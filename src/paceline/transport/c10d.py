"""Summing and copying through `torch.distributed`: any device, any number of hosts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.transport.flat import slices
from paceline.transport.interface import Reduction


class C10d:
    """Leaves everything to collectives of the process group."""

    def __init__(self, group: Group, why: str) -> None:
        self.description = f"c10d: {why}"
        self._group = group
        self._is_alone = group.size() == 1  # then the group may be without a backend

    def sum(self, flat: Tensor, what: str) -> Reduction:
        if self._is_alone:
            return _All([])
        return comm.start_all_reduce(self._group, flat, what)

    def scatter_sum(self, flat: Tensor, what: str) -> Reduction:
        return _All(
            [
                comm.start_reduce(self._group, flat[start:stop], owner, what)
                for owner, start, stop in self._slices(flat)
            ]
        )

    def gather(self, flat: Tensor, what: str) -> Reduction:
        return _All(
            [
                comm.start_broadcast(self._group, flat[start:stop], owner, what)
                for owner, start, stop in self._slices(flat)
            ]
        )

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        if not self._is_alone:
            comm.broadcast(self._group, flat, root, what)

    def _slices(self, flat: Tensor) -> list[tuple[int, int, int]]:
        """Owner, start and stop of every slice that is not empty; none in a world of one."""
        cut = [] if self._is_alone else slices(flat.numel(), self._group.size())
        return [(owner, start, stop) for owner, (start, stop) in enumerate(cut) if start < stop]


class _All:
    """Several collectives under way, waited for in order; or none."""

    def __init__(self, parts: Sequence[Reduction]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
