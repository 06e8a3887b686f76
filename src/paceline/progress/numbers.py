"""Numbers as people read them: durations, counts, speeds and metrics, always in ASCII."""

from __future__ import annotations

import math
import unicodedata

_TINY, _LARGE = 1e-4, 1e5


def duration(seconds: float) -> str:
    """`0.42 s`, `17 s`, `3:05`, `2:00:09` or `4 d 03:12`; never longer than ten characters."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.995:
        return f"{seconds:.2g} s" if seconds < 0.0995 else f"{seconds:.2f} s"
    whole = round(seconds)
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    if whole < 60:
        return f"{whole} s"
    if hours == 0:
        return f"{m}:{s:02}"
    if hours < 24:
        return f"{hours}:{m:02}:{s:02}"
    return f"{hours // 24} d {hours % 24:02}:{m:02}"


def speed(per_second: float) -> str:
    """A rate with three digits that mean something: `7.42`, `74.2`, `742`, `7,420`."""
    if not math.isfinite(per_second) or per_second < 0:
        return "?"
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.3g}"


def metric(name: str, value: float) -> str:
    """A loss with four decimals, an accuracy in percent, anything else as short as it goes."""
    if not math.isfinite(value):
        return str(value)
    if is_share(name) and 0 <= value <= 1:
        return f"{value:.1%}"
    if value != 0 and not _TINY <= abs(value) < _LARGE:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def is_share(name: str) -> bool:
    """Whether a metric of this name is a part of a whole, which reads best in percent."""
    return name.lower().split()[-1:] in (["accuracy"], ["acc"], ["precision"], ["recall"])


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: letters of East Asia take two."""
    if text.isascii():
        return len(text)
    letters = (letter for letter in text if not unicodedata.combining(letter))
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in letters)


def count(number: int, thing: str) -> str:
    """`1 epoch`, `5 epochs`, `12,000 samples`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def strict(value: object) -> object:
    """A value that strict JSON can hold: floats that are no numbers become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value
