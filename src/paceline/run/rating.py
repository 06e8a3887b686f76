"""The metric by which a run judges its model: the best so far, and how long ago that was.

It lowers the learning rate, where the scheduler is one that waits for a metric, and ends the run
when patience does. All workers have the same numbers, so they do both alike and need not ask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from paceline.errors import UsageError
from paceline.run.config import RunOptions
from paceline.update import Update, needs_metric

_MODE_BY_BETTER = {"lower": "min", "higher": "max"}


class Rating:
    """What `best_metric` has been, one value per step after which it was measured.

    Invariant: a step counts once, also for a worker that is given the state of another one and then
    runs the code which follows that step itself.
    """

    def __init__(self, options: RunOptions, scheduler: Any, update: Update) -> None:
        self._name, self._patience = options.best_metric, options.patience
        self._sign = 1.0 if options.better == "lower" else -1.0
        self._update = update
        self._best = math.inf
        self._since = self._step = 0
        self._is_said = False
        if needs_metric(scheduler):
            _check(scheduler, options)

    def note(self, step: int, scores: Mapping[str, float]) -> None:
        """Rate the model after `step`, if that was measured."""
        value = scores.get(self._name or "")
        if value is None or step == self._step:
            return
        self._step = step
        is_better = self._sign * value < self._best
        self._best = self._sign * value if is_better else self._best
        self._since = 0 if is_better else self._since + 1
        self._update.rate(value)

    @property
    def is_over(self) -> bool:
        """Whether patience is."""
        return self._patience is not None and self._since >= self._patience

    @property
    def reason(self) -> str:
        """Why the run is stopped, where patience is over."""
        return (
            f"stopped early: {self._name} was not better than {self._sign * self._best:.6g} "
            f"{self._since} times in a row"
        )

    def find_mistake(self, scores: Mapping[str, float]) -> str:
        """What to say, once, where an epoch is over and nobody has measured the metric."""
        name = self._name
        if name is None or self._step or self._is_said or name in scores:
            return ""
        self._is_said = True
        near = get_close_matches(name, scores, n=1)
        text = f"best_metric is {name!r}, which nobody has measured yet"
        text += f"; did you mean {near[0]!r}?" if near else "."
        return f"{text} This epoch has {', '.join(sorted(scores)) or 'no metric'}."

    def state_dict(self) -> dict[str, Any]:
        best, metric = self._sign * self._best, [self._name, self._sign]
        return {"metric": metric, "step": self._step, "best": best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["metric"] == [self._name, self._sign]:  # another one says nothing about this one
            self._best = self._sign * state["best"]
            self._step, self._since = state["step"], state["since"]


def _check(scheduler: Any, options: RunOptions) -> None:
    name, better = type(scheduler).__name__, options.better
    if options.best_metric is None:
        raise UsageError(
            f"{name} steps on a metric, and nobody says which.",
            advice='Pass best_metric="loss", or another name that run.evaluate() returns, in '
            "RunOptions.",
        )
    mode = getattr(scheduler, "mode", None)
    if mode not in (None, _MODE_BY_BETTER[better]):
        raise UsageError(
            f"{name} has mode={mode!r}, and better={better!r} says the opposite of "
            f"{options.best_metric!r}.",
            advice=f"Use mode={_MODE_BY_BETTER[better]!r}, or the other better= in RunOptions.",
        )
