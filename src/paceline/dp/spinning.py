"""OpenMP's idle threads, which would take the processors away from replicas on the CPU.

After every operation that used several threads they spin for some milliseconds, in the hope of
another one. The caller's optimizer is such an operation, and the replicas start right after it: on
two cores a step of a small convolutional net took 37 ms instead of 31. So they are sent away before
replicas start; the caller's next large operation makes new ones, in some 10 us for each.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

_SOFT = 1  # omp_pause_soft: settings such as the number of threads stay
_MAPS, _TASKS = Path("/proc/self/maps"), Path("/proc/self/task")


def send_helpers_away() -> None:
    """End the threads that help the calling one, where they are GNU's and can be asked to.

    A forked process has none, but its OpenMP does not know that and would wait for them forever.
    """
    if not _find() or len(os.listdir(_TASKS)) <= threading.active_count():
        return  # there are no threads but Python's
    for pause in _find():
        pause(_SOFT)  # refuses inside a parallel region, which is right too


@functools.cache
def _find() -> list[Callable[[int], int]]:
    try:
        paths = set(re.findall(r"(/.*/libgomp\S*\.so\S*)$", _MAPS.read_text(), re.MULTILINE))
        return [ctypes.CDLL(path).omp_pause_resource_all for path in sorted(paths)]
    except (OSError, AttributeError):  # another system, or a libgomp from before OpenMP 5
        return []
