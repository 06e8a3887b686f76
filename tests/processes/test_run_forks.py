"""Loader processes that a fork leaves without life are forked again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from paceline.run.forks import let_live
from paceline.run.loader import make_loader

_stuck_file = ""


def _stick() -> None:
    """In a new process: what a lock that nobody returns does, for the first one."""
    if _stuck_file:
        try:
            os.close(os.open(_stuck_file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        Path(_stuck_file).write_text(str(os.getpid()))
        time.sleep(3600)


@pytest.mark.parametrize("whose", ["the run's", "a script's"])
def test_a_loader_process_that_does_not_come_to_life_is_forked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    os.register_at_fork(after_in_child=_stick)
    monkeypatch.setitem(globals(), "_stuck_file", str(tmp_path / "stuck"))
    data: Any = [10, 11, 12, 13]
    if whose == "the run's":
        loader = make_loader(data, {"num_workers": 2}, int, [0, 1, 2, 3])
    else:
        loader = DataLoader(data, num_workers=2)
        let_live(loader)
    assert list(map(int, loader)) == data
    stuck = int((tmp_path / "stuck").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(stuck, 0)


def test_a_loader_that_says_how_its_processes_start_is_left_alone() -> None:
    data: Any = [10, 11]
    chosen = DataLoader(data, num_workers=1, multiprocessing_context="spawn")
    before = chosen.multiprocessing_context
    let_live(chosen)
    assert chosen.multiprocessing_context is before
    here = DataLoader(data)
    let_live(here)
    assert here.multiprocessing_context is None
