"""`paceline ckpt diff`, `export` and `clean`: weights compared, and written under bare names."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.difference import compare_states, flatten
from paceline.checkpoint.files import replace_file
from paceline.checkpoint.foreign import find_weights, is_state_dict, read_state
from paceline.checkpoint.header import Header
from paceline.checkpoint.names import clean_names, describe_renames, find_wrappers, without_wrappers
from paceline.checkpoint.printing import (
    SHOWN,
    add_step,
    count_of,
    print_json,
    print_rest,
    print_table,
    printable,
)
from paceline.checkpoint.tensors import is_storable, plan_image, storable, write_tensors
from paceline.errors import CheckpointError, UsageError


def diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a checkpoint, a folder of them, or a file with weights")
    parser.add_argument("second", help="the same, to compare with")
    parser.add_argument("--all", action="store_true", help="everything, not the weights alone")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.epilog = "Exit code 0: equal to the last bit. 1: they differ."


def diff(args: argparse.Namespace) -> int:
    paths = [Path(args.first), Path(args.second)]
    if args.all:
        states = [dict(flatten(read_state(path))) for path in paths]
    else:
        states = [_clean_weights(path, None)[0] for path in paths]
    found = compare_states(*states)
    if args.json:
        print_json(asdict(found))
        return 0 if found.is_equal else 1
    print(f"{count_of(found.equal, 'name')} equal to the last bit, {len(found.differing):,} not")
    print_table([[each.name, each.words] for each in found.differing[:SHOWN]])
    print_rest(len(found.differing) - SHOWN)
    for path, names in zip(paths, (found.only_in_first, found.only_in_second), strict=True):
        if names:
            print(printable(f"only in {path}: {', '.join(names[:10])}"))
            print_rest(len(names) - 10)
    return 0 if found.is_equal else 1


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, a folder of them, or a file with weights")
    parser.add_argument("out", help="the file to write: .safetensors, .pt or .pth")
    add_step(parser)
    parser.add_argument("--force", action="store_true", help="replace a file that exists")


def export(args: argparse.Namespace) -> int:
    out = Path(args.out)
    _check_out(out, args.force)
    weights, renamed, where = _clean_weights(Path(args.path), args.step)
    _write_state(out, weights)
    print(f"{count_of(len(weights), 'tensor')} from {args.path}{where} written to {out}")
    for line in describe_renames(renamed):
        print(printable(f"  {line}"))
    return 0


def clean_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="what torch.save wrote, or a safetensors file")
    parser.add_argument("out", nargs="?", help="the file to write (default: NAME.clean.SUFFIX)")
    parser.add_argument("--in-place", action="store_true", help="replace the file itself")
    parser.add_argument("--force", action="store_true", help="replace another file that exists")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME",
        help="a part that is really called so, such as encoder.module; may be repeated",
    )


def clean(args: argparse.Namespace) -> int:
    path = Path(args.path)
    if args.in_place and args.out:
        raise UsageError("--in-place and a file to write exclude each other.")
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder; checkpoints of paceline have bare names already.",
            advice="`paceline ckpt export` writes a file from one.",
        )
    out = path if args.in_place else Path(args.out or path.with_suffix(f".clean{path.suffix}"))
    _check_out(out, args.force or args.in_place)
    state = read_state(path)
    find_weights(state, path)  # an error where there are none
    cleaned, renamed = _clean_state(state, args.keep)
    _write_state(out, find_weights(cleaned, path).tensors if _is_safetensors(out) else cleaned)
    lines = describe_renames(renamed) or ["no name had a wrapper's part in it"]
    print(f"{count_of(len(renamed), 'name')} changed, written to {out}")
    for line in lines:
        print(printable(f"  {line}"))
    return 0


def header_of_torch_file(path: Path) -> Header:
    """What a torch file holds, as the header of a safetensors file would say it."""
    tensors = {name: each for name, each in flatten(read_state(path)) if torch.is_tensor(each)}
    plain, metadata = storable({n: each for n, each in tensors.items() if is_storable(each)})
    image = plan_image(plain, metadata)
    return Header(image.places, metadata, len(image.prefix))


def _clean_state(state: Any, keep: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """The same nested state with bare names in every state dict of it, and what was renamed."""
    renamed: dict[str, str] = {}

    def clean(value: Any) -> Any:
        if is_state_dict(value):
            new = clean_names(value.keys(), keep)
            renamed.update({old: name for old, name in new.items() if old != name})
            return _with_names(value, new, keep)
        if isinstance(value, Mapping):
            return {key: clean(each) for key, each in value.items()}
        return value

    return clean(state), renamed


def _with_names(value: Any, names: Mapping[str, str], keep: Sequence[str]) -> Any:
    """A state dict under other names, with the versions of its modules under theirs."""
    cleaned: Any = type(value)((names[old], each) for old, each in value.items())
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, Mapping):
        wrappers = find_wrappers(value.keys(), keep)
        cleaned._metadata = OrderedDict(
            (without_wrappers(old, wrappers), each) for old, each in versions.items()
        )
    return cleaned


def _clean_weights(path: Path, step: int | None) -> tuple[Any, dict[str, str], str]:
    """A file's weights under bare names, what was renamed, and where in the file they were."""
    weights = find_weights(read_state(path, step), path)
    if path.is_dir():  # ours: written under bare names, so a `module` in them is the model's own
        return weights.tensors, {}, weights.where
    cleaned, renamed = _clean_state(weights.tensors, ())
    return cleaned, renamed, weights.where


def _write_state(out: Path, state: Any) -> None:
    try:
        if _is_safetensors(out):
            tensors = {name: each for name, each in state.items() if torch.is_tensor(each)}
            write_tensors(out, tensors, {"format": "pt"})
            return
        with replace_file(out) as file, open(file, "wb", closefd=False) as stream:
            torch.save(state, stream)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}.") from error


def _is_safetensors(out: Path) -> bool:
    return out.suffix == ".safetensors"


def _check_out(out: Path, may_replace: bool) -> None:
    if out.suffix not in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        raise UsageError(
            f"{str(out)!r} does not say which kind of file to write.",
            advice="End it in .safetensors, .pt or .pth.",
        )
    if out.exists() and not may_replace:
        raise UsageError(f"{out} is there already.", advice="Name another file, or pass --force.")
