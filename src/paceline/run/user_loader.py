"""A loader of the user's own: what a run asks of it, and how it continues.

    yields      this worker's batches, one for each step; which samples they hold is its business
    length      how many there are in an epoch, unless `steps_per_epoch` says so
    set_epoch   called before each epoch, on the loader and on its dataset and samplers that have it
    state_dict, load_state_dict
                where it has both, they are saved and loaded, each worker's own

Workers need not have equally many batches or samples: they tell each other how many, in every
step, and who has none left takes part with nothing. Random numbers are seeded by (seed, step, rank)
before each batch is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.data import Generators, Portion, Position, Shard
from paceline.errors import UsageError, shown
from paceline.files import decode, encode
from paceline.group import Membership, World, all_gather, find_tensors, gather_bytes
from paceline.run.forks import let_live, take
from paceline.torch_private import find_queue


class UserLoader:
    """A worker's batches from a loader that the script made, epoch after epoch."""

    def __init__(
        self,
        loader: Any,
        membership: Membership,
        *,
        on_start: Callable[[int], None],
        epochs: int,
        seed: int,
        steps_per_epoch: int | None,
        states: Sequence[Any] | None = None,
    ) -> None:
        """`on_start` is called in each process that loads; `states` are those of all workers in the
        checkpoint that the run continues from."""
        self._loader, self._membership = loader, membership
        let_live(loader, on_start)
        self._epochs, self._seed, self._length = epochs, seed, steps_per_epoch
        self._states = states
        self._own = Generators()
        self._batches: Iterator[Any] | None = None
        self._taken = Position()
        """What is done when the batch that was taken last is trained on."""
        self._batch: Any = None
        self.queue: Any = None
        self.first_rank = 0
        """Who computes shard 0 of the step: the first that has a batch."""

    def portions(self, done: Position) -> Iterator[Portion]:
        """What this worker computes in every step after `done`."""
        # After a death the step is dealt again, and its batch has been taken: a loader cannot go
        # back.
        position, comes_again = done, done.step == self._taken.step - 1
        for epoch in range(done.epoch, self._epochs):
            if not comes_again:
                self._begin(epoch, position)
            length = self._agree_on_length(epoch)
            for number in range(position.step_of_epoch, length):
                if not comes_again:
                    self._batch = self._take(position.step + 1)
                comes_again = False
                position = Position(position.step + 1, epoch, number + 1)
                self._taken = position
                yield self._portion(position, is_last=number + 1 == length)
            position = Position(position.step, epoch + 1, 0)

    def load(self, shard: Shard) -> Any:
        return self._batch

    def close(self, *, at_once: bool = False) -> None:
        """Forget the batches; whatever processes load them are the script's own."""
        self._batches = self.queue = None

    def gather_states(self, done: Position) -> list[Any] | None:
        """The states of all workers' loaders; None unless all have one, and stand at `done`."""
        mine = None
        if has_state(self._loader) and self._taken.step == done.step:
            mine = self._loader.state_dict()
        everyone = [mine]
        if self._membership.size > 1:
            members, what = self._membership, "Gathering the states of the loaders"
            sent = gather_bytes(members.group, encode(mine), members.word_device, what)
            everyone = list(map(decode, sent))
        return None if None in everyone else everyone

    def _begin(self, epoch: int, position: Position) -> None:
        for part in _parts_of(self._loader):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        states, self._states = self._states, None
        before = position.step_of_epoch
        if before and states is not None and has_state(self._loader):
            self._loader.load_state_dict(states[self._membership.rank])
            before = 0
        with self._own.kept():
            # As in the first step of the epoch: a shuffling loader draws its order when it is
            # iterated.
            self._own.seed(self._seed, "loader", position.step - before, self._membership.rank)
            self._batches = iter(self._loader)
        for step in range(position.step - before, position.step):
            self._take(step + 1)  # trained on before, and now thrown away

    def _take(self, step: int) -> Any:
        """The next batch; None when there are no more in this epoch."""
        assert self._batches is not None
        with self._own.kept():  # what is loaded in this process draws from its generators
            self._own.seed(self._seed, "loader", step, self._membership.rank)
            batch = take(self._batches)
            # `steps_per_epoch` may be more batches than the loader has: it begins anew within the
            # epoch.
            if batch is None and self._length is not None:
                self._batches = iter(self._loader)
                batch = take(self._batches)
            self.queue = find_queue(self._batches)
        return batch

    def _agree_on_length(self, epoch: int) -> int:
        """How many steps the epoch has: as many as the worker with the most batches."""
        if self._length is not None:
            return self._length
        longest = max(self._exchange(length_of(self._loader), f"Epoch {epoch}: comparing lengths"))
        if not longest:
            raise UsageError("The loaders of all workers are empty.", advice="Look at their data.")
        return longest

    def _portion(self, done: Position, *, is_last: bool) -> Portion:
        count = 0 if self._batch is None else count_samples(self._batch)
        counts = self._exchange(count, f"Step {done.step}: comparing batches")
        if not any(counts):
            raise UsageError(
                f"Step {done.step}: the loaders have no more batches in epoch {done.epoch + 1}, "
                f"after {done.step_of_epoch - 1}.",
                advice="Give them the length that they have, and let them begin anew whenever they "
                "are iterated over.",
            )
        # Numbered without those who have nothing: the first who has something is number 0.
        self.first_rank = next(rank for rank, each in enumerate(counts) if each)
        number = sum(1 for each in counts[: self._membership.rank] if each)
        mine = Shard(done.step, done.epoch, number, [-1] * count)
        busy = sum(1 for each in counts if each)
        shards = [mine] if count else []
        return Portion(done.step, done.epoch, sum(counts), shards, is_last, busy)

    def _exchange(self, number: int, what: str) -> list[int]:
        members = self._membership
        if members.size == 1:
            return [number]
        word = torch.tensor([number], device=members.word_device)
        return [int(each) for each in all_gather(members.group, word, what)]


def make_user_loader(loader: Any, world: World) -> Any:
    """The loader of this worker: what was passed, or what it makes when it is told the world."""
    if isinstance(loader, type) or (callable(loader) and not hasattr(loader, "__iter__")):
        loader = loader(world)
    if not hasattr(loader, "__iter__"):
        raise UsageError(
            f"loader is {shown(loader)}, which cannot be iterated over.",
            advice="Pass an iterable of batches, or a function that makes one of a World.",
        )
    if isinstance(loader, Iterator):
        raise UsageError(
            f"loader is a {type(loader).__name__}, which can be read only once, but every epoch "
            "reads it again.",
            advice="Pass the object whose iter() this is.",
        )
    return loader


def length_of(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        raise UsageError(
            f"The loader has the type {type(loader).__name__} and no length, so it is not known "
            "where an epoch ends.",
            advice="Pass options=RunOptions(steps_per_epoch=...): how many batches of each worker "
            "are an epoch.",
        ) from None


def find_global_batch(loader: Any, size: int) -> int:
    """How many samples a step has, where the loader says so."""
    for part in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(batch := getattr(part, "batch_size", None), int):
            return batch * size
    raise UsageError(
        "The loader does not say how many samples its batches have.",
        advice="Pass global_batch=: how many those of all workers have together, as a rule. It is "
        "what is shown; each step counts for itself.",
    )


def count_samples(batch: Any) -> int:
    """The rows of the first tensor in a batch; without one its length, or that of its columns."""
    for tensor in find_tensors(batch):
        if tensor.ndim:
            return len(tensor)
    if isinstance(batch, Mapping):
        return count_samples(next(iter(batch.values()), ()))
    try:
        return len(batch)
    except TypeError:
        return 1


def has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _parts_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts += [getattr(loader, name, None) for name in ("sampler", "dataset")]
    return list({id(part): part for part in parts if part is not None}.values())
