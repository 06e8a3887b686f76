"""How many items the accumulated gradients are sums over: what `weighted()` keeps count of.

Gradients are summed over the ranks as if each had one item; `transport.mean_factor` turns that into
the mean over all items, in the reducer, in transports that divide on the way, and in a run of one.
"""

from __future__ import annotations

from paceline.errors import UsageError


class LossWeight:
    """The weight of one rank's loss, collected over the micro-batches of a step.

    Without any `weighted()` block the weight is 1, and sums become torch's plain averages.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self.is_set = False
        """Whether any micro-batch of this step had a weight."""
        self.was_used = False
        """Whether any step was weighted: then a rank without inputs weighs nothing."""
        self.is_clean = True
        """Whether there is nothing to reset."""
        self._is_inside = False
        self._has_unweighted = False

    def enter(self, count: float) -> tuple[float, bool, bool]:
        """Begin a block of `count` items; returns what `leave` needs."""
        if not count >= 0 or count == float("inf"):
            raise UsageError(
                f"weighted({count}): the count of items must be a number from 0 up.",
                advice="Pass how many samples or tokens this rank's loss is a sum over.",
            )
        before = self.value, self.is_set, self._is_inside
        self.value = count + (self.value if self.is_set else 0.0)
        self.is_set = self._is_inside = True
        self.is_clean = False
        return before

    def leave(self, before: tuple[float, bool, bool], had_backward: bool) -> None:
        """End a block; without a backward inside, nothing of it weighs."""
        if not had_backward:
            self.value, self.is_set, _ = before
        self._is_inside = before[2]

    def set(self, weight: float) -> None:
        self.value, self.is_set, self.is_clean = weight, True, False

    def on_local_backward(self) -> None:
        """A micro-batch was accumulated without being averaged yet."""
        self._has_unweighted |= not self._is_inside
        self.is_clean = False

    def refuse_mixture(self, step: int) -> None:
        """Raise if some micro-batches of the step had a weight and some had none."""
        if self.is_set and (self._has_unweighted or not self._is_inside):
            raise UsageError(
                f"Step {step}: some of the accumulated backward passes had a weight and some had "
                "none, so their sum means nothing.",
                advice="Put every micro-batch of a step into a weighted() block, or none.",
            )

    def reset(self) -> None:
        """The step is over."""
        self.was_used |= self._is_inside
        self.value, self.is_set, self.is_clean = 1.0, False, True
        self._has_unweighted = False
