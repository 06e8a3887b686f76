"""Printing and saving results: a Markdown table on the terminal, JSON in a file."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import paceline


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    cells = [[str(row[column]) for column in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    print(f"\n{title}\n")
    print(_line([c.ljust(w) for c, w in zip(columns, widths, strict=True)]))
    print(_line(["-" * w for w in widths]))
    for line in cells:
        print(_line([text.ljust(w) for text, w in zip(line, widths, strict=True)]), flush=True)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def save(path: Path, command: str, results: Any) -> None:
    record = {"command": command, **circumstances(), "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nSaved to {path}")


def circumstances() -> dict[str, str]:
    """What a reader must know to judge the numbers."""
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
