"""Markup that cannot be broken by what is shown in it.

`tag` escapes every child and attribute that is not `Html` already, and `Html` is only made here.
So a run's name or a line of its log is text wherever it ends up. Numbers become words here too.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_VOID = {"link", "meta", "br"}
# Invisible characters that reorder or end text: they would make a page say what no file says.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufeff\ufffe\uffff]"
)
_TEXT_LIMIT = 2000
NOTHING = "\N{EN DASH}"
"""What a table says where there is no number."""
_NB = "\N{NO-BREAK SPACE}"
"""Between a number and its unit, so that no line ends there."""


class Html(str):
    """Markup, as opposed to text that is still to be escaped."""

    __slots__ = ()


def text(value: object, limit: int = _TEXT_LIMIT) -> str:
    """A value as visible text: no control characters, not endless."""
    shown = _UNSEEN.sub("\ufffd", str(value)[: limit + 1])
    return shown if len(shown) <= limit else shown[:limit] + "…"


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is `class`, other underscores are dashes; None and False leave out."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown = number(value) if isinstance(value, float) else _UNSEEN.sub("\ufffd", str(value))
        parts.append(f" {key}" if value is True else f' {key}="{html.escape(shown)}"')
    if name in _VOID:
        return Html("".join(parts) + ">")
    return Html("".join(parts) + ">" + join(children) + f"</{name}>")


def join(children: Iterable[object]) -> Html:
    """Markup as it is, anything else as text; None is nothing."""
    return Html("".join(map(_child, children)))


def _child(child: object) -> str:
    if isinstance(child, Html):
        return child
    return "" if child is None else html.escape(text(child), quote=False)


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    words: Collection[int] = (0,),
) -> Html:
    """A table. The columns in `words`, from 0, hold words; the others hold numbers."""

    def cell(name: str, index: int, value: object, **more: object) -> Html:
        return tag(name, value, class_=None if index in words else "number", **more)

    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag(
                "thead",
                tag("tr", *(cell("th", i, each, scope="col") for i, each in enumerate(head))),
            ),
            tag("tbody", *(tag("tr", *(cell("td", *each) for each in enumerate(r))) for r in rows)),
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def data_block(identity: str | None, value: object) -> Html:
    """JSON for the page's script, which no string inside can end early."""
    content = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        content = content.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Html(content), type="application/json", id=identity)


def number(value: float, digits: int = 4) -> str:
    """A number for coordinates and plain reading: few digits, no trailing zeros, no exponent."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    shown = f"{value:.{min(places, 12)}f}"
    return (shown.rstrip("0").rstrip(".") if "." in shown else shown) or "0"


def figure(value: float | None, digits: int = 3) -> str:
    """A number for people: thousands separated, very small or large ones with an exponent."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return number(value)
    if value and not 1e-4 <= abs(value) < 1e12:
        return f"{value:.{digits - 1}e}"
    if float(value).is_integer() or abs(value) >= 10 ** (digits):
        return f"{value:,.0f}"
    return number(value, digits)


def count(value: float, noun: str, plural: str | None = None) -> str:
    """`1 worker`, `4 workers`."""
    return f"{figure(value)} {noun if value == 1 else plural or noun + 's'}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit in which people would say them."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if abs(seconds) < 59.95:
        for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if abs(seconds) * factor >= 0.9995:
                return f"{number(seconds * factor, 3)}{_NB}{unit}"
        return f"0{_NB}s" if seconds == 0 else f"{number(seconds * 1e9, 3)}{_NB}ns"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours:,}{_NB}h {minutes}{_NB}min"
    return f"{minutes}{_NB}min {rest}{_NB}s"


def size(amount: float | None) -> str:
    """Bytes in the unit in which people would say them."""
    if amount is None or not math.isfinite(amount):
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if abs(amount) < 999.5:
            return f"{number(amount, 3)}{_NB}{unit}"
        amount /= 1000
    return f"{number(amount, 3)}{_NB}TB"


def percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return NOTHING
    value = share * 100
    places = 1 if 0 < abs(value) < 9.95 else 0
    return f"{value:.{places}f}{_NB}%"


def sentence(value: object) -> str:
    """Text with a capital at its beginning."""
    shown = text(value)
    return shown[:1].upper() + shown[1:]


def listing(names: Sequence[object]) -> str:
    """`a, b and c`."""
    words = [str(each) for each in names]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def as_number(value: Any) -> float | None:
    """A number out of a file: anything else is None."""
    return float(value) if isinstance(value, int | float) and value is not True else None
