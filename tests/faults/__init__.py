"""Whole trainings under planned faults: the tests and the benchmarks of surviving use these.

Not part of the package, because `moments` wraps private functions of the engine.
"""

from tests.faults.plans import MOMENTS as MOMENTS
from tests.faults.plans import TrainingFaults as TrainingFaults
from tests.faults.trainings import Training as Training
from tests.faults.trainings import assert_survived as assert_survived
from tests.faults.trainings import run_training as run_training
from tests.faults.trainings import train_alone as train_alone
from tests.faults.trainings import wait_for_replacements as wait_for_replacements
