"""`paceline trace`: a recorded step drawn for people, and what training and prediction look like.

The recording itself is `paceline.record`.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
