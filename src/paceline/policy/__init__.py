"""Batch size and learning rate for N workers, and whether more workers would still help.

`batch` is arithmetic that comes with a sentence saying what was chosen and why, `scheduler` gives
its learning rate to torch, and `noise` measures the gradient noise scale in training. Names are
loaded when first used: `paceline policy` starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {
    "BatchPlan": "paceline.policy.batch",
    "LearningRate": "paceline.policy.batch",
    "LearningRateScheduler": "paceline.policy.scheduler",
    "NoiseEstimate": "paceline.policy.noise",
    "NoiseMeter": "paceline.policy.noise",
    "NoiseScale": "paceline.policy.noise",
    "plan_batch": "paceline.policy.batch",
    "plan_global_batch": "paceline.policy.batch",
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.policy.batch import BatchPlan as BatchPlan
    from paceline.policy.batch import LearningRate as LearningRate
    from paceline.policy.batch import plan_batch as plan_batch
    from paceline.policy.batch import plan_global_batch as plan_global_batch
    from paceline.policy.noise import NoiseEstimate as NoiseEstimate
    from paceline.policy.noise import NoiseMeter as NoiseMeter
    from paceline.policy.noise import NoiseScale as NoiseScale
    from paceline.policy.scheduler import LearningRateScheduler as LearningRateScheduler

__getattr__ = load_names(__name__, _HOME_BY_NAME)
