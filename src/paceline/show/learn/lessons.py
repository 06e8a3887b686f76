"""The lessons: introductions, questions, open questions, and the five problems.

The texts are in `assets/lessons.toml`. Starts without torch.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib import resources

from paceline.errors import UsageError, did_you_mean
from paceline.files import read_value
from paceline.show.learn.values import Kind


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question to answer in your own words, and the points of a good answer."""

    question: str
    points: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question before anything is run."""

    name: str
    facts: list[str]
    """Which entries of the list of facts it covers; see docs/learn.md."""
    kind: Kind
    question: str
    """The text, with names of the lab in braces."""
    why: str = ""
    """The reason for the answer, where it does not depend on the answer."""
    choices: list[str] = field(default_factory=list)
    choices_of: str = ""
    """The name of the lab that has the choices."""
    unit: str = ""
    tolerance: float = 0.0
    breaks: bool = False
    """Whether the question breaks something on purpose."""
    needs: str = ""
    """A name of the lab: where its value is empty, the question does not apply."""
    stage: list[str] | None = None
    """The recorded step (a name of the lab) and the stage that show the answer."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson of about three minutes."""

    name: str
    title: str
    introduction: str
    questions: list[Asked]
    explain: list[OpenQuestion]


@dataclass(frozen=True, slots=True)
class Problem:
    """One of the five problems: a title and the names of its questions."""

    title: str
    questions: list[str]


_TEXTS = tomllib.loads(
    resources.files(__package__).joinpath("assets", "lessons.toml").read_text("utf-8")
)
LESSONS: list[Lesson] = read_value(list[Lesson], _TEXTS["lessons"], "lessons")
PROBLEMS: list[Problem] = read_value(list[Problem], _TEXTS["problems"], "problems")


def find_lesson(name: str) -> Lesson:
    """The lesson with this name, or number from 1."""
    if name.isascii() and name.isdecimal() and 0 < int(name[:9]) <= len(LESSONS):
        return LESSONS[int(name) - 1]
    lesson_by_name = {lesson.name: lesson for lesson in LESSONS}
    if name not in lesson_by_name:
        raise UsageError(
            f"There is no lesson {name[:40]!r}.{did_you_mean(name, lesson_by_name)}",
            advice=f"The lessons are {', '.join(lesson_by_name)}, or 1 to {len(LESSONS)}.",
        )
    return lesson_by_name[name]
