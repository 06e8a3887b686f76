"""The check in conftest.py sees what a test leaves behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import Belongings


def test_a_clean_test_leaves_nothing() -> None:
    assert Belongings.now().since(Belongings.now()) == []


def test_a_variable_set_changed_or_removed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST", "1")
    before = Belongings.now()
    monkeypatch.setenv("PACELINE_TEST", "2")
    assert "environment variables: PACELINE_TEST=1" in Belongings.now().since(before)[0]
    monkeypatch.delenv("PACELINE_TEST")
    assert "environment variables: PACELINE_TEST=1" in Belongings.now().since(before)[0]


def test_a_thread_is_seen() -> None:
    before = Belongings.now()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left over")
    thread.start()
    assert "left over" in Belongings.now().since(before)[0]
    done.set()
    thread.join()


def test_a_child_process_is_seen() -> None:
    before = Belongings.now()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert f"process {child.pid}" in "".join(Belongings.now().since(before))
        child.communicate(b"\n")


def test_an_open_socket_and_an_open_file_are_seen(tmp_path: Path) -> None:
    before = Belongings.now()
    with socket.socket(), (tmp_path / "held").open("w"):
        (left,) = Belongings.now().since(before)
        assert "socket:" in left
        assert "held" in left
    assert Belongings.now().since(before) == []


def test_a_file_in_the_working_directory_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = Belongings.now()
    Path("stray").touch()
    assert "stray" in Belongings.now().since(before)[0]


def test_a_default_process_group_is_seen() -> None:
    before = Belongings.now()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert any("process groups" in line for line in Belongings.now().since(before))
    dist.destroy_process_group()
