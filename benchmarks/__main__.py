"""`python -m benchmarks WHAT`: run one measurement, or all of them, and print the tables."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import circumstances, save

MEASUREMENTS = [
    "step",
    "first_steps",
    "update",
    "memory",
    "allreduce",
    "startup",
    "launching",
    "allocation",
    "overhead",
    "run_overhead",
    "bits",
    "fit",
    "hashes",
    "checkpoints",
    "observing",
    "watch",
    "survive",
    "islands",
    "islands_speed",
    "data_parallel",
    "single_gpu",
    "gpu_overlap",
    "nccl",
]
CPU_RESULTS = {
    "step-2-ranks": "step --ranks 2",
    "step-4-ranks": "step --ranks 4 --rounds 5",
    "update-2-ranks": "update --ranks 2 --model mlp-8.4M,gpt-17M,conv-0.1M",
    "update-4-ranks": "update --ranks 4 --model mlp-8.4M,conv-0.1M --rounds 5",
    "update-small": "update --ranks 2 --model small-600,normed-150x48 --form default",
    "memory": "memory --ranks 2",
    "allreduce": "allreduce --ranks 2",
    "startup": "startup --ranks 2",
    "allocation": "allocation",
    "overhead": "overhead",
    "run-overhead": "run_overhead --ranks 2",
    "survive": "survive",
}
GPU_RESULTS = {
    "h200-single-gpu": "single_gpu",
    "h200-overlap": "gpu_overlap",
    "h200-nccl": "nccl --ranks 2 --rounds 4 --steps 3",
}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.what == "page":
        _module("page").main(args)
        return
    for key, value in circumstances().items():
        print(f"{key}: {value}")
    if args.what in ("all", "gpu"):
        planned = CPU_RESULTS if args.what == "all" else GPU_RESULTS
        args.out.mkdir(parents=True, exist_ok=True)
        for name, command in planned.items():
            quick = " --quick" if args.quick and "--quick" in _flags(command) else ""
            _run(parser.parse_args(shlex.split(command + quick)), command + quick, args.out / name)
        return
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    _run(args, command, args.json)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in MEASUREMENTS:
        module = _module(name)
        command = commands.add_parser(name, help=_first_line(module), description=module.__doc__)
        command.add_argument("--json", type=Path, help="also save the results to this file")
        module.add_arguments(command)
    everything = {"all": "everything that needs no GPU: minutes", "gpu": "everything on one GPU"}
    for name, text in everything.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
        command.add_argument(
            "--quick", action="store_true", help="a short test that everything runs"
        )
    page = _module("page")
    page.add_arguments(commands.add_parser("page", help=_first_line(page)))
    return parser


def _run(args: argparse.Namespace, command: str, path: Path | None) -> None:
    start = time.monotonic()
    results = _module(args.what).main(args)
    print(f"\n{args.what}: {time.monotonic() - start:.0f} s")
    if path is not None:
        command = re.sub(r" --json[= ]\S+", "", command)  # the path of the results is irrelevant
        save(path.with_suffix(".json"), f"python -m benchmarks {command}", results)


def _flags(command: str) -> str:
    parser = argparse.ArgumentParser()
    _module(command.split()[0]).add_arguments(parser)
    return parser.format_help()


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def _first_line(module: Any) -> str:
    return str(module.__doc__).splitlines()[0]


if __name__ == "__main__":
    main()
