"""`paceline ckpt diff`, `export` and `clean`: weights compared, and written under bare names."""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import folders, formats, weights
from paceline.checkpoint.command import SHOWN, print_json, print_table
from paceline.checkpoint.folders import folder_of, read_state
from paceline.checkpoint.formats import flatten
from paceline.ddp import find_wrappers, without_wrappers
from paceline.errors import UsageError
from paceline.files import Header, dtype_name, is_storable, plan_file
from paceline.telemetry import count_text, printable

_NAMES_SHOWN = 10


def diff(args: argparse.Namespace) -> int:
    paths = [Path(args.path), Path(args.other)]
    if args.all:
        first, second = (dict(flatten(read_state(path))) for path in paths)
    else:
        first, second = (_clean_weights(path, None, ())[0] for path in paths)
    shared = [name for name in first if name in second]
    found = {name: _difference(first[name], second[name]) for name in shared}
    differing: list[dict[str, Any]] = [
        {"name": name, "words": words, "largest": largest}
        for name, (words, largest) in sorted(found.items(), key=lambda item: -item[1][1])
        if words
    ]
    only_in = {
        "only_in_first": [name for name in first if name not in second],
        "only_in_second": [name for name in second if name not in first],
    }
    equal = len(shared) - len(differing)
    code = 1 if differing or any(only_in.values()) else 0
    if args.json:
        print_json({"equal": equal, "differing": differing, **only_in})
        return code
    print(f"{count_text(equal, 'name')} equal to the last bit, {len(differing):,} not")
    print_table([[each["name"], each["words"]] for each in differing], SHOWN)
    for path, names in zip(paths, only_in.values(), strict=True):
        if names:
            print(printable(f"only in {path}:"))
            print_table([[name] for name in names], _NAMES_SHOWN)
    return code


def _difference(first: Any, second: Any) -> tuple[str, float]:
    """How two values differ, in words, empty if they do not, and by how much at most."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        same = first == second or (first != first and second != second)
        return ("", 0.0) if same is True else (f"{first!r:.40} and {second!r:.40}", math.inf)
    if not is_storable(first) or not is_storable(second):
        return "sparse, quantized or without memory: not compared", math.inf
    if first.shape != second.shape:
        return f"shape {tuple(first.shape)} and {tuple(second.shape)}", math.inf
    kinds = [dtype_name(each) for each in (first, second)]
    prefix = "" if kinds[0] == kinds[1] else f"{kinds[0]} and {kinds[1]}, "
    # float64 represents the values of all smaller types exactly, so any two can be subtracted.
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (first, second))
    is_same = (a == b) | (a.isnan() & b.isnan())
    count = int((~is_same).sum())
    if count == 0:
        return (f"{prefix}equal values" if prefix else ""), 0.0
    gap = torch.where(is_same, 0.0, (a - b).abs())
    largest = float(gap.nan_to_num(nan=math.inf).max())
    relative = largest / max(float(a.abs().nan_to_num(posinf=0.0).max()), 1e-300)
    words = f"{prefix}{count:,} of {a.numel():,} differ, by at most {largest:.3g}"
    return f"{words} ({relative:.2g} times the largest value)", largest


def export(args: argparse.Namespace) -> int:
    path, out, kind = Path(args.path), Path(args.out), args.kind
    is_whole = args.all
    _check_out(out, args.force, kind)
    weights_only = kind == "hf" or (
        kind is None and formats.format_to_write(out) is formats.SAFETENSORS
    )
    if is_whole and (weights_only or args.prefix):
        raise UsageError(
            "--all is for files that hold more than weights, under the names they have.",
            advice="Write a .pt file or --as dcp, without --prefix.",
        )
    renamed: dict[str, str] = {}
    where = ""
    if is_whole:
        state = read_state(path, args.step)
    else:
        state, renamed, where = _clean_weights(path, args.step, args.keep, args.part)
        state = {f"{args.prefix}{name}": each for name, each in state.items()}
    if kind is None:
        formats.write_state(out, state)
    else:
        folders.write_folder(kind, out, state)
    count = sum(torch.is_tensor(each) for _, each in flatten(state))
    print(f"{count_text(count, 'tensor')} from {path}{where} written to {out}")
    print(printable(weights.renames_text(renamed)))
    return 0


def clean(args: argparse.Namespace) -> int:
    path = Path(args.path)
    if args.in_place and args.out:
        raise UsageError("--in-place and a file to write exclude each other.")
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder; checkpoints of paceline have bare names already.",
            advice="`paceline ckpt export` writes a file or a folder from one, under bare names.",
        )
    out = path if args.in_place else Path(args.out or path.with_suffix(f".clean{path.suffix}"))
    _check_out(out, args.force or args.in_place)
    state = read_state(path)
    weights.find_weights(state, path)  # raises where there are none
    renamed: dict[str, str] = {}
    cleaned = _cleaned(state, args.keep, renamed)
    if formats.format_to_write(out) is formats.SAFETENSORS:  # can store weights only
        cleaned, _ = weights.find_weights(cleaned, path)
    formats.write_state(out, cleaned)
    print(f"{path} written to {out}")
    print(printable(weights.renames_text(renamed)))
    return 0


def header_of_torch_file(path: Path) -> Header:
    """The header that a torch file's tensors would have as a safetensors file."""
    tensors = {
        name.encode("utf-8", "replace").decode(): each
        for name, each in flatten(read_state(path))
        if torch.is_tensor(each) and is_storable(each)
    }
    return plan_file(tensors).header


def _clean_weights(
    path: Path, step: int | None, keep: Sequence[str], part: str | None = None
) -> tuple[Any, dict[str, str], str]:
    """A file's weights under bare names, what was renamed, and where in the file they were."""
    tensors, where = weights.find_weights(read_state(path, step), path, part=part)
    renamed: dict[str, str] = {}
    # Our own checkpoints have bare names: a `module` in them is part of the model's own names.
    if not path.is_dir() or folder_of(path):
        tensors = _cleaned(tensors, keep, renamed)
    return tensors, renamed, where


def _cleaned(value: Any, keep: Sequence[str], renamed: dict[str, str]) -> Any:
    """The nested state with bare names in all its state dicts; adds renames to `renamed`."""
    if not formats.is_state_dict(value):
        if not isinstance(value, Mapping):
            return value
        return {key: _cleaned(each, keep, renamed) for key, each in value.items()}
    names = weights.clean_names(value.keys(), keep)
    renamed.update({old: new for old, new in names.items() if old != new})
    cleaned: Any = type(value)((names[old], each) for old, each in value.items())
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, Mapping):
        wrappers = find_wrappers(value.keys(), keep)
        cleaned._metadata = OrderedDict(
            (without_wrappers(old, wrappers), each) for old, each in versions.items()
        )
    return cleaned


def _check_out(out: Path, may_replace: bool, folder: str | None = None) -> None:
    if folder is not None:
        if out.exists():  # a folder may hold a user's other files: it is never replaced
            raise UsageError(f"{out} exists already.", advice="Name a new folder.")
        return
    formats.format_to_write(out)
    if out.exists() and not may_replace:
        raise UsageError(f"{out} exists already.", advice="Name another file, or pass --force.")
