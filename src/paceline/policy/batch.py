"""How many rows each worker gets in a step, in how many passes, and at which learning rate.

There are two ways from one device to N. Keep the rows per device, and the global batch is N times
as large: every step sees more data, and the learning rate may have to change. Or keep the global
batch, and every device gets a part of it: the training stays the same, only faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from paceline.errors import UsageError, check_choice, check_number, check_whole

Keep = Literal["device", "global"]
Rule = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A global batch, divided among workers."""

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
    def share_text(self) -> str:
        """`8`, or `42 or 43`."""
        least, longer = divmod(self.global_batch, self.workers)
        return f"{least:,} or {least + 1:,}" if longer else f"{least:,}"

    @property
    def rows_per_worker(self) -> int:
        """The most rows that a worker gets in a step."""
        return -(-self.global_batch // self.workers)

    @property
    def rows_per_pass(self) -> int:
        """The most rows that a worker has in memory at a time."""
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
    """Plan the batch for several workers, from the batch that works on one device.

    `keep="device"` gives every worker `single_batch` rows; `keep="global"` divides `single_batch`
    among them. `device_limit` is the most rows that fit on a device at a time.
    """
    check_whole("single_batch", single_batch)
    check_whole("workers", workers)
    check_choice("keep", keep, get_args(Keep))
    whole = single_batch * workers if keep == "device" else single_batch
    plan = plan_global_batch(whole, workers, device_limit=device_limit)
    if workers == 1:
        return plan
    reason = (
        f"Global batch {whole:,}, as on one device: each of {workers:,} workers gets "
        f"{plan.share_text} rows, so the training stays the same and so does the learning rate."
    )
    if keep == "device":
        reason = (
            f"Global batch {whole:,}: each of {workers:,} workers keeps the {single_batch:,} rows "
            f"of one device, so a step takes as long as before and sees {workers:,} times the data."
        )
    return replace(plan, reason=reason)


def plan_global_batch(
    global_batch: int, workers: int, *, device_limit: int | None = None
) -> BatchPlan:
    """Divide a global batch among workers, in as few passes as `device_limit` rows allow."""
    check_whole("global_batch", global_batch)
    check_whole("workers", workers)
    check_whole("device_limit", device_limit, or_none=True)
    if workers > global_batch:
        raise UsageError(
            f"{workers:,} workers cannot share a global batch of {global_batch:,} rows.",
            advice=f"Use at most {global_batch:,} workers, or a larger batch.",
        )
    busiest = -(-global_batch // workers)
    plan = BatchPlan(global_batch, workers, -(-busiest // (device_limit or busiest)), "")
    who = "one worker" if workers == 1 else f"{workers:,} workers, {plan.share_text} rows each"
    return replace(plan, reason=f"Global batch {global_batch:,} on {who}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A learning rate as a function of the step, for a batch other than the one it was tuned for.

    It is a factor on the rate that was tuned on one device, so optimizers with several rates keep
    their proportions.
    """

    global_batch: int
    """The batch of a step."""
    single_batch: int | None = None
    """The batch for which the optimizer's rate was tuned, if it was another."""
    rule: Rule = "none"
    """`linear` suits SGD, `sqrt` Adam and its relatives, `none` changes nothing."""
    warmup_steps: int = 0
    """Over how many steps the rate rises linearly to its full value."""
    warmup_from: float = 0.0
    """Where the warm-up begins, as a share of the full value."""
    decay: Decay = "none"
    """What happens after the warm-up, until `steps`."""
    steps: int | None = None
    """How many steps the whole training has; required for a decay."""
    decay_to: float = 0.0
    """Where the decay ends, as a share of the full value."""

    def __post_init__(self) -> None:
        check_whole("global_batch", self.global_batch)
        check_whole("warmup_steps", self.warmup_steps, least=0)
        check_whole("single_batch", self.single_batch, or_none=True)
        check_whole("steps", self.steps, or_none=True)
        for name, kind in (("rule", Rule), ("decay", Decay)):
            check_choice(name, getattr(self, name), get_args(kind))
        for name in ("warmup_from", "decay_to"):
            advice = "It is a share of the full learning rate, from 0 to 1."
            check_number(name, getattr(self, name), 0, 1, advice, ends=True)
        if self.decay != "none" and (self.steps is None or self.steps <= self.warmup_steps):
            raise UsageError(
                f"A {self.decay} decay over steps={self.steps} after {self.warmup_steps} steps of "
                "warm-up is impossible.",
                advice="Set steps to the number of steps of the whole training.",
            )

    @property
    def scale(self) -> float:
        """The full value, as a multiple of the single-device rate."""
        ratio = self.global_batch / (self.single_batch or self.global_batch)
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rule]

    @property
    def sentence(self) -> str:
        """The rule and the warm-up, in words."""
        found = "" if self.single_batch is None else f", found with {self.single_batch:,}"
        what = "as given"
        if self.rule != "none":
            what = f"times {self.scale:.4g} by the {self.rule} rule"
        text = f"Learning rate {what} (global batch {self.global_batch:,}{found})"
        if self.warmup_steps:
            text += f", warmed up over {self.warmup_steps:,} steps"
        if self.decay != "none":
            text += f", {self.decay} decay until step {self.steps:,}"
        return text + "."

    def factor(self, step: int) -> float:
        """The factor on the single-device rate in this step, counted from 0."""
        if step < self.warmup_steps:
            # Not zero in the first step, which would be wasted.
            risen = (step + 1) / (self.warmup_steps + 1)
            return self.scale * (self.warmup_from + (1.0 - self.warmup_from) * risen)
        if self.decay == "none" or self.steps is None:
            return self.scale
        progress = min((step - self.warmup_steps) / (self.steps - self.warmup_steps), 1.0)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        left = 1.0 - progress if self.decay == "linear" else cosine
        return self.scale * (self.decay_to + (1.0 - self.decay_to) * left)
