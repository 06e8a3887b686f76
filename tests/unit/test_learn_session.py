"""A lesson as a reader meets it: what is asked, counted and kept; nothing here runs an engine."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.explain.trace.command import Screen
from paceline.learn import command
from paceline.learn.lessons import LESSONS
from paceline.learn.question import YES_NO, Found, Question
from paceline.learn.saved import LIMIT_BYTES, Memory, Score
from paceline.learn.session import Leave, Session

LESSON = LESSONS[6]  # saving


def how_many(lab: Any) -> Found:
    """How many of {rows} rows?"""
    half = lab.rows // 2
    unused = "words"
    return Found(half, f"Half of them, {unused}.", ["a line", "\tmore"])


def which(lab: Any) -> Found:
    """Which one?"""
    return Found("yes", "Because.")


QUESTIONS = [
    Question(lesson=LESSON.name, facts=("15",), kind="number", find=how_many, unit="rows"),
    Question(lesson=LESSON.name, facts=("15",), kind="choice", find=which, choices=YES_NO),
]
POINTS = sum(len(each.points) + 1 for each in LESSON.explain)


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "data" / "learn.json")


def play(memory: Memory, *typed: str, lesson: bool = True) -> str:
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

    lab: Any = SimpleNamespace(rows=8, seed=0, is_own=False, named={"rows": 8}.get)
    screen = Screen(stream)
    screen.is_plain = False  # which a stream without an encoding is otherwise
    session = Session(lab, QUESTIONS, memory, screen, ask)
    try:
        session.lesson(LESSON) if lesson else session.cards()
    except Leave:
        stream.write("LEFT")
    return stream.getvalue()


def test_the_code_shown_is_what_finds_the_value_and_nothing_else() -> None:
    assert QUESTIONS[0].code == "half = lab.rows // 2\nreturn half"


def test_a_right_and_a_wrong_prediction_are_compared_counted_and_kept(memory: Memory) -> None:
    shown = play(memory, "4", "", "n", "", *["y"] * POINTS)
    assert "How many of 8 rows?" in shown
    assert "✓ 4 rows\n  Half of them, words.\n\n  a line\n    more\n" in shown
    assert "✗ You said no. The answer is yes." in shown
    assert f"Done: 1 of 2 predicted, {POINTS - 2} of {POINTS - 2} points named." in shown
    assert shown.endswith("Next: paceline learn speedup\n")
    again = Memory(memory.path)
    assert again.done.lessons == {LESSON.name: Score(right=1, asked=2, is_done=True)}
    assert memory.path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_answer_is_asked_again_and_never_counted(memory: Memory) -> None:
    shown = play(memory, "four", "4 apples", "4", "q")
    assert shown.count("is not an answer to this question. Type a number") == 2
    assert "✓ 4 rows" in shown
    assert Memory(memory.path).done.lessons[LESSON.name] == Score(right=1, asked=1)


def test_enter_alone_shows_the_answer_and_c_the_code(memory: Memory) -> None:
    shown = play(memory, "", "c", "q")
    assert "The answer is 4 rows." in shown
    assert "half = lab.rows // 2" in shown
    assert Memory(memory.path).done.lessons[LESSON.name] == Score(right=0, asked=1)


@pytest.mark.parametrize("typed", [[], ["q"], ["QUIT"]])
def test_one_can_leave_at_once(memory: Memory, typed: list[str]) -> None:
    assert play(memory, *typed).endswith("LEFT")
    assert not memory.path.exists()


def test_a_lesson_left_half_way_does_not_undo_a_finished_one(memory: Memory) -> None:
    play(memory, "4", "", "yes", "", *["y"] * POINTS)
    play(memory, "5", "q")
    assert Memory(memory.path).done.lessons[LESSON.name].is_done


def test_cards_that_were_not_known_come_first_the_next_time(memory: Memory) -> None:
    shown = play(memory, "", "y", "", "maybe", "n", lesson=False)
    assert "Type y or n." in shown
    assert shown.endswith("All cards seen; 1 of 2 known.\n")
    known = Memory(memory.path).done.cards
    assert sorted(known.values()) == [False, True]
    unknown = next(q for q in QUESTIONS if not known[q.name])
    words = {"how-many": "How many", "which": "Which one"}[unknown.name]
    assert words in play(Memory(memory.path), lesson=False)


def test_the_list_says_what_is_done(memory: Memory) -> None:
    memory.done.lessons = {"split": Score(right=7, asked=8, is_done=True), "batch": Score(asked=1)}
    memory.done.cards = {"a": True, "b": False}
    lines = list(command._list_lines(memory, 80))
    assert any("1  split" in line and "done, 7 of 8 right" in line for line in lines)
    assert any("batch" in line and "begun, 0 of 1 right" in line for line in lines)
    assert any("cards" in line and "1 known" in line for line in lines)
    assert max(map(len, lines)) <= 80
    narrow = list(command._list_lines(memory, 60))
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
def test_a_hostile_file_is_put_aside_and_never_written_over(content: bytes, memory: Memory) -> None:
    memory.path.parent.mkdir()
    memory.path.write_bytes(content)
    found = Memory(memory.path)
    assert found.done.lessons == {}
    aside = memory.path.with_name("learn.json.unreadable")
    assert str(aside) in found.remark
    assert aside.read_bytes() == content
    found.save()
    assert json.loads(memory.path.read_text())["schema"] == 1


@pytest.fixture
def strange(memory: Memory, request: pytest.FixtureRequest) -> Path:
    path = memory.path
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
    found = Memory(strange)
    assert "could not be read" in found.remark
    found.save()
    assert strange.is_file()
    assert not strange.is_symlink()
    assert Path("/etc/passwd").is_file()


def test_where_nothing_can_be_kept_lessons_work_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = play(Memory(tmp_path / "file" / "learn.json"), "4", "q")
    assert "✓ 4 rows" in shown
    assert "Progress cannot be kept in" in shown


def test_progress_can_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    memory = Memory()
    assert memory.path == tmp_path / "paceline" / "learn.json"
    memory.save()
    from paceline.cli import main

    for _ in range(2):  # nothing to forget is no mistake
        assert main(["learn", "--forget"]) == 0
        assert not memory.path.exists()
    assert "Forgotten" in capsys.readouterr().out
