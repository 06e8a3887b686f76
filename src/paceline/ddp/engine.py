"""What a run needs of whatever keeps a model equal on all workers: the `Engine` protocol.

`DistributedDataParallel` is the fast one, with buckets that are summed while backward runs;
`NaiveEngine` the plain one, with one all-reduce per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from paceline.ddp.buffer import Bucket
from paceline.errors import check_members
from paceline.group import Membership
from paceline.transport import Transport


class Engine(Protocol):
    """Keeps one model equal on all workers of a membership: what a run needs of it.

    Invariant: after a backward outside `no_sync()`, or `take_part()`, gradients are the same bits
    on every rank: the ranks' sums, divided by the sum of their weights.
    """

    module: nn.Module
    """What is trained."""

    membership: Membership
    """Who takes part."""

    identity: int
    """Which of several models this is, equal on all ranks."""

    has_news: bool
    """Set in a step, this rank tells the others so in the step's sum. Afterwards it says whether
    any rank did; on a GPU, in the sum before, so that the host need not wait."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""

    def begin_step(self, number: int) -> None:
        """A run begins its step `number`: nothing is accumulated yet, and errors name that step."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes only accumulate gradients."""

    def weigh(self, weight: float, shard: int, of_shard: float) -> None:
        """Say, before a backward, what this rank's gradients of a run's step weigh with it; a run
        keeps count itself. The backward is that of `shard`, which alone weighs `of_shard`."""

    def take_part(self) -> None:
        """Sum with the others without anything to add, and get what they have."""

    def on_generation(self) -> None:
        """The membership has moved on: find memory, order and transport anew."""


class SummedGradients(Protocol):
    """What an update that is shared out needs of an engine: where the sums are, on all ranks."""

    membership: Membership

    @property
    def size(self) -> int: ...
    @property
    def steps(self) -> int:
        """The number of the step whose gradients were summed last, and one more."""

    @property
    def buckets(self) -> Sequence[Bucket]: ...
    @property
    def transport(self) -> Transport:
        """How tensors travel; the first to ask in a generation are all ranks at one point."""

    @property
    def is_joined(self) -> bool:
        """Whether ranks may run out of inputs."""

    def meet(self, what: str) -> None:
        """Wait for all ranks, where the transport can."""


METHODS = [name for name, member in vars(Engine).items() if callable(member) and name[0] != "_"]
MEMBERS = [*Engine.__annotations__, *METHODS]


def check_engine(value: object) -> Engine:
    """The object, or an error that names what it lacks."""
    advice = f"Pass an object with {', '.join(MEMBERS)}; see paceline.ddp.Engine."
    check_members("engine", value, Engine.__annotations__, advice, METHODS)
    return value  # type: ignore[return-value]
