"""The lessons: what each is about, asks and has explained, and the five problems.

The words are in `assets/lessons.toml`. Starts without torch.
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
    """Something to explain, and the points that a good answer has."""

    question: str
    points: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked, before anything is run."""

    name: str
    facts: list[str]
    """Which entries of the list of facts it covers; see docs/learn.md."""
    kind: Kind
    question: str
    """With names of the lab in braces."""
    why: str = ""
    """Why the answer is as it is, where that does not depend on it."""
    choices: list[str] = field(default_factory=list)
    choices_of: str = ""
    """Which name of the lab has the choices."""
    unit: str = ""
    tolerance: float = 0.0
    breaks: bool = False
    """Whether something is broken on purpose to see what then happens."""
    needs: str = ""
    """A name of the lab: where it is empty, the question has no sense."""
    stage: list[str] | None = None
    """Which recorded step shows the answer (a name of the lab), and at which stage."""


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
    """One of the five problems, and the names of the questions that it consists of."""

    title: str
    questions: list[str]


_WORDS = tomllib.loads(
    resources.files(__package__).joinpath("assets", "lessons.toml").read_text("utf-8")
)
LESSONS: list[Lesson] = read_value(list[Lesson], _WORDS["lessons"], "lessons")
PROBLEMS: list[Problem] = read_value(list[Problem], _WORDS["problems"], "problems")
FACTS = [*map(str, range(1, 17)), "pipeline", "multi-gpu", "epochs", "prediction", "islands"]
"""What the lessons cover; docs/learn.md lists them."""


def find_lesson(name: str) -> Lesson:
    """The lesson of a name, or of a number from 1."""
    if name.isascii() and name.isdecimal() and 0 < int(name[:9]) <= len(LESSONS):
        return LESSONS[int(name) - 1]
    lesson_by_name = {lesson.name: lesson for lesson in LESSONS}
    if name not in lesson_by_name:
        raise UsageError(
            f"There is no lesson {name[:40]!r}.{did_you_mean(name, lesson_by_name)}",
            advice=f"The lessons are {', '.join(lesson_by_name)}, or 1 to {len(LESSONS)}.",
        )
    return lesson_by_name[name]
