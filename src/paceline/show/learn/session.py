"""A lesson on a terminal: predict, run, compare, break it, and explain it in your own words.

Typed answers are parsed as values (`values`); one that cannot be parsed is asked for again and
never counted. Enter alone shows the answer, `q` leaves. Every answer is saved as soon as it is
compared, so a lesson continues where it stopped, however it ended.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.show.learn import values
from paceline.show.learn.lab import Lab
from paceline.show.learn.lessons import LESSONS, PROBLEMS, Lesson, OpenQuestion
from paceline.show.learn.question import Answered, Question
from paceline.show.learn.saved import Prediction, ProgressFile, Score
from paceline.show.trace.command import Printer
from paceline.show.trace.drawing import BAD, GOOD, HERE, WIDTH, wrap
from paceline.telemetry import count_text, seconds_text

INDENT = "  "
SHORT_S = 0.01


class Leave(Exception):
    """The reader has left the lesson."""


class Session:
    """Asks questions about one lab on one terminal."""

    def __init__(
        self,
        lab: Lab,
        questions: Sequence[Question],
        file: ProgressFile,
        screen: Printer,
        ask: Callable[[str], str] = input,
    ) -> None:
        self.lab, self.file, self.screen = lab, file, screen
        self.questions = [question for question in questions if question.fits(lab)]
        self._ask = ask

    # Showing and asking.

    def say(self, text: str = "", indent: str = "") -> None:
        """Print text as paragraphs of limited width."""
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

    def _put(self, question: Question) -> list[str]:
        """Show the question; returns its choices."""
        choices = question.choices_in(self.lab)
        self.say(question.prompt(self.lab))
        for letter, choice in zip(values.LETTERS, choices, strict=False):
            self.say(f"{letter}) {choice}", INDENT)
        return choices

    def ask_value(self, question: Question) -> Any:
        """Ask for a prediction; None if the reader asks for the answer."""
        choices = self._put(question)
        asked = question.asked
        form = values.form_of(asked.kind, choices, asked.unit)
        self.say(f"({form[0].upper()}{form[1:]}. Enter alone shows the answer, q leaves.)", INDENT)
        return self._read_value(question, choices)

    def _read_value(
        self, question: Question, choices: list[str], hint: Callable[[], None] | None = None
    ) -> Any:
        asked = question.asked
        while True:
            typed = self._input("> ")
            if not typed:
                return None
            if hint is not None and typed.lower() in ("h", "hint"):
                hint()
                continue
            try:
                return values.read(asked.kind, typed, choices)
            except UsageError as error:
                self.say(f"{error.what} {error.advice}", INDENT)

    # One question.

    def play(self, question: Question) -> tuple[Prediction, Answered]:
        """Predict, run, compare, perhaps predict again; returns the prediction and the answer."""
        typed = self.ask_value(question)
        self.say("Running it ...", INDENT)
        answered = question.answer(self.lab)

        def is_right(typed: Any) -> bool:
            return typed is not None and values.is_same(
                answered.kind, typed, answered.answer, answered.tolerance, answered.unit
            )

        said = [] if typed is None else [values.show(answered.kind, typed, answered.unit)]
        verdict = "right" if is_right(typed) else "wrong" if said else "shown"
        if verdict == "wrong" and answered.is_sure and _has_second_try(answered):
            typed = self._try_again(question, answered, said[0])
            said += [] if typed is None else [values.show(answered.kind, typed, answered.unit)]
            verdict = "second try" if is_right(typed) else verdict
        if not answered.is_sure:
            verdict = "not scored"
        self.say(_verdict_text(verdict, said, answered))
        self.show_evidence(answered)
        prediction = Prediction(
            question=answered.question,
            said=", then ".join(said),
            found=answered.shown,
            verdict=verdict,
        )
        return prediction, answered

    def _try_again(self, question: Question, answered: Answered, said: str) -> Any:
        """Ask for another prediction; a hint runs a smaller example first."""
        has_hint = answered.kind in ("shape", "number", "numbers")
        hint = " h runs a smaller example first." if has_hint else ""
        self.say(f"{BAD} It is not {said}. Try once more, or press Enter to see it.{hint}")

        def show_hint() -> None:
            smaller = question.answer(self.lab.smaller)
            self.say(f"Smaller: {smaller.question}", INDENT)
            self.say(f"There it is {smaller.shown}.", INDENT)

        return self._read_value(question, answered.choices, show_hint if has_hint else None)

    def show_evidence(self, answered: Answered) -> None:
        """Show the reason, the recorded stage with the answer marked, and the output."""
        self.say(answered.why, INDENT)
        if answered.stage is not None:
            self.screen.show([""])
            self.screen.show(self._stage(answered))
        if answered.evidence:
            self.screen.show([""])
        for line in answered.evidence:
            self.screen.show(_fitted(line, self.screen.width))
        if answered.seconds > SHORT_S:  # else an earlier run is reused
            self.say(f"(run just now in {seconds_text(answered.seconds)})", INDENT)

    def _stage(self, answered: Answered) -> Iterable[str]:
        for line in self.lab.draw(answered.stage or (), self.screen.width):
            is_marked = line.startswith("    │") and any(each in line for each in answered.mark)
            yield f"  {HERE} {line[4:]}" if is_marked else line

    def wait_for_enter(self, answered: Answered) -> None:
        """Wait for Enter; on request show the code, or save it."""
        while True:
            typed = self._input("Enter: continue, c: its code, s: save the code. ").lower()
            if typed in ("c", "code"):
                code = [
                    _fitted(f"  {line}", self.screen.width) for line in answered.code.splitlines()
                ]
                self.screen.show(["", *(line for lines in code for line in lines), ""])
            elif typed in ("s", "save"):
                self.say(_save_code(answered), INDENT)
            else:
                self.screen.show([""])
                return

    # Lessons, cards, the challenge.

    def lesson(self, lesson: Lesson) -> None:
        """Play one lesson, from where it was left."""
        asked = [question for question in self.questions if question.lesson == lesson.name]
        score = self._begin(lesson.name, "question")
        for number, question in enumerate(asked, start=1):
            if question.name not in score.predictions:
                self.say(f"{number} of {len(asked)}")
                self._note(lesson.name, score, question)
        points = sum(self._explain(each) for each in lesson.explain)
        of = sum(len(each.points) for each in lesson.explain)
        self._finish(lesson.name, score)
        second = sum(each.verdict == "second try" for each in score.predictions.values())
        tries = f", {second} at the second try" if second else ""
        self.say(
            f"Done: {score.right} of {score.asked} predicted{tries}, {points} of {of} points named."
        )
        following = LESSONS[LESSONS.index(lesson) + 1 :]
        self.say(f"Next: paceline learn {following[0].name if following else 'challenge'}")

    def _begin(self, name: str, thing: str) -> Score:
        """The score of a lesson that was begun, or a new one."""
        score = self.file.progress.begun.get(name)
        if score is None or score.about != self.lab.about:
            return Score(about=self.lab.about)
        self.say(f"Continued after {count_text(len(score.predictions), thing)}.\n")
        return score

    def _note(self, name: str, score: Score, question: Question) -> bool:
        """Ask one question, and save the prediction at once."""
        prediction, answered = self.play(question)
        # Saved before anything else, because the terminal may go away at any time.
        score.add(question.name, prediction)
        self.file.progress.begun[name] = score
        self._save()
        self.wait_for_enter(answered)
        return prediction.verdict in ("right", "not scored")

    def _finish(self, name: str, score: Score) -> None:
        """Record the score of a finished lesson; it replaces an earlier one."""
        score.is_done = True
        self.file.progress.lessons[name] = score
        self.file.progress.begun.pop(name, None)
        self._save()
        self.screen.show(review_lines(score, min(self.screen.width, WIDTH)))

    def _explain(self, question: OpenQuestion) -> int:
        self.say(f"In your own words: {question.question}")
        self._input("Say it or write it down, then press Enter. ")
        named = 0
        for point in question.points:
            named += self._is_yes(f"{INDENT}{point}: did you say this? [y/n] ")
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

    def _save(self) -> None:
        self.file.save()
        if self.file.remark:
            self.say(self.file.remark)
            self.file.remark = ""

    def cards(self) -> None:
        """Every question as a card; those that were not known the last time come first."""
        known = self.file.progress.cards
        deck = list(self.questions)
        random.Random(self.lab.seed).shuffle(deck)
        deck.sort(key=lambda question: known.get(question.name, False))
        for number, question in enumerate(deck, start=1):
            self.say(f"Card {number} of {len(deck)}")
            self._put(question)
            self._input("Enter: turn it over. ")
            answered = question.answer(self.lab)
            self.say(f"The answer is {answered.shown}.")
            self.show_evidence(answered)
            known[question.name] = self._is_yes("Did you know it? [y/n] ")
            self._save()
            self.screen.show([""])
        self.say(f"All cards seen; {sum(known.values())} of {len(deck)} known.")

    def challenge(self) -> None:
        """The five problems, from where they were left."""
        question_by_name = {question.name: question for question in self.questions}
        score = self._begin("challenge", "question")
        for number, problem in enumerate(PROBLEMS, start=1):
            left = [name for name in problem.questions if name not in score.predictions]
            if left:
                self.say(f"Problem {number} of {len(PROBLEMS)}: {problem.title}")
            for name in left:
                self._note("challenge", score, question_by_name[name])
        self._finish("challenge", score)
        counts = ("right", "second try", "not scored")
        solved = [
            all(score.predictions[name].verdict in counts for name in problem.questions)
            for problem in PROBLEMS
        ]
        self.say(f"Solved: {sum(solved)} of {count_text(len(solved), 'problem')}.")

    def review(self) -> None:
        """All predictions so far, beside the results."""
        done = self.file.progress
        for name in [*(lesson.name for lesson in LESSONS), "challenge"]:
            score = done.begun.get(name) or done.lessons.get(name)
            if score is not None and score.predictions:
                self.say(name.capitalize())
                self.screen.show(review_lines(score, min(self.screen.width, WIDTH)))


def _has_second_try(answered: Answered) -> bool:
    """Whether a second try makes sense: not for two choices, nor for measurements."""
    return not answered.tolerance and not (answered.kind == "choice" and len(answered.choices) < 3)


def _verdict_text(verdict: str, said: Sequence[str], answered: Answered) -> str:
    close = "  (close enough: it is measured)" if answered.tolerance else ""
    again = "  (at the second try)" if verdict == "second try" else ""
    match verdict:
        case "right" | "second try":
            return f"{GOOD} {answered.shown}{close}{again}"
        case "wrong":
            return f"{BAD} You answered {said[-1]}. The answer is {answered.shown}."
        case "not scored":
            given = f"You answered {said[-1]}. " if said else ""
            return (
                f"{given}Measured: {answered.shown}. Not counted: the machine is too busy for a "
                "reliable measurement."
            )
    return f"The answer is {answered.shown}."


def review_lines(score: Score, width: int) -> Iterator[str]:
    """Predictions beside results, wrong ones first."""
    marks = {"right": GOOD, "second try": GOOD, "wrong": BAD}
    later = ("wrong", "shown", "not scored", "second try", "right")
    yield from ("", "Your answers and the results:", "")
    for each in sorted(score.predictions.values(), key=lambda each: later.index(each.verdict)):
        said = each.said or "nothing"
        lead = f"{marks.get(each.verdict, ' ')} "
        yield from wrap(f"{lead}{each.question}", width, "    ", "  ")
        yield from wrap(
            f"you: {said}; found: {each.found} ({each.verdict})", width, "      ", "    "
        )
    yield ""


def _save_code(answered: Answered) -> str:
    """Save the code as a new file in this folder; returns what to print about it."""
    path = Path(f"{answered.name.replace('-', '_')}.py")
    try:
        with open(path, "x") as file:
            file.write(answered.code)
    except FileExistsError:
        return f"{path} exists already, and is left as it is."
    except OSError as error:
        return f"{path} cannot be written here: {error.strerror}."
    return f"Written. To run it: python {path}"


def _fitted(line: str, width: int) -> list[str]:
    """A line of output, indented, and wrapped with a hanging indent."""
    inner = line.expandtabs(2).rstrip()
    lead = INDENT + " " * (len(inner) - len(inner.lstrip()))
    return wrap(inner.lstrip(), width, lead + INDENT, lead) or [""]
