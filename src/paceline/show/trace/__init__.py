"""`paceline trace`: draws a recorded step, the epochs after it, and a prediction.

The recording itself is `paceline.record`.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
