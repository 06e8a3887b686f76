"""Markup that cannot be broken by what is shown in it, and values as the page says them.

`html` escapes everything that is put into a template and is not `Html` already, and templates are
written in this package. So a run's name or a line of its log is text wherever it ends up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any, TypeGuard

from paceline.observe.units import bytes_text, seconds_text, share_text

# Invisible characters that reorder or end text: they would make a page say what no file says.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufeff\ufffe\uffff]"
)
_TEXT_LIMIT = 2000
NOTHING = "\N{EN DASH}"
"""What a table says where there is no number."""


class Html(str):
    """Markup, as opposed to text that is still to be escaped."""

    __slots__ = ()


def html(template: str, /, *values: object, **named: object) -> Html:
    """A template with its `{}` filled in: values go in as text unless they are markup."""
    inside = {name: _inside(value) for name, value in named.items()}
    return Html(template.format(*map(_inside, values), **inside))


def join(parts: Iterable[object]) -> Html:
    """One after the other: markup as it is, anything else as text; None is nothing."""
    return Html("".join(map(_inside, parts)))


def _inside(value: object) -> str:
    if isinstance(value, Html):
        return value
    if isinstance(value, list):
        return join(value)
    if isinstance(value, float):  # a coordinate
        return f"{value:.4g}"
    return "" if value is None else escape(text(value))


def text(value: object, limit: int = _TEXT_LIMIT) -> str:
    """A value as visible text: no control characters, not endless."""
    shown = _UNSEEN.sub("\ufffd", str(value)[: limit + 1])
    return shown if len(shown) <= limit else shown[:limit] + "…"


def note(said: object) -> Html | None:
    """A remark in small print, if there is anything to say."""
    return html('<p class="note">{}</p>', said) if said else None


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    words: Collection[int] = (0,),
) -> Html:
    """A table. The columns in `words`, from 0, hold words; the others hold numbers."""

    def row(template: str, cells: Sequence[object]) -> Html:
        looks = ["" if index in words else "number" for index in range(len(cells))]
        pairs = zip(looks, cells, strict=True)
        return html("<tr>{}</tr>", [html(template, look, cell) for look, cell in pairs])

    return html(
        '<div class="scroll" tabindex="0" role="region" aria-label="{}"><table>'
        "<caption>{}</caption><thead>{}</thead><tbody>{}</tbody></table></div>",
        caption,
        caption,
        row('<th class="{}" scope="col">{}</th>', head),
        [row('<td class="{}">{}</td>', cells) for cells in rows],
    )


def data_block(value: object) -> Html:
    """JSON for the page's script, which no string inside can end early."""
    content = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        content = content.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json">{content}</script>')


def figure(value: float | None, digits: int = 3) -> str:
    """A number for people: thousands separated, very small or large ones with an exponent."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value and not 1e-4 <= abs(value) < 1e12:
        return f"{value:.{digits - 1}e}"
    rounded = round(value) if abs(value) >= 10**digits else float(f"{value:.{digits}g}")
    return f"{rounded:,.12g}"


def count(value: float, noun: str) -> str:
    """`1 worker`, `4 workers`."""
    return f"{figure(value)} {noun if value == 1 else noun + 's'}"


def duration(seconds: float | None) -> str:
    return _together(seconds_text(seconds)) if _is_known(seconds) else NOTHING


def size(amount: float | None) -> str:
    return _together(bytes_text(amount)) if _is_known(amount) else NOTHING


def percent(share: float | None) -> str:
    """`83 %`, `4.6 %`."""
    if not _is_known(share):
        return NOTHING
    return _together(share_text(share, 1 if 0 < abs(share) < 0.0995 else 0))


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _together(said: str) -> str:
    """A number and its unit, between which no line ends."""
    return said.replace(" ", "\N{NO-BREAK SPACE}")


def sentence(value: object) -> str:
    """Text with a capital at its beginning."""
    shown = text(value)
    return shown[:1].upper() + shown[1:]


def as_number(value: Any) -> float | None:
    """A number out of a file: anything else is None."""
    try:
        return float(value) if type(value) in (int, float) else None
    except OverflowError:
        return None
