"""Lessons about data parallelism whose answers come from running the engine.

    question + lab --> answer --> terminal (session), text and JSON (command), page, notebook

`about_...` are the questions, each a function that finds its answer; `lessons` are the words around
them; `runs` and `lab` run what is asked for; `values` compares what a reader types. Names are
loaded when first used: the list of lessons needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {"lesson": "paceline.learn.notebook"}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.learn.notebook import lesson as lesson

__getattr__ = load_names(__name__, _HOME_BY_NAME)
