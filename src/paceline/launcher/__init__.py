"""Launching: plans worker processes, starts, supervises and ends them.

    flags -> plan -> start -> supervise -> report

`run` does it for programs (`paceline run`), `function` for a function of the calling process
(`paceline.launch`). What they plan is data; nothing here imports torch until it must.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
