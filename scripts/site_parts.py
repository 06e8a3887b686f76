"""Parts of pages that are made from the source: every message it raises, every public name.

A value in a message is written `…`. The page of errors quotes messages by hand and explains them; a
test compares the quotes with this list, and the site shows the whole list below them. The reference
groups names by hand, and has those that nobody has grouped yet at its end.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MESSAGES, NAMES = "<!-- every message -->", "<!-- every other public name -->"


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """What one `raise` says: the class, what happened, and what to do."""

    error: str
    what: str
    advice: str


def messages(source: Path = ROOT / "src" / "paceline") -> list[Message]:
    """All messages in the source, by class."""
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Name(name), [first, *more]) if name.endswith("Error"):
                    named = {each.arg: each.value for each in node.keywords}
                    what, advice = _text(first), _text(named.get("advice", (*more, None, None)[1]))
                    if re.search(r"\w{2,}.*\w{2,}", what):
                        found.add(Message(name, what, advice))
    return sorted(found)


def _text(node: ast.expr | None) -> str:
    """A string as it will be read, with `…` for what is only known then."""
    match node:
        case ast.Constant(str(value)):
            return value
        case ast.JoinedStr(parts):
            return "".join("…" if isinstance(p, ast.FormattedValue) else _text(p) for p in parts)
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
        case None:
            return ""
    return "…"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the lists where a page wants them."""
    if NAMES in markdown:
        markdown = markdown.replace(NAMES, other_names(markdown))
    return markdown.replace(MESSAGES, _table()) if MESSAGES in markdown else markdown


def other_names(reference: str) -> str:
    """What `paceline` offers and the reference has not named, as it would name it."""
    import paceline

    homes = {name: f"{home}.{name}" for name, home in paceline._HOME_BY_NAME.items()}
    listed = set(re.findall(r"^::: (\S+)", reference, re.M))
    missing = [home for name, home in homes.items() if not listed & {home, f"paceline.{name}"}]
    return "\n".join(f"::: {home}" for home in missing)


def _table() -> str:
    rows = ["| error | says | do |", "|---|---|---|"]
    for each in messages():
        if each.error not in ("ValueError", "TypeError", "RuntimeError", "OSError"):
            cells = (each.error, each.what, each.advice)
            rows.append("| " + " | ".join(_cell(text) for text in cells) + " |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", text.replace("\n", " "))
