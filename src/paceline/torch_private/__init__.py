"""Names that torch does not document, used only through this package.

A module looks its names up when it is imported, and names the one that an unsupported torch lacks.
Functions called for every gradient are torch's own objects, without a wrapper. Attributes that
module authors rely on (`_version` of a tensor, `_parameters`, `_buffers` and `_modules` of a
module) may be used anywhere.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
