"""`paceline compare` on a GPU, where the process that asks must not touch it."""

from __future__ import annotations

import subprocess
import sys


def test_all_contestants_are_measured_on_the_gpu() -> None:
    command = [sys.executable, "-m", "paceline", "compare", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[-5:-1]
    names = ["bare", "DataParallel", "DataParallel, loss on replicas", "DistributedDataParallel"]
    assert [row.split("  ")[0] for row in rows] == names
    assert all("cuda:0" in row for row in rows)
