"""Data-parallel training with PyTorch: one model, many devices, every copy in step.

The names are listed in the stub beside this file and loaded when first used, so that
`paceline --help` and the launcher start without torch.
"""

from paceline.lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__)
__all__ += ["__version__"]
