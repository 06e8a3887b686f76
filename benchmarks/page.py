"""Fills docs/benchmarks.md from the committed results, between marks that stay.

<!-- begin step-2-ranks -->  tables of results/step-2-ranks.json  <!-- end step-2-ranks -->
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
RESULTS = Path(__file__).parent / "results"

_PART = re.compile(r"<!-- begin ([\w.-]+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--page", type=Path, default=PAGE)


def main(args: argparse.Namespace) -> dict[str, Any]:
    before = args.page.read_text()
    args.page.write_text(filled(before, args.results))
    print(f"Filled {args.page}")
    return {}


def filled(text: str, results: Path) -> str:
    """The page with every part replaced by what its file of results says."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        path = results / f"{name}.json"
        body = part(json.loads(path.read_text())) if path.exists() else "Not measured yet.\n"
        return f"<!-- begin {name} -->\n{body}<!-- end {name} -->"

    return _PART.sub(fill, text)


def part(record: dict[str, Any]) -> str:
    """One file of results as Markdown: where and how, then a table for each entry."""
    lines = [
        f"`{record['command']}` · {record['date']} · {record['hardware']} · {record['versions']}",
        "",
    ]
    for title, entry in record["results"].items():
        rows = entry if isinstance(entry, list) else entry["rows"]
        lines += [f"**{title}**{_facts(entry)}", "", *markdown(rows), ""]
    return "\n".join(lines)


def _facts(entry: Any) -> str:
    if isinstance(entry, list):
        return ""
    tuning = f", {entry['tuning']}" if "tuning" in entry else ""  # older results have it
    return (
        f" · {entry['ranks']} ranks with {entry['threads']} thread each · {entry['rounds']} rounds "
        f"of {entry['steps']} steps · Paceline by {entry['transport']}{tuning}"
    )
