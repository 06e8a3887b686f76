"""`paceline report`: the whole page, sections in reading order, locked by its own policy.

The policy allows exactly this style and this script, by their hashes, and nothing from anywhere:
even text that slipped through as markup could neither run nor fetch anything.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from paceline import __version__
from paceline.errors import UsageError, WireError
from paceline.explain.report import sections, words
from paceline.explain.report.collect import Story, collect
from paceline.explain.report.markup import (
    Html,
    count,
    duration,
    figure,
    html,
    join,
    percent,
    size,
    text,
)
from paceline.explain.report.step import pipeline
from paceline.observe.run_folder import open_plain, replace_file

GENERATOR = "paceline report"
"""What the head of every report says, so that one can be told from other files."""
HEAD_BYTES = 1000
MISSING_LIMIT = 20


class Section(NamedTuple):
    """One part of the page, drawn from the story; `otherwise` says why it is not there."""

    draw: Callable[[Story], Html | None]
    """Its name is the section's address and its entry in the list of sections."""
    title: str
    otherwise: str = ""
    lead: str = ""


SECTIONS = (
    Section(
        sections.learning,
        "How it learned",
        "nothing was recorded step by step, so there are no curves.",
        "Every curve counts each sample once, whichever worker had it.",
    ),
    Section(
        pipeline,
        "One batch, step by step",
        "no batch was recorded; <code>paceline run --trace-step 12</code> does that.",
        "Data parallelism: every worker has a copy of the model, computes on its part of the "
        "batch, and all copies get the same update.",
    ),
    Section(
        sections.workers,
        "Who worked, who waited",
        "none has finished a step.",
        "All workers finish a step together, so each step takes as long as the slowest one.",
    ),
    Section(
        sections.timeline,
        "When it happened",
        "when each worker did what was not recorded; <code>paceline run --timeline</code> does.",
    ),
    Section(
        sections.scaling,
        "What more workers bring",
        "the job was not measured on several numbers of workers; <code>paceline scale</code> does.",
    ),
    Section(sections.checkpoints, "What was saved", "none was written."),
    Section(sections.details, "Settings and messages"),
)


def render(story: Story) -> Html:
    """The document."""
    shown, links, absent = [_overview(story)], list[Html](), list[Html]()
    frame = (
        '<section id="{0}" aria-labelledby="{0}-title"><h2 id="{0}-title">{1}</h2>'
        '<p class="lead">{2}</p>{3}</section>'
    )
    for part in SECTIONS:
        name = part.draw.__name__
        content = part.draw(story)
        if content:
            shown.append(html(frame, name, part.title, part.lead, content))
            links.append(html('<li><a href="#{}">{}</a></li>', name, name.capitalize()))
        elif part.otherwise:
            absent.append(html("<li><b>{}</b>: {}</li>", name.capitalize(), Html(part.otherwise)))
    if absent:
        content = html("<ul>{}</ul>", absent)
        shown.append(html(frame, "absent", "What was not recorded", "", content))
    style, script = _asset("page.css"), _asset("page.js")
    return html(
        _asset("page.html"),
        generator=f"{GENERATOR} {__version__}",
        style_hash=_hash(style),
        script_hash=_hash(script),
        name=story.name,
        style=style,
        script=script,
        links=links,
        sections=shown,
        version=__version__,
        made=sections.moment(time.time()),
        folder=story.folder.name,
    )


def _asset(name: str) -> Html:
    return Html(resources.files(__package__).joinpath("assets", name).read_text("utf-8"))


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _overview(story: Story) -> Html:
    said = [words.what_it_was(story), words.how_far(story), *words.how_it_learned(story)]
    if story.ranks:
        said += [words.where_time_went(story)]
        said += [words.who_waited(story)] if story.workers > 1 else []
    missing = [html("<li>{}</li>", text(each, 400)) for each in story.missing[:MISSING_LIMIT]]
    status = "stopped early" if story.status == "stopped" else story.status
    badge = html('<span class="badge {}">{}</span>', story.status, status)
    warning = '<div class="missing"><strong>What this page cannot show</strong><ul>{}</ul></div>'
    return html(
        '<section id="overview" aria-label="Overview"><div class="headline"><h1>{}</h1>{}</div>'
        '<div class="story">{}</div><dl class="tiles">{}</dl>{}</section>',
        story.name,
        badge if story.has_run else None,
        [html("<p>{}</p>", each) for each in said],
        _tiles(story),
        html(warning, missing) if missing else None,
    )


def _tiles(story: Story) -> Html:
    info, tiles = story.info, list[tuple[str, str, str]]()
    if story.workers:
        device = f"on {text(info.device, 30)}" if info and info.device else ""
        tiles.append(("workers", figure(story.workers), device))
    if story.steps:
        batch = f"of {count(info.global_batch, 'sample')}" if info and info.global_batch else ""
        tiles.append(("steps", figure(story.steps), batch))
    if story.rate:
        tiles.append(("speed", figure(story.rate.points(1)[0].mean), "samples per second"))
    if loss := story.metrics.get("loss"):
        first, *_, last = [point.mean for point in loss.points()] * 2
        tiles.append(("loss", figure(last), f"began at {figure(first)}"))
    if best := words.best_accuracy(story):
        tiles.append(("best accuracy", percent(best[1]), best[0].strip() or "on training data"))
    if story.last_t > story.first_t:
        redone = f"{count(story.restarts, 'restart')}, {count(story.redone, 'step')} redone"
        spent = duration(story.last_t - story.first_t)
        tiles.append(("time", spent, redone if story.restarts else ""))
    tile = "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>"
    return join(html(tile, *each) for each in tiles)


def write(
    run_folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
) -> Path:
    """Write the report of a run, by default to `report.html` in its folder; where it is now.

    A reader sees the old file or the new one, never half. An older report is replaced; another
    file only with `force`.
    """
    story = collect(Path(run_folder))
    path = Path(out) if out is not None else story.folder.report
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", advice="Name a file: -o report.html.")
    if not path.parent.is_dir():
        raise UsageError(
            f"There is no folder {str(path.parent)!r} to write {path.name} to.",
            advice="Make it first, or name another file with -o.",
        )
    if not force and not _is_replaceable(path):
        raise UsageError(
            f"{path} exists and is not a report, so it is left as it is.",
            advice="Name another file with -o, or add --force to replace it.",
        )
    try:
        replace_file(path, [render(story)])
    except OSError as error:
        raise UsageError(
            f"The report cannot be written to {path}: {error.strerror}.",
            advice="Name another file with -o.",
        ) from error
    return path


def _is_replaceable(path: Path) -> bool:
    """Whether nothing is lost: there is no such file, or it is a report or empty."""
    try:
        with open_plain(path) as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return True
    except (WireError, OSError):
        return False
    return not head or f'content="{GENERATOR} '.encode() in head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run", metavar="RUN", help="the run folder, with run.json and events/ in it"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (RUN/report.html if not given)"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace FILE even if it is not a report"
    )


def main(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    path = write(args.run, args.output, force=args.force)
    print(f"{path} ({size(os.path.getsize(path))}): open it in a browser; it needs no network.")
    return 0
