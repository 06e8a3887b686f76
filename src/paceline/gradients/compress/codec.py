"""What all ways of compressing share: the bucket they are given, the sums they start, the count.

    hook(state, bucket) --start--> first message under way --wait()--> restored mean

A hook gets local gradients, not divided by anything, and returns their mean over the ranks; the
reducer turns that into a weighted mean where losses are weighted. See Note [Weights].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.errors import HookError
from paceline.gradients.compress.deferred import Deferred
from paceline.gradients.compress.spec import Spec
from paceline.gradients.compress.traffic import BucketTraffic, Traffic


class NamedBucket(Protocol):
    """What is asked of a bucket: torch's `GradBucket`, and the names of its parameters."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def names(self) -> list[str]: ...


class Scale:
    """How many items a rank's gradient is a sum over, as a mean over the ranks.

    A tensor where it was agreed on, so that a GPU need not be waited for.
    """

    def __init__(self, value: Tensor | None = None) -> None:
        self.is_one = value is None
        self.or_one: float | Tensor = 1.0
        """The scale; 1 where no rank has any item, as then there is nothing to scale."""
        self.has_items: bool | Tensor = True
        if value is not None:
            self.has_items = value > 0
            self.or_one = torch.where(self.has_items, value, 1.0)


class Compression(ABC):
    """Shrinks buckets on their way and counts what was sent; the state of `hook`.

    One object belongs to one model. `weight` says how many items this rank's loss is a sum over in
    the step that is being sent; None where losses are never weighted.
    """

    weight: Callable[[], float] | None

    def __init__(self, spec: Spec, group: Group) -> None:
        self.spec = spec
        self.group = group
        self.size: int = group.size()
        self.steps = 0
        """How many steps have begun."""
        self.weight = None
        self.scale = Scale()
        """The mean weight of a rank in the step that is being sent."""
        self._traffic = Traffic()

    @property
    def bytes_before(self) -> int:
        """Bytes of all gradients that were reduced, as they would have been sent."""
        return self._traffic.bytes_before

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank gave to sums over the ranks instead."""
        return self._traffic.bytes_sent

    @property
    def ratio(self) -> float:
        """How many times fewer bytes that is."""
        return self._traffic.ratio

    @property
    def bytes_by_bucket(self) -> dict[int, BucketTraffic]:
        """The same for each bucket of the latest step."""
        return dict(self._traffic.by_bucket)

    def start(self, bucket: NamedBucket) -> Deferred:
        """Send a bucket on its way; what is waited for is the mean over the ranks."""
        flat = bucket.buffer()
        if bucket.index() == 0:
            self.steps += 1
            self._traffic.begin_step()
            self._agree_on_scale(flat.device)
        self._traffic.record(bucket.index(), before=_bytes_of(flat), sent=0)
        with torch.no_grad():
            return Deferred(self._start(bucket, flat))

    def state_dict(self) -> dict[str, Any]:
        """What this rank has to go on with: numbers, and tensors where it remembers any."""
        return {
            "steps": self.steps,
            "bytes_before": self.bytes_before,
            "bytes_sent": self.bytes_sent,
        }

    def averaged_state_dict(self) -> dict[str, Any]:
        """One state for all ranks, and for worlds of another size; call it on every rank."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved state stopped."""
        self.steps = int(state["steps"])
        self._traffic.bytes_before = int(state["bytes_before"])
        self._traffic.bytes_sent = int(state["bytes_sent"])

    @property
    @abstractmethod
    def needs_scale(self) -> bool:
        """Whether the weights of all ranks must be known before a step's first bucket."""

    @abstractmethod
    def _start(self, bucket: NamedBucket, flat: Tensor) -> Callable[[], Tensor]:
        """Start the first message; returns what finishes the bucket."""

    def _sum(self, index: int, message: Tensor, what: str) -> comm.Pending:
        """Start summing a message over the ranks, and count it."""
        self._traffic.record(index, before=0, sent=_bytes_of(message))
        return comm.start_all_reduce(
            self.group, message, f"Step {self.steps - 1}: the sum of {what} of bucket {index}"
        )

    def _agree_on_scale(self, device: torch.device) -> None:
        if self.weight is None or not self.needs_scale:
            return
        mean = torch.tensor([self.weight() / self.size], dtype=torch.float64, device=device)
        self._sum(0, mean, "the weights").wait()
        self.scale = Scale(mean[0])


def hook(state: Compression, bucket: Any) -> torch.futures.Future[Tensor]:
    """The communication hook: `model.register_comm_hook(compression, hook)`."""
    if not hasattr(bucket, "names"):
        raise HookError(
            f"Compression: {type(bucket).__name__} does not say which parameters it holds.",
            advice="Use it with paceline.DistributedDataParallel; torch's class has hooks of its "
            "own.",
        )
    return state.start(bucket)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Note [Weights]
# Where losses are weighted, a rank's gradient is a sum over its items, a hook returns the sum of
# these divided by the number of ranks, and the reducer multiplies by ranks / items at the end, when
# the trailer has told it the number of all items. Two ways of compressing have to know it before:
# float16 because a sum over thousands of tokens leaves its range where the mean does not, and
# PowerSGD because what was left out in a step of 1,000 items must not count 1,000 times in a
# step of one. So there the weights are summed in a message of 8 bytes before the first bucket.
