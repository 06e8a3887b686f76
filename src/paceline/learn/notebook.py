"""Lessons in a notebook: `paceline.learn.lesson("sampler")` as the last line of a cell.

The same questions as on a terminal, answered on the spot; each answer stands behind a line to open.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from paceline.errors import UsageError
from paceline.learn.catalogue import QUESTIONS
from paceline.learn.lab import Lab
from paceline.learn.lessons import LESSONS, Lesson
from paceline.learn.question import Answered
from paceline.learn.runs import LearnOptions


def lesson(
    name: str | int,
    *,
    seed: int = 0,
    workers: int | None = None,
    batch: int | None = None,
    model: str | None = None,
) -> LessonShown:
    """Run one lesson, named or numbered from 1, and show its questions with their answers."""
    by_name: dict[str | int, Lesson] = {each.name: each for each in LESSONS}
    by_name |= dict(enumerate(LESSONS, start=1))
    if name not in by_name:
        raise UsageError(
            f"There is no lesson {name!r:.60}.",
            advice=f"The lessons are {', '.join(each.name for each in LESSONS)}.",
        )
    lab = Lab(LearnOptions(seed=seed, workers=workers, batch=batch, model=model))
    asked = [question for question in QUESTIONS if question.lesson == by_name[name].name]
    answered = [question.answer(lab) for question in asked if question.fits(lab)]
    return LessonShown(by_name[name], answered, lab.trouble)


@dataclass(frozen=True, slots=True)
class LessonShown:
    """A lesson that has been run: rich output in a notebook, text elsewhere."""

    lesson: Lesson
    answers: list[Answered]
    trouble: str = ""
    """Why a model of one's own was not used."""

    def __str__(self) -> str:
        lines = [self.lesson.title, "", self.lesson.introduction, ""]
        lines += [self.trouble, ""] if self.trouble else []
        for each in self.answers:
            lines += [each.question, *(f"  - {choice}" for choice in each.choices)]
            lines += [f"  = {each.shown}", f"  {each.why}", ""]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<h3>{escape(self.lesson.title)}</h3><p>{escape(self.lesson.introduction)}</p>"]
        parts += [f"<p><em>{escape(self.trouble)}</em></p>"] if self.trouble else []
        parts += map(_question_html, self.answers)
        for each in self.lesson.explain:
            points = "".join(f"<li>{escape(point)}</li>" for point in each.points)
            words = f"In your own words: {escape(each.question)}"
            parts.append(
                f"<p><b>{words}</b></p><details><summary>The points</summary><ul>{points}</ul>"
                "</details>"
            )
        return "\n".join(parts)


def _question_html(each: Answered) -> str:
    choices = "".join(f"<li>{escape(choice)}</li>" for choice in each.choices)
    printed = "".join(
        f"<pre>{escape(chr(10).join(lines))}</pre>"
        for lines in (each.recorded, each.evidence)
        if lines
    )
    return (
        f"<p><b>{escape(each.question)}</b></p>"
        + (f"<ul>{choices}</ul>" if choices else "")
        + f"<details><summary>The answer</summary><p><b>{escape(each.shown)}</b></p>"
        f"<p>{escape(each.why)}</p>{printed}<pre>{escape(each.code)}</pre></details>"
    )
