"""Lessons about data parallelism whose answers come from running the engine.

    question + lab --> answer --> terminal (session), text and JSON (command), page, notebook

`lessons` has the texts, `about_...` a function for each question that computes its answer; `runs`
and `lab` run the engine; `values` parses and compares answers.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
