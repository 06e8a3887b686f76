"""How many items the accumulated gradients are sums over: what `weighted()` keeps count of."""

from __future__ import annotations

from paceline.errors import UsageError


class LossWeight:
    """The weight of one rank's loss, collected over the micro-batches of a step.

    Without any `weighted()` block the weight is 1, and sums become torch's plain averages.
    """

    def __init__(self) -> None:
        self.was_used = False
        """Whether any step was weighted: then a rank without inputs weighs nothing."""
        self._total: float | None = None
        self._is_inside = False
        self._has_unweighted = False

    @property
    def is_set(self) -> bool:
        return self._total is not None

    @property
    def value(self) -> float:
        return 1.0 if self._total is None else self._total

    def enter(self, count: float) -> tuple[float | None, bool]:
        """Begin a block of `count` items; returns what `leave` needs."""
        before = self._total, self._is_inside
        self._total, self._is_inside = (self._total or 0.0) + count, True
        return before

    def leave(self, before: tuple[float | None, bool], had_backward: bool) -> None:
        """End a block; without a backward inside, nothing of it weighs."""
        if not had_backward:
            self._total = before[0]
        self._is_inside = before[1]

    def set(self, weight: float) -> None:
        self._total = weight

    def on_local_backward(self) -> None:
        """A micro-batch was accumulated without being averaged yet."""
        self._has_unweighted |= not self._is_inside

    def refuse_mixture(self, step: int) -> None:
        """Raise if some micro-batches of the step had a weight and some had none."""
        if self._total is not None and (self._has_unweighted or not self._is_inside):
            raise UsageError(
                f"Step {step}: some of the accumulated backward passes had a weight and some had "
                "none, so their sum means nothing.",
                advice="Put every micro-batch of a step into a weighted() block, or none.",
            )

    def reset(self) -> None:
        """The step is over."""
        self.was_used |= self._is_inside
        self._total = None
        self._has_unweighted = False
