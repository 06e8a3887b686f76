"""What `fit="auto"` costs where memory suffices, beside `fit="off"`, and that beside itself.

All live in the same processes, one thread each, and take turns stretch by stretch, as in `bits`.
Stretches are short and many: half a percent is asked for, and what a run without the option comes
to against its twin says how much of the difference is the machine's.
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
