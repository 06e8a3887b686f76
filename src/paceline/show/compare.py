"""`paceline compare A B`: whether two runs have the same bits, and where they first differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.files import RunFolder, read_events, read_info
from paceline.show.report.bounds import whole
from paceline.show.report.collect import check_folder
from paceline.telemetry import count_text

SHOWN = ("seed", "global_batch", "shards", "workers", "dataset_size", "device", "parameters")
"""Facts that may explain a difference, besides versions and settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the hashes that two runs with RunOptions(same_bits=True) have written: the first "
        "step and the first tensor that differ, and what else differs between the runs. Exits "
        "with 1 if they differ."
    )
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the comparison; returns 1 where bits differ."""
    one, other = (read_hashes(Path(path)) for path in args.runs)
    found = compare(one, other)
    found["settings"] = compare_settings(*(describe(Path(path)) for path in args.runs))
    print(json.dumps(found, indent=2) if args.json else "\n".join(lines_of(found)))
    return 1 if found["step"] is not None else 0


def read_hashes(path: Path) -> dict[int, dict[str, str]]:
    """By step, the hashes of a run's state; the last ones of a repeated step."""
    check_folder(path)
    found: dict[int, dict[str, str]] = {
        event["step"]: event["hashes"]
        for event in read_events(RunFolder(path))
        if event["kind"] == "hashes"
        if whole(event.get("step")) is not None and isinstance(event.get("hashes"), dict)
    }
    if not found:
        raise UsageError(
            f"{str(path)!r} has no hashes.",
            advice="They are written by a run with a folder and RunOptions(same_bits=True).",
        )
    return found


def compare(
    one: Mapping[int, Mapping[str, str]], other: Mapping[int, Mapping[str, str]]
) -> dict[str, Any]:
    """Compare the common steps: the first that differs, and the tensors that differ in it."""
    steps = sorted(one.keys() & other.keys())
    if not steps:
        raise UsageError(
            f"The runs share no step: one has {min(one)} to {max(one)}, the other {min(other)} "
            f"to {max(other)}.",
            advice="Hashes are written every 100 steps and after the last: train as many steps.",
        )
    first = next((step for step in steps if one[step] != other[step]), None)
    differs: list[str] = []
    if first is not None:
        names = dict.fromkeys([*one[first], *other[first]])
        differs = [n for n in names if one[first].get(n) != other[first].get(n)]
        differs = [n for n in differs if n != "all"] or differs
    last = max(step for step in steps if first is None or step < first) if first != steps[0] else 0
    hashes = one[steps[-1]].get("all", "")
    return {"compared": len(steps), "equal_until": last, "step": first, "tensors": differs} | {
        "hash": hashes if first is None else ""
    }


def describe(path: Path) -> dict[str, str]:
    """A run's facts, settings and versions, as one flat dictionary."""
    found = read_info(RunFolder(path))
    if found is None:
        return {}
    info = asdict(found)
    shown = {name: info[name] for name in SHOWN} | info["settings"] | info["versions"]
    return {name: str(value) for name, value in shown.items()}


def compare_settings(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, list[str]]:
    """The settings that differ, by name."""
    names = dict.fromkeys([*one, *other])
    pairs = {name: [one.get(name, "-"), other.get(name, "-")] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """The comparison as text."""
    if found["step"] is None:
        steps = count_text(found["compared"], "step")
        last, sha = found["equal_until"], found["hash"][:16]
        lines = [f"The same bits: {steps} compared, the last one {last}, SHA-256 {sha}."]
    else:
        count = len(found["tensors"])
        differ = f"{count_text(count, 'value')} {'differs' if count == 1 else 'differ'}"
        before = f"; they are equal after step {found['equal_until']}"
        lines = [
            f"Different bits after step {found['step']}{before if found['equal_until'] else ''}.",
            f"{differ}, the first of them {found['tensors'][0]!r}.",
        ]
    for name, (one, other) in found["settings"].items():
        lines.append(f"  {name}: {one} in the first, {other} in the second")
    return lines
