"""Buffers in a step: the same at its end whatever the number of workers, and put back if it fails.

Forward passes change buffers: running statistics, counters, codebooks. Every shard begins with the
buffers as they were before the step. Afterwards those of normalisation layers have moved by the
mean over all shards, and every other buffer is what shard 0 made of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.data import Plan
from paceline.errors import UsageError
from paceline.group import HostCopy, Membership, all_reduce, exchange
from paceline.run.broadcast import copy_from
from paceline.torch_private import NormBase

_SMALL, _SAMPLES = 2**14, 2**10
"""Up to so many elements a buffer is compared whole; of a larger one so many, spread over it."""
_TURN_STEPS = 16
"""After so many steps others are taken."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffers:
    """The buffers of one model on one worker.

        begin --> (begin_shard --> end_shard) per shard --> settle, or restore

    Which other buffers ever change is not known in advance. Those that a shard has changed here are
    `_moving`; those that all workers know of are `live`, and copied in every step. A rank whose
    shard 0 changes another one says so with its gradients. See Note [How a change is noticed].
    """

    def __init__(
        self, module: nn.Module, membership: Membership, *, is_ordered: bool = False
    ) -> None:
        """`is_ordered`: statistics are added shard by shard, whichever worker computes them."""
        self.is_cut = False
        """Whether shards are in pieces: then no statistics move, and other buffers are what the
        first piece of shard 0 makes of them."""
        self._is_ordered = is_ordered
        self.live: set[str] = set()
        self._module, self._membership = module, membership
        self._statistics = _names_of_statistics(module)
        self._is_agreed = False
        """Whether this generation has compared which buffers are live."""
        self._moving: set[str] = set()
        self._unsaid: set[str] = set()
        """Those that shard 0 has changed and that not all workers know of."""
        self._saved: dict[str, Tensor] = {}
        self._marks: dict[str, tuple[int, int, int]] = {}
        self._still = _Contents()
        self._first: dict[str, Tensor] = {}
        self._moves: defaultdict[int, Tensor] = defaultdict()
        self._of = self._shards = self._root = 0

    @torch.no_grad()
    def begin(self, shards: int, root: int = 0) -> None:
        """Remember the buffers as they are; one that has not changed since is not copied again.

        The step has so many `shards`, on all workers together, the first of them on rank `root`.
        """
        self._of, self._root, self._shards, self._first = shards, root, 0, {}
        self._moves = defaultdict(lambda: torch.zeros_like(self._before()))
        named = dict(self._module.named_buffers())
        # Before anything is saved again: what changed in the last step is found by comparing with
        # the copies from before it.
        if self._still.was_changed():
            self._unsaid |= self._find_moved(named) - self.live
        still = {}
        for name, buffer in named.items():
            if name in self._statistics or name in self._moving:
                self._save(name, buffer)
                continue
            still[name] = buffer
            if self._marks.get(name) != _mark(buffer):
                self._save(name, buffer)
        # Written to through `.data` between two steps: no version shows that the copies are out of
        # date.
        if still and self._still.begin(still):
            for name, buffer in still.items():
                self._save(name, buffer)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What happens to buffers inside is undone: each worker evaluates other batches."""
        self.begin(self._of, self._root)
        moving = set(self._moving)
        try:
            yield
        finally:
            self.restore()
            # What only an evaluation changes would otherwise be copied in every step from now on.
            moved, self._moving = self._moving - moving, moving
            for name, buffer in self._module.named_buffers():
                if name in moved:
                    self._marks[name] = _mark(buffer)

    def begin_shard(self) -> None:
        if self._shards:
            self.restore()

    @torch.no_grad()
    def has_news(self, number: int) -> bool:
        """Whether shard 0 has changed a buffer that is not live; asked in shard `number`."""
        if self._is_alone:
            return False
        found = set(self._unsaid)
        if number == 0:
            found |= self._look()
        return not self.live.issuperset(found)

    @torch.no_grad()
    def have_changed(self) -> bool:
        """Whether a shard of this step has changed any, here."""
        return bool(self._look()) or any(bool(moves.any()) for moves in self._moves.values())

    @torch.no_grad()
    def end_shard(self, number: int) -> None:
        """Take what the shard has made of the buffers."""
        self._shards += 1
        if self._is_alone:
            return
        moved = self._look(is_end=True)
        if self._statistics:
            now = [self._module.get_buffer(name) for name in self._statistics]
            moves = _flat(now) - self._before()
            self._moves[number if self._is_ordered else 0] += moves
        if number == 0:
            found = {name: self._module.get_buffer(name) for name in moved}
            self._first = {name: buffer.detach().clone() for name, buffer in found.items()}
            self._unsaid |= moved - self.live

    @torch.no_grad()
    def settle(self, step: int, *, has_news: bool) -> None:
        """Give the model the buffers that all workers have after a step.

        `has_news` is agreed on: whether any worker had news before the sum.
        """
        if self._is_alone:
            return  # they are what the only shard has made of them
        size = self._membership.size
        self._restore(self._moving)
        if self._statistics:
            self._move(step)
        for name, value in self._first.items():
            self._put(name, value)
        if size > 1 and (has_news or not self._is_agreed):
            self.agree()
        elif size > 1:
            self._copy_live(f"Step {step}: copying shard 0's buffers")

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back as they were before the step."""
        self._look()
        self._restore([*self._statistics, *self._moving])

    def _restore(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._saved:
                self._put(name, self._saved[name])

    def agree(self) -> None:
        """Agree on the buffers that change, and copy them; called by all workers together."""
        members, what = self._membership, "Finding live buffers"
        if members.size == 1:
            return
        for names in exchange(
            members.group, sorted(self.live | self._unsaid), members.word_device, what
        ):
            self.live.update(names)
        self._moving |= self.live
        self._unsaid.clear()
        self._is_agreed = True
        self._copy_live("Copying shard 0's buffers")

    @property
    def _is_alone(self) -> bool:
        return self._of == self._membership.size == 1 and not self.is_cut

    def on_generation(self) -> None:
        """A newcomer knows nothing of what the others have agreed on."""
        self._is_agreed = False

    def _look(self, *, is_end: bool = False) -> set[str]:
        """The names of the buffers that this shard has changed, or may have."""
        named = dict(self._module.named_buffers())
        for name, buffer in named.items():
            if name not in self._statistics and self._marks.get(name) != _mark(buffer):
                self._moving.add(name)
        if self._still.looks_changed(is_end=is_end):
            self._find_moved(named)
        return self._moving & named.keys()

    def _find_moved(self, named: dict[str, Tensor]) -> set[str]:
        """Those whose contents are not as they were saved, though their versions say so."""
        known = self._moving.union(self._statistics)
        moved = {
            name
            for name, buffer in named.items()
            if name not in known and not _are_same_bits(buffer, self._saved[name])
        }
        self._moving |= moved
        return moved

    def _save(self, name: str, buffer: Tensor) -> None:
        saved = self._saved.get(name)
        if saved is None or not _are_alike(saved, buffer):
            self._saved[name] = buffer.detach().clone()
        else:
            saved.copy_(buffer)
        self._marks[name] = _mark(buffer)

    def _move(self, step: int) -> None:
        """Move the statistics by the mean over all shards, from where they were before."""
        before = self._before()
        # With `is_ordered` a shard has a row of its own, zeros on all other workers: the exchange
        # adds nothing that rounds, and rows are added here in the order of the shards.
        moves = torch.stack([self._moves[n] for n in range(self._of if self._is_ordered else 1)])
        if self._membership.size > 1:
            all_reduce(
                self._membership.group, moves, f"Step {step}: the mean of running statistics"
            )
        after = before + moves.sum(0) / self._of
        buffers = [self._module.get_buffer(name) for name in self._statistics]
        for buffer, part in zip(
            buffers, torch.split(after, [b.numel() for b in buffers]), strict=True
        ):
            values = part if buffer.is_floating_point() else part.round()
            buffer.data.copy_(values.view(buffer.shape))

    def _before(self) -> Tensor:
        return _flat([self._saved[name] for name in self._statistics])

    def _copy_live(self, what: str) -> None:
        if self.live:
            tensors = [self._module.get_buffer(name).data for name in sorted(self.live)]
            copy_from(self._membership, self._root, tensors, what)

    def _put(self, name: str, value: Tensor) -> None:
        buffer = self._module.get_buffer(name)
        if _are_alike(buffer, value):
            # Not through the tensor itself: a backward still to come would refuse a buffer that
            # has changed, although in training it reads no running statistics.
            buffer.data.copy_(value)
        else:
            owner, _, attribute = name.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, value.clone())


class _Contents:
    """Some bits of every buffer that seems to be still: they show what no version counter does."""

    def __init__(self) -> None:
        self._key: list[tuple[int, int]] = []
        self._samples: list[Tensor] = []
        self._steps = 0
        self._bits: Tensor | None = None
        self._late: HostCopy | None = None

    def begin(self, buffers: dict[str, Tensor]) -> bool:
        """A step begins; whether these are others than at the beginning of the last one.

        On a GPU the host does not ask: it would have to wait.
        """
        before = self._bits
        self._steps += 1
        device = next(iter(buffers.values())).device  # most models have one
        dense = [b for b in buffers.values() if _is_readable(b) and b.device == device]
        key = [(id(buffer), buffer.data_ptr()) for buffer in dense]
        if key != self._key or self._steps % _TURN_STEPS == 0:
            self._sample(dense, key)
            before = None
        self._bits = self._read()
        if before is None or self._bits is None or self._bits.device.type != "cpu":
            return False
        return not torch.equal(before, self._bits)

    def looks_changed(self, *, is_end: bool) -> bool:
        """Whether they have changed in this step, as far as it can be seen without waiting."""
        bits = self._read()
        if bits is None or self._bits is None:
            return False
        if bits.device.type == "cpu":
            return not torch.equal(bits, self._bits)
        if is_end and self._late is None:
            self._late = HostCopy((bits != self._bits).any())
        return False

    def was_changed(self) -> bool:
        """Whether they had changed in the last step, where the device could not be asked then."""
        late, self._late = self._late, None
        return late is not None and bool(late.read())

    def _sample(self, buffers: list[Tensor], key: list[tuple[int, int]]) -> None:
        flat = [_as_bits(buffer) for buffer in buffers]
        sizes = [bits.numel() for bits in flat]
        every = [1 if size <= _SMALL else -(-size // _SAMPLES) for size in sizes]
        turn = self._steps // _TURN_STEPS
        # Each turn begins one element later, so that in the end every one of them has been looked
        # at.
        self._samples = [b[turn % n :: n] for b, n in zip(flat, every, strict=True)]
        self._key = key

    def _read(self) -> Tensor | None:
        # A copy, also of a single sample: the samples are views of the buffers.
        return torch.cat(self._samples) if self._samples else None


def _mark(buffer: Tensor) -> tuple[int, int, int]:
    """Changes when a buffer is written to, replaced or given other memory; not through `.data`."""
    is_dense = buffer.layout is torch.strided
    return id(buffer), buffer._version, buffer.data_ptr() if is_dense else 0


def _as_bits(buffer: Tensor) -> Tensor:
    """What lies in the buffer's memory, as whole numbers: NaN is equal to itself there."""
    ends = zip(buffer.shape, buffer.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in ends)
    bits = buffer.detach().as_strided((span if buffer.numel() else 0,), (1,))
    if bits.is_complex():
        bits = torch.view_as_real(bits).reshape(-1)
    return bits.view(_INTEGERS[bits.element_size()])


def _are_same_bits(one: Tensor, other: Tensor) -> bool:
    return _are_alike(one, other) and (
        not _is_readable(one) or torch.equal(_as_bits(one), _as_bits(other))
    )


def _is_readable(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_conj()


def _flat(buffers: list[Tensor]) -> Tensor:
    """In double precision: a counter has more digits than a float."""
    return torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _names_of_statistics(module: nn.Module) -> dict[str, None]:
    """The buffers of normalisation layers, under the names the model has for them."""
    known = {id(buffer): name for name, buffer in module.named_buffers()}
    layers = [layer for layer in module.modules() if isinstance(layer, NormBase)]
    return {known[id(b)]: None for layer in layers for b in layer.buffers(recurse=False)}


def check_sync_norm(size: int, shards: int, plan: Plan | None) -> None:
    """Refuse layers that talk to all workers in every pass where some would not be there."""
    if shards == size == 1:
        return
    if shards != size:
        raise UsageError(
            f"SyncBatchNorm needs one shard per worker, not {shards} for {size}.",
            advice="Use shards equal to the number of workers, or BatchNorm, whose statistics are "
            "those of a shard at any number of workers.",
        )
    if plan is None or plan.shortest_batch < size:
        raise UsageError(
            "SyncBatchNorm needs samples on every worker, and the last batch of an epoch has too "
            "few.",
            advice="Pass drop_last=True in RunOptions, or choose another global_batch.",
        )


# Note [How a change is noticed]
# Most changes show in a tensor's version, or it is another tensor. Writing through `.data` leaves
# no trace, so the bits of buffers that seem to be still are compared too: all bits of small ones,
# of a large one some, others now and then. On a GPU the answer is read a step later.
# What shard 0 changes is said in the trailer of the step's gradients, which leaves at the end of
# backward. A buffer that changes later in a step, for the first time and not in the first step of a
# generation, is said with the next step's, or by an evaluation, whichever comes first.
