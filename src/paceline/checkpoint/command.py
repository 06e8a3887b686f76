"""`paceline ckpt`: a table of verbs, each loaded only when it is asked for.

`ls`, `show` and `verify` start without torch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing that `paceline ckpt` does."""

    module: str
    summary: str


_LOOK = "paceline.checkpoint.look"
_CONVERT = "paceline.checkpoint.convert"
VERBS = {
    "ls": Verb(_LOOK, "list the checkpoints in a folder"),
    "show": Verb(_LOOK, "say what a checkpoint holds"),
    "verify": Verb(_LOOK, "read every byte and compare it with its hash"),
    "diff": Verb(_CONVERT, "say which weights differ, and by how much"),
    "export": Verb(_CONVERT, "write the weights as a plain file"),
    "clean": Verb(_CONVERT, "take 'module.' and '_orig_mod.' out of a file's names"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline ckpt`."""
    width = max(map(len, VERBS)) + 2
    parser.description = "List, show, verify, compare, export and clean checkpoints."
    parser.epilog = "\n".join(
        [
            "verbs:",
            *(f"  {name:<{width}}{verb.summary}" for name, verb in VERBS.items()),
            "",
            "`paceline ckpt VERB --help` says more about one of them.",
        ]
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", metavar="VERB", choices=list(VERBS), help=", ".join(VERBS))
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="what the verb is about"
    )
    # The parser of a verb is of the same class, which makes suggestions; `cli` is above us.
    parser.set_defaults(make_parser=type(parser))


def main(args: argparse.Namespace) -> int:
    """Do one verb; the exit code."""
    verb = VERBS[args.verb]
    parser = args.make_parser(
        prog=f"paceline ckpt {args.verb}",
        description=f"{verb.summary[:1].upper()}{verb.summary[1:]}.",
    )
    home = import_module(verb.module)
    getattr(home, f"{args.verb}_arguments")(parser)
    code: int = getattr(home, args.verb)(parser.parse_args(args.arguments))
    return code
