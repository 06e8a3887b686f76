"""What a step would take on a network: buckets that leave while backward runs, simulated; pure.

A ring all-reduce of n workers sends 2(n-1)/n of the bytes over every link, in 2(n-1) messages.
One bucket is under way at a time, in the order of the buckets, none before its gradients are ready.

    backward   |=======================|
    buckets         |--0--|  |---1---|  |--2--|
                                       exposed ^
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """What a message costs between two neighbours."""

    name: str
    latency_s: float
    bytes_per_s: float


NETWORKS = {
    "nvlink": Network("nvlink", 3e-6, 300e9),
    "100g": Network("100g", 10e-6, 11e9),
    "1g": Network("1g", 60e-6, 0.115e9),
    "home": Network("home", 20e-3, 5e6),
}
"""Usual networks: what one direction of a link carries for one worker, after protocols."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together."""

    ready_s: float
    """How long after the begin of backward they are ready."""
    nbytes: int


def ring_s(nbytes: float, size: int, network: Network) -> float:
    """How long one all-reduce takes if nobody is late."""
    if size == 1:
        return 0.0
    return 2 * (size - 1) * network.latency_s + 2 * (size - 1) / size * nbytes / network.bytes_per_s


def exposed_s(buckets: Sequence[Bucket], backward_s: float, size: int, network: Network) -> float:
    """How long after the end of backward the last bucket arrives."""
    free = 0.0
    for bucket in buckets:
        free = max(free, min(bucket.ready_s, backward_s)) + ring_s(bucket.nbytes, size, network)
    return max(0.0, free - backward_s) if size > 1 else 0.0
