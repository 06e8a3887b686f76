"""Batch size and learning rate for N workers, and whether more workers would still help.

`batch` and `learning_rate` are arithmetic that comes with a sentence saying what was chosen and
why. `noise` estimates the gradient noise scale from squared norms, `noise_meter` takes those norms
in training, `schedule` is a learning rate as a torch scheduler.
"""

from paceline.policy.batch import BatchPlan, plan_batch, plan_global_batch
from paceline.policy.learning_rate import LearningRate
from paceline.policy.noise import NoiseEstimate, NoiseScale
from paceline.policy.noise_meter import NoiseMeter
from paceline.policy.schedule import LearningRateScheduler

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
