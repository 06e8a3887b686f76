"""Two trainings that were started into one folder: the second is refused, and a killed one is not
in the way."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import train

from paceline.errors import UsageError
from paceline.files.run_folder import RunFolder
from paceline.group.world import World
from paceline.run.folder_lock import FolderLock
from paceline.testing import run_processes

HOLD = """
import os, sys
from paceline.run.folder_lock import FolderLock
from paceline.files.run_folder import RunFolder

folder = RunFolder(sys.argv[1])
folder.create()
lock = FolderLock(folder)
lock.take()
if os.fork() == 0:  # as a process that loads data, which is still there when its parent is killed
    os.close(1)
    os.read(0, 1)
    os._exit(0)
print("taken", flush=True)
os.read(0, 1)
"""


def test_a_folder_that_another_process_trains_in_is_refused_until_that_is_gone(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(UsageError, match=f"in use: process {other.pid} trains there"):
            train(folder=folder)
        other.send_signal(signal.SIGKILL)
        other.wait()
        train(folder=folder)


def test_a_run_that_is_over_gives_its_folder_up(tmp_path: Path) -> None:
    train(folder=tmp_path / "run")
    run_processes(1, take, str(tmp_path / "run"))


def take(_world: World, folder: str) -> None:
    FolderLock(RunFolder(folder)).take()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder.path / ".lock").symlink_to(victim)
    lock = FolderLock(folder)
    lock.take()
    lock.give_up()
    assert victim.read_text() == "precious"
