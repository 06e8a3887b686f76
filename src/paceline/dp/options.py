"""What torch's class has no argument for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Literal, get_args

from paceline.errors import UsageError

BatchNorm = Literal["first", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOptions:
    """How replicas behave where torch's have one way only."""

    batch_norm: BatchNorm = "first"
    """Which rows BatchNorm normalises by in training: each replica's own, with running statistics
    from the first replica (`"first"`, as torch's class does), or those of the whole batch
    (`"whole"`, as the bare module does)."""

    share_parameters: bool = True
    """Let replicas in the module's own memory use its parameters themselves. With False each has a
    copy, for modules that write to their parameters in forward."""

    cpu_threads: int | None = None
    """Threads that operators of one CPU replica may use; by default the replicas share out those
    that the process has."""

    def __post_init__(self) -> None:
        if self.batch_norm not in get_args(BatchNorm):
            raise UsageError(
                f"batch_norm is {self.batch_norm!r}.", advice="Use 'first' or 'whole'."
            )
        threads = self.cpu_threads
        if threads is not None and (type(threads) is not int or threads < 1):
            raise UsageError(f"cpu_threads is {threads!r}.", advice="Use a whole number from 1 up.")


DEFAULT_OPTIONS = DPOptions()


def check_split(split: Sequence[float] | None, replicas: int) -> None:
    """Raise unless `split` says how to share a batch among the replicas."""
    if split is None:
        return
    is_list = isinstance(split, Sequence) and not isinstance(split, str)
    if not is_list or not all(isinstance(weight, Real) for weight in split):
        raise UsageError(
            f"split is {split!r}, which is no list of numbers.",
            advice="Pass one weight for each entry of device_ids, such as [3, 1].",
        )
    if len(split) != replicas:
        raise UsageError(
            f"split has {len(split)} weights for {replicas} replicas: {list(split)}.",
            advice="Pass one weight for each entry of device_ids.",
        )
    if not all(isfinite(weight) and weight >= 0 for weight in split) or not sum(split) > 0:
        raise UsageError(
            f"split is {list(split)}.",
            advice="Weights are numbers from 0 up, and at least one is above 0: [3, 1] gives the "
            "first replica three quarters of the rows.",
        )
