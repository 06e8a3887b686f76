"""Fill docs/benchmarks.md and docs/claims.md from the committed results.

<!-- begin step-2-ranks -->  tables of results/step-2-ranks.json  <!-- end step-2-ranks -->

A row of claims names the number it shows: result · entry · row · column.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
CLAIMS = PAGE.with_name("claims.md")
RESULTS = Path(__file__).parent / "results"

_PART = re.compile(r"<!-- begin ([\w.-]+) -->\n.*?<!-- end \1 -->", re.DOTALL)
_CLAIM = re.compile(r"^(\| .* \| )-?[\d.]+( \| ([\w-]+) · (.+) · (.+) · (.+) \|)$", re.MULTILINE)
_COMMAND = re.compile(r"^(\| \[([\w-]+)\]\(.*\) \| ).* \|$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--page", type=Path, default=PAGE)


def main(args: argparse.Namespace) -> dict[str, Any]:
    before = args.page.read_text()
    args.page.write_text(filled(before, args.results))
    CLAIMS.write_text(claimed(CLAIMS.read_text(), args.results))
    print(f"Filled {args.page} and {CLAIMS}")
    return {}


def filled(text: str, results: Path) -> str:
    """The page with every part replaced from its file of results."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        path = results / f"{name}.json"
        body = part(json.loads(path.read_text())) if path.exists() else "Not measured yet.\n"
        return f"<!-- begin {name} -->\n{body}<!-- end {name} -->"

    return _PART.sub(fill, text)


def claimed(text: str, results: Path) -> str:
    """The page of claims with every number and command taken from the results."""

    def number(match: re.Match[str]) -> str:
        begin, end, name, entry, row, column = match.groups()
        found = json.loads((results / f"{name}.json").read_text())["results"][entry]
        rows = found if isinstance(found, list) else found["rows"]
        value = next(each[column] for each in rows if str(next(iter(each.values()))) == row)
        return f"{begin}{value:g}{end}"

    def command(match: re.Match[str]) -> str:
        record = json.loads((results / f"{match[2]}.json").read_text())
        return f"{match[1]}`{record['command']}` | {record['hardware']}, {record['date']} |"

    return _COMMAND.sub(command, _CLAIM.sub(number, text))


def part(record: dict[str, Any]) -> str:
    """One file of results as Markdown: the circumstances, then a table for each entry."""
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
