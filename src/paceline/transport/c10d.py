"""Summing and copying through `torch.distributed`: any device, any number of hosts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.group import Group, broadcast, start_all_reduce, start_broadcast
from paceline.transport.interface import Reduction, slices


class C10d:
    """Leaves everything to collectives of the process group."""

    def __init__(self, group: Group, why: str) -> None:
        self.description = f"c10d: {why}"
        self._group = group
        self._is_alone = group.size() == 1  # then the group may be without a backend

    def sum(self, flat: Tensor, what: str) -> Reduction:
        if self._is_alone:
            return _All([])
        return start_all_reduce(self._group, flat, what)

    def gather(self, flat: Tensor, what: str) -> Reduction:
        """One broadcast for every slice that is not empty; none in a world of one."""
        cut = [] if self._is_alone else slices(flat.numel(), self._group.size())
        parts = [(owner, flat[start:stop]) for owner, (start, stop) in enumerate(cut)]
        return _All(
            [
                start_broadcast(self._group, part, owner, what)
                for owner, part in parts
                if part.numel()
            ]
        )

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        if not self._is_alone:
            broadcast(self._group, flat, root, what)


class _All:
    """Several collectives under way, waited for in order; or none."""

    def __init__(self, parts: Sequence[Reduction]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
