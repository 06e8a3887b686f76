"""Batch normalisation over the chunks of all replicas, which synchronise in every layer.

The statistics are those of the whole batch, so N replicas normalise as one would. Each replica
contributes its chunk's mean and variance and gets those of all; autograd differentiates through
them, because all replicas are in one process and one graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paceline.dp.devices import ReplicaDevice
from paceline.errors import UsageError
from paceline.torch_private import BatchNorm

Moments = tuple[Tensor, Tensor, int]
"""Mean and biased variance per channel, and the number of elements."""


class AbsentError(UsageError):
    """A replica waits for one that has left, usually because of an error of its own."""


class StatisticsExchange:
    """Exchanges moments between the replicas of one forward pass, layer by layer.

    A replica that has finished or failed leaves. Replicas that wait for it then fail too, instead
    of waiting forever.
    """

    def __init__(self, devices: Sequence[ReplicaDevice]) -> None:
        self._devices = devices
        self._changed = threading.Condition()
        self.open([])

    def open(self, replicas: Sequence[int]) -> None:
        """Begin a forward pass of these replicas."""
        self._expected = list(replicas)
        self._moments: dict[int, tuple[str, Moments]] = {}
        self._left: list[int] = []

    def leave(self, replica: int) -> None:
        with self._changed:
            self._left.append(replica)
            self._changed.notify_all()

    def exchange(self, replica: int, layer: str, moments: Moments) -> list[Moments]:
        """Wait for all replicas; returns their moments in the order of replicas."""
        with self._changed:
            # A new dictionary for each layer, so that a waiting replica still has its own layer's.
            brought = self._moments
            brought[replica] = (layer, moments)
            if len(brought) == len(self._expected):
                self._moments = {}  # for the next layer
                self._changed.notify_all()
            self._changed.wait_for(lambda: brought is not self._moments or self._left)
            if brought is self._moments:
                del brought[replica]
                where = "which is done: it failed, or it left this layer out"
                raise AbsentError(*self._mismatch(replica, layer, self._left[0], where))
        for number in self._expected:
            other, _ = brought[number]
            if other != layer:
                raise UsageError(*self._mismatch(replica, layer, number, f"which is in {other!r}"))
        return [brought[number][1] for number in self._expected]

    def _mismatch(self, replica: int, layer: str, other: int, where: str) -> tuple[str, str, str]:
        """The message for two replicas that are not in the same layer."""
        return (
            f"Replica {replica} on {self._devices[replica].name} waits in {layer!r} for the batch "
            f"statistics of replica {other} on {self._devices[other].name}, {where}.",
            "",
            "With batch_norm='whole' all replicas must pass the same layers in the same order; use "
            "batch_norm='first' for this model.",
        )


class WholeBatch:
    """Mixin for a BatchNorm class: normalises by the moments of all replicas' chunks."""

    exchange: StatisticsExchange
    replica: int
    layer: str

    def forward(self: Any, input: Tensor) -> Tensor:
        plain: Callable[[Tensor], Tensor] = super().forward  # type: ignore[misc]
        has_statistics = self.running_mean is not None or self.running_var is not None
        if not self.training and has_statistics:
            return plain(input)
        self._check_input_dim(input)
        wide = torch.promote_types(input.dtype, torch.float32)
        values = input.to(wide)
        dims = [d for d in range(input.dim()) if d != 1]
        elements = input.numel() // input.size(1)
        if elements:
            variance, mean = torch.var_mean(values, dims, correction=0)
        else:  # without rows they would be NaN; zero elements give them no weight
            variance = mean = values.sum(dims)
        moments = self.exchange.exchange(self.replica, self.layer, (mean, variance, elements))
        if sum(theirs for _, _, theirs in moments) < 2:
            return plain(input)  # torch's class raises for a batch of fewer than two
        mean, variance, elements = _combine(moments, input.device)
        self._track(mean.detach(), variance.detach(), elements)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = (variance + self.eps).rsqrt()
        output = (values - mean.view(shape)) * scale.view(shape)
        if self.weight is not None:
            output = output * self.weight.to(wide).view(shape)
        if self.bias is not None:
            output = output + self.bias.to(wide).view(shape)
        normalised: Tensor = output.to(input.dtype)
        return normalised

    @torch.no_grad()
    def _track(self: Any, mean: Tensor, variance: Tensor, elements: int) -> None:
        if not self.track_running_stats or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            weight = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        unbiased = variance * (elements / max(1, elements - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


def _combine(moments: Sequence[Moments], device: torch.device) -> Moments:
    """The moments of all chunks combined."""
    total = sum(elements for _, _, elements in moments)
    shares = [
        (mean.to(device), variance.to(device), elements / total)
        for mean, variance, elements in moments
    ]
    mean = torch.stack([mean * share for mean, _, share in shares]).sum(0)
    variance = torch.stack(
        [(variance + (own - mean).square()) * share for own, variance, share in shares]
    ).sum(0)
    return mean, variance, total


def has_batch_norm(module: nn.Module) -> bool:
    return any(is_replaced(layer) for layer in module.modules())


def is_replaced(module: nn.Module) -> bool:
    """Whether replicas of this layer synchronise; SyncBatchNorm synchronises ranks instead."""
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


@cache
def whole_batch_class(kind: type[Any]) -> Any:
    """The BatchNorm class with the mixin `WholeBatch`."""
    return type(kind.__name__, (WholeBatch, kind), {})
