"""A worker that was forked from the template finds what a new Python would have found."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.launcher import starts
from paceline.launcher.generations import without_survival
from paceline.launcher.template import Template, TemplateError

SCRIPT = """
import json, os, signal, sys, threading
import numpy, torch

facts = {
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path,
    "flags": list(sys.flags),
    "threads": torch.get_num_threads(),
    "open": len(os.listdir("/proc/self/fd")),
    "python threads": threading.active_count(),
    "leads its group": os.getpgid(0) == os.getpid(),
    "parent": os.getppid() == int(os.environ["LAUNCHER"]) if "LAUNCHER" in os.environ else None,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    "stdin": sys.stdin.read(),
    "variables": sorted(name for name in os.environ if name not in ("_", "KMP_INIT_AT_FORK")),
    "world": [os.environ["RANK"], os.environ["WORLD_SIZE"]],
    "sum": torch.ones(200, 200).matmul(torch.ones(200, 200)).sum().item(),
}
print(json.dumps([facts, numpy.random.random()]))
"""


def test_a_template_that_is_closed_is_gone_and_says_so(tmp_path: Path) -> None:
    template = Template([sys.executable], os.environ)
    template.close()
    assert template._process.returncode == -signal.SIGKILL
    with pytest.raises(TemplateError):
        template.ask(["script.py"], {}, {0: 0}, leads_group=True)


def test_a_fork_can_be_signalled_with_its_group_from_the_first_moment() -> None:
    template = Template([sys.executable], os.environ)
    try:
        template.ask(["script.py"], os.environ, {2: 2}, leads_group=True)
        while (forked := template.answer()) is None:
            select.select([template], [], [])
        os.killpg(forked.pid, signal.SIGKILL)
        while forked.poll() is None:
            time.sleep(0.001)
        assert forked.returncode == -signal.SIGKILL
    finally:
        template.close()


ORPHAN = """
import os
from paceline.launcher.template import become_worker
reader, writer = os.pipe()
os.write(writer, b"!")
if os.fork() == 0:  # its parent is neither the launcher nor the process in between
    become_worker({"numbers": [0]}, [0, reader], launcher=2**22 + 1, between=2**22 + 2)
print(os.wait()[1])
"""


def test_a_worker_whose_launcher_is_killed_while_it_is_forked_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")


SLOW = "import os, sys, time; end = time.monotonic() + 1\nwhile time.monotonic() < end: {}\n"


@pytest.mark.parametrize(
    ("does", "is_kept"),
    [("pass", True), ("time.sleep(60)", False), ("os.kill(os.getpid(), 19)", False)],
    ids=["computes", "waits for something", "is stopped"],
)
def test_a_template_is_waited_for_as_long_as_it_works(
    does: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "LOOK_S", 0.05)
    says_ready = "os.write(int(sys.argv[2]), b'0 0'); time.sleep(600)"
    template = Template([sys.executable, "-c", SLOW.format(does) + says_ready], os.environ)
    gone: list[int] = []
    waited = starts.Starts(
        start=lambda *_: pytest.fail("nobody is to be started"),
        console=None,  # type: ignore[arg-type]
        generations=without_survival(),
        template=template,
        on_started=lambda worker: None,
        on_template_gone=gone.append,
        may_start=lambda: True,
    )
    try:
        while not template.is_ready and not gone:
            waited.turn()
            time.sleep(0.001)
    finally:
        template.close()
    assert (template.is_ready, bool(gone)) == (is_kept, not is_kept)


def facts_of(folder: Path, *flags: str) -> tuple[list[Any], list[float]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--no-label", "--workers", "2", *flags]
    done = subprocess.run(
        [*command, "script.py", "--lr", "1"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["/first", "/second"])},
        input="",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    rows.sort(key=lambda row: row[0]["world"])
    return [facts for facts, _ in rows], [number for _, number in rows]


def test_a_forked_worker_is_like_a_new_python_and_has_random_numbers_of_its_own(
    tmp_path: Path,
) -> None:
    new, _ = facts_of(tmp_path, "--no-template")
    forked, numbers = facts_of(tmp_path)
    assert forked == new
    assert numbers[0] != numbers[1]
