"""Into how many shards the batch of a step is cut, and when that may change.

Where there are more workers than shards, the first step of a generation finds out whether it would
be the same in more of them, unless the script has fixed their number:

    step k, as it is cut --(draws, or changes buffers)-------------------> applied; it stays so
             │
             └──> step k, one shard per worker --(the same loss and gradients)--> applied; so from
                           │                                                      now on
                           └──(others)--> step k, as it was cut --> applied; it stays so

What a step draws is seeded by the numbers of its shards, and batch statistics are those of a shard;
without either, a loss that is a mean over its items has the same gradients in any cut. A loss that
is none, because it compares samples, or divides by something that `items=` does not say, shows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.group import exchange
from paceline.run.user_loader import UserLoader
from paceline.telemetry import Message, count_text
from paceline.update import total_norm

if TYPE_CHECKING:
    from paceline.run.metrics import ExactSums
    from paceline.run.parts import RunParts

_LOSS, _LOSS_IN_DOUBLE, _LOSS_IN_16_BITS = 1e-5, 1e-10, 1e-3
"""How far apart two cuts may be, relatively, by rounding alone."""
_NORM = 100
"""In gradients more cancels out than in a loss: so many times as far."""


class Cut:
    """The number of shards, as one worker knows it: all have agreed on it, as on the position.

    Invariant: whether a step is computed in another cut first depends on what all workers have told
    each other, so they compute it equally often.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.is_open = self.is_repeated = False
        """Whether the step under way decides about the cut; and whether it is computed once more,
        in another one."""
        self._has_drawn = False
        self._before = 0
        """How many shards there were, while others are tried."""
        self._told: list[list[float]] = []
        """What each worker has found in the old cut."""
        self._said: set[tuple[int, int]] = set()
        self.begin()

    def begin(self) -> None:
        """A generation begins: with its first step it is open whether there can be more."""
        if self._before:
            self._cut_into(self._before)
        progress, self._before, self._has_drawn = self._parts.progress, 0, False
        self.is_repeated, self.is_open = False, self._parts.may_cut and self._most > progress.shards

    def adopt(self, shards: int) -> None:
        """So many shards are what the workers have agreed on."""
        if shards != self._parts.progress.shards:
            self._note(shards)
        self.begin()

    @property
    def _most(self) -> int:
        return min(self._parts.progress.size, self._parts.config.global_batch)

    def look(self, *key: int) -> None:
        """The loss of a shard, seeded by `key`, is computed: have random numbers been drawn?"""
        parts = self._parts
        self._has_drawn |= parts.training.generators.were_used(parts.config.seed, "model", *key)

    def decide(self, step: int, sums: ExactSums) -> None:
        """The gradients of an open step have arrived; a collective: all workers call this.

        `sums` are those of this worker's losses.
        """
        told, progress = self._tell(step, sums), self._parts.progress
        before, self._before, self._has_drawn = self._before, 0, False
        if before:
            why = self._difference(step, before, told)
            if why:
                self._cut_into(before)
                self.is_repeated = True
            else:
                self._note(progress.shards)
                self._say_changed(step, before)
        else:
            why = _reason(step, told)
            if not why and math.isfinite(_mean(told)):
                self._before, self._told, self.is_repeated = progress.shards, told, True
                self._cut_into(self._most)
        self.is_open = bool(self._before)
        if why:
            self._say_refused(why)

    def _tell(self, step: int, sums: ExactSums) -> list[list[float]]:
        """What every worker has found: whether it drew, changed buffers; loss, items, length."""
        training, members = self._parts.training, self._parts.place.membership
        loss, items = (math.fsum(part) for part in sums.get("loss", ([], [])))
        norm = 0.0
        if not training.shares_out:  # there a worker has its share of the sums only
            norm = total_norm(param.grad for param in training.module.parameters()).item()
        has_changed = training.buffers is not None and training.buffers.have_changed()
        found = [float(self._has_drawn), float(has_changed), loss, items, norm]
        what = f"Step {step}: comparing two cuts of the batch"
        told: list[list[float]] = exchange(members.group, found, members.word_device, what)
        return told

    def _difference(self, step: int, before: int, told: list[list[float]]) -> str:
        """What is not the same in both cuts; empty where all is."""
        parts, near = self._parts, _LOSS
        if parts.training.precision.is_short:
            near = _LOSS_IN_16_BITS
        elif all(p.dtype == torch.float64 for p in parts.training.module.parameters()):
            near = _LOSS_IN_DOUBLE
        losses = [_mean(each) for each in (self._told, told)]
        norms = [max(each[4] for each in cut) for cut in (self._told, told)]
        pairs = {"loss": (losses, near), "length of the gradients": (norms, _NORM * near)}
        for what, ((was, now), most) in pairs.items():
            if not math.isclose(was, now, rel_tol=most):
                counts = [count_text(n, "shard") for n in (before, parts.progress.shards)]
                return (
                    f"the {what} of step {step} is {was:.7g} in {counts[0]} and {now:.7g} in "
                    f"{counts[1]}"
                )
        return ""

    def _note(self, shards: int) -> None:
        """From now on there are so many, for those who come later too."""
        self._cut_into(shards)
        self._parts.outlets.saving.note_shards(shards)

    def _cut_into(self, shards: int) -> None:
        loader = self._parts.feed.loader
        assert not isinstance(loader, UserLoader)  # whose batches are what they are
        self._parts.progress.shards = shards
        loader.cut_into(shards)
        self._parts.count_passes()

    def _say_changed(self, step: int, before: int) -> None:
        parts, shards = self._parts, self._parts.progress.shards
        text = (
            f"From step {step} on the batch is cut into {shards} shards, one per worker, and not "
            f"into {before}: it draws no random numbers, and has the same loss and gradients "
            f"either way. A new run with shards={before} cuts it as before."
        )
        facts = {"text": text, "level": "info", "shards": shards}
        parts.outlets.sinks.tell("message", Message(text, facts=facts))
        parts.recovery.tell_facts(shards=shards)

    def _say_refused(self, why: str) -> None:
        parts, size, shards = self._parts, self._parts.progress.size, self._parts.progress.shards
        parts.recovery.tell_facts(grows=False)
        if (size, shards) not in self._said:
            self._said.add((size, shards))
            text = say_idle(size, shards, f" The batch cannot be cut into more: {why}.")
            parts.outlets.sinks.tell("message", Message(text, "warning"))


def _reason(step: int, told: list[list[float]]) -> str:
    """Why a step, as it is cut, would be another one in any other cut; empty where it may not."""
    if any(has_drawn for has_drawn, *_ in told):
        return f"step {step} draws random numbers"
    if any(has_changed for _, has_changed, *_ in told):
        return f"step {step} changes buffers, as layers do that keep statistics of a batch"
    return ""


def _mean(told: list[list[float]]) -> float:
    total, items = (math.fsum(each[n] for each in told) for n in (2, 3))
    return total / items if items else 0.0


def say_idle(workers: int, shards: int, why: str = "") -> str:
    """There are more workers than shards."""
    idle = workers - shards
    return (
        f"{workers} workers share {count_text(shards, 'shard')}, so {count_text(idle, 'worker')} "
        f"{'has' if idle == 1 else 'have'} nothing to compute.{why} Pass shards= to a new run to "
        "use them."
    )
