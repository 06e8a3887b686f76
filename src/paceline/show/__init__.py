"""Pages, pictures and the numbers behind them: trace, report, live page, scaling, lessons."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
