"""Buffers in a step: the same at its end whatever the number of workers, and put back if it fails.

Forward passes change buffers: running statistics, counters, codebooks. Every shard begins with the
buffers as they were before the step. Afterwards those of normalisation layers have moved by the
mean over all shards, and every other buffer is what shard 0 made of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline import comm
from paceline.comm.membership import Membership
from paceline.run.state import copy_from


class Buffers:
    """The buffers of one model on one worker.

        begin --> (begin_shard --> end_shard) per shard --> settle, or restore

    Which other buffers ever change is not known in advance. Those that do are `live`; all workers
    have the same list, and add to it together (`adopt`) when shard 0 has changed another one.
    """

    def __init__(self, module: nn.Module, membership: Membership) -> None:
        self.live: set[str] = set()
        self._module, self._membership = module, membership
        self._statistics = _names_of_statistics(module)
        self._saved: dict[str, Tensor] = {}
        self._marks: dict[str, tuple[int, int]] = {}
        self._first: dict[str, Tensor] = {}
        self._moves: Tensor | None = None
        self._shards = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the buffers as they are; one that has not changed since is not copied again."""
        self._shards, self._moves, self._first = 0, None, {}
        for name, buffer in self._module.named_buffers():
            if name not in self._statistics and self._marks.get(name) == _mark(buffer):
                continue
            saved = self._saved.get(name)
            if saved is None or not _are_alike(saved, buffer):
                self._saved[name] = buffer.detach().clone()
            else:
                saved.copy_(buffer)
            self._marks[name] = _mark(buffer)

    def begin_shard(self) -> None:
        if self._shards:
            self.restore()

    @torch.no_grad()
    def end_shard(self, number: int) -> None:
        """Take what the shard has made of the buffers."""
        self._shards += 1
        now = dict(self._module.named_buffers())
        if self._statistics:
            moved = _flat([now[n] for n in self._statistics]) - self._before()
            self._moves = moved if self._moves is None else self._moves + moved
        if number == 0:
            changed = [(name, b) for name, b in now.items() if self._has_changed(name, b)]
            self._first = {name: buffer.detach().clone() for name, buffer in changed}

    @torch.no_grad()
    def settle(self, step: int, shards: int) -> None:
        """Give the model the buffers that all workers have after a step of `shards` shards."""
        size = self._membership.size
        if size == 1 and shards == 1:
            return  # they are what the only shard has made of them
        self.restore()
        if self._statistics:
            self._move(step, shards)
        for name, value in self._first.items():
            self._put(name, value)
        if size > 1 and self.live:
            self._copy_live(f"Step {step}: copying shard 0's buffers")

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back as they were before the step."""
        for name, buffer in list(self._module.named_buffers()):
            is_changed = name in self._statistics or self._has_changed(name, buffer)
            if is_changed and name in self._saved:
                self._put(name, self._saved[name])
                self._marks[name] = _mark(self._module.get_buffer(name))

    @property
    def has_news(self) -> bool:
        """Whether shard 0 has changed a buffer that was not `live`."""
        return self._membership.size > 1 and not self.live.issuperset(self._first)

    def adopt(self) -> None:
        """Agree on the buffers that change; called by all workers together."""
        mine = sorted(self._first)
        members, what = self._membership, "Finding live buffers"
        for names in comm.exchange(members.group, mine, members.word_device, what):
            self.live.update(names)
        self._copy_live("Copying shard 0's buffers")

    def _move(self, step: int, shards: int) -> None:
        """Move the statistics by the mean over all shards, from where they were before."""
        before = self._before()
        moves = torch.zeros_like(before) if self._moves is None else self._moves
        if self._membership.size > 1:
            comm.all_reduce(
                self._membership.group, moves, f"Step {step}: the mean of running statistics"
            )
        after = before + moves / shards
        buffers = [self._module.get_buffer(name) for name in self._statistics]
        for buffer, part in zip(
            buffers, torch.split(after, [b.numel() for b in buffers]), strict=True
        ):
            values = part if buffer.is_floating_point() else part.round()
            buffer.data.copy_(values.view(buffer.shape))

    def _before(self) -> Tensor:
        return _flat([self._saved[name] for name in self._statistics])

    def _copy_live(self, what: str) -> None:
        tensors = [self._module.get_buffer(name).data for name in sorted(self.live)]
        copy_from(self._membership, 0, tensors, what)
        for name in self.live:
            self._marks.pop(name, None)

    def _put(self, name: str, value: Tensor) -> None:
        buffer = self._module.get_buffer(name)
        if _are_alike(buffer, value):
            # Not through the tensor itself: a backward still to come would refuse a buffer that
            # has changed, although in training it reads no running statistics.
            buffer.data.copy_(value)
        else:
            owner, _, attribute = name.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, value.clone())
        self._marks.pop(name, None)

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        return name not in self._statistics and self._marks.get(name) != _mark(buffer)


def _mark(buffer: Tensor) -> tuple[int, int]:
    """Changes when a buffer is written to or replaced; running statistics are exceptions."""
    return id(buffer), buffer._version


def _flat(buffers: list[Tensor]) -> Tensor:
    """In double precision: a counter has more digits than a float."""
    return torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _names_of_statistics(module: nn.Module) -> list[str]:
    """The buffers of normalisation layers, under the names the model has for them."""
    known = {id(buffer): name for name, buffer in module.named_buffers()}
    layers = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
    found = [known[id(b)] for layer in layers for b in layer.buffers(recurse=False)]
    return list(dict.fromkeys(found))
