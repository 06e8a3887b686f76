"""`paceline learn` on a real terminal: narrow and wide, mistyped, interrupted, continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentences import says
from terminals import Session

from paceline.show.learn.lessons import LESSONS

WAITS = (">", "save the code.", "found it.", "to leave:", "[y/n]", "press Enter.", "turn it over.")


class Reader:
    """Somebody at a terminal who types when asked."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.read_to = 0

    def type(self, text: str) -> str:
        """Wait to be asked, type a line; what was shown since the last time."""
        self.session.until(lambda glass: glass.bottom.endswith(WAITS), f"a prompt for {text!r}")
        shown = "\n".join(self.session.glass.lines[self.read_to :])
        self.read_to = len(self.session.glass.lines)
        if text == "\x03":
            self.session.interrupt()
        else:
            self.session.press(f"{text}\n")
        self.session.until(
            lambda glass: not glass.bottom.endswith(WAITS) or len(glass.lines) > self.read_to,
            f"an answer to {text!r}",
        )
        return shown


def saved(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "paceline" / "learn.json").read_text())
    return document


def test_a_lesson_on_terminals_of_several_widths_mistyped_interrupted_and_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "learn.json").write_text("hostile")
    with Session(
        *(tmp_path, "-m", "paceline", "learn", "--workers", "3"),
        columns=60,
        environ={"XDG_DATA_HOME": str(tmp_path)},
    ) as session:
        reader = Reader(session)
        listed = reader.type("42")
        assert "learn.json.unreadable" in listed.replace("\n", "")
        assert all(lesson.title in listed for lesson in LESSONS)
        assert says(reader.type("split"), "no lesson '42'")
        asked = " ".join(reader.type("all of them").split())
        assert "16 rows are shared among 3 workers" in asked
        assert says(reader.type("6+5+5"), "not an answer")
        shown = reader.type("c")
        assert "✓ 6, 5, 5" in shown
        assert "  » │ 6 x 10" in shown  # the recorded stage, the answer marked in it
        assert max(map(len, session.glass.lines)) <= 60
        session.resize(80)
        assert "rows_of(stage_of(lab.ddp, 'batch'))" in reader.type("")
        reader.type("6 5 5")
        assert "It is not 6, 5, 5." in reader.type("")
        shown = reader.type("")
        assert "6, 6, 4" in shown
        assert 60 < max(map(len, shown.splitlines())) <= 80
        session.resize(120)
        reader.type("100x10")
        shown = reader.type("\x03")
        assert "✓ (100, 10)" in shown
        assert 80 < max(map(len, shown.splitlines())) <= 120
        assert session.finish() == 0
        lines = session.glass.lines
    assert "Traceback" not in "\n".join(lines)
    begun = saved(tmp_path)["begun"]["split"]
    assert (begun["right"], begun["asked"], begun["is_done"]) == (2, 3, False)
