"""Weights from any file into any model: `paceline.load_weights`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What `load_weights` did."""

    loaded: list[str]


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True
) -> WeightsReport:
    """Load the weights in `path` into `model`, whatever either was wrapped in."""
    raise NotImplementedError
