"""The whole page: sections in reading order, one style, one script, and a policy that locks it.

The policy allows exactly this style and this script, by their hashes, and nothing from anywhere:
even text that slipped through as markup could neither run nor fetch anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from paceline import __version__
from paceline.explain.report import pipeline, ranks, scaling, tables, timeline
from paceline.explain.report.collect import Story
from paceline.explain.report.markup import Html, count, duration, figure, join, percent, tag, text
from paceline.explain.report.window import Window
from paceline.explain.report.words import (
    STATUS,
    best_accuracy,
    how_far,
    how_it_learned,
    what_it_was,
    where_time_went,
    who_waited,
)
from paceline.record.stages import Trace

GENERATOR = "paceline report"
"""What the head of every report says, so that one can be told from other files."""

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M1 4h9M4 8h11M1 12h9' stroke='%232a72c9' stroke-width='2.5'/%3E%3C/svg%3E"
)


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page. `content` is None where there is nothing, and `otherwise` says why."""

    identity: str
    title: str
    short: str
    lead: str
    content: Html | None
    otherwise: str


def render(story: Story, traces: Sequence[Trace], window: Window | None) -> Html:
    """The document."""
    every = _sections(story, traces, window)
    sections = [part for part in every if part.content]
    absent = [part for part in every if not part.content and part.otherwise]
    style, script = _style(), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href=ICON),
        tag("title", f"{story.name} · Paceline report"),
        tag("style", style),
    )
    links = [("overview", "Overview"), *((part.identity, part.short) for part in sections)]
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#main", class_="skip"),
        _definitions(),
        tag(
            "header",
            tag(
                "div",
                tag("span", "Paceline", class_="brand"),
                tag(
                    "nav",
                    tag("ul", *(tag("li", tag("a", s, href=f"#{i}")) for i, s in links)),
                    aria_label="Sections",
                ),
                tag("button", "Dark", type="button", id="theme", hidden=True),
                class_="top-inner",
            ),
            class_="top",
        ),
        tag("main", _overview(story), *map(_show, sections), _absent(absent), id="main"),
        tag(
            "footer",
            tag(
                "p",
                f"Made by paceline {__version__} on {tables.moment(time.time())} from the folder ",
                tag("code", story.folder.name),
                ". This file is complete: it needs no network and sends nothing.",
            ),
        ),
        tag("script", script),
    )
    return join([Html("<!doctype html>\n"), tag("html", head, body, lang="en"), Html("\n")])


def _asset(name: str) -> Html:
    return Html(resources.files(__package__).joinpath("assets", name).read_text("utf-8"))


def _style() -> Html:
    """The style, with its light colours alone for browsers that cannot choose by themselves."""
    style = _asset("page.css")
    light = re.findall(r"(--[\w-]+): light-dark\((#\w+),", style)
    plain = "".join(f"{name}: {colour};" for name, colour in light)
    return Html(f"{style}@supports not (color: light-dark(#000, #fff)) {{ :root {{ {plain} }} }}\n")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _definitions() -> Html:
    """The hatching for time in which somebody waits."""
    pattern = tag(
        "pattern",
        tag("rect", width=8, height=8, class_="hatch-page"),
        tag("path", d="M-2 10L10 -2M-2 2L2 -2M6 10L10 6", class_="hatch-line"),
        id="hatch",
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    )
    return tag("svg", tag("defs", pattern), class_="definitions", aria_hidden="true")


def _show(part: Section) -> Html:
    lead = tag("p", part.lead, class_="lead") if part.lead else None
    return tag(
        "section",
        tag("h2", part.title, id=f"{part.identity}-title"),
        lead,
        part.content,
        id=part.identity,
        aria_labelledby=f"{part.identity}-title",
    )


def _absent(parts: Sequence[Section]) -> Html | None:
    """What could have been here, in one place at the end."""
    if not parts:
        return None
    return tag(
        "section",
        tag("h2", "What was not recorded", id="absent"),
        tag("ul", *(tag("li", tag("b", part.short), ": ", part.otherwise) for part in parts)),
        aria_labelledby="absent",
    )


def _overview(story: Story) -> Html:
    said = [what_it_was(story), how_far(story), *how_it_learned(story)]
    if story.ranks:
        said += [where_time_went(story), who_waited(story) if story.workers > 1 else ""]
    missing = None
    if story.missing:
        missing = tag(
            "div",
            tag("strong", "What this page cannot show"),
            tag("ul", *(tag("li", text(each, 400)) for each in story.missing[:20])),
            class_="missing",
        )
    return tag(
        "section",
        tag(
            "div",
            tag("h1", story.name),
            tag("span", STATUS.get(story.status, "unknown"), class_=f"badge {story.status}")
            if story.has_run
            else None,
            class_="headline",
        ),
        tag("div", *(tag("p", each) for each in said if each), class_="story"),
        _tiles(story),
        missing,
        id="overview",
        aria_label="Overview",
    )


def _tiles(story: Story) -> Html | None:
    tiles: list[tuple[str, str, str]] = []
    if story.workers:
        device = text(story.info.device, 30) if story.info and story.info.device else ""
        tiles.append(("workers", figure(story.workers), f"on {device}" if device else ""))
    if story.steps:
        batch = story.info.global_batch if story.info else 0
        tiles.append(
            ("steps", figure(story.steps), f"of {count(batch, 'sample')}" if batch else "")
        )
    if story.rate:
        points = story.rate.points(1)
        tiles.append(("speed", figure(points[0].mean), "samples per second"))
    loss = story.metrics.get("loss")
    if loss:
        points = loss.points(20)
        tiles.append(("loss", figure(points[-1].mean), f"began at {figure(points[0].mean)}"))
    if (best := best_accuracy(story)) is not None:
        tiles.append(("best accuracy", percent(best[1]), best[0].strip() or "on training data"))
    if story.last_t > story.first_t:
        restarts = f"{count(story.restarts, 'restart')}, {count(story.redone, 'step')} redone"
        tiles.append(
            ("time", duration(story.last_t - story.first_t), restarts if story.restarts else "")
        )
    shown = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more) if more else None))
        for name, value, more in tiles
    ]
    return tag("dl", *shown, class_="tiles") if shown else None


def _sections(story: Story, traces: Sequence[Trace], window: Window | None) -> list[Section]:
    return [
        Section(
            "learning",
            "How it learned",
            "Learning",
            "Every curve counts each sample once, whichever worker had it.",
            join([tables.curves(story), tables.epochs(story)]) or None,
            "nothing was recorded step by step, so there are no curves.",
        ),
        Section(
            "pipeline",
            "One batch, step by step",
            "Pipeline",
            "Data parallelism: every worker has a copy of the model, computes on its part of the "
            "batch, and all copies get the same update.",
            pipeline.section(traces, story.info),
            "no batch was recorded.",
        ),
        Section(
            "workers",
            "Who worked, who waited",
            "Workers",
            "All workers finish a step together, so each step takes as long as the slowest one.",
            ranks.section(story),
            "none has finished a step.",
        ),
        Section(
            "timeline",
            "When it happened",
            "Timeline",
            "",
            timeline.section(window) if window else None,
            join(
                [
                    "when each worker did what was not recorded; ",
                    tag("code", "paceline run --timeline"),
                    " does that.",
                ]
            ),
        ),
        Section(
            "scaling",
            "What more workers bring",
            "Scaling",
            "",
            scaling.section(story.scaling) if story.scaling else None,
            join(
                [
                    "the job was not measured on several numbers of workers; ",
                    tag("code", "paceline scale"),
                    " does that.",
                ]
            ),
        ),
        Section(
            "checkpoints",
            "What was saved",
            "Checkpoints",
            "",
            tables.checkpoints(story),
            "none was written.",
        ),
        Section("details", "Settings and messages", "Details", "", tables.details(story), ""),
    ]
