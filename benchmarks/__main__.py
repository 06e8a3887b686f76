"""`python -m benchmarks WHAT`: run one measurement and print its table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import data_parallel, overhead, single_gpu, step
from benchmarks.tables import circumstances, save

MEASUREMENTS = {
    "data_parallel": data_parallel,
    "overhead": overhead,
    "single_gpu": single_gpu,
    "step": step,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, module in MEASUREMENTS.items():
        command = commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        command.add_argument("--json", type=Path, help="also save the results to this file")
        module.add_arguments(command)
    args = parser.parse_args()
    for key, value in circumstances().items():
        print(f"{key}: {value}")
    results = MEASUREMENTS[args.what].main(args)
    if args.json:
        save(args.json, f"python -m benchmarks {' '.join(sys.argv[1:])}", results)


if __name__ == "__main__":
    main()
