"""What a worker does around the user's code, as far as it needs no worker."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import SourceFileLoader
from multiprocessing import current_process
from multiprocessing.connection import Listener
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.errors import UsageError, summarize
from paceline.launcher.deaths import read_error
from paceline.launcher.worker import (
    ALIVE,
    Instructions,
    Worker,
    format_error,
    when_imported,
    write_error,
)
from paceline.run import RunOptions


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "seldom_imported"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield name
    sys.meta_path[:] = finders
    sys.modules.pop(name, None)


def test_an_import_is_heard_of_once_and_after_the_modules_own_code(module: str) -> None:
    heard: list[int] = []
    when_imported(module, lambda: heard.append(sys.modules[module].value))
    assert heard == []
    import_module(module)
    import_module(module)
    assert heard == [1]


def test_looking_for_a_module_without_loading_it_does_not_end_the_watch(module: str) -> None:
    heard: list[str] = []
    when_imported(module, lambda: heard.append(module))
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(module) == "value = 1\n"  # type: ignore[attr-defined]
    assert heard == []
    import_module(module)
    assert heard == [module]


def test_a_watched_module_shows_no_trace_of_it(module: str) -> None:
    before = list(sys.meta_path)
    when_imported(module, lambda: None)
    loaded = import_module(module)
    assert sys.meta_path == before
    assert type(loaded.__loader__) is SourceFileLoader
    assert loaded.__spec__ is not None
    assert loaded.__spec__.loader is loaded.__loader__


def test_a_module_that_is_there_already_is_heard_of_at_once(module: str) -> None:
    import_module(module)
    heard: list[str] = []
    when_imported(module, lambda: heard.append(module))
    assert heard == [module]


def test_instructions_are_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = Instructions(parent=7, kind="module", status_fd=3, as_torch=True)
    for name, value in instructions.as_variable().items():
        monkeypatch.setenv(name, value)
    assert Instructions.take() == instructions
    assert not any(name in os.environ for name in instructions.as_variable())


def test_a_worker_that_is_still_importing_its_stopwatch_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "paceline.telemetry.stopwatch"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # none of its code has run yet
    assert Worker(Instructions(parent=os.getpid())).look() == ALIVE


@pytest.mark.parametrize("path", ["", "/dev/null/error.json"])
def test_an_error_that_cannot_be_written_for_the_launcher_is_printed(
    path: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    monkeypatch.setattr("sys.excepthook", lambda *_: None)

    def fail() -> None:
        raise ValueError("of the script")

    assert Worker(Instructions(parent=os.getpid())).call(fail) == 1
    assert "ValueError: of the script" in capfd.readouterr().err


@pytest.mark.parametrize("length", [1, 120])
def test_sockets_of_loaders_lie_in_the_launchers_folder_however_long_its_name(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    config: dict[str, Any] = {"authkey": b"", "semprefix": "/mp"}
    monkeypatch.setattr(current_process(), "_config", config)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    Worker(Instructions(parent=0)).keep_sockets_together()
    with Listener(family="AF_UNIX"):
        assert len(list(folder.iterdir())) == 1
    if length > 100:
        os.close(int(config["tempdir"].rpartition("/")[2]))


class Wordless(RuntimeError):
    def __str__(self) -> str:
        raise ValueError


def test_a_traceback_of_an_error_of_ours_leaves_out_the_calls_that_led_to_it() -> None:
    with pytest.raises(UsageError) as ours:
        RunOptions(precision="fp8")  # type: ignore[arg-type]
    assert len(ours.traceback) > 2
    *_, users, raised = re.findall(r'File "(.*)"', format_error(ours.value))
    assert users == __file__
    assert raised.endswith("errors.py")
    with pytest.raises(RuntimeError) as theirs:
        torch.nn.Linear(2, 2)(torch.ones(1, 3))
    shown = format_error(theirs.value)
    assert shown == "".join(traceback.format_exception(theirs.value))


@pytest.mark.parametrize("error", [Wordless(), ValueError("x" * 10**7), ValueError("\x00" * 10**6)])
def test_an_error_is_read_whatever_its_words_are(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error(str(path), error)
    found = read_error(str(path))
    assert found["summary"].startswith(type(error).__name__)
    assert found["traceback"].rstrip().endswith(("failed>", "x", "\x00"))
    assert summarize(error).startswith(type(error).__name__)
