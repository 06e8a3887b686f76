"""All questions with the functions that answer them, in the order of the lessons."""

from __future__ import annotations

from paceline.show.learn import about_engines, about_islands, about_results
from paceline.show.learn.lab import Lab
from paceline.show.learn.lessons import LESSONS, Lesson
from paceline.show.learn.question import Answered, Question

_FUNCTIONS = vars(about_engines) | vars(about_islands) | vars(about_results)
QUESTIONS = [
    Question(lesson.name, asked, _FUNCTIONS[asked.name.replace("-", "_")])
    for lesson in LESSONS
    for asked in lesson.questions
]


def answer_all(lab: Lab, lesson: Lesson | None = None) -> list[Answered]:
    """Answer every question of one lesson, or of all, that applies to this lab."""
    asked = [q for q in QUESTIONS if lesson is None or q.lesson == lesson.name]
    return [question.answer(lab) for question in asked if question.fits(lab)]
