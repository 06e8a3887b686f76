"""How many rows each worker gets in a step, and in how many passes.

There are two honest ways from one device to N. Keep the rows per device, and the global batch is
N times as large: every step sees more data, and the learning rate may have to follow. Or keep the
global batch, and every device gets its part of it: the training stays the same, only faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError

Keep = Literal["device", "global"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A global batch, cut among workers."""

    global_batch: int
    workers: int
    accumulation: int
    """How many forward and backward passes each worker makes in one step."""
    reason: str
    """What was chosen and why, in one sentence."""

    @property
    def rows_by_worker(self) -> list[int]:
        """By rank; where the batch does not divide evenly, the first ranks get one more."""
        share, longer = divmod(self.global_batch, self.workers)
        return [share + (rank < longer) for rank in range(self.workers)]

    @property
    def rows_per_worker(self) -> int:
        """What the busiest worker gets in a step."""
        return -(-self.global_batch // self.workers)

    @property
    def rows_per_pass(self) -> int:
        """What the busiest worker holds at a time."""
        return -(-self.rows_per_worker // self.accumulation)

    @property
    def sentence(self) -> str:
        """The reason, and the passes if there are several."""
        if self.accumulation == 1:
            return self.reason
        return (
            f"{self.reason} Each worker takes its {self.rows_per_worker:,} rows in "
            f"{self.accumulation:,} passes of at most {self.rows_per_pass:,} "
            "and updates the model once."
        )

    def steps_per_epoch(self, rows: int) -> int:
        """How many steps see every row of a data set once; the last one may be smaller."""
        return -(-rows // self.global_batch)


def plan_batch(
    single_batch: int, workers: int, *, keep: Keep = "global", device_limit: int | None = None
) -> BatchPlan:
    """From the batch that works on one device to a plan for several.

    `keep="device"` gives every worker `single_batch` rows; `keep="global"` cuts `single_batch`
    among them. `device_limit` is the most rows that a device can hold at a time.
    """
    check_count("single_batch", single_batch)
    check_count("workers", workers)
    if keep not in ("device", "global"):
        raise UsageError(
            f"keep is {keep!r}.",
            advice='Use "device" for the same rows on every device, or "global" for the same rows '
            "in all.",
        )
    if workers == 1:
        return _plan(single_batch, 1, device_limit, f"Global batch {single_batch:,} on one worker.")
    if keep == "device":
        whole = single_batch * workers
        reason = (
            f"Global batch {whole:,}: each of {workers:,} workers keeps the {single_batch:,} rows "
            f"of one device, so a step takes as long as before and sees {workers:,} times the data."
        )
        return _plan(whole, workers, device_limit, reason)
    shares = _shares(single_batch, workers)
    reason = (
        f"Global batch {single_batch:,}, as on one device: each of {workers:,} workers gets "
        f"{shares} rows, so the training stays the same and so does the learning rate."
    )
    return _plan(single_batch, workers, device_limit, reason)


def plan_global_batch(
    global_batch: int, workers: int, *, device_limit: int | None = None
) -> BatchPlan:
    """Cut a global batch among workers, in as few passes as `device_limit` rows allow."""
    check_count("global_batch", global_batch)
    check_count("workers", workers)
    who = "one worker" if workers == 1 else f"{workers:,} workers"
    each = "" if workers == 1 else f", {_shares(global_batch, workers)} rows each"
    return _plan(
        global_batch, workers, device_limit, f"Global batch {global_batch:,} on {who}{each}."
    )


def _plan(global_batch: int, workers: int, device_limit: int | None, reason: str) -> BatchPlan:
    if workers > global_batch:
        raise UsageError(
            f"{workers:,} workers cannot share a global batch of {global_batch:,} rows.",
            advice=f"Use at most {global_batch:,} workers, or a larger batch.",
        )
    if device_limit is not None:
        check_count("device_limit", device_limit)
    busiest = -(-global_batch // workers)
    passes = 1 if device_limit is None else -(-busiest // device_limit)
    return BatchPlan(global_batch, workers, passes, reason)


def _shares(global_batch: int, workers: int) -> str:
    least, rest = divmod(global_batch, workers)
    return f"{least:,} or {least + 1:,}" if rest else f"{least:,}"


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{name} is {value!r}.", advice=f"It counts something: use {least} or more."
        )
