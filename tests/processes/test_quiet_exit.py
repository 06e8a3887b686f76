"""A script that simply ends keeps its exit code, whatever torch's threads are doing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline.group.exit import wait_for_rest

SCRIPT = """
import ctypes, os, sys, threading
import torch, torch.distributed as dist, paceline

world = paceline.init_process_group()
store, groups = dist.HashStore(), {}
options = world.group._get_backend(torch.device("cpu")).options

def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, options)

threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
kept = [torch.ones(5_000_000), torch.ones(5_000_000)]
sys.setswitchinterval(1000)
for rank in (0, 1):
    groups[rank].allreduce([kept[rank]])
# Keeps the interpreter, for which Gloo's threads will be waiting, up to the very end.
ctypes.PyDLL(None).usleep(500_000)
"""


def end(folder: Path, ending: str) -> subprocess.CompletedProcess[str]:
    (folder / "ending.py").write_text(SCRIPT + textwrap.dedent(ending))
    return subprocess.run(
        [sys.executable, "ending.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the script calls usleep() of glibc")
def test_threads_that_wait_for_the_interpreter_do_not_abort_the_process(tmp_path: Path) -> None:
    done = end(tmp_path, "sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")


def test_a_script_that_fails_shows_its_traceback_and_fails(tmp_path: Path) -> None:
    done = end(tmp_path, "raise ValueError('told to')")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: told to")


def test_a_forked_child_does_not_wait_for_threads_of_its_parent(tmp_path: Path) -> None:
    done = end(
        tmp_path,
        """
        import atexit
        from paceline.group import exit as quiet_exit

        quiet_exit.wait_for_rest = lambda: os._exit(5)
        if os.fork() == 0:
            atexit._run_exitfuncs()
            os._exit(4)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    )
    assert done.returncode == 4, done.stderr


def test_a_process_without_groups_has_nothing_to_wait_for() -> None:
    assert wait_for_rest()
