"""Find tests that depend on the wording of messages, with a copy that has other words.

    python scripts/reword_messages.py FOLDER [--everything]
    cd FOLDER && PYTHONPATH=src pytest tests/unit

copies the working tree to FOLDER and replaces three common words in every literal of an error, a
warning or a `print` there; with `--everything` in every literal of several words that is not a
docstring. A test that fails there asserts words, where it should assert class and values. Tests
that compare golden files under tests/data and quotations in docs/ are expected to fail.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = {"is": "seems", "the": "that", "pass": "hand"}
WORDS = re.compile(rf"\b(?:{'|'.join(OTHERS)})\b", re.IGNORECASE)
LEFT_OUT = (".venv", ".git", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
Position = tuple[int, int]


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    folder, *more = arguments
    home = Path(folder)
    shutil.copytree(ROOT, home, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    for path in sorted((home / "src" / "paceline").rglob("*.py")):
        path.write_text(reword(path.read_text(), everything="--everything" in more))


def reword(source: str, *, everything: bool = False) -> str:
    """The source text with other words in its messages."""
    tree = ast.parse(source)
    ranges = [*_messages(tree), *(_sentences(tree) if everything else ())]
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token in reversed(tokens):
        if token.type == tokenize.STRING and any(a <= token.start < b for a, b in ranges):
            (first, start), (last, end) = token.start, token.end
            text = lines[first - 1][:start] + _other(token.string) + lines[last - 1][end:]
            lines[first - 1 : last] = text.splitlines(keepends=True)
    return "".join(lines)


def _messages(tree: ast.AST) -> Iterator[tuple[Position, Position]]:
    """Where errors and warnings are built and sentences are printed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name.endswith(("Error", "Warning")) or name in ("warn", "print"):
                yield _range(node)


def _sentences(tree: ast.AST) -> Iterator[tuple[Position, Position]]:
    """All literals of several words that are not docstrings."""
    remarks = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if is_text and id(node) not in remarks and ast.unparse(node).count(" ") > 2:
            yield _range(node)


def _range(node: ast.expr) -> tuple[Position, Position]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _other(literal: str) -> str:
    """A literal of the source with other words, except inside the braces of an f-string."""
    if '"""' in literal:
        return literal
    is_format = "f" in literal[: min(literal.find('"') % 99, literal.find("'") % 99)]
    parts, depth = re.split(r"(\{\{|\}\}|[{}])", literal) if is_format else [literal], 0
    for number, part in enumerate(parts):
        depth += (part == "{") - (part == "}")
        if depth == 0:
            parts[number] = WORDS.sub(_replace, part)
    return "".join(parts)


def _replace(found: re.Match[str]) -> str:
    word = OTHERS[found[0].lower()]
    return word.capitalize() if found[0][0].isupper() else word


if __name__ == "__main__":
    main(sys.argv[1:])
