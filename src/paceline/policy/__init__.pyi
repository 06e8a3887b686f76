from paceline.policy.batch import BatchPlan as BatchPlan
from paceline.policy.batch import LearningRate as LearningRate
from paceline.policy.batch import plan_batch as plan_batch
from paceline.policy.batch import plan_global_batch as plan_global_batch
from paceline.policy.noise import NoiseEstimate as NoiseEstimate
from paceline.policy.noise import NoiseMeter as NoiseMeter
from paceline.policy.noise import NoiseScale as NoiseScale
from paceline.policy.scheduler import LearningRateScheduler as LearningRateScheduler
