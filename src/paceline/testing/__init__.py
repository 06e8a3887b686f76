"""Public tools for tests: ranks as threads or processes, planned faults, whole trainings."""

from __future__ import annotations

from paceline.testing.faults import MOMENTS as MOMENTS
from paceline.testing.faults import Fault as Fault
from paceline.testing.faults import Faults as Faults
from paceline.testing.faults import PlannedFault as PlannedFault
from paceline.testing.models import assert_replicas_equal as assert_replicas_equal
from paceline.testing.models import gradients as gradients
from paceline.testing.models import seeded as seeded
from paceline.testing.processes import run_processes as run_processes
from paceline.testing.ranks import run_ranks as run_ranks
from paceline.testing.trainings import Training as Training
from paceline.testing.trainings import assert_survived as assert_survived
from paceline.testing.trainings import run_training as run_training

__all__ = [
    "MOMENTS",
    "Fault",
    "Faults",
    "PlannedFault",
    "Training",
    "assert_replicas_equal",
    "assert_survived",
    "gradients",
    "run_processes",
    "run_ranks",
    "run_training",
    "seeded",
]
