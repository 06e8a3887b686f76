"""Parsing a reader's answers as values, and comparing them.

`(16, 5)`, `16x5`, `[16,5]` and `torch.Size([16, 5])` are the same shape; `3.33x` and `10/3` the
same number; `b`, `B)` and the words of the second choice the same choice. Anything else is not an
answer, and the question is asked again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from paceline.errors import UsageError
from paceline.telemetry import list_text

Kind = Literal["shape", "number", "numbers", "choice", "order"]
"""`numbers` are given by rank or in another order that counts; `order` is all choices in order."""

LETTERS = "abcdefghijkl"
MOST_LETTERS = 300
ROUNDING = 0.015
"""A number that is not whole may be rounded by this share: 3.3 for 10/3, 83 for 83.33."""

_UNITS = {"kb": 10**3, "mb": 10**6}
_PLAIN_UNITS = re.compile(
    "|x|times|%|percent|b|ms|milliseconds|(byte|row|worker|device|line|step|file|epoch|tensor)s?"
    "|process(es)?|cop(y|ies)"
)
_ASKED_AS = {"": "", "x": "", "times": "", "%": " in percent", "ms": " of milliseconds"}
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?"


def form_of(kind: Kind, choices: Sequence[str] = (), unit: str = "") -> str:
    """What an answer looks like, in words, with an example that is not the answer."""
    if kind == "shape":
        return "a shape, such as (3, 7) or 3x7"
    if kind == "numbers":
        return "numbers in order, such as 3, 2, 2"
    if kind == "choice":
        return f"one of {list_text(LETTERS[: len(choices)], 'or')}"
    if kind == "order":
        return f"all {len(choices)} letters in order, such as {LETTERS[: len(choices)][::-1]}"
    example = "12 or 0.25" if unit in _ASKED_AS else "12"
    return f"a number{_ASKED_AS.get(unit, f' of {unit}')}, such as {example}"


def read(kind: Kind, text: str, choices: Sequence[str] = ()) -> Any:
    """The value that was typed; a UsageError says what form is expected."""
    typed = text.strip().replace("\N{MINUS SIGN}", "-").replace("\N{MULTIPLICATION SIGN}", "x")
    value = None
    if typed and len(typed) <= MOST_LETTERS:
        if kind in ("choice", "order"):
            value = _read_choices(kind, typed.lower(), choices)
        else:
            value = {"shape": _read_shape, "number": _read_number, "numbers": _read_numbers}[kind](
                typed.lower()
            )
    if value is None:
        what = f"{text.strip()[:40]!r} is not an answer to this question."
        raise UsageError(what, advice=f"Type {form_of(kind, choices)}.")
    return value


def _read_shape(text: str) -> list[int] | None:
    text = re.sub(r"^(?:torch\.)?size", "", text).strip()
    text = _without_brackets(text)
    if re.search(r"[0-9]\s*x\s*[0-9]", text):
        text = text.replace(",", "")  # 1,000 x 10
    if not re.fullmatch(r"\s*(?:[0-9]+\s*[,x;\s]*\s*)*", text):
        return None
    return [int(extent) for extent in re.findall("[0-9]+", text)]


def _read_number(text: str) -> float | None:
    whole = r"(?<![0-9])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9])"  # 1,000
    text = re.sub(whole, lambda found: found[0].replace(",", ""), text)
    text = re.sub(r"^([+-]?[0-9]+),([0-9]+)", r"\1.\2", text)  # a comma before decimals
    match = re.fullmatch(rf"({_NUMBER})\s*(?:/\s*({_NUMBER}))?\s*([a-z%]*)", text)
    if match is None or not (match[3] in _UNITS or _PLAIN_UNITS.fullmatch(match[3])):
        return None
    over = float(match[2] or 1)
    value = float(match[1]) / over * _UNITS.get(match[3], 1) if over else math.inf
    return value if math.isfinite(value) else None


def _read_numbers(text: str) -> list[float] | None:
    parts = re.split(r"[\s,;+&]+|and", _without_brackets(text))
    found = [_read_number(part) for part in parts if part]
    return None if not found or None in found else [each for each in found if each is not None]


def _read_choices(kind: Kind, text: str, choices: Sequence[str]) -> Any:
    if kind == "order":
        letters = re.sub(r"[^a-z]", "", text)
        wanted = sorted(LETTERS[: len(choices)])
        is_all = sorted(letters) == wanted
        return [choices[LETTERS.index(letter)] for letter in letters] if is_all else None
    bare = text.rstrip(" .)")
    if len(bare) == 1 and bare in LETTERS[: len(choices)]:
        return choices[LETTERS.index(bare)]
    near = [each for each in choices if each.lower().startswith(bare)] if bare else []
    same = [each for each in near if each.lower() == bare]
    return same[0] if same else near[0] if len(near) == 1 else None


def _without_brackets(text: str) -> str:
    while len(text) > 1 and text[0] + text[-1] in ("()", "[]", "{}"):
        text = text[1:-1].strip()
    return text


def is_same(kind: Kind, typed: Any, answer: Any, tolerance: float = 0.0, unit: str = "") -> bool:
    """Whether two values are the same; numbers that are not whole may be rounded."""
    if kind == "number":
        # A share is as well said as a part of one.
        is_share = unit == "%" and abs(answer) > 1
        said = [typed, typed * 100] if is_share else [typed]
        return any(
            _is_near(each, answer, tolerance) or (is_share and each == round(answer))
            for each in said
        )
    if kind == "numbers":
        pairs = zip(typed, answer, strict=False)
        return len(typed) == len(answer) and all(_is_near(*pair, tolerance) for pair in pairs)
    return bool(typed == answer)


def _is_near(typed: float, answer: float, tolerance: float) -> bool:
    if float(answer).is_integer() and not tolerance:
        return typed == answer
    return abs(typed - answer) <= max(tolerance, ROUNDING) * abs(answer)


def show(kind: Kind, value: Any, unit: str = "") -> str:
    """The value as a reader would write it."""
    if kind == "shape":
        return f"({', '.join(map(str, value))}{',' if len(value) == 1 else ''})"
    if kind == "numbers":
        return ", ".join(map(_plain, value))
    if kind == "order":
        return ", then ".join(value)
    if kind == "choice":
        return str(value)
    if unit.endswith("s") and unit != "ms" and value == 1:
        unit = unit[:-3] + "y" if unit.endswith("ies") else unit[: -2 if unit[-3:] == "ses" else -1]
    return _plain(value) + {"": "", "x": "x"}.get(unit, f" {unit}")


def _plain(number: float) -> str:
    if float(number).is_integer() and abs(number) < 10**15:
        return f"{int(number):,}" if abs(number) >= 10_000 else str(int(number))
    return f"{number:.4g}"
