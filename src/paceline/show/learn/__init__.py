"""Lessons about data parallelism whose answers come from running the engine.

    question + lab --> answer --> terminal (session), text and JSON (command), page, notebook

`lessons` has the words, `about_...` a function for each question that finds its answer; `runs` and
`lab` run what is asked for; `values` compares what a reader types.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
