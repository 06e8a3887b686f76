"""`paceline ckpt`: the table of its verbs, and those without torch: `ls`, `show`, `verify`.

These three start without torch. The others are in `convert`, which is loaded when needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.checkpoint import directory
from paceline.checkpoint.directory import CheckpointEntry, Manifest, find_entry, find_folder
from paceline.checkpoint.files import open_file, size_of
from paceline.checkpoint.folders import FOLDERS, folder_of, hf_files
from paceline.checkpoint.formats import SAFETENSORS, flatten, format_of
from paceline.errors import CheckpointError, UsageError, did_you_mean
from paceline.files import Header, TensorPlace, plain_json, read_header, restore_tensors
from paceline.telemetry import bytes_text, count_text, printable, shape_text, table_lines

SHOWN = 40
MOST_LISTED = 1000
"""How many manifests `ls` reads, the newest first: these take a second or two."""

VERBS = {
    "ls": ("list the checkpoints in a folder", "folder --json"),
    "show": ("list what a checkpoint contains", "path --step --all --json"),
    "verify": ("read every byte and compare it with its hash", "path --json"),
    "diff": ("list the weights that differ, and by how much", "path other --all --json"),
    "export": (
        "write the weights as a file, or as a folder of DCP or Hugging Face",
        "path out --as --prefix --keep --part --all --step --force",
    ),
    "clean": (
        "remove 'module.' and '_orig_mod.' from a file's names",
        "path [out] --in-place --force --keep",
    ),
}
"""What each verb does, and its arguments. The verb is a function, here or in `convert`."""
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "folder": {"nargs": "?", "default": ".", "help": "a folder of checkpoints, or a run folder"},
    "path": {
        "help": "a checkpoint, a folder of them, a folder of DCP or Hugging Face, or a file with "
        "weights"
    },
    "other": {"help": "what to compare with; exit code 1 where they differ"},
    "out": {"help": "the file to write: .safetensors, .pt or .pth; with --as, the folder"},
    "--as": {
        "dest": "kind",
        "choices": list(FOLDERS),
        "help": "write a folder: dcp for torch.distributed.checkpoint, hf for Hugging Face",
    },
    "--prefix": {
        "default": "",
        "choices": ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."],
        "help": "put this before every name, to load into a wrapped or compiled model",
    },
    "--part": {"metavar": "NAME", "help": "which weights, where there are several, such as ema"},
    "--step": {
        "type": int,
        "metavar": "N",
        "help": "the checkpoint of this step (default: the newest)",
    },
    "--all": {"action": "store_true", "help": "everything, not only the weights or first lines"},
    "--json": {"action": "store_true", "help": "print JSON instead of text"},
    "--force": {"action": "store_true", "help": "replace another file that exists"},
    "--in-place": {"action": "store_true", "help": "replace the file itself"},
    "--keep": {
        "action": "append",
        "default": [],
        "metavar": "NAME",
        "help": "a part whose name is meant, such as encoder.module; may be repeated",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline ckpt`."""
    rows = table_lines([[name, summary] for name, (summary, _) in VERBS.items()])
    parser.description = "List, show, verify, compare, export and clean checkpoints."
    parser.epilog = "verbs:\n  " + "\n  ".join(rows)
    parser.epilog += "\n\n`paceline ckpt VERB --help` says more about one of them."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", nargs="?", metavar="VERB", help=", ".join(VERBS))
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the verb's arguments"
    )
    # A verb's parser has the same class, which suggests names; `cli` may not be imported here.
    parser.set_defaults(make_parser=type(parser))


def main(args: argparse.Namespace) -> int:
    """Run one verb; returns the exit code."""
    if args.verb not in VERBS:
        what = "A verb is missing" if args.verb is None else f"There is no verb {args.verb!r}"
        raise UsageError(
            f"{what}.{did_you_mean(args.verb, VERBS)}",
            advice=f"The verbs are {', '.join(VERBS)}; see `paceline ckpt --help`.",
        )
    parser = args.make_parser(
        prog=f"paceline ckpt {args.verb}", description=f"{VERBS[args.verb][0].capitalize()}."
    )
    declare(args.verb, parser)
    home = __name__ if args.verb in ("ls", "show", "verify") else "paceline.checkpoint.convert"
    code: int = getattr(import_module(home), args.verb)(parser.parse_args(args.arguments))
    return code


def declare(verb: str, parser: argparse.ArgumentParser) -> None:
    """Declare a verb's arguments."""
    for name in VERBS[verb][1].split():
        optional: dict[str, Any] = {"nargs": "?"} if name.startswith("[") else {}
        parser.add_argument(name.strip("[]"), **_ARGUMENTS[name.strip("[]")], **optional)


def ls(args: argparse.Namespace) -> int:
    folder = find_folder(Path(args.folder))
    if not folder.is_dir():
        raise UsageError(
            f"There is no folder {args.folder!r}.", advice="Name a run folder, or its checkpoints/."
        )
    unfinished = sum(path.name.startswith(directory.TEMPORARY) for path in folder.iterdir())
    rows: list[dict[str, Any]] = []
    table = [["step", "saved", "size", "metric", "name"]]
    older = max(0, len(directory.list_entries(folder)) - MOST_LISTED)
    for entry, found in reversed(directory.list_manifests(folder, MOST_LISTED)):
        rows.append({"step": entry.step, "name": entry.name, "path": str(entry.path)})
        if isinstance(found, CheckpointError):
            rows[-1] |= {"problem": str(found)}
            cells = ["", "", "", f"{entry.name}  DAMAGED: {found.what}"]
        else:
            facts = {"created": found.created, "bytes": found.total_bytes, "metric": found.metric}
            rows[-1] |= {**facts, "problem": None}
            metric = "" if found.metric is None else f"{found.metric:.6g}"
            cells = [_date(found.created), bytes_text(found.total_bytes), metric, entry.name]
        table.append([str(entry.step), *cells])
    if args.json:
        counts = {"unfinished": unfinished, "older": older}
        print_json({"folder": str(folder), "checkpoints": rows, **counts})
        return 0
    print(f"{folder}: {count_text(len(rows) + older, 'checkpoint')}")
    if older:
        print(f"  {older} are older than these")
    print_table(table if rows else [])
    if unfinished:
        print(f"  {unfinished} unfinished: being written, or to be removed by the next save")
    return 0


def show(args: argparse.Namespace) -> int:
    path = Path(args.path)
    shown: dict[str, Any] = {"path": str(path)}
    if path.is_dir() and folder_of(path) is None:
        entry = find_entry(path, args.step)
        manifest, header, values = _read_descriptions(entry)
        shown = {"path": str(entry.path), "manifest": asdict(manifest), "values": values}
    else:
        manifest, header = None, _header_of(path)
    shown["metadata"] = header.metadata
    shown["tensors"] = {
        name: {"dtype": each.dtype, "shape": each.shape, "bytes": each.nbytes}
        for name, each in sorted(header.places.items())
    }
    if args.json:
        print_json(shown)
        return 0
    count = count_text(len(header.places), "tensor")
    size = bytes_text(sum(each.nbytes for each in header.places.values()))
    print(printable(f"{shown['path']}: {count}, {size}"))
    if manifest is not None:
        metric = "" if manifest.metric is None else f", metric {manifest.metric:.6g}"
        print(f"  step {manifest.step}, saved {_date(manifest.created)}{metric}")
        shown["facts"] = manifest.facts
    limit = sys.maxsize if args.all else SHOWN
    for title in ("facts", "values", "metadata"):
        if shown.get(title):
            print(title)
            rows = [[name, json.dumps(value)[:80]] for name, value in shown[title].items()]
            print_table(rows, limit)
    print("tensors")
    rows = [
        [name, each["dtype"], shape_text(each["shape"]), bytes_text(each["bytes"])]
        for name, each in shown["tensors"].items()
    ]
    print_table(rows, limit)
    return 0


def _read_descriptions(entry: CheckpointEntry) -> tuple[Manifest, Header, dict[str, Any]]:
    """A checkpoint's manifest, header and values, without its tensors; its files must agree."""
    with directory.open_checkpoint(entry) as checkpoint:
        skeleton = checkpoint.read_skeleton()
        with checkpoint.open(directory.TENSORS) as (file, path):
            header, _ = read_header(file, size_of(file), path, CheckpointError)
    state = restore_tensors(
        skeleton,
        header.places,
        entry.path / directory.SKELETON,
        CheckpointError,
        lambda kind, parts: parts[0] if kind == "bytes" else f"{kind} {str(parts)[1:-1]}",
    )
    values = {name: value for name, value in flatten(state) if not isinstance(value, TensorPlace)}
    return checkpoint.manifest, header, values


def _header_of(path: Path) -> Header:
    """A safetensors file's header; for a file that only torch can read, an equivalent one."""
    files = hf_files(path)[0] if path.is_dir() else [path]
    if files and all(format_of(each) is SAFETENSORS for each in files):
        headers = []
        for each in files:
            with open_file(each) as file:
                headers.append(read_header(file, size_of(file), each, CheckpointError)[0])
        places = {name: place for header in headers for name, place in header.places.items()}
        return Header(places, headers[0].metadata)
    from paceline.checkpoint.convert import header_of_torch_file

    return header_of_torch_file(path)


def verify(args: argparse.Namespace) -> int:
    path = Path(args.path)
    results: dict[str, str | None] = {}
    kind = folder_of(path)
    if kind is not None:
        raise UsageError(
            f"{path} is {kind.title}, which has no hash to compare.",
            advice="`paceline ckpt diff` reads every byte and compares it with another.",
        )
    if path.is_dir():
        is_one = (path / directory.MANIFEST).exists()
        entries = [] if is_one else directory.list_entries(find_folder(path))
        for entry in entries or [find_entry(path)]:
            results[str(entry.path)] = None
            try:
                directory.verify(entry)
                _read_descriptions(entry)
            except CheckpointError as error:
                results[str(entry.path)] = str(error)
    elif format_of(path) is SAFETENSORS:
        _header_of(path)
        results[str(path)] = None
    else:
        raise UsageError(f"{path} was written by torch.save and has no hash to compare.")
    damaged = sum(problem is not None for problem in results.values())
    if args.json:
        print_json({"results": results, "damaged": damaged})
        return 1 if damaged else 0
    good = "good" if path.is_dir() else "its header is valid; it has no hash to compare:"
    for name, problem in results.items():
        print(printable(f"{good}  {name}" if problem is None else f"DAMAGED  {name}"))
        if problem is not None:
            print(printable(f"  {problem}", keep="\n"))
    return 1 if damaged else 0


def print_json(value: Any) -> None:
    print(json.dumps(plain_json(value), indent=2, allow_nan=False))


def print_table(rows: Sequence[Sequence[str]], limit: int = sys.maxsize) -> None:
    cells = [[printable(cell) for cell in row] for row in rows[:limit]]
    for line in table_lines(cells):
        print(f"  {line}")
    if len(rows) > limit:
        print(f"  and {len(rows) - limit:,} more")


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "unknown"
