"""`paceline ckpt`: a table of verbs, and those that look without loading: `ls`, `show`, `verify`.

These three start without torch. The others are in `convert`, which is loaded when asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.checkpoint import directory
from paceline.checkpoint.directory import Entry, Manifest, find_entry, find_folder
from paceline.checkpoint.files import open_file, size_of
from paceline.checkpoint.formats import SAFETENSORS, flatten, format_of
from paceline.comm.codec import put_together
from paceline.comm.documents import plain_json
from paceline.comm.safetensors import Header, Place, read_header
from paceline.errors import CheckpointError, UsageError
from paceline.observe.units import bytes_text, count_text, printable, table_lines

SHOWN = 40


VERBS = {
    "ls": "list the checkpoints in a folder",
    "show": "say what a checkpoint holds",
    "verify": "read every byte and compare it with its hash",
    "diff": "say which weights differ, and by how much",
    "export": "write the weights as a plain file",
    "clean": "take 'module.' and '_orig_mod.' out of a file's names",
}
"""What each verb does. It is a function here or in `convert`, with another for its arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline ckpt`."""
    rows = table_lines([[name, summary] for name, summary in VERBS.items()])
    parser.description = "List, show, verify, compare, export and clean checkpoints."
    parser.epilog = "verbs:\n  " + "\n  ".join(rows)
    parser.epilog += "\n\n`paceline ckpt VERB --help` says more about one of them."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", nargs="?", metavar="VERB", help=", ".join(VERBS))
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="what the verb is about"
    )
    # The parser of a verb is of the same class, which makes suggestions; `cli` is above us.
    parser.set_defaults(make_parser=type(parser))


def main(args: argparse.Namespace) -> int:
    """Do one verb; the exit code."""
    if args.verb not in VERBS:
        near = get_close_matches(args.verb or "", VERBS, n=1)
        what = "A verb is missing" if args.verb is None else f"There is no verb {args.verb!r}"
        raise UsageError(
            what + (f"; did you mean {near[0]}?" if near else "."),
            advice=f"The verbs are {', '.join(VERBS)}; see `paceline ckpt --help`.",
        )
    summary = VERBS[args.verb]
    parser = args.make_parser(
        prog=f"paceline ckpt {args.verb}", description=f"{summary[:1].upper()}{summary[1:]}."
    )
    home = home_of(args.verb)
    getattr(home, f"{args.verb}_arguments")(parser)
    code: int = getattr(home, args.verb)(parser.parse_args(args.arguments))
    return code


def home_of(verb: str) -> ModuleType:
    """The module with a verb, of which `convert` needs torch."""
    return import_module(__name__ if verb in globals() else "paceline.checkpoint.convert")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)"
    )


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", default=".", help="checkpoints, or the run around them (default: .)"
    )
    add_json(parser)


def ls(args: argparse.Namespace) -> int:
    folder = find_folder(Path(args.folder))
    if not folder.is_dir():
        raise UsageError(
            f"There is no folder {args.folder!r}.", advice="Name a run folder, or its checkpoints/."
        )
    rows = [_row(*found) for found in reversed(directory.list_manifests(folder))]
    unfinished = sum(path.name.startswith(directory.TEMPORARY) for path in folder.iterdir())
    if args.json:
        print_json({"folder": str(folder), "checkpoints": rows, "unfinished": unfinished})
        return 0
    print(f"{folder}: {count_text(len(rows), 'checkpoint')}")
    table = [["step", "saved", "size", "metric", "name"]]
    for row in rows:
        cells = ["", "", "", f"{row['name']}  DAMAGED"]
        if row["problem"] is None:
            metric = "" if row["metric"] is None else f"{row['metric']:.6g}"
            cells = [_date(row["created"]), bytes_text(row["bytes"]), metric, row["name"]]
        table.append([str(row["step"]), *cells])
    print_table(table if rows else [])
    for row in rows:
        if row["problem"] is not None:
            print(printable(f"  {row['problem']}", keep="\n"))
    if unfinished:
        print(f"  {unfinished} unfinished: being written, or to be removed by the next save")
    return 0


def _row(entry: Entry, manifest: Manifest | CheckpointError) -> dict[str, Any]:
    known: dict[str, Any] = {"step": entry.step, "name": entry.name, "path": str(entry.path)}
    if isinstance(manifest, CheckpointError):
        return {**known, "problem": str(manifest)}
    facts = {"created": manifest.created, "bytes": manifest.total_bytes, "metric": manifest.metric}
    return {**known, **facts, "problem": None}


def show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, a folder of them, or a file with weights")
    add_step(parser)
    parser.add_argument("--all", action="store_true", help=f"more than {SHOWN} lines of each kind")
    add_json(parser)


def show(args: argparse.Namespace) -> int:
    path = Path(args.path)
    limit = sys.maxsize if args.all else SHOWN
    manifest: Manifest | None = None
    values: dict[str, Any] = {}
    if path.is_dir():
        entry = find_entry(path, args.step)
        path, (manifest, header, values) = entry.path, _look(entry)
    else:
        header = _header_of(path)
    places = dict(sorted(header.places.items()))
    if args.json:
        tensors = {
            name: {"dtype": each.dtype, "shape": each.shape, "bytes": each.end - each.begin}
            for name, each in places.items()
        }
        said: dict[str, Any] = {"path": str(path), "tensors": tensors, "metadata": header.metadata}
        if manifest is not None:
            said |= {"manifest": asdict(manifest), "values": values}
        print_json(said)
        return 0
    total = bytes_text(header.data_bytes)
    print(printable(f"{path}: {count_text(len(places), 'tensor')}, {total}"))
    if manifest is not None:
        metric = "" if manifest.metric is None else f", metric {manifest.metric:.6g}"
        print(f"  step {manifest.step}, saved {_date(manifest.created)}{metric}")
        _print_values("facts", manifest.facts, limit)
        _print_values("values", values, limit)
    _print_values("metadata", header.metadata, limit)
    rows = []
    for name, place in places.items():
        shape = "x".join(map(str, place.shape)) or "scalar"
        rows.append([name, place.dtype, shape, bytes_text(place.end - place.begin)])
    print("tensors")
    print_table(rows, limit)
    return 0


def _look(entry: Entry) -> tuple[Manifest, Header, dict[str, Any]]:
    """A checkpoint's descriptions, a few kilobytes whatever its size; its files must agree."""
    with directory.open_checkpoint(entry) as checkpoint:
        skeleton = checkpoint.read_skeleton()
        with checkpoint.open(directory.TENSORS) as (file, path):
            header, _ = read_header(file, size_of(file), path, CheckpointError)
    state = put_together(
        skeleton,
        header.places,
        entry.path / directory.SKELETON,
        CheckpointError,
        lambda kind, parts: parts[0] if kind == "bytes" else f"{kind} {str(parts)[1:-1]}",
    )
    values = {name: value for name, value in flatten(state) if not isinstance(value, Place)}
    return checkpoint.manifest, header, values


def _header_of(path: Path) -> Header:
    """A safetensors file's header, or what it would be for a file that only torch can read."""
    if format_of(path) is SAFETENSORS:
        with open_file(path) as file:
            return read_header(file, size_of(file), path, CheckpointError)[0]
    from paceline.checkpoint.convert import header_of_torch_file

    return header_of_torch_file(path)


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, a folder of them, or a safetensors file")
    add_json(parser)


def verify(args: argparse.Namespace) -> int:
    path = Path(args.path)
    problem_by_path: dict[str, str | None] = {}
    if path.is_dir():
        is_one = (path / directory.MANIFEST).exists()
        entries = [] if is_one else directory.list_entries(find_folder(path))
        for entry in entries or [find_entry(path)]:
            problem_by_path[str(entry.path)] = None
            try:
                directory.verify(entry)
                _look(entry)
            except CheckpointError as error:
                problem_by_path[str(entry.path)] = str(error)
    elif format_of(path) is SAFETENSORS:
        _header_of(path)
        problem_by_path[str(path)] = None
    else:
        raise UsageError(f"{path} was written by torch.save and has no hash to compare.")
    damaged = sum(problem is not None for problem in problem_by_path.values())
    if args.json:
        print_json({"results": problem_by_path, "damaged": damaged})
        return 1 if damaged else 0
    for name, problem in problem_by_path.items():
        print(printable(f"{'good' if problem is None else 'DAMAGED':<9}{name}"))
        if problem is not None:
            print(printable(f"         {problem}", keep="\n"))
    if not path.is_dir():
        print("         Its header is sound. A safetensors file has no hash to compare.")
    return 1 if damaged else 0


def print_json(value: Any) -> None:
    print(json.dumps(plain_json(value), indent=2, allow_nan=False))


def print_table(rows: Sequence[Sequence[str]], limit: int = sys.maxsize) -> None:
    cells = [[printable(cell) for cell in row] for row in rows[:limit]]
    for line in table_lines(cells):
        print(f"  {line}")
    if len(rows) > limit:
        print(f"  and {len(rows) - limit:,} more")


def _print_values(title: str, values: Mapping[str, Any], limit: int) -> None:
    if values:
        print(title)
        print_table([[name, json.dumps(value)[:80]] for name, value in values.items()], limit)


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "at no known time"
