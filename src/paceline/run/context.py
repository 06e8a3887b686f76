"""What every step of a run works with, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.ddp import DistributedDataParallel
from paceline.policy import NoiseMeter
from paceline.run.buffers import Buffers
from paceline.run.loader import MapLoader
from paceline.run.metrics import Metrics
from paceline.run.recorder import StepRecorder
from paceline.run.seeds import Generators
from paceline.run.stream import StreamLoader
from paceline.update.finite import FiniteCheck
from paceline.update.whole import Update


@dataclass(slots=True, kw_only=True)
class Workshop:
    """The tools of a step: who computes, loads, checks and commits."""

    model: DistributedDataParallel
    module: nn.Module
    device: torch.device
    size: int
    seed: int
    shards: int
    loader: MapLoader | StreamLoader
    update: Update
    buffers: Buffers
    finite: FiniteCheck
    generators: Generators
    metrics: Metrics
    noise: NoiseMeter | None = None
    recorder: StepRecorder | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """What the step under way has spent, by phase, as the host sees it."""
