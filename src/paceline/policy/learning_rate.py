"""The learning rate for another batch size than the one it was found with.

A rule says how it follows the global batch: not at all, in proportion, or with the square root. A
warm-up leads there over the first steps, and a decay leads away from there until the last one.
Everything is a factor on the rate that was right on one device, so that optimizers with several
rates keep their proportions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.policy.batch import check_count

Rule = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear", "cosine"]

_RULES = ("none", "linear", "sqrt")
_DECAYS = ("none", "linear", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A learning rate as a function of the step, in units of the single-device rate."""

    global_batch: int
    """The batch that a step has."""
    single_batch: int | None = None
    """The batch that the optimizer's rate was found with, if it was another."""
    rule: Rule = "none"
    """`linear` suits SGD, `sqrt` Adam and its relatives, `none` changes nothing."""
    warmup_steps: int = 0
    """Over so many steps the rate rises evenly to its full height."""
    warmup_from: float = 0.0
    """Where the warm-up begins, as a part of the full height."""
    decay: Decay = "none"
    """What happens after the warm-up, until `steps`."""
    steps: int | None = None
    """How many steps the whole training has; a decay needs to know."""
    decay_to: float = 0.0
    """Where the decay ends, as a part of the full height."""

    def __post_init__(self) -> None:
        check_count("global_batch", self.global_batch)
        check_count("warmup_steps", self.warmup_steps, least=0)
        for name in ("single_batch", "steps"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        for name, allowed in (("rule", _RULES), ("decay", _DECAYS)):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}.",
                    advice=f"Choose one of {', '.join(allowed)}.",
                )
        for name in ("warmup_from", "decay_to"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}.",
                    advice="It is a part of the full learning rate, from 0 to 1.",
                )
        if self.decay != "none" and (self.steps is None or self.steps <= self.warmup_steps):
            raise UsageError(
                f"A {self.decay} decay over steps={self.steps} after {self.warmup_steps} steps of "
                "warm-up is impossible.",
                advice="Set steps to the number of steps of the whole training.",
            )

    @property
    def scale(self) -> float:
        """How many times the single-device rate the full height is."""
        ratio = self.global_batch / (self.single_batch or self.global_batch)
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rule]

    def factor(self, step: int) -> float:
        """What to multiply the single-device rate with in this step, counted from 0."""
        return self.scale * self._warmup(step) * self._decay(step)

    @property
    def sentence(self) -> str:
        """The rule and the warm-up, in words."""
        batches = f"global batch {self.global_batch:,}"
        if self.single_batch is not None:
            batches += f", found with {self.single_batch:,}"
        if self.scale == 1.0:
            text = f"Learning rate as given ({batches}"
            text += ")" if self.rule == "none" else f", {_NAMES[self.rule]} rule)"
        else:
            text = f"Learning rate times {self.scale:.4g} by the {_NAMES[self.rule]} rule"
            text += f" ({batches})"
        if self.warmup_steps:
            text += f", warmed up over {self.warmup_steps:,} steps"
        if self.decay != "none":
            text += f", {self.decay} decay until step {self.steps:,}"
        return text + "."

    def _warmup(self, step: int) -> float:
        if step >= self.warmup_steps:
            return 1.0
        # The first step already moves: a rate of exactly zero would waste it.
        way = (step + 1) / (self.warmup_steps + 1)
        return self.warmup_from + (1.0 - self.warmup_from) * way

    def _decay(self, step: int) -> float:
        if self.decay == "none" or self.steps is None or step < self.warmup_steps:
            return 1.0
        way = min((step - self.warmup_steps) / (self.steps - self.warmup_steps), 1.0)
        left = 1.0 - way if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * way))
        return self.decay_to + (1.0 - self.decay_to) * left


_NAMES = {"none": "constant", "linear": "linear", "sqrt": "square root"}
