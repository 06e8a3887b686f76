"""`paceline ckpt ls`, `show` and `verify`: what is there, what it holds, whether it is sound.

Start without torch, and look at files without loading them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.checkpoint.directory import (
    TEMPORARY,
    Entry,
    find_entry,
    find_folder,
    list_entries,
    opened,
)
from paceline.checkpoint.header import Header
from paceline.checkpoint.manifest import FILE_NAME
from paceline.checkpoint.outline import (
    Outline,
    is_written_by_torch,
    read_file_header,
    read_outline,
    verify_fully,
)
from paceline.checkpoint.printing import (
    SHOWN,
    add_step,
    count_of,
    date_of,
    print_json,
    print_rest,
    print_table,
    print_values,
    printable,
    size_of,
)
from paceline.errors import CheckpointError, UsageError


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", default=".", help="checkpoints, or the run around them (default: .)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def ls(args: argparse.Namespace) -> int:
    folder = find_folder(Path(args.folder))
    if not folder.is_dir():
        raise UsageError(f"There is no folder {args.folder!r}.")
    rows = [_describe(entry) for entry in reversed(list_entries(folder))]
    unfinished = sum(path.name.startswith(TEMPORARY) for path in folder.iterdir())
    if args.json:
        print_json({"folder": str(folder), "checkpoints": rows, "unfinished": unfinished})
        return 0
    print(f"{folder}: {count_of(len(rows), 'checkpoint')}")
    table = [["step", "saved", "size", "metric", "name"]]
    for row in rows:
        if row["problem"]:
            table.append([str(row["step"]), "", "", "", f"{row['name']}  DAMAGED"])
        else:
            metric = "" if row["metric"] is None else f"{row['metric']:.6g}"
            size = size_of(row["bytes"])
            table.append([str(row["step"]), date_of(row["created"]), size, metric, row["name"]])
    if rows:
        print_table(table)
    for row in rows:
        if row["problem"]:
            print(printable(f"  {row['problem']}"))
    if unfinished:
        print(f"  {unfinished} unfinished: being written, or to be removed by the next save")
    return 0


def _describe(entry: Entry) -> dict[str, Any]:
    known: dict[str, Any] = {"step": entry.step, "name": entry.name, "path": str(entry.path)}
    try:
        with opened(entry) as (_, manifest):
            return {
                **known,
                "created": manifest.created,
                "bytes": manifest.total_bytes,
                "metric": manifest.metric,
                "problem": None,
            }
    except CheckpointError as error:
        return {**known, "problem": str(error)}


def show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, a folder of them, or a file with weights")
    add_step(parser)
    parser.add_argument("--all", action="store_true", help=f"more than {SHOWN} lines of each kind")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def show(args: argparse.Namespace) -> int:
    path = Path(args.path)
    limit = sys.maxsize if args.all else SHOWN
    outline: Outline | None = None
    if path.is_dir():
        entry = find_entry(path, args.step)
        outline = read_outline(entry)
        header, path = outline.header, entry.path
    else:
        header = _header_of_any(path)
    tensors: dict[str, dict[str, Any]] = {
        name: {"dtype": place.dtype, "shape": list(place.shape), "bytes": place.end - place.begin}
        for name, place in sorted(header.places.items())
    }
    if args.json:
        said = {"path": str(path), "tensors": tensors, "metadata": header.metadata}
        if outline is not None:
            said |= {"manifest": asdict(outline.manifest), "values": outline.values}
        print_json(said)
        return 0
    print(printable(f"{path}: {count_of(len(tensors), 'tensor')}, {size_of(header.data_bytes)}"))
    if outline is not None:
        manifest = outline.manifest
        print(
            f"  step {manifest.step}, saved {date_of(manifest.created)}, metric {manifest.metric}"
        )
        print_values("facts", manifest.facts, limit)
        print_values("values", outline.values, limit)
    print_values("metadata", header.metadata, limit)
    rows = [
        [
            name,
            facts["dtype"],
            "x".join(map(str, facts["shape"])) or "scalar",
            size_of(facts["bytes"]),
        ]
        for name, facts in tensors.items()
    ]
    print("tensors")
    print_table(rows[:limit])
    print_rest(len(rows) - limit)
    return 0


def _header_of_any(path: Path) -> Header:
    """A safetensors file's header, or what it would be for a file that only torch can read."""
    if not is_written_by_torch(path):
        return read_file_header(path)
    from paceline.checkpoint.convert import header_of_torch_file

    return header_of_torch_file(path)


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, a folder of them, or a safetensors file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def verify(args: argparse.Namespace) -> int:
    path = Path(args.path)
    results: dict[str, str | None] = {}
    if path.is_dir():
        folder = find_folder(path)
        entries = list_entries(folder) if not (path / FILE_NAME).exists() else []
        for entry in entries or [find_entry(path)]:
            results[str(entry.path)] = _problem_of(entry)
    elif is_written_by_torch(path):
        raise UsageError(f"{path} was written by torch.save and has no hash to compare.")
    else:
        read_file_header(path)
        results[str(path)] = None
    damaged = sum(problem is not None for problem in results.values())
    if args.json:
        print_json({"results": results, "damaged": damaged})
        return 1 if damaged else 0
    for name, problem in results.items():
        print(printable(f"{'good' if problem is None else 'DAMAGED':<9}{name}"))
        if problem is not None:
            print(printable(f"         {problem}"))
    if not path.is_dir():
        print("         Its header is sound. A safetensors file has no hash to compare.")
    return 1 if damaged else 0


def _problem_of(entry: Entry) -> str | None:
    try:
        verify_fully(entry)
    except CheckpointError as error:
        return str(error)
    return None
