"""The metric by which a run judges its model: the best so far, and how long ago that was.

It lowers the learning rate, where the scheduler is one that waits for a metric, and ends the run
when patience does. All workers have the same numbers, so they do both alike and need not ask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import UsageError, did_you_mean
from paceline.update import Update, needs_metric

if TYPE_CHECKING:
    from paceline.run.config import RunOptions

Better = Literal["lower", "higher"]

_MODE_BY_BETTER = {"lower": "min", "higher": "max"}
_PREFIX = re.compile(
    r"(ema|val|valid|validation|dev|test|train|training|eval|mean|avg|average|macro|micro|weighted"
    r"|balanced|top_?\d+)_"
)
_NAMES: dict[Better, str] = {
    "lower": "loss error err error_rate perplexity ppl mse rmse mae mape nll bce cross_entropy wer "
    "cer fid bpb bpc",
    "higher": "accuracy acc f1 f1_score auc auroc auprc roc_auc precision average_precision recall "
    "map iou miou dice bleu rouge r2 psnr ssim mcc",
}
_BETTER_BY_NAME = {name: better for better, names in _NAMES.items() for name in names.split()}


def find_better(metric: str | None, said: Better | None) -> Better:
    """Whether a lower or a higher metric is better: as somebody said, or as its name does."""
    if said is not None or metric is None:
        return said or "lower"
    name = re.sub(r"\W+", "_", metric.lower())
    while name not in _BETTER_BY_NAME:
        if (prefix := _PREFIX.match(name)) is None:
            raise UsageError(
                f"best_metric is {metric!r}, and nothing says which values of it are better.",
                advice='Pass better="lower" or better="higher" in RunOptions.',
            )
        name = name[prefix.end() :]
    return _BETTER_BY_NAME[name]


class Rating:
    """What `best_metric` has been, one value per step after which it was measured.

    Invariant: a step counts once, also for a worker that is given the state of another one and then
    runs the code which follows that step itself.
    """

    def __init__(self, options: RunOptions, scheduler: Any, update: Update) -> None:
        self._name, self._patience = options.best_metric, options.patience
        better = find_better(options.best_metric, options.better)
        self._sign = 1.0 if better == "lower" else -1.0
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
        text = f"best_metric is {name!r}, which nobody has measured yet."
        measured = ", ".join(sorted(scores)) or "no metric"
        return f"{text}{did_you_mean(name, scores)} This epoch has {measured}."

    def state_dict(self) -> dict[str, Any]:
        best, metric = self._sign * self._best, [self._name, self._sign]
        return {"metric": metric, "step": self._step, "best": best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["metric"] == [self._name, self._sign]:  # another one says nothing about this one
            self._best = self._sign * state["best"]
            self._step, self._since = state["step"], state["since"]


def _check(scheduler: Any, options: RunOptions) -> None:
    name, better = type(scheduler).__name__, find_better(options.best_metric, options.better)
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
