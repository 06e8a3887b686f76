"""How a run steps its optimizer, or, where it has several models, each of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.group import Membership
from paceline.run.config import RunConfig
from paceline.run.models import TurnUpdate
from paceline.run.precision import Precision
from paceline.update import FiniteCheck, Update, WeightAverage, WholeUpdate


def make_update(
    config: RunConfig,
    module: nn.Module,
    precision: Precision,
    members: Membership,
    average: WeightAverage | None,
    make: Callable[..., Update],
) -> Update:
    """What applies the gradients of a run; `make` makes that of one model."""
    options, models = config.options, config.models

    def settings(module: nn.Module, scaler: Any) -> dict[str, Any]:
        finite = None
        if options.check_finite != "off":
            named, is_complete = list(module.named_parameters()), options.check_finite == "all"
            finite = FiniteCheck(named, members, is_complete=is_complete, is_saved=config.is_saved)
        return {"scaler": precision.find_scaler(scaler), "finite": finite}

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
