"""Lessons in a notebook: `paceline.learn.lesson("sampler")` as the last line of a cell.

The same questions as on a terminal, with computed answers; each answer is folded until it is
opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from paceline.show.learn.catalogue import answer_all
from paceline.show.learn.command import answer_lines
from paceline.show.learn.lab import Lab
from paceline.show.learn.lessons import Lesson, find_lesson
from paceline.show.learn.question import Answered
from paceline.show.learn.runs import LearnOptions
from paceline.show.trace.drawing import WIDTH


def lesson(
    name: str | int,
    *,
    seed: int = 0,
    workers: int | None = None,
    batch: int | None = None,
    model: str | None = None,
) -> LessonShown:
    """Run one lesson, named or numbered from 1, and show its questions with their answers."""
    found = find_lesson(str(name))
    lab = make_lab(seed=seed, workers=workers, batch=batch, model=model)
    return LessonShown(found, answer_all(lab, found), lab)


def make_lab(
    *, seed: int = 0, workers: int | None = None, batch: int | None = None, model: str | None = None
) -> Lab:
    """Make the lab of the lessons, whose runs start when they are first needed."""
    return Lab(LearnOptions(seed=seed, workers=workers, batch=batch, model=model))


@dataclass(frozen=True, slots=True)
class LessonShown:
    """A lesson that has been run: rich output in a notebook, text elsewhere."""

    lesson: Lesson
    answers: list[Answered]
    lab: Lab
    """Has `trouble` if the reader's own model could not be used."""

    def __str__(self) -> str:
        intro = filter(None, (self.lesson.introduction, self.lab.trouble))
        return "\n\n".join([*intro, "\n".join(answer_lines(self.lab, self.answers, WIDTH))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<h3>{escape(self.lesson.title)}</h3><p>{escape(self.lesson.introduction)}</p>"]
        parts += [f"<p><em>{escape(self.lab.trouble)}</em></p>"] if self.lab.trouble else []
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
