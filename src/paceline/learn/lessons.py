"""The lessons: what each is about, what to explain in one's own words, and the five problems.

The words are in `assets/lessons.toml`. Starts without torch.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

from paceline.comm.documents import read_value


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """Something to explain, and the points that a good answer has."""

    question: str
    points: list[str]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson of about three minutes."""

    name: str
    title: str
    introduction: str
    explain: list[OpenQuestion]


@dataclass(frozen=True, slots=True)
class Problem:
    """One of the five problems, and the names of the questions that it consists of."""

    title: str
    questions: list[str]


_WORDS = tomllib.loads(
    resources.files(__package__).joinpath("assets", "lessons.toml").read_text("utf-8")
)
LESSONS: list[Lesson] = read_value(list[Lesson], _WORDS["lessons"], "lessons")
PROBLEMS: list[Problem] = read_value(list[Problem], _WORDS["problems"], "problems")
FACTS = [*map(str, range(1, 17)), "pipeline", "multi-gpu", "epochs", "prediction"]
"""What the lessons cover; docs/learn.md lists them."""
