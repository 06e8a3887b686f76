"""`paceline run --watch`: the page is there while a run trains, and when the run is over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.files import RunFolder, read_log

pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'paceline[watch]'")
SCRIPT = """
import torch, paceline
from torch.utils.data import TensorDataset
net = torch.nn.Linear(2, 1)
data = TensorDataset(torch.ones(40, 2))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for step in paceline.Run(net, sgd, data, global_batch=4, epochs=1, folder="runs/beside"):
    with step:
        for (x,) in step.batches():
            step.backward(net(x).mean())
"""


def find_watchers(mark: str) -> Iterator[int]:
    """Processes of `paceline watch` that were started with `mark` in their environment."""
    for entry in Path("/proc").iterdir():
        try:
            is_watch = entry.name.isdigit() and b"\0watch\0" in (entry / "cmdline").read_bytes()
            if is_watch and mark.encode() in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:
            continue


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_page_opened_beside_a_training_outlives_it_and_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    mark = f"PACELINE_TEST_MARK={tmp_path}"
    environ = os.environ | dict([mark.split("=")]) | {"BROWSER": "true"}
    command = [sys.executable, "-m", "paceline", "run", "--watch", "train.py"]
    try:
        # Returns when nobody has its pipes any more.
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        (address,) = re.findall(r"http://\S+", done.stderr)
        url = address.replace("/?", "/document?")
        deadline_s = time.monotonic() + 60
        live = {"state": ""}
        while live["state"] != "finished" and time.monotonic() < deadline_s:
            with urllib.request.urlopen(url, timeout=60) as answer:
                live = json.load(answer)["live"]
            time.sleep(0.05)  # it looks at the folder now and then
        assert (live["run"], live["state"], live["step"]) == ("beside", "finished", 10)
    finally:
        for pid in find_watchers(mark):
            os.kill(pid, signal.SIGTERM)
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.02)


def test_what_workers_print_is_kept_in_the_run_folder_in_the_order_of_time(tmp_path: Path) -> None:
    told = 'print("before the run")\n' + SCRIPT + '    print(f"step {step.number}", flush=True)\n'
    (tmp_path / "train.py").write_text(told)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = read_log(RunFolder(tmp_path / "runs" / "beside"), 1000)
    assert [each["t"] for each in lines] == sorted(each["t"] for each in lines)
    for rank in (0, 1):
        own = [each["text"] for each in lines if each["rank"] == rank]
        assert own == ["before the run", *(f"step {number}" for number in range(1, 11))]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at folders that are locked")
def test_a_page_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    run, temporary = tmp_path / "run" / "events", tmp_path / "temporary"
    for each in (run, temporary):
        each.mkdir(parents=True)
    command = [sys.executable, "-m", "paceline", "watch", str(run.parent)]
    environ = os.environ | {"TMPDIR": str(temporary), "BROWSER": "true"}

    def show() -> set[str]:
        """What is there while a page is shown, which is killed then."""
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as page:
            assert page.stdout is not None
            assert "http://" in page.stdout.readline()
            found = {each.name for each in temporary.iterdir()}
            page.kill()
        return found

    first, second = show(), show()
    assert len(first) == len(second) == 1
    assert first != second
