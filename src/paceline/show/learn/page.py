"""`paceline learn --html`: all lessons as one offline page, with answers computed for it.

The page is drawn in the browser from one document, with the style and the libraries of the report;
answers are compared as values, as on a terminal.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

from paceline import __version__
from paceline.errors import UsageError
from paceline.files import write_output
from paceline.record import Trace
from paceline.show.learn import values
from paceline.show.learn.command import as_document
from paceline.show.learn.lab import Lab
from paceline.show.learn.lessons import LESSONS, PROBLEMS
from paceline.show.learn.question import Answered
from paceline.show.report.document import pipeline
from paceline.show.report.page import LIBRARIES, STYLES, assemble, asset, is_replaceable
from paceline.show.trace import card

SHARED = ("pieces.js", "chart.js", "pipeline.js")
"""The report's scripts that draw numbers, curves and recorded steps."""


def document(lab: Lab, answered: list[Answered]) -> dict[str, Any]:
    """Everything the page shows."""
    used = {each.stage[0] for each in answered if each.stage} | {"pipeline"}
    return {
        **{name: value for name, value in as_document(lab, []).items() if name != "answers"},
        "version": __version__,
        "made": time.time(),
        "lessons": [
            {
                **asdict(lesson),
                "questions": [
                    {
                        **each.as_json(),
                        "recorded": [],  # the page draws it, from the traces
                        "form": values.form_of(each.kind, each.choices, each.unit),
                    }
                    for each in answered
                    if each.lesson == lesson.name
                ],
            }
            for lesson in LESSONS
        ],
        "problems": [asdict(problem) for problem in PROBLEMS],
        "picture": _picture(lab.ddp),
        "traces": {name: pipeline(getattr(lab, name)) for name in sorted(used)},
    }


def _picture(trace: Trace) -> list[Any]:
    """The card of a recorded step in the colours of the page, as plain data."""
    names = {card.PAGE: "card", card.INK: "ink", card.MUTED: "muted", card.RULE: "rule"}
    names |= {card.GOOD: "good", card.BAD: "bad"}
    names |= dict(zip(card.COLOURS, ("forward", "orange", "optimizer", "pink"), strict=True))

    def plain(element: Element) -> list[Any]:
        tag = element.tag.rpartition("}")[2]
        is_text = tag == "text"  # the lanes' colours have too little contrast for text
        colours = {
            key: "ink" if is_text and value in card.COLOURS else names.get(value, "")
            for key, value in element.items()
        }
        own = {key: f"var(--{name})" if name else element.get(key) for key, name in colours.items()}
        inside = [plain(each) for each in element]
        return [tag, own, (element.text or "").strip(), inside]

    return plain(fromstring(card.draw_card(trace)))


def render(shown: dict[str, Any]) -> str:
    """The page that shows a document."""
    style = "\n".join([*map(asset, STYLES), asset("lessons.css", __package__)])
    names = [*(f"vendor/{name}" for name in LIBRARIES), *SHARED]
    script = "\n".join([*map(asset, names), asset("lessons.js", __package__)])
    facts = [
        f"{each['question']} {each['shown']}"
        for lesson in shown["lessons"]
        for each in lesson["questions"]
    ]
    return assemble("lessons", "Data parallelism, by running it", shown, facts, style, script)


def check_place(path: Path) -> None:
    """Refuse a path that cannot or should not be written to, before anything is run."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {path.parent}.", advice="Name a file in a folder.")
    if not is_replaceable(path, "lessons"):
        raise UsageError(
            f"{path} exists and is not a page of lessons, so it is left as it is.",
            advice="Name another file.",
        )


def write(path: Path, lab: Lab, answered: list[Answered]) -> None:
    """Write the page, atomically."""
    write_output(path, [render(document(lab, answered))])
