"""Generate parts of pages from the source: every message it raises, every public name.

A value in a message is written `…`. docs/troubleshooting.md quotes and explains some messages; a
test compares the quotes with this list, and the site shows the whole list below them. Another test
compares the list with tests/data/messages.txt, which `make messages` writes. The reference groups
names by hand, and lists names without a group at its end.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MESSAGES, NAMES = "<!-- every message -->", "<!-- every other public name -->"


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """The message of one `raise`: the class, what happened, and what to do."""

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


def as_lines(found: list[Message]) -> str:
    """One message per line, the format of tests/data/messages.txt."""
    lines = [f"{each.error}: {each.what} | {each.advice}".rstrip(" |") for each in found]
    return "".join(line.replace("\n", " / ") + "\n" for line in lines)


def _text(node: ast.expr | None) -> str:
    """A string as a user reads it, with `…` for values known only at run time."""
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


def modules(source: Path = ROOT / "src" / "paceline") -> str:
    """docs/modules.md: every module with the first sentence of its docstring, by package."""
    lines = ["# Modules", "", "Generated from the docstrings by `make modules`.", ""]
    for package in sorted({path.parent for path in source.rglob("*.py")}):
        name = str(package.relative_to(source.parent)).replace("/", ".")
        lines += [f"## {name}", "", "| module | is about |", "|---|---|"]
        for path in sorted(package.glob("*.py")):
            told = ast.get_docstring(ast.parse(path.read_text())) or ""
            first = " ".join(told.partition("\n\n")[0].split())
            lines.append(f"| `{path.stem}` | {_cell(first)} |")
        lines.append("")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the lists at the markers in a page."""
    if NAMES in markdown:
        markdown = markdown.replace(NAMES, other_names(reference()))
    return markdown.replace(MESSAGES, _table()) if MESSAGES in markdown else markdown


def interface_of(name: str) -> str:
    """The package that defines a name of `paceline`."""
    stub = (ROOT / "src" / "paceline" / "__init__.pyi").read_text()
    return str(re.search(rf"^from (\S+) import {name} as", stub, re.M)[1])  # type: ignore[index]


def reference() -> str:
    """All pages of the reference."""
    pages = sorted((ROOT / "docs").glob("reference*.md"))
    return "\n".join(page.read_text() for page in pages)


def other_names(reference: str) -> str:
    """Public names that the reference does not list yet, in its format."""
    import paceline

    homes = {name: f"{interface_of(name)}.{name}" for name in paceline.__all__ if name[0] != "_"}
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


if __name__ == "__main__":
    print(modules() if sys.argv[1:] == ["modules"] else as_lines(messages()), end="")
