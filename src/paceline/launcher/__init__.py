"""Launching: plans worker processes, starts, supervises and ends them.

    flags -> plan -> start -> supervise -> report

`run` does it for programs (`paceline run`), `function` for a function of the calling process
(`paceline.launch`). What they plan is data; nothing here imports torch until it must.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {"launch": "paceline.launcher.function", "count_cores": "paceline.launcher.plan"}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.launcher.function import launch as launch
    from paceline.launcher.plan import count_cores as count_cores

__getattr__ = load_names(__name__, _HOME_BY_NAME)
