"""What can be chosen about a run besides its dozen arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings that most runs leave alone."""

    shuffle: bool = True
    """Whether every epoch has an order of its own; False takes the samples as they stand."""
    drop_last: bool = False
    """Whether samples that do not fill the last global batch of an epoch are left out of it."""
    clip_norm: float | None = None
    """Shorten gradients to this length where they are longer."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None: as a `DataLoader` does."""
    pin_memory: bool | None = None
    """Whether batches are loaded into page-locked memory; None: when the model is on a GPU."""
    prefetch: int = 2
    """How many shards every DataLoader worker loads ahead."""
    merge_shards: bool = False
    """Whether a worker's shards go through the model together. Exact only for a model that draws
    no random numbers and computes nothing over a batch, such as dropout and BatchNorm do."""
    checkpoint_every: int | None = None
    """Save after every so many steps. In any case a run saves after every epoch and when a signal
    stops it; 0 means never at all."""
    keep: int = 3
    """How many of the newest checkpoints are kept; at least 2, in case one is damaged."""
    keep_best: int = 1
    """How many of the best ones are kept besides, by `best_metric`."""
    best_metric: str | None = None
    """A metric of `run.evaluate()`, or of training, that says which checkpoints are best."""
    better: Literal["lower", "higher"] = "lower"
    """Whether a lower or a higher `best_metric` is better."""
    check_finite: Literal["sample", "all", "off"] = "sample"
    """How closely gradients are searched for NaN and infinity on CPUs; see docs/run.md. On GPUs,
    and with `clip_norm`, all of them are, because it costs next to nothing there."""
    noise_every: int = 0
    """Measure the gradient noise scale in every so many steps; 0 means never."""
    trace_step: int = 0
    """Record this step stage by stage into the folder, for `paceline trace` and the report; 0: what
    `paceline run --trace-step` says, or none."""
    timeline: bool = False
    """Whether every worker records into the folder what it does when; `paceline run --timeline`
    goes before."""
    handle_signals: bool = True
    """Whether the first Ctrl-C or SIGTERM lets the step end and saves, and the second kills."""
    exit_on_signal: bool = True
    """Whether the process then exits, with 128 + the signal's number; False only ends the loop."""
    progress: str = "auto"
    """How rank 0 shows the run: `auto`, `bar`, `plain`, `json` or `quiet`."""
    policy: Sequence[str] = ()
    """What was decided about batch size and learning rate and why, to be shown and kept; empty: how
    the global batch is cut among the workers."""

    def __post_init__(self) -> None:
        least_by_name = {"prefetch": 1, "keep": 2, "keep_best": 0}
        least_by_name |= {"checkpoint_every": 0, "noise_every": 0, "trace_step": 0}
        for name, least in least_by_name.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(
                    f"{name} is {value!r}.", advice=f"Pass a whole number from {least} up."
                )
        if self.better not in ("lower", "higher"):
            raise UsageError(f"better is {self.better!r}.", advice="Use 'lower' or 'higher'.")
        if self.check_finite not in ("sample", "all", "off"):
            raise UsageError(
                f"check_finite is {self.check_finite!r}.", advice="Use 'sample', 'all' or 'off'."
            )
