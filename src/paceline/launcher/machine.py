"""What this machine offers: cores and accelerators, counted without importing torch here."""

from __future__ import annotations

import glob
import math
import os
import subprocess
import sys
from pathlib import Path

from paceline.errors import DeviceError

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dri/renderD*", "/dev/accel*")


def count_cores() -> int:
    """Cores this process may use: by affinity, and by a container's limit where there is one."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
        limit = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or `max`: no limit
        return cores
    return max(1, min(cores, limit))


def count_workers(wanted: str) -> int:
    """How many workers `--nproc-per-node` means here: a number, or auto, gpu, cpu, xpu."""
    if wanted == "cpu":
        return count_cores()
    if wanted not in {"auto", "gpu", "xpu"}:
        return int(wanted)
    if wanted == "auto" and sys.platform == "linux" and not _may_have_accelerator():
        return count_cores()
    count = _ask_torch(wanted)
    if count == 0 and wanted == "auto":
        return count_cores()
    if count == 0:
        raise DeviceError(
            f"--nproc-per-node is {wanted}, but torch finds none on this machine.",
            advice="Pass a number, or look at `paceline doctor`.",
        )
    return count


def _may_have_accelerator() -> bool:
    return any(glob.glob(pattern) for pattern in _ACCELERATOR_FILES)


def _ask_torch(kind: str) -> int:
    """Count in a process of its own: only torch knows all the ways to hide a device."""
    module = {"auto": "accelerator", "gpu": "cuda", "xpu": "xpu"}[kind]
    question = f"import torch; print(torch.{module}.device_count())"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    last_line = answer.stdout.strip().rpartition("\n")[2]
    return int(last_line) if answer.returncode == 0 and last_line.isdigit() else 0
