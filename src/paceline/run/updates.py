"""How a run steps its optimizer, or, where it has several models, each of theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    wanted, models = config.options.update, config.models
    if models is not None:
        make_one = partial(_make, WholeUpdate, config, precision, members, average=None)
        updates = {
            name: make_one(
                models.modules[name],
                optimizer,
                scheduler=models.schedulers.get(name),
                scaler=models.scalers.get(name),
                clip_norm=models.clip_norms.get(name),
            )
            for name, optimizer in models.optimizers.parts.items()
        }
        return TurnUpdate(models, updates)
    if not isinstance(wanted, str):
        return wanted
    update: Update = _make(
        make,
        config,
        precision,
        members,
        module,
        config.optimizer,
        scheduler=config.scheduler,
        scaler=config.scaler,
        clip_norm=config.options.clip_norm,  # type: ignore[arg-type]
        average=average,
    )
    return update


def _make(
    make: Callable[..., Any],
    config: RunConfig,
    precision: Precision,
    members: Membership,
    module: nn.Module,
    optimizer: Any,
    *,
    scheduler: Any,
    scaler: Any,
    clip_norm: float | None,
    average: WeightAverage | None,
) -> Any:
    options, finite = config.options, None
    if options.check_finite != "off":
        named, is_complete = list(module.named_parameters()), options.check_finite == "all"
        finite = FiniteCheck(named, members, is_complete=is_complete, is_saved=config.is_saved)
    return make(
        list(module.parameters()),
        optimizer,
        scheduler=scheduler,
        scaler=precision.find_scaler(scaler),
        clip_norm=clip_norm,
        finite=finite,
        average=average,
    )
