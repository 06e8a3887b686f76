"""Names that torch does not document, each used from here and nowhere else.

A module looks its names up when it is imported, and says which one an unsupported torch lacks. What
is called for every gradient is torch's own function object. Attributes that module authors rely on
(`_version` of a tensor, `_parameters`, `_buffers` and `_modules` of a module) may be used anywhere.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
