"""How many bytes were handed over to be sent, and how many they would have been.

A byte counts when this rank gives it to a sum over the ranks. What the network makes of that (a
ring of N ranks moves each byte about twice) is the same factor with and without compression.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketTraffic:
    """One bucket in one step."""

    bytes_before: int
    bytes_sent: int


class Traffic:
    """Counts bytes, in all and for each bucket of the latest step."""

    def __init__(self) -> None:
        self.bytes_before = 0
        self.bytes_sent = 0
        self.by_bucket: dict[int, BucketTraffic] = {}
        """The latest step, by the index of the bucket."""

    @property
    def ratio(self) -> float:
        """How many times smaller the gradients have become on their way; 1 before any step."""
        return self.bytes_before / self.bytes_sent if self.bytes_sent else 1.0

    def record(self, bucket: int, before: int, sent: int) -> None:
        """Count a message; several for one bucket in one step add up, as do their bytes."""
        seen = self.by_bucket.get(bucket, BucketTraffic(0, 0))
        self.by_bucket[bucket] = BucketTraffic(seen.bytes_before + before, seen.bytes_sent + sent)
        self.bytes_before += before
        self.bytes_sent += sent

    def begin_step(self) -> None:
        self.by_bucket = {}
