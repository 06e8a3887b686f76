"""`paceline scale --engines` on a GPU, where the process that asks must not touch it."""

from __future__ import annotations

import json
import subprocess
import sys


def test_all_engines_are_timed_on_the_gpu() -> None:
    command = [sys.executable, "-m", "paceline", "scale", "--engines", "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    step_s = json.loads(done.stdout)["step_s"]
    assert list(step_s) == [
        "bare",
        "DataParallel",
        "DataParallel, loss on replicas",
        "DistributedDataParallel",
    ]
    assert all(seconds > 0 for seconds in step_s.values())
