"""Launching: plans worker processes, starts, watches and ends them.

    options -> plan -> start -> watch -> ending -> report

`run` does it for programs (`paceline run`), `function` for a function of the calling process
(`paceline.launch`). What they plan is data; nothing here imports torch until it must.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.launcher.function import launch as launch

__all__ = ["launch"]


def __getattr__(name: str) -> Any:
    if name == "launch":
        return import_module("paceline.launcher.function").launch
    raise AttributeError(f"module 'paceline.launcher' has no attribute {name!r}")
