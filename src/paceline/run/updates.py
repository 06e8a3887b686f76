"""How a run changes its model: the precision of passes, its update, the metric that rates it.

Parameters, gradients and the optimizer stay in float32. Under `bf16` and `fp16` forward passes and
losses run under torch's autocast, which has matrix products and convolutions compute in 16 bits,
and backward passes outside of it, as torch wants it. Only float16 needs its losses scaled.

The metric lowers the learning rate, where the scheduler is one that waits for it, and ends the run
when patience does. All workers have the same numbers, so they do both alike and need not ask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import Parameter

from paceline.errors import UsageError, did_you_mean, message_of
from paceline.group import Membership
from paceline.run.models import TurnUpdate
from paceline.update import FiniteCheck, Update, WeightAverage, WholeUpdate, needs_metric

if TYPE_CHECKING:
    from paceline.run.config import RunConfig, RunOptions


DTYPE_BY_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class Precision:
    """What a run does around forward and backward passes; `fp32` leaves both to the script."""

    def __init__(self, name: str, device: torch.device, params: Sequence[Parameter]) -> None:
        self.name, self._dtype = name, DTYPE_BY_PRECISION[name]
        self.forward: AbstractContextManager[Any] = nullcontext()
        """Around a shard's forward pass and its loss; entered many times, never within itself."""
        self.backward: AbstractContextManager[Any] = nullcontext()
        """Around its backward pass, inside of `forward`."""
        self._device = device
        self.is_short = self._dtype is not None
        """Whether gradients are computed in 16 bits."""
        if self._dtype is not None:
            self._refuse_missing(self._dtype, params)
            self.forward = torch.autocast(device.type, self._dtype)
            self.backward = torch.autocast(device.type, enabled=False)

    def find_scaler(self, scaler: Any) -> Any:
        """What scales losses: the one that was passed, one of torch's where fp16 needs it."""
        if scaler is None and self.name == "fp16":
            return torch.amp.GradScaler(self._device.type)
        if scaler is not None and self.name == "bf16":
            raise UsageError(
                'A scaler was passed along with precision="bf16", whose range is that of float32: '
                "there is nothing to scale.",
                advice='Leave scaler= out, or use precision="fp16".',
            )
        return scaler

    def explain(self, error: BaseException | None) -> UsageError | None:
        """What an error means that says that an operation does not exist in this precision."""
        text = "" if error is None else message_of(error)
        is_missing = "not implemented for" in text or "Low precision dtypes not supported" in text
        names = ("'Half'", "Got Half") if self.name == "fp16" else ("'BFloat16'", "Got BFloat16")
        if self._dtype is None or not is_missing or not any(name in text for name in names):
            return None
        other = 'precision="bf16" or ' * (self.name == "fp16")
        return UsageError(
            f'The model needs an operation that torch does not have for precision="{self.name}" on '
            f"{self._device.type}: {text.splitlines()[0]}.",
            advice=f'Use {other}precision="fp32", or compute that part under '
            f'torch.autocast("{self._device.type}", enabled=False) from inputs in float32.',
        )

    def _refuse_missing(self, dtype: torch.dtype, params: Sequence[Parameter]) -> None:
        kind, advice, problem = self._device.type, 'Use precision="fp32".', ""
        if not torch.amp.is_autocast_available(kind):
            problem = f"torch has no autocast for {kind}"
        elif self.name == "bf16" and kind == "cuda" and not _has_bf16():
            problem = f"{torch.cuda.get_device_name(self._device)} does not compute in bfloat16"
            advice = 'Use precision="fp16", which it does.'
        elif self.name == "fp16" and any(p.requires_grad and p.dtype == dtype for p in params):
            problem = "the model's parameters are float16, and small updates to them would be lost"
            advice = "Leave the model in float32: autocast casts where that is safe."
        if problem:
            raise UsageError(f'precision="{self.name}" on {kind}: {problem}.', advice=advice)


def _has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def make_update(
    config: RunConfig,
    module: nn.Module,
    precision: Precision,
    members: Membership,
    average: WeightAverage | None,
    make: Callable[..., Update],
) -> Update | TurnUpdate:
    """What applies the gradients of a run; `make` makes that of one model."""
    options, models = config.options, config.models

    def settings(module: nn.Module, scaler: Any) -> dict[str, Any]:
        found = {"scaler": precision.find_scaler(scaler), "finite": None}
        if options.check_finite != "off":
            named, is_complete = list(module.named_parameters()), options.check_finite == "all"
            is_saved = config.is_saved
            found["finite"] = FiniteCheck(
                named, members, is_complete=is_complete, is_saved=is_saved
            )
        return found

    if models is not None:
        updates = {
            name: WholeUpdate(
                list(models.modules[name].parameters()),
                optimizer,
                scheduler=models.schedulers.get(name),
                clip_norm=models.clip_norms.get(name),
                average=None,
                **settings(models.modules[name], models.scalers.get(name)),
            )
            for name, optimizer in models.optimizers.parts.items()
        }
        return TurnUpdate(models, updates)
    if not isinstance(options.update, str):
        return options.update
    return make(
        list(module.parameters()),
        config.optimizer,
        scheduler=config.scheduler,
        clip_norm=options.clip_norm,
        average=average,
        **settings(module, config.scaler),
    )


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
    """Whether a lower or a higher metric is better: as the options or its name say."""
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

    def __init__(
        self, options: RunOptions, schedulers: Iterable[Any], update: Update | TurnUpdate
    ) -> None:
        self._name, self._patience = options.best_metric, options.patience
        better = find_better(options.best_metric, options.better)
        self._sign = 1.0 if better == "lower" else -1.0
        self._update = update
        self._best = math.inf
        self._since = self._step = 0
        self._is_said = False
        for scheduler in filter(needs_metric, schedulers):
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
        """What to say, once, where an epoch is over and the metric was not measured."""
        name = self._name
        if name is None or self._step or self._is_said or name in scores:
            return ""
        self._is_said = True
        text = f"best_metric is {name!r}, which was not measured yet."
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
            f"{name} steps on a metric, and it is not said on which.",
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
