"""`paceline learn`: the command line.

The list of lessons and the first words of each appear at once; torch is imported when something
has to be run.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.explain.trace.command import Screen
from paceline.explain.trace.drawing import GOOD, WIDTH, wrap
from paceline.learn.lessons import LESSONS, Lesson
from paceline.learn.saved import Memory
from paceline.observe.units import bytes_text, table_lines

if TYPE_CHECKING:
    from paceline.learn.lab import Lab
    from paceline.learn.question import Answered, Question

SCHEMA = 1
NARROW = 76
CARDS, CHALLENGE = "cards", "challenge"
OTHERS = {CARDS: "every question as a card to turn over", CHALLENGE: "five problems"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline learn`."""
    names = ", ".join(lesson.name for lesson in LESSONS)
    parser.description = (
        "Learn data parallelism by predicting what the engine does, running it, and breaking it. "
        "Every answer is computed when the question is asked."
    )
    parser.add_argument(
        "lesson",
        nargs="?",
        metavar="LESSON",
        help=f"{names}, or a number; {CARDS}, {CHALLENGE} (default: the list)",
    )
    for flag, metavar, text in (
        (
            "--seed",
            "N",
            "makes other data, weights and orders, so other right answers (default: 0)",
        ),
        ("--workers", "N", "how many share a batch (default: 2; 4 for batch size, speed-up)"),
        ("--batch", "N", "rows of a batch (default: 16; 32 for batch size, 100 in the pipeline)"),
    ):
        default = 0 if flag == "--seed" else None
        parser.add_argument(flag, metavar=metavar, type=int, default=default, help=text)
    parser.add_argument(
        "--model",
        metavar="FILE:FUNCTION",
        help="your own function: it returns (model, dataset, loss_fn), as for `paceline trace`",
    )
    parser.add_argument(
        "--answers", action="store_true", help="no questions: every answer, with how it was found"
    )
    parser.add_argument("--json", action="store_true", help="with --answers: print JSON")
    parser.add_argument("--html", metavar="FILE", help="write all lessons as one offline page")
    parser.add_argument("--forget", action="store_true", help="forget what is done")
    parser.add_argument("--ascii", action="store_true", help="draw without characters beyond ASCII")


def main(args: argparse.Namespace) -> int:
    """List, play, print or write lessons."""
    if args.json and not args.answers:
        raise UsageError("--json is for --answers.", advice="Add --answers.")
    chosen = _find(args.lesson)
    if args.forget:
        memory = Memory()
        memory.forget()
        print(f"Forgotten: {memory.path} is gone.")
        return 0
    if args.html is not None:
        return _write_page(args)
    if args.answers:
        if isinstance(chosen, str):
            raise UsageError(
                f"--answers and {chosen} do not go together.", advice="Name a lesson, or nothing."
            )
        return _print_answers(args, chosen)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "There is no terminal to ask questions on.",
            advice="`paceline learn --answers` prints every question with its computed answer; "
            "`paceline learn --html FILE` writes a page.",
        )
    return _play(args, chosen)


def _find(name: str | None) -> Lesson | str | None:
    """The lesson of a name or a number; `cards` or `challenge`; None where none was named."""
    if name is None or name in OTHERS:
        return name
    if name.isascii() and name.isdecimal() and 0 < int(name[:9]) <= len(LESSONS):
        return LESSONS[int(name) - 1]
    lesson_by_name = {lesson.name: lesson for lesson in LESSONS}
    if name not in lesson_by_name:
        near = difflib.get_close_matches(name, [*lesson_by_name, *OTHERS], n=1)
        raise UsageError(
            f"There is no lesson {name[:40]!r}" + (f"; did you mean {near[0]}?" if near else "."),
            advice=f"The lessons are {', '.join(lesson_by_name)}, or 1 to {len(LESSONS)}; "
            f"there are also {CARDS} and {CHALLENGE}.",
        )
    return lesson_by_name[name]


def _load(args: argparse.Namespace) -> tuple[Lab, list[Question]]:
    """The lab and all questions; imports torch."""
    with warnings.catch_warnings():
        # torch without NumPy says so once; nothing here needs it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from paceline.learn.catalogue import QUESTIONS
        from paceline.learn.lab import Lab
        from paceline.learn.runs import LearnOptions

        options = LearnOptions(
            seed=args.seed, workers=args.workers, batch=args.batch, model=args.model
        )
        return Lab(options), QUESTIONS


def answers(args: argparse.Namespace, lesson: Lesson | None = None) -> tuple[Lab, list[Answered]]:
    """Every question of one lesson or of all, answered."""
    lab, questions = _load(args)
    names = [each.name for each in ([lesson] if lesson else LESSONS)]
    asked = [q for name in names for q in questions if q.lesson == name]
    return lab, [question.answer(lab) for question in asked if question.fits(lab)]


def as_document(lab: Lab, answered: list[Answered]) -> dict[str, Any]:
    """What `--answers --json` prints."""
    return {
        "schema": SCHEMA,
        "seed": lab.seed,
        "workers": lab.workers,
        "batch": lab.batch,
        "model": lab.model_name,
        "trouble": lab.trouble,
        "answers": [each.as_json() for each in answered],
    }


def _print_answers(args: argparse.Namespace, lesson: Lesson | None) -> int:
    lab, answered = answers(args, lesson)
    if args.json:
        print(json.dumps(as_document(lab, answered), allow_nan=False))
        return 0
    screen = Screen(sys.stdout, is_plain=args.ascii)
    if lab.trouble:
        screen.show([lab.trouble, "The built-in model takes its place.", ""])
    screen.show(_answer_lines(lab, answered, min(screen.width, 100)))
    return 0


def _answer_lines(lab: Lab, answered: list[Answered], width: int) -> Iterator[str]:
    title_by_name = {lesson.name: lesson.title for lesson in LESSONS}
    last = ""
    for each in answered:
        if each.lesson != last:
            yield from (title_by_name[each.lesson], "=" * len(title_by_name[each.lesson]), "")
            last = each.lesson
        yield from textwrap.wrap(each.question, width)
        if each.choices:
            yield from textwrap.wrap(f"[{' | '.join(each.choices)}]", width)
        yield f"  {GOOD} {each.shown}"
        yield from textwrap.wrap(each.why, width, initial_indent="  ", subsequent_indent="  ")
        yield from (f"    {line}" for line in each.code.splitlines())
        if each.stage:
            yield from lab.draw(each.stage, width)
        for line in each.evidence:
            yield from textwrap.wrap(
                line.expandtabs(2), width, initial_indent="  | ", subsequent_indent="  |   "
            ) or ["  |"]
        yield ""


def _write_page(args: argparse.Namespace) -> int:
    from paceline.learn import page

    path = Path(args.html)
    page.check_place(path)
    print("Running every lesson once ...", file=sys.stderr, flush=True)
    page.write(path, *answers(args))
    print(
        f"{path} ({bytes_text(os.path.getsize(path))}): open it in a browser; it needs no network."
    )
    return 0


def _play(args: argparse.Namespace, chosen: Lesson | str | None) -> int:
    screen, memory = Screen(sys.stdout, is_plain=args.ascii), Memory()
    if chosen is None:
        screen.show(_list_lines(memory, screen.width))
        chosen = _choose()
        if chosen is None:
            return 0
    _show_head(screen, chosen)
    lab, questions = _load(args)  # imports torch, so the head comes first
    from paceline.learn.session import Leave, Session

    session = Session(lab, questions, memory, screen)
    if lab.trouble:
        session.say(f"{lab.trouble}\nThe built-in model takes its place.\n")
    play: Callable[[], None] = {CARDS: session.cards, CHALLENGE: session.challenge}.get(
        str(chosen), lambda: None
    )
    try:
        play() if isinstance(chosen, str) else session.lesson(chosen)
    except Leave:
        screen.show(["", "Left. `paceline learn` shows what is done."])
    return 0


def _show_head(screen: Screen, chosen: Lesson | str) -> None:
    if isinstance(chosen, str):
        screen.show([f"{chosen.capitalize()}: {OTHERS[chosen]}", ""])
        return
    number, width = LESSONS.index(chosen) + 1, min(screen.width, WIDTH)
    title = f"{chosen.title} (lesson {number} of {len(LESSONS)}, about three minutes)"
    screen.show([*wrap(title, width), "", *wrap(chosen.introduction, width), ""])


def _list_lines(memory: Memory, width: int) -> Iterator[str]:
    """The lessons, and what is done of them; a narrow terminal has no room for their names."""
    rows = []
    for number, lesson in enumerate(LESSONS, start=1):
        rows.append([str(number), lesson.name, lesson.title, _standing(memory, lesson.name)])
    known = sum(memory.done.cards.values())
    rows.append(["", CARDS, OTHERS[CARDS], f"{known} known" if known else ""])
    rows.append(["", CHALLENGE, OTHERS[CHALLENGE], _standing(memory, CHALLENGE)])
    if width < NARROW:
        rows = [[row[0], row[2] if row[0] else row[1], row[3]] for row in rows]
    yield "Data parallelism, by running it"
    yield ""
    yield from table_lines(rows, "><")
    yield ""
    if memory.remark:
        yield from textwrap.wrap(memory.remark, width)
        memory.remark = ""


def _standing(memory: Memory, name: str) -> str:
    score = memory.done.lessons.get(name)
    if score is None:
        return ""
    return f"{'done' if score.is_done else 'begun'}, {score.right} of {score.asked} right"


def _choose() -> Lesson | str | None:
    """What the reader types; None to leave."""
    while True:
        try:
            typed = input("A name or a number, or Enter to leave: ").strip().lower()
        except EOFError:
            print()
            return None
        if typed in ("", "q", "quit", "exit"):
            return None
        try:
            return _find(typed)
        except UsageError as error:
            print(error.what)
