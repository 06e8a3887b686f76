"""Trackers: a run's numbers in the places where people already look for them.

`Run(trackers=["tensorboard", "wandb:my-project"])`. Each is a sink that hands what it is told to
the tracker's own library, from a thread (`tracker`), so that nothing here costs a step. `kinds` has
one class for every library, which is imported when a run begins, and on the worker that writes.
"""

from paceline.trackers.kinds import CSV, MLflow, TensorBoard, Trackio, WandB, make_trackers
from paceline.trackers.tracker import Point, Tracker

__all__ = [
    "CSV",
    "MLflow",
    "Point",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "WandB",
    "make_trackers",
]
