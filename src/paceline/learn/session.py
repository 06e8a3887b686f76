"""A lesson on a terminal: predict, run, compare, break it, and explain it in one's own words.

What is typed is read as a value (`values`); what cannot be read is asked for again and never
counted. Enter alone shows the answer, `q` leaves, and everything done so far is kept.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.explain.trace.command import Screen
from paceline.explain.trace.drawing import BAD, GOOD, WIDTH, wrap
from paceline.learn import values
from paceline.learn.lab import Lab
from paceline.learn.lessons import LESSONS, PROBLEMS, Lesson, OpenQuestion
from paceline.learn.question import Answered, Question
from paceline.learn.saved import Memory, Score
from paceline.observe.units import count_text, seconds_text

MARK, PLAIN_MARK = "  » ", "  > "
INDENT = "  "
SHORT_S = 0.01


class Leave(Exception):
    """The reader wants to stop here."""


class Session:
    """What is shown and asked, on one terminal, about one lab."""

    def __init__(
        self,
        lab: Lab,
        questions: Sequence[Question],
        memory: Memory,
        screen: Screen,
        ask: Callable[[str], str] = input,
    ) -> None:
        self.lab, self.memory, self.screen = lab, memory, screen
        self.questions = [question for question in questions if question.fits(lab)]
        self._ask = ask

    # Showing and asking.

    def say(self, text: str = "", indent: str = "") -> None:
        """Text as paragraphs, no wider than reads well."""
        width = min(self.screen.width, WIDTH)
        for paragraph in text.splitlines() or [""]:
            self.screen.show(wrap(paragraph, width, indent) or [""])

    def _input(self, words: str) -> str:
        try:
            typed = self._ask(words).strip()
        except EOFError:
            self.screen.show([""])
            raise Leave from None
        if typed.lower() in ("q", "quit", "exit"):
            raise Leave
        return typed

    def ask_value(self, question: Question) -> Any:
        """What the reader predicts; None where they would rather be shown."""
        choices = question.choices_in(self.lab)
        self.say(question.prompt(self.lab))
        for letter, choice in zip(values.LETTERS, choices, strict=False):
            self.say(f"{letter}) {choice}", INDENT)
        form = values.form_of(question.kind, choices, question.unit)
        self.say(f"({form[0].upper()}{form[1:]}. Enter alone shows the answer, q leaves.)", INDENT)
        while True:
            typed = self._input("> ")
            if not typed:
                return None
            try:
                return values.read(question.kind, typed, choices)
            except UsageError as error:
                self.say(f"{error.what} {error.advice}", INDENT)

    # One question.

    def play(self, question: Question) -> tuple[bool, Answered]:
        """Predict, run, compare; whether the prediction was right, and the answer."""
        typed = self.ask_value(question)
        self.say("Running it ...", INDENT)
        answered = question.answer(self.lab)
        is_right = typed is not None and values.is_same(
            answered.kind, typed, answered.answer, answered.tolerance, answered.unit
        )
        self._compare(answered, typed, is_right)
        return is_right, answered

    def _compare(self, answered: Answered, typed: Any, is_right: bool) -> None:
        close = "  (close enough: it is measured)" if is_right and answered.tolerance else ""
        verdict = f"The answer is {answered.shown}."
        if is_right:
            verdict = f"{GOOD} {answered.shown}{close}"
        elif typed is not None:
            said = values.show(answered.kind, typed, answered.unit)
            verdict = f"{BAD} You said {said}. {verdict}"
        self.say(verdict)
        self.show_evidence(answered)

    def show_evidence(self, answered: Answered) -> None:
        """Why it is so, the recorded stage with the answer marked in it, what was printed."""
        self.say(answered.why, INDENT)
        if answered.stage is not None:
            self.screen.show([""])
            self.screen.show(self._stage(answered))
        if answered.evidence:
            self.screen.show([""])
        for line in answered.evidence:
            self.screen.show(_fitted(line, self.screen.width))
        if answered.seconds > SHORT_S:  # else a run before had shown it already
            self.say(f"(run just now in {seconds_text(answered.seconds)})", INDENT)

    def _stage(self, answered: Answered) -> Iterable[str]:
        lines = self.lab.draw(answered.stage or (), self.screen.width, self.screen.is_plain)
        mark = PLAIN_MARK if self.screen.is_plain else MARK
        for line in lines:
            is_marked = line.startswith("    ") and any(each in line for each in answered.mark)
            yield mark + line[4:] if is_marked and line[4] in "│|" else line

    def go_on(self, answered: Answered) -> None:
        """Wait, and show the code to whoever wants to see it."""
        while True:
            typed = self._input("Enter: continue, c: the code that found it. ")
            if typed.lower() not in ("c", "code"):
                self.screen.show([""])
                return
            code = [_fitted(f"  {line}", self.screen.width) for line in answered.code.splitlines()]
            self.screen.show(["", *(line for lines in code for line in lines), ""])

    # Lessons, cards, the challenge.

    def lesson(self, lesson: Lesson) -> None:
        """All of one lesson."""
        score = Score()
        asked = [question for question in self.questions if question.lesson == lesson.name]
        try:
            for number, question in enumerate(asked, start=1):
                self.say(f"{number} of {len(asked)}")
                is_right, answered = self.play(question)
                score.right += is_right
                score.asked += 1
                self.go_on(answered)
            points = sum(self._explain(each) for each in lesson.explain)
            score.is_done = True
        finally:
            if score.asked:
                self._keep(lesson.name, score)
        of = sum(len(each.points) for each in lesson.explain)
        self.say(f"Done: {score.right} of {score.asked} predicted, {points} of {of} points named.")
        following = LESSONS[LESSONS.index(lesson) + 1 :]
        self.say(f"Next: paceline learn {following[0].name if following else 'challenge'}")

    def _explain(self, question: OpenQuestion) -> int:
        self.say(f"In your own words: {question.question}")
        self._input("Say it or write it down, then press Enter. ")
        named = 0
        for point in question.points:
            named += self._is_yes(f"{INDENT}{point}: did you say so? [y/n] ")
        self.screen.show([""])
        return named

    def _is_yes(self, words: str) -> bool:
        *above, last = textwrap.wrap(
            words, self.screen.width - 2, drop_whitespace=False, subsequent_indent=INDENT
        ) or [words]
        self.screen.show(line.rstrip() for line in above)
        while True:
            typed = self._input(last).lower()
            if typed in ("y", "yes", "n", "no", ""):
                return typed.startswith("y")
            self.say("Type y or n.", INDENT)

    def _keep(self, name: str, score: Score) -> None:
        before = self.memory.done.lessons.get(name)
        if before is not None and before.is_done and not score.is_done:
            return  # a lesson left half way does not undo one that was finished
        self.memory.done.lessons[name] = score
        self._save()

    def _save(self) -> None:
        self.memory.save()
        if self.memory.remark:
            self.say(self.memory.remark)
            self.memory.remark = ""

    def cards(self) -> None:
        """Every question as a card: those first that were not known the last time."""
        known = self.memory.done.cards
        deck = list(self.questions)
        random.Random(self.lab.seed).shuffle(deck)
        deck.sort(key=lambda question: known.get(question.name, False))
        for number, question in enumerate(deck, start=1):
            self.say(f"Card {number} of {len(deck)}")
            self.say(question.prompt(self.lab))
            for letter, choice in zip(values.LETTERS, question.choices_in(self.lab), strict=False):
                self.say(f"{letter}) {choice}", INDENT)
            self._input("Enter: turn it over. ")
            answered = question.answer(self.lab)
            self.say(f"The answer is {answered.shown}.")
            self.show_evidence(answered)
            known[question.name] = self._is_yes("Did you know it? [y/n] ")
            self._save()
            self.screen.show([""])
        self.say(f"All cards seen; {sum(known.values())} of {len(deck)} known.")

    def challenge(self) -> None:
        """The five problems."""
        question_by_name = {question.name: question for question in self.questions}
        score = Score()
        try:
            for number, problem in enumerate(PROBLEMS, start=1):
                self.say(f"Problem {number} of {len(PROBLEMS)}: {problem.title}")
                solved = True
                for name in problem.questions:
                    is_right, answered = self.play(question_by_name[name])
                    solved = solved and is_right
                    self.go_on(answered)
                score.right += solved
                score.asked += 1
            score.is_done = True
        finally:
            if score.asked:
                self._keep("challenge", score)
        self.say(f"Solved: {score.right} of {count_text(score.asked, 'problem')}.")


def _fitted(line: str, width: int) -> list[str]:
    """A line that was printed somewhere, indented; what is too long goes on below."""
    inner = line.expandtabs(2).rstrip()
    lead = INDENT + " " * (len(inner) - len(inner.lstrip()))
    return wrap(inner.lstrip(), width, lead + INDENT, lead) or [""]
