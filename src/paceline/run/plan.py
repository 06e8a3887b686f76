"""Which samples form which shard of which step: arithmetic on five numbers, nothing else.

    order of epoch e:   a permutation drawn from (seed, e)
    batch of step k:    `global_batch` neighbours in that order
    shard v of V:       every V-th sample of the batch, beginning with the v-th

No worker appears in it: rank r of W computes shards r, r + W, r + 2W and so on, so W changes who
computes what, and never what is computed. With V = W, and a batch that W divides, a rank gets the
very samples that `DistributedSampler` with the same seed deals it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The data of a whole run. Steps count from 1, epochs and shards from 0."""

    samples: int
    global_batch: int
    shards: int
    epochs: int
    drop_last: bool = False
    """Whether samples that do not fill the last batch of an epoch are left out of it."""

    def __post_init__(self) -> None:
        for name in ("samples", "global_batch", "shards", "epochs"):
            value = getattr(self, name)
            if name == "samples" and value == 0:
                raise UsageError(
                    "The dataset is empty.", advice="Look at how it finds its samples."
                )
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} is {value!r}.", advice="Pass a whole number from 1 up.")
        check_batch(self.global_batch, self.shards)
        if self.drop_last and self.samples < self.global_batch:
            raise UsageError(
                f"The dataset has {self.samples} samples, which do not fill one global batch of "
                f"{self.global_batch}, and drop_last leaves them out.",
                advice="Use a smaller global_batch, or drop_last=False.",
            )

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def batch(self, step: int) -> range:
        """Where in the order of its epoch the batch of a step is."""
        start = (step - 1) % self.steps_per_epoch * self.global_batch
        return range(start, min(start + self.global_batch, self.samples))

    def shard(self, step: int, number: int) -> range:
        """Where in the order of its epoch one shard is; empty where the batch is too short."""
        return self.batch(step)[number :: self.shards]

    @property
    def shortest_batch(self) -> int:
        return len(self.batch(self.steps_per_epoch))


def shards_of(rank: int, size: int, shards: int) -> range:
    """The shards that one worker computes, in order."""
    return range(rank, shards, size)


def check_batch(global_batch: int, shards: int) -> None:
    if global_batch < shards:
        raise UsageError(
            f"A global batch of {global_batch} cannot be cut into {shards} shards.",
            advice="Use a larger global_batch, fewer shards, or fewer workers: without shards= "
            "there is one shard per worker.",
        )
