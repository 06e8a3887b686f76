"""The command line: a table of commands, each imported only when it is called.

A command is a module with `add_arguments(parser)` and `main(args) -> exit code`. Listing them needs
no import, so `paceline --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from paceline import __version__
from paceline.errors import PacelineError, UsageError, did_you_mean

USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What the machine has no room for, which no traceback explains."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: the module of this package that implements it, and a line of help."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command("show.demo", "train, resume and report a small model on two workers"),
    "learn": Command("show.learn.command", "lessons that run the engine: predict, run, break it"),
    "run": Command("launcher.run", "run a training script on several workers"),
    "ckpt": Command("checkpoint.command", "list, verify, compare and clean checkpoints"),
    "doctor": Command("doctor", "describe this machine and check that training works"),
    "timeline": Command("telemetry.timeline", "show where each worker's time went, step by step"),
    "scale": Command("show.scaling.command", "find where the speed-up of more workers is lost"),
    "fit": Command("show.fit", "find how many samples fit into memory, and how fast each size is"),
    "speedup": Command("show.scaling.two_times", "turn two times of one job into its speed-up"),
    "policy": Command("policy.command", "plan batch size and learning rate for several workers"),
    "trace": Command("show.trace.command", "follow one batch through a training step"),
    "report": Command("show.report.page", "write a run as one HTML file"),
    "compare": Command("show.compare", "check whether two runs have the same bits"),
    "replay": Command("show.replay", "compute a recorded step again, and compare the bits"),
    "watch": Command("show.watch.command", "show a run on a live page while it trains"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # Closed by the parent process: the next file that is opened would get its number, and be
        # written to by every print.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have any bytes
    try:
        return _dispatch(arguments)
    except PacelineError as error:
        _print_error(arguments, error)
        return USAGE_ERROR if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it; Python must not report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in {*FULL, errno.EIO} and error.filename is None:
            raise
        where = f": {error.filename}" if error.filename else ""
        _print_error(arguments, PacelineError(f"{error.strerror}{where}."))
        return 1


class Parser(argparse.ArgumentParser):
    """argparse with suggestions, which leaves all arguments after a script to the script."""

    flags_may_follow = False
    """Whether our flags may also stand directly after the script, if none stand before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: list[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else list(args)
        self._typed = {argument.partition("=")[0] for argument in given}
        mine, rest = self.split(given)
        parsed, unknown = super().parse_known_args(mine, namespace)
        if self._rest_destination is not None:
            setattr(parsed, self._rest_destination, rest)
        return parsed, unknown

    @property
    def _rest_destination(self) -> str | None:
        """The destination of a script's own arguments, if the command takes a script."""
        found = (a.dest for a in self._actions if a.nargs == argparse.REMAINDER)
        return next(found, None)

    def split(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """Split into our own flags with the script's name, and the script's arguments.

        Left to itself, argparse would look for our flags among the script's, and take the value of
        a misspelt flag for the script.
        """
        if self._rest_destination is None:
            self._check_flags(arguments)
            return arguments, []
        index = 0
        while index < len(arguments) and arguments[index].startswith("-"):
            if arguments[index] == "--":
                return arguments[:index] + arguments[index + 1 : index + 2], arguments[index + 2 :]
            self._check_flags(arguments[index : index + 1])
            index += self._length(arguments[index])
        mine, rest = arguments[: index + 1], arguments[index + 1 :]
        if self.flags_may_follow and index == 0:
            while rest and self._is_flag(rest[0]):
                mine, rest = rest[: (n := self._length(rest[0]))] + mine, rest[n:]
            if len(mine) > 1 and rest[:1] == ["--"]:
                del rest[0]
        return mine, rest

    def _is_flag(self, argument: str) -> bool:
        action = self._option_string_actions.get(argument.partition("=")[0])
        return action is not None and action.dest != "help"

    def _length(self, flag: str) -> int:
        """How many arguments a flag is: its value may be the next one."""
        action = self._option_string_actions.get(flag)
        return 2 if action is not None and action.nargs != 0 else 1

    def _check_flags(self, arguments: list[str]) -> None:
        for argument in arguments:
            name = argument.partition("=")[0]
            if not name.startswith("--") or name == "--" or name in self._option_string_actions:
                continue
            known = [option for option in self._option_string_actions if "_" not in option]
            self.error(f"unknown flag {name!r}.{did_you_mean(name.replace('_', '-'), known)}")

    def error(self, message: str) -> NoReturn:
        for own in ("...", self._rest_destination):  # argparse's name for a script's own arguments
            message = message.removesuffix(f", {own}")
        if match := re.fullmatch(r"argument (\S+): (.+)", message, re.DOTALL):
            message = _explain(self._name(match[1]), match[2])
        text = message if message.startswith("-") else message[:1].upper() + message[1:]
        text = text if text.endswith((".", "?")) else f"{text}."
        raise UsageError(text, advice=f"See `{self.prog} --help`.")

    def _name(self, spellings: str) -> str:
        """An argument as it was typed; argparse names all spellings of a flag."""
        names = spellings.split("/")
        return next((name for name in names if name in self._typed), names[-1])


_KINDS = {"int": "a whole number", "float": "a number"}


def _explain(name: str, problem: str) -> str:
    """A sentence for argparse's words about a value."""
    if match := re.fullmatch(r"invalid (\w+) value: (.+)", problem, re.DOTALL):
        return f"{name} is {match[2]}, which is not {_KINDS.get(match[1], 'possible')}."
    if match := re.fullmatch(r"invalid choice: (.+) \(choose from (.+)\)", problem, re.DOTALL):
        return f"{name} is {match[1]}: use one of {match[2]}."
    if problem.startswith("ignored explicit argument"):
        return f"{name} takes no value."
    if problem == "expected one argument":
        return f"{name} needs a value."
    return f"{name}: {problem}"


def _dispatch(arguments: list[str]) -> int:
    top = _top_parser()
    if not arguments:
        top.print_help()
        return USAGE_ERROR
    name, *rest = arguments
    if name.startswith("-"):
        known = top._option_string_actions
        if name.partition("=")[0] not in known and not did_you_mean(name, known):
            advice = "Flags follow a command, as in `paceline run --workers 2 train.py`."
            raise UsageError(f"There is no command before {name!r}.", advice=advice)
        top.parse_args([name])
        top.print_help()
        return USAGE_ERROR
    if name not in COMMANDS and (name.endswith(".py") or os.path.isfile(name)):
        advice = f"To train with a script: `paceline run {shlex.join(arguments)}`."
        raise UsageError(f"{name!r} is not a command.", advice=advice)
    if name not in COMMANDS:
        raise UsageError(
            f"There is no command {name!r}.{did_you_mean(name, COMMANDS)}",
            advice=f"The commands are {', '.join(COMMANDS)}.",
        )
    module = import_module(f"paceline.{COMMANDS[name].module}")
    summary = COMMANDS[name].summary
    parser = Parser(prog=f"paceline {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    module.add_arguments(parser)
    with warnings.catch_warnings():
        # torch warns on import where NumPy is missing; nothing here needs NumPy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        warnings.showwarning = partial(_show_warning, arguments, warnings.showwarning)
        code: int = module.main(parser.parse_args(rest)) or 0
    return code


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS)) + 2
    listing = "\n".join(f"  {name:<{width}}{c.summary}" for name, c in COMMANDS.items())
    parser = Parser(
        prog="paceline",
        usage="paceline COMMAND [flags]",
        description="Data-parallel training with PyTorch: one model, many devices, every copy "
        "in step.",
        epilog=f"commands:\n{listing}\n\n`paceline COMMAND --help` says more about one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    return parser


def _show_warning(
    arguments: list[str],
    show: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    *place: Any,
    **more: Any,
) -> None:
    """Our own without the line of this package that has warned; it is none of the user's."""
    if category.__module__.startswith("paceline."):
        _print_error(arguments, message)
    else:
        show(message, category, *place, **more)


def _print_error(arguments: list[str], error: Warning | PacelineError | str) -> None:
    who = f"paceline {arguments[0]}" if arguments[:1] and arguments[0] in COMMANDS else "paceline"
    print(f"{who}: {error}", file=sys.stderr)
