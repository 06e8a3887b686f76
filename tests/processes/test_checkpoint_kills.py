"""Savers that are killed, savers in two processes, and disks that are full."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says

from paceline.checkpoint import Checkpoints, CheckpointWarning
from paceline.checkpoint.directory import list_entries, verify
from paceline.group.world import World
from paceline.testing import run_processes

KILLS = 20
# What a save does to the disk, in the modules that do it.
CALLS = ["mkdir", "open", "write", "fsync", "rename", "close", "listdir"]


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((400_000,), float(step)), "step": step}


def save(folder: str, step: int) -> str | None:
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(step, state_of(step), facts={"step": step})
        checkpoints.wait()
        return checkpoints.problem


def save_and_die(world: World, folder: str, step: int, at: int) -> int:
    """Save one checkpoint; die before the call number `at` of those that touch the disk."""
    count = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    save(folder, step)
    return count


def test_a_saver_killed_at_any_call_leaves_the_last_good_one(tmp_path: Path) -> None:
    (total,) = run_processes(1, save_and_die, str(tmp_path), 1, 10**9)
    assert total >= KILLS
    stops = random.Random(0).sample(range(1, total + 1), KILLS)
    newest = 1
    for number, stop in enumerate(stops):
        step = number + 2
        (ended,) = run_processes(1, save_and_die, str(tmp_path), step, stop, return_exceptions=True)
        assert "SIGKILL" in str(ended), ended
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            found = checkpoints.load()
        assert found is not None
        # The kill came before the rename, or after it; never is there anything in between.
        assert found.step in (newest, step)
        newest = found.step
        assert found.state["w"].eq(float(newest)).all()
        assert found.facts == {"step": newest}
        for entry in list_entries(tmp_path):
            verify(entry)
    assert save(str(tmp_path), 99) is None
    assert [entry.step for entry in list_entries(tmp_path)] == [99, newest]
    assert not list(tmp_path.glob(".tmp-*"))


def save_forever(world: World, folder: str) -> None:
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in range(1, 10**6):
            if world.rank == 1 and len(list_entries(Path(folder))) >= 2 and step > 5:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.save(step, state_of(step), facts={})
            if world.rank == 0 and step == 30:
                return


def test_a_saver_goes_on_beside_one_that_is_killed(tmp_path: Path) -> None:
    ended = run_processes(2, save_forever, str(tmp_path), return_exceptions=True)
    assert ended[0] is None
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.load()
        assert found is not None
        assert found.step == 30
    save(str(tmp_path), 31)
    assert not list(tmp_path.glob(".tmp-*"))


def save_all(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, state_of(step), facts={})
    checkpoints.wait()


def save_on_a_full_disk(world: World, folder: str) -> list[Any]:
    """A limit on the size of files stops the second save in the middle of its bytes."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state_of(1), facts={})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, resource.RLIM_INFINITY))
        with pytest.warns(CheckpointWarning) as caught:
            save_all(checkpoints, 2, 3, 4)
        found = checkpoints.load()
        assert found is not None
        left = sorted(os.listdir(folder))
        problem = checkpoints.problem
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        checkpoints.save(5, state_of(5), facts={})
        checkpoints.wait()
        after = [checkpoints.problem, len(os.listdir(folder))]
    return [len(caught), str(caught[0].message), problem, found.step, left, *after]


def test_a_full_disk_is_said_once_and_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    ((count, said, problem, step, left, after, files),) = run_processes(
        1, save_on_a_full_disk, str(tmp_path)
    )
    assert count == 1
    assert "step 2" in said
    assert "File too large" in said
    assert "step 4" in problem
    assert says(said, "last 1 step")
    assert step == 1
    assert left == ["step-00000001.0001"]
    assert after is None
    assert files == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room_keeps_what_it_has(small_disk: Path) -> None:
    with Checkpoints(small_disk) as checkpoints:
        save_all(checkpoints, 1)
        with pytest.warns(CheckpointWarning, match="No space left on device"):
            save_all(checkpoints, 2, 3)
        assert os.listdir(small_disk) == ["step-00000001.0001"]
        found = checkpoints.load()
        assert found is not None
        assert found.step == 1


def save_where_only_reading_is_allowed(world: World, folder: str) -> list[Any]:
    os.chdir(folder)
    user = os.geteuid()
    if user == 0:  # root may write everywhere
        os.seteuid(65534)
    try:
        with Checkpoints(".") as checkpoints:
            with pytest.warns(CheckpointWarning) as caught:
                save_all(checkpoints, 1, 2)
            return [len(caught), checkpoints.problem]
    finally:
        os.seteuid(user)


def test_a_read_only_folder_is_said_once_and_is_no_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    ((count, problem),) = run_processes(1, save_where_only_reading_is_allowed, str(tmp_path))
    assert count == 1
    assert "Permission denied" in problem
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o700)


def test_a_program_that_ends_right_after_saving_still_has_its_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from paceline.checkpoint import Checkpoints\n"
        "Checkpoints(sys.argv[1]).save(1, {'w': torch.ones(10**6)}, facts={})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.load()
    assert found is not None
    assert found.state["w"].sum() == 10**6
