"""`paceline learn`: the command line.

The list of lessons and the introduction of each appear at once; torch is imported when something is
run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.show.learn.lessons import LESSONS, Lesson, find_lesson
from paceline.show.learn.saved import ProgressFile
from paceline.show.trace.command import Printer
from paceline.show.trace.drawing import GOOD, WIDTH, wrap
from paceline.telemetry import table_lines

if TYPE_CHECKING:
    from paceline.show.learn.lab import Lab
    from paceline.show.learn.question import Answered

SCHEMA = 1
NARROW = 76
CARDS, CHALLENGE, REVIEW = "cards", "challenge", "review"
OTHERS = {
    CARDS: "every question as a card to turn over",
    CHALLENGE: "five problems",
    REVIEW: "your answers and the results",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(lesson.name for lesson in LESSONS)
    parser.description = (
        "Learn data parallelism by predicting what the engine does, running it, and breaking it. "
        "Every answer is computed when the question is asked."
    )
    add = parser.add_argument
    help = f"{names}, or a number; {CARDS}, {CHALLENGE}, {REVIEW} (default: the list)"
    add("lesson", nargs="?", metavar="LESSON", help=help)
    help = "generates data, weights and orders, and so the answers (default: 0)"
    add("--seed", metavar="N", type=int, default=0, help=help)
    help = "workers that share a batch (default: 3; 2 in the pipeline, 4 for batch size, speed-up)"
    add("--workers", metavar="N", type=int, help=help)
    help = "rows of a batch (default: 16; 32 for batch size, 100 in the pipeline)"
    add("--batch", metavar="N", type=int, help=help)
    help = "a function that returns (model, dataset, loss_fn), as for `paceline trace`"
    add("--model", metavar="FILE:FUNCTION", help=help)
    help = "print every answer, with the code that computes it, instead of asking"
    add("--answers", action="store_true", help=help)
    add("--json", action="store_true", help="with --answers: print JSON")
    add("--html", metavar="FILE", help="write all lessons as one offline page")
    add("--forget", action="store_true", help="delete the saved progress")
    add("--ascii", action="store_true", help="draw without characters beyond ASCII")


def main(args: argparse.Namespace) -> int:
    """List, play, print or write lessons."""
    if args.json and not args.answers:
        raise UsageError("--json is for --answers.", advice="Add --answers.")
    chosen = _find(args.lesson)
    if args.forget:
        file = ProgressFile()
        file.forget()
        print(f"Deleted: {file.path}")
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
            "Lessons need a terminal to ask questions.",
            advice="`paceline learn --answers` prints every question with its computed answer; "
            "`paceline learn --html FILE` writes a page.",
        )
    return _play(args, chosen)


def _find(name: str | None) -> Lesson | str | None:
    """The lesson with this name or number; `cards` and others as they are; None without a name."""
    return name if name is None or name in OTHERS else find_lesson(name)


def _load(args: argparse.Namespace) -> Lab:
    """The lab; imports torch."""
    with _ended_by_interrupt():
        from paceline.show.learn.lab import Lab
        from paceline.show.learn.runs import LearnOptions

    options = {name: getattr(args, name) for name in ("seed", "workers", "batch", "model")}
    return Lab(LearnOptions(**options))


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process directly: code that is imported here may swallow the exception."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def answers(args: argparse.Namespace, lesson: Lesson | None = None) -> tuple[Lab, list[Answered]]:
    """Every question of one lesson or of all, answered."""
    lab = _load(args)
    from paceline.show.learn.catalogue import answer_all

    return lab, answer_all(lab, lesson)


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
    screen = Printer(sys.stdout, is_plain=args.ascii)
    if lab.trouble:
        screen.show([lab.trouble, "The built-in model is used instead.", ""])
    screen.show(answer_lines(lab, answered, min(screen.width, 100)))
    return 0


def answer_lines(lab: Lab, answered: list[Answered], width: int) -> Iterator[str]:
    """Questions with their answers as text, lesson by lesson."""
    title_by_name = {lesson.name: lesson.title for lesson in LESSONS}
    last = ""
    for each in answered:
        if each.lesson != last:
            yield from (title_by_name[each.lesson], "=" * len(title_by_name[each.lesson]), "")
            last = each.lesson
        yield from textwrap.wrap(each.question, width)
        if each.choices:
            yield from textwrap.wrap(f"[{' | '.join(each.choices)}]", width)
        answer = f"{GOOD} {each.shown}"
        yield from textwrap.wrap(answer, width, initial_indent="  ", subsequent_indent="    ")
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
    from paceline.show.learn import page
    from paceline.show.report.page import announce

    path = Path(args.html)
    page.check_place(path)
    print("Running every lesson once ...", file=sys.stderr, flush=True)
    page.write(path, *answers(args))
    announce(path)
    return 0


def _play(args: argparse.Namespace, chosen: Lesson | str | None) -> int:
    screen, file = Printer(sys.stdout, is_plain=args.ascii), ProgressFile()
    if chosen is None:
        screen.show(_list_lines(file, screen.width))
        chosen = _choose()
        if chosen is None:
            return 0
    _show_head(screen, chosen)
    lab = _load(args)  # imports torch, so the head comes first
    from paceline.show.learn.catalogue import QUESTIONS
    from paceline.show.learn.session import Leave, Session

    session = Session(lab, QUESTIONS, file, screen)
    if lab.trouble:
        session.say(f"{lab.trouble}\nThe built-in model is used instead.\n")
    others = {CARDS: session.cards, CHALLENGE: session.challenge, REVIEW: session.review}
    try:
        others[chosen]() if isinstance(chosen, str) else session.lesson(chosen)
    except (Leave, KeyboardInterrupt):
        screen.show(["", "Your answers are saved: the same command continues here."])
    return 0


def _show_head(screen: Printer, chosen: Lesson | str) -> None:
    if isinstance(chosen, str):
        screen.show([f"{chosen.capitalize()}: {OTHERS[chosen]}", ""])
        return
    number, width = LESSONS.index(chosen) + 1, min(screen.width, WIDTH)
    title = f"{chosen.title} (lesson {number} of {len(LESSONS)}, about three minutes)"
    screen.show([*wrap(title, width), "", *wrap(chosen.introduction, width), ""])


def _list_lines(file: ProgressFile, width: int) -> Iterator[str]:
    """The lessons and their progress; without names on a narrow terminal."""
    rows = []
    for number, lesson in enumerate(LESSONS, start=1):
        rows.append([str(number), lesson.name, lesson.title, _standing(file, lesson.name)])
    known = sum(file.progress.cards.values())
    rows.append(["", CARDS, OTHERS[CARDS], f"{known} known" if known else ""])
    rows.append(["", CHALLENGE, OTHERS[CHALLENGE], _standing(file, CHALLENGE)])
    rows.append(["", REVIEW, OTHERS[REVIEW], ""])
    if width < NARROW:
        rows = [[row[0], row[2] if row[0] else row[1], row[3]] for row in rows]
    yield "Data parallelism, by running it"
    yield ""
    yield from table_lines(rows, "><")
    yield ""
    if file.remark:
        yield from textwrap.wrap(file.remark, width)
        file.remark = ""


def _standing(file: ProgressFile, name: str) -> str:
    score = file.progress.begun.get(name) or file.progress.lessons.get(name)
    if score is None:
        return ""
    return f"{'done' if score.is_done else 'begun'}, {score.right} of {score.asked} right"


def _choose() -> Lesson | str | None:
    """Ask for a lesson; None to leave."""
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
