"""`paceline learn` on a real terminal: narrow and wide, mistyped, interrupted, continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from terminals import Session

from paceline.learn.lessons import LESSONS

WAITS = (">", "found it.", "to leave:", "[y/n]", "press Enter.", "turn it over.")


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
        self.session.press(text if text == "\x03" else f"{text}\n")
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
        assert "There is no lesson '42'" in reader.type("split")
        asked = " ".join(reader.type("all of them").split())
        assert "16 rows are shared among 3 workers" in asked
        assert "is not an answer" in reader.type("6+5+5")
        shown = reader.type("c")
        assert "✓ 6, 5, 5" in shown
        assert "  » │ 6 x 10" in shown  # the recorded stage, the answer marked in it
        assert max(map(len, session.glass.lines)) <= 60
        session.resize(80)
        assert "rows_of(stage_of(lab.ddp, 'batch'))" in reader.type("")
        reader.type("6 5 5")
        shown = reader.type("")
        assert "✗ You said 6, 5, 5. The answer is 6, 6, 4." in shown
        assert 60 < max(map(len, shown.splitlines())) <= 80
        session.resize(120)
        reader.type("100x10")
        shown = reader.type("\x03")
        assert "✓ (100, 10)" in shown
        assert 80 < max(map(len, shown.splitlines())) <= 120
        assert session.finish() == 130
        lines = session.glass.lines
    assert "Traceback" not in "\n".join(lines)
    assert saved(tmp_path)["lessons"]["split"] == {"right": 2, "asked": 3, "is_done": False}
