"""Batch size and learning rate for N workers, and whether more workers would still help.

`batch` is arithmetic that comes with a sentence saying what was chosen and why; `noise` measures
the gradient noise scale in training.
"""

from paceline.policy.batch import (
    BatchPlan,
    LearningRate,
    LearningRateScheduler,
    plan_batch,
    plan_global_batch,
)
from paceline.policy.noise import NoiseEstimate, NoiseMeter, NoiseScale

__all__ = [
    "BatchPlan",
    "LearningRate",
    "LearningRateScheduler",
    "NoiseEstimate",
    "NoiseMeter",
    "NoiseScale",
    "plan_batch",
    "plan_global_batch",
]
