"""A lesson as a reader meets it: what is asked, counted and kept; nothing here runs an engine."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.show.learn import command
from paceline.show.learn.lessons import LESSONS, Asked
from paceline.show.learn.question import Found, Question
from paceline.show.learn.runs import LearnOptions
from paceline.show.learn.saved import LIMIT_BYTES, ProgressFile, Score
from paceline.show.learn.session import Leave, Session
from paceline.show.trace.command import Printer

LESSON = LESSONS[6]  # saving


def how_many(lab: Any) -> Found:
    half = lab.rows // 2
    unused = "words"
    return Found(half, ["a line", "\tmore"], why=f"Half of them, {unused}.")


def which(lab: Any) -> Found:
    return Found("yes")


ROWS = {"name": "how-many", "question": "How many of {rows} rows?"}
QUESTIONS = [
    Question(LESSON.name, Asked(**asked, facts=["15"]), find)
    for asked, find in (
        ({**ROWS, "kind": "number", "unit": "rows"}, how_many),
        ({"name": "which", "question": "Which one?", "why": "Because.", "kind": "choice"}, which),
    )
]
POINTS = sum(len(each.points) + 1 for each in LESSON.explain)


@pytest.fixture
def file(tmp_path: Path) -> ProgressFile:
    return ProgressFile(tmp_path / "data" / "learn.json")


def play(file: ProgressFile, *typed: str, lesson: bool = True) -> str:
    """What is shown to somebody who types these lines and then leaves."""
    stream = io.StringIO()
    keys = iter(typed)

    def ask(words: str) -> str:
        stream.write(words)
        try:
            line = next(keys)
        except StopIteration:
            raise EOFError from None
        stream.write(f"{line}\n")
        return line

    lab: Any = SimpleNamespace(rows=8, seed=0, is_own=False, about="these", named={"rows": 8}.get)
    lab.smaller = SimpleNamespace(**{**vars(lab), "rows": 4, "named": {"rows": 4}.get})
    lab.options = lab.smaller.options = LearnOptions()
    screen = Printer(stream)
    screen.is_plain = False  # which a stream without an encoding is otherwise
    session = Session(lab, QUESTIONS, file, screen, ask)
    try:
        session.lesson(LESSON) if lesson else session.cards()
    except Leave:
        stream.write("LEFT")
    return stream.getvalue()


def test_the_code_shown_is_what_finds_the_value_and_nothing_else() -> None:
    assert QUESTIONS[0].code == "half = lab.rows // 2\nprint(half)"


def test_a_right_and_a_wrong_prediction_are_compared_counted_and_kept(file: ProgressFile) -> None:
    shown = play(file, "4", "", "n", "", *["y"] * POINTS)
    assert "How many of 8 rows?" in shown
    assert "✓ 4 rows\n  Half of them, words.\n\n  a line\n    more\n" in shown
    assert re.search(r"✗.* no\..* yes\.", shown)
    assert f"Done: 1 of 2 predicted, {POINTS - 2} of {POINTS - 2} points named." in shown
    assert shown.endswith("Next: paceline learn speedup\n")
    assert "you: no; found: yes (wrong)" in shown
    score = ProgressFile(file.path).progress.lessons[LESSON.name]
    assert (score.right, score.asked, score.is_done) == (1, 2, True)
    assert [each.verdict for each in score.predictions.values()] == ["right", "wrong"]
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_answer_is_asked_again_and_never_counted(file: ProgressFile) -> None:
    shown = play(file, "four", "4 apples", "4", "q")
    assert len(re.findall("not an answer.*number", shown)) == 2
    assert "✓ 4 rows" in shown
    score = ProgressFile(file.path).progress.begun[LESSON.name]
    assert (score.right, score.asked) == (1, 1)


def test_a_lesson_continues_where_it_stopped_and_only_with_the_same_numbers(
    file: ProgressFile,
) -> None:
    play(file, "4")  # then the terminal goes away
    shown = play(ProgressFile(file.path), "yes", "", *["y"] * POINTS)
    assert "Continued after 1 question." in shown
    assert "How many of 8 rows?" not in shown.partition("Your answers")[0]
    assert "Done: 2 of 2 predicted" in shown
    again = ProgressFile(file.path)
    assert again.progress.begun == {}
    play(again, "4")
    again.progress.begun[LESSON.name].about = "others"
    assert "Continued" not in play(again, "q")


def test_a_second_try_has_a_hint_that_runs_something_smaller(file: ProgressFile) -> None:
    shown = play(file, "5", "h", "4", "q")
    assert "It is not 5 rows." in shown
    assert "Smaller: How many of 4 rows?\n  There it is 2 rows." in shown
    assert "✓ 4 rows  (at the second try)" in shown
    score = ProgressFile(file.path).progress.begun[LESSON.name]
    assert (score.right, score.asked) == (0, 1)
    assert score.predictions["how-many"].said == "5 rows, then 4 rows"
    shown = play(ProgressFile(file.path), "n")  # of two choices one is left
    assert "Try once more" not in shown


def test_what_could_not_be_measured_is_not_counted(
    file: ProgressFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsure = replace(QUESTIONS[0], find=lambda lab: Found(3, is_sure=False))
    monkeypatch.setattr(Question, "code", "")
    monkeypatch.setitem(globals(), "QUESTIONS", [unsure])
    shown = play(file, "4", "q")
    assert "Measured: 3 rows. Not counted" in shown
    score = ProgressFile(file.path).progress.begun[LESSON.name]
    assert (score.right, score.asked) == (0, 0)


def test_the_code_can_be_saved_and_nothing_is_written_over(
    file: ProgressFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = play(file, "4", "s", "s", "q")
    assert "To run it: python how_many.py" in shown
    assert "exists already" in shown
    compile((tmp_path / "how_many.py").read_text(), "how_many.py", "exec")


def test_enter_alone_shows_the_answer_and_c_the_code(file: ProgressFile) -> None:
    shown = play(file, "", "c", "q")
    assert re.search(r"answer.* 4 rows\.", shown)
    assert "half = lab.rows // 2" in shown
    score = ProgressFile(file.path).progress.begun[LESSON.name]
    assert (score.right, score.asked) == (0, 1)
    assert score.predictions["how-many"].verdict == "shown"


@pytest.mark.parametrize("typed", [[], ["q"], ["QUIT"]])
def test_one_can_leave_at_once(file: ProgressFile, typed: list[str]) -> None:
    assert play(file, *typed).endswith("LEFT")
    assert not file.path.exists()


def test_a_lesson_left_half_way_does_not_undo_a_finished_one(file: ProgressFile) -> None:
    play(file, "4", "", "yes", "", *["y"] * POINTS)
    play(file, "5", "", "q")
    assert ProgressFile(file.path).progress.lessons[LESSON.name].is_done


def test_cards_that_were_not_known_come_first_the_next_time(file: ProgressFile) -> None:
    shown = play(file, "", "y", "", "maybe", "n", lesson=False)
    assert "Type y or n." in shown
    assert shown.endswith("All cards seen; 1 of 2 known.\n")
    known = ProgressFile(file.path).progress.cards
    assert sorted(known.values()) == [False, True]
    unknown = next(q for q in QUESTIONS if not known[q.name])
    words = {"how-many": "How many", "which": "Which one"}[unknown.name]
    assert words in play(ProgressFile(file.path), lesson=False)


def test_the_list_says_what_is_done(file: ProgressFile) -> None:
    file.progress.lessons = {
        "split": Score(right=7, asked=8, is_done=True),
        "batch": Score(asked=1),
    }
    file.progress.cards = {"a": True, "b": False}
    lines = list(command._list_lines(file, 80))
    assert any("1  split" in line and "done, 7 of 8 right" in line for line in lines)
    assert any("batch" in line and "begun, 0 of 1 right" in line for line in lines)
    assert any("cards" in line and "1 known" in line for line in lines)
    assert max(map(len, lines)) <= 80
    narrow = list(command._list_lines(file, 60))
    assert max(map(len, narrow)) <= 60
    assert any("1  Splitting a batch" in line and "done, 7 of 8 right" in line for line in narrow)


HOSTILE = {
    "no JSON": b"{",
    "a list": b"[1, 2]",
    "other types": b'{"lessons": {"split": 3}}',
    "a number": b'{"lessons": {"split": {"right": "many"}}}',
    "deep": b"[" * 100_000,
    "large": b" " * (LIMIT_BYTES + 1),
    "binary": bytes(range(256)),
    "later": b'{"schema": 2}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_put_aside_and_never_written_over(
    content: bytes, file: ProgressFile
) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    found = ProgressFile(file.path)
    assert found.progress.lessons == {}
    aside = file.path.with_name("learn.json.unreadable")
    assert str(aside) in found.remark
    assert aside.read_bytes() == content
    found.save()
    assert json.loads(file.path.read_text())["schema"] == 1


@pytest.fixture
def strange(file: ProgressFile, request: pytest.FixtureRequest) -> Path:
    path = file.path
    path.parent.mkdir()
    if request.param == "link":
        path.symlink_to("/etc/passwd")
    elif request.param == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("strange", ["link", "pipe", "folder"], indirect=True)
def test_what_is_not_a_plain_file_is_neither_read_nor_followed(strange: Path) -> None:
    found = ProgressFile(strange)
    assert "could not be read" in found.remark
    found.save()
    assert strange.is_file()
    assert not strange.is_symlink()
    assert Path("/etc/passwd").is_file()


def test_where_nothing_can_be_kept_lessons_work_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = play(ProgressFile(tmp_path / "file" / "learn.json"), "4", "q")
    assert "✓ 4 rows" in shown
    assert "Progress cannot be kept in" in shown


def test_progress_can_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    file = ProgressFile()
    assert file.path == tmp_path / "paceline" / "learn.json"
    file.save()
    from paceline.cli import main

    for _ in range(2):  # nothing to forget is no mistake
        assert main(["learn", "--forget"]) == 0
        assert not file.path.exists()
    assert "Deleted" in capsys.readouterr().out


def test_an_interrupt_while_torch_is_imported_ends_the_lesson_whatever_catches_exceptions() -> None:
    code = (
        "import os, signal, time\n"
        "from paceline.show.learn.command import _ended_by_interrupt\n"
        "with _ended_by_interrupt():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(60)\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGINT
