"""The example of DataParallel runs as a plain script and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_parallel.py"


def test_the_example_trains_without_a_launcher() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    right = re.search(r"(\d+) of 101 right", done.stdout)
    assert right is not None
    assert int(right[1]) > 95
    assert re.search(r"two loops' weights: \d+e-0[5-9]|: 0e\+00", done.stdout), done.stdout
    assert "bare model: 0.weight, 0.bias" in done.stdout
