"""Batch size and learning rate for N workers, and whether more workers would still help.

`batch` is arithmetic that comes with a sentence saying what was chosen and why, `scheduler` gives
its learning rate to torch, and `noise` measures the gradient noise scale in training.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
