"""Print and save results: a Markdown table on the terminal, JSON in a file."""

from __future__ import annotations

import difflib
import json
import os
import platform
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import paceline


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n")
    print("\n".join(markdown(rows)), flush=True)


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as lines of a table; a cell that a row does not have is empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    marks = [
        "-" * (w - 1) + ":" if all(_is_number(row.get(c, 0)) for row in rows) else "-" * w
        for c, w in zip(columns, widths, strict=True)
    ]
    table = [columns, marks, *cells]
    return [_line([t.ljust(w) for t, w in zip(line, widths, strict=True)]) for line in table]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def read_names(text: str, known: Iterable[str]) -> list[str]:
    """The names in a flag: `all`, or known names separated by commas."""
    known = list(known)
    names = known if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            sys.exit(f"There is no {name!r}.{hint} There are: {', '.join(known)}.")
    return names


def save(path: Path, command: str, results: Any) -> None:
    record = {"command": command, **circumstances(), "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nSaved to {path}")


def circumstances() -> dict[str, str]:
    """Hardware, versions and date, for judging the numbers."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{device}, {os.cpu_count()} cores",
        "versions": f"paceline {paceline.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
