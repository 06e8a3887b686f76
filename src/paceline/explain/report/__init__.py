"""The report: one HTML file that tells a run, from its folder alone.

`collect` reads, `words` says it in sentences, the sections draw it, `page` puts them together.
Needs neither torch nor a network, and takes a folder in any state: the page says what is missing.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paceline.errors import UsageError, WireError
from paceline.explain.report.collect import Story, collect
from paceline.explain.report.files import opened
from paceline.explain.report.page import GENERATOR, render
from paceline.explain.report.window import read_window
from paceline.record.schema import from_json
from paceline.record.stages import Trace

__all__ = ["write"]

_HEAD_BYTES = 1000


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
    _check_target(path, force)
    document = render(story, _traces(story), read_window(story.folder))
    _replace(path, document.encode("utf-8", "replace"))
    return path


def _traces(story: Story) -> list[Trace]:
    found = []
    for step, document in story.pipelines:
        try:
            found.append(from_json(document))
        except WireError as error:
            story.missing.append(f"The trace of step {step} cannot be shown. {error.what}")
    return found


def _check_target(path: Path, force: bool) -> None:
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


def _is_replaceable(path: Path) -> bool:
    """Whether nothing is lost: there is no such file, or it is a report or empty."""
    try:
        with opened(path) as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return True
    except WireError:
        return False
    return not head or f'content="{GENERATOR} '.encode() in head


def _replace(path: Path, data: bytes) -> None:
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(
            f"The report cannot be written to {path}: {error.strerror}.",
            advice="Name another file with -o.",
        ) from error
