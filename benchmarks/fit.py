"""Cost of `fit="auto"` when memory suffices, against `fit="off"`, and of "off" against itself.

All run in the same processes, one thread each, and alternate in intervals, as in `bits`. Intervals
are short and many, to measure half a percent; the difference between two runs without the option
is the noise.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import bits

CONTESTANTS: dict[str, dict[str, Any]] = {
    "off": {"fit": "off"},
    "off, once more": {"fit": "off"},
    "auto": {"fit": "auto"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bits.add_arguments(parser)
    parser.set_defaults(model="small-600,mlp-8.4M,gpt-17M", steps=5, rounds=60)


def main(args: argparse.Namespace) -> dict[str, Any]:
    return bits.compare(args, CONTESTANTS, digits=4)
