"""All questions, in the order of the lessons."""

from __future__ import annotations

from paceline.learn import about_replicas, about_results, about_workers
from paceline.learn.question import ASKED

__all__ = ["QUESTIONS"]

QUESTIONS = list(ASKED)
_ = about_replicas, about_results, about_workers  # importing them puts their questions on the list
