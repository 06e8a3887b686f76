"""A reader's progress, saved in one small file.

A file that cannot be read, or is not a progress file, is renamed and never overwritten. Lessons
work even if progress cannot be saved.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline import env
from paceline.errors import WireError
from paceline.files import make_private, open_plain, read_json, read_value, replace_file

SCHEMA = 1
LIMIT_BYTES = 2**18


@dataclass(slots=True, kw_only=True)
class Prediction:
    """A reader's answer to one question, and the result."""

    question: str
    said: str
    """Empty if the reader asked for the answer."""
    found: str
    verdict: str
    """`right`, `second try`, `wrong`, `shown`, or `not scored` for an unreliable measurement."""


@dataclass(slots=True, kw_only=True)
class Score:
    """The score of one lesson, or of the challenge: the last one, or the current one."""

    right: int = 0
    """At the first try."""
    asked: int = 0
    """Those that count."""
    is_done: bool = False
    about: str = ""
    """Identifies the questions: other numbers make other questions."""
    predictions: dict[str, Prediction] = field(default_factory=dict)

    def add(self, name: str, prediction: Prediction) -> None:
        self.predictions[name] = prediction
        self.right += prediction.verdict == "right"
        self.asked += prediction.verdict != "not scored"


@dataclass(slots=True, kw_only=True)
class SavedProgress:
    """All saved progress."""

    schema: int = SCHEMA
    lessons: dict[str, Score] = field(default_factory=dict)
    """Those that were finished."""
    begun: dict[str, Score] = field(default_factory=dict)
    """Those to be continued."""
    cards: dict[str, bool] = field(default_factory=dict)
    """By question, whether the answer was known."""


class ProgressFile:
    """The progress file, its contents, and a remark if it failed."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(_data_home(), "paceline", "learn.json")
        self.remark = ""
        self.progress = self._read()

    def _read(self) -> SavedProgress:
        try:
            with open_plain(self.path) as file:
                document = read_json(file, LIMIT_BYTES, self.path)
            found: SavedProgress = read_value(SavedProgress, document, "progress")
            if found.schema != SCHEMA:
                raise WireError(f"It has schema {found.schema}.")
            return found
        except FileNotFoundError:
            pass
        except (WireError, OSError) as error:
            self._put_aside(error)
        return SavedProgress()

    def _put_aside(self, error: Exception) -> None:
        aside = self.path.with_name(self.path.name + ".unreadable")
        why = error.what if isinstance(error, WireError) else f"{error}"
        try:
            os.replace(self.path, aside)
            self.remark = f"Your progress could not be read and is now {aside}. {why}"
        except OSError:
            self.remark = f"{self.path} cannot be read, so progress is not kept. {why}"

    def save(self) -> None:
        """Write the file atomically; a failing disk does not stop a lesson."""
        try:
            make_private(self.path.parent)
            replace_file(self.path, [json.dumps(asdict(self.progress), indent=1), "\n"])
        except OSError as error:
            self.remark = f"Progress cannot be kept in {self.path}: {error.strerror}."

    def forget(self) -> None:
        """Remove the file."""
        self.progress = SavedProgress()
        with suppress(FileNotFoundError):
            self.path.unlink()


def _data_home() -> str:
    """The folder for user data: XDG_DATA_HOME, or ~/.local/share."""
    given = env.read("XDG_DATA_HOME")
    # The XDG specification requires that a relative path be ignored.
    return given if os.path.isabs(given) else os.path.expanduser("~/.local/share")
