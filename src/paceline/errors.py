"""Every exception raised on purpose, in one tree.

    PacelineError
    ├── UsageError               the calling code: an argument or an order of calls is wrong
    │   ├── SettingError         an environment variable or a flag has an impossible value
    │   ├── NotInitializedError  there is no process group yet
    │   ├── DeviceError          a device does not exist, or tensors lie on several
    │   ├── HookError            a communication hook returned the wrong thing
    │   └── MissingLibraryError  a library that a module of Paceline's needs is not installed
    ├── DesyncError              the ranks disagree on what is being trained or reduced
    │   └── ReplicaError         parameters or buffers that should be equal are not
    ├── CheckpointError          a checkpoint or weights file is damaged, or not what it should be
    │   └── WeightsError         the weights in a file do not fit the model
    ├── NotFiniteError           a loss or a gradient is NaN or infinite
    ├── FitError                 a rank ran out of memory in a step, which is not applied
    ├── PeerError                another rank died, left, or did not arrive in time
    ├── AuditError               workers computed different bits of the same shard
    ├── WorkerError              a worker process failed; carries its traceback
    └── WireError                bytes from a file, pipe or store are malformed

A message has up to three sentences: what happened, with the values and the rank; where the first
difference is; what to do. torch raises `ValueError` for some of these mistakes and `RuntimeError`
for others, so the classes below are also one or both of them and existing handlers keep working.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

LINE_LENGTH = 500

Called = TypeVar("Called", bound=Callable[..., Any])


class PacelineError(Exception):
    """The root of the tree: `what` happened, `where` it first shows, and `advice`."""

    ends_run = False
    """Whether this ends a run that would survive the loss of a worker."""

    def __init__(self, what: str, where: str = "", advice: str = "") -> None:
        super().__init__(what, where, advice)
        self.what = what
        self.where = where
        self.advice = advice

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.where, self.advice) if part)


class UsageError(PacelineError, ValueError, RuntimeError):
    """The calling code passed something impossible, or called in an impossible order."""


class SettingError(UsageError):
    """An environment variable or a command line flag has an impossible value."""


class NotInitializedError(UsageError):
    """Something needs a process group and there is none yet."""


class DeviceError(UsageError):
    """A device does not exist, or tensors that belong together are on several devices."""


class MissingLibraryError(UsageError, ImportError):
    """A module of Paceline's needs a library of one of its extras, which is not installed."""


class HookError(UsageError, TypeError):
    """A communication hook has the wrong signature or returned the wrong thing."""


class DesyncError(PacelineError, RuntimeError):
    """The ranks disagree on what is being trained or reduced."""


class ReplicaError(DesyncError):
    """Parameters or buffers that should be equal on all ranks are not.

    It ends the run: a survivor would give the others its copy, which may be the wrong one.
    """

    ends_run = True


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint or a file with weights is damaged, missing, or not what it should be."""


class WeightsError(CheckpointError):
    """The weights in a file do not fit the model they are loaded into."""


class NotFiniteError(PacelineError, ArithmeticError):
    """A loss or a gradient is NaN or infinite; the parameters are unchanged.

    Raised on all ranks; `rank` is the one with that loss, if it is known. Computing the step again
    gives it again.
    """

    ends_run = True

    def __init__(
        self, what: str, where: str = "", advice: str = "", *, rank: int | None = None
    ) -> None:
        super().__init__(what, where, advice)
        self.rank = rank


class PeerError(PacelineError, RuntimeError):
    """Another rank died, left, or did not arrive in time."""


class FitError(PacelineError, RuntimeError):
    """A rank ran out of memory in a step, which no rank has applied.

    A run that may compute in smaller pieces does so, and raises this when a piece is one sample.
    """

    ends_run = True


class AuditError(PacelineError, ArithmeticError):
    """Workers computed different bits of the same shard; the parameters are unchanged.

    Raised on the worker that is wrong, which may be replaced. Where that is undecided, it is raised
    on all, and ends the run.
    """

    def __init__(
        self, what: str, where: str = "", advice: str = "", *, ends_run: bool = False
    ) -> None:
        super().__init__(what, where, advice)
        self.ends_run = ends_run


class WorkerError(PacelineError, RuntimeError):
    """A worker process failed: `rank` is its rank, `traceback` its traceback."""

    def __init__(
        self, what: str, where: str = "", advice: str = "", *, rank: int = -1, traceback: str = ""
    ) -> None:
        super().__init__(what, where, advice)
        self.rank = rank
        self.traceback = traceback


class WireError(PacelineError, ValueError):
    """Bytes from a file, a pipe or a store are malformed."""


def name_ranks(ranks: list[int], noun: str = "rank") -> str:
    """Ranks as a message names them: `rank 3`, or `ranks 0, 1 and 3`; or `worker 3`."""
    *most, last = map(str, ranks)
    return f"{noun}s {', '.join(most)} and {last}" if most else f"{noun} {last}"


def describe_failure(worker: int, summary: str, step: int, *, is_late: bool = False) -> str:
    """The reason of a run that an exception ended, for messages, `run.json` and the report."""
    where = " after its training was over" if is_late else f" in step {step}" if step else ""
    return f"worker {worker} failed{where}: {summary}"


def summarize(error: BaseException) -> str:
    """The first line of an exception's message, with its class."""
    return first_line(f"{type(error).__name__}: {message_of(error)}")


def message_of(error: BaseException) -> str:
    """An exception's message; empty where its own str() fails."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line(text: str) -> str:
    """The first line of a message, shortened to fit into a sentence."""
    line = text.partition("\n")[0]
    return line.rstrip(".: ") if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}…"


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it: on one line, and a class by its name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if type(value).__repr__ is object.__repr__:
        return f"a {type(value).__name__} object"
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check_whole(
    name: str, value: object, least: int = 1, or_none: bool = False, most: int = 2**63 - 1
) -> None:
    """Refuse an argument that is not a whole number from `least` up, or above `most`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    if not is_whole and not (or_none and value is None):
        is_beyond = isinstance(value, int) and value > most
        upto = f"to {most}" if is_beyond or most != 2**63 - 1 else "up"
        advice = f"Pass a whole number from {least} {upto}{', or None' if or_none else ''}."
        raise UsageError(f"{name} is {shown(value, 100)}.", advice=advice)


def check_kind(name: str, value: object, kind: Any, advice: str) -> None:
    """Refuse an argument of another type."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {shown(value)}.", advice=advice)


def check_number(
    name: str, value: Any, low: float, high: float, advice: str, *, ends: bool = False
) -> None:
    """Refuse an argument that is not a number between two; with `ends` it may be one of them."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (low < value < high or (ends and value in (low, high))):
        raise UsageError(f"{name} is {shown(value, 100)}.", advice=advice)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse an argument that is not one of the choices."""
    if value not in choices:
        meant = did_you_mean(value, [each for each in choices if isinstance(each, str)])
        advice = f"Use one of {', '.join(map(repr, choices))}."
        raise UsageError(f"{name} is {shown(value)}.{meant}", advice=advice)


def check_members(
    name: str, value: object, members: Iterable[str], advice: str, methods: Iterable[str] = ()
) -> None:
    """Refuse an object that lacks members or methods, and name them."""
    missing = [each for each in members if not hasattr(value, each)]
    lacking = [each for each in methods if not callable(getattr(value, each, None))]
    missing += [f"{each}()" for each in lacking if each not in missing]
    if missing or (methods and isinstance(value, type)):
        what = f", which has no {', '.join(missing)}" if missing else ""
        raise UsageError(f"{name} is {shown(value)}{what}.", advice=advice)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: ` Did you mean 'run'?`, or nothing."""
    if not isinstance(name, str):
        return ""
    given, known_by_lower = name.lower(), {each.lower(): each for each in known}
    near = [each for each in known_by_lower if given and each.startswith(given)]
    near = near or difflib.get_close_matches(given, known_by_lower, n=1)
    return f" Did you mean {known_by_lower[near[0]]!r}?" if near else ""


def refuse_unknown_arguments(
    renamed: Mapping[str, str] | None = None, **classes: type[Any]
) -> Callable[[Called], Called]:
    """Decorate a class or a method to suggest the name that an unknown argument meant.

    `renamed` has advice for former names; `classes` are the types of arguments that have arguments
    themselves, such as options.
    """

    def decorate(called: Called) -> Called:
        made: Any = called
        init = made.__init__ if isinstance(called, type) else made
        known = list(inspect.signature(init).parameters)[1:]
        inner_arguments = {
            name: f"{argument}={inner.__name__}({name}=...)"
            for argument, inner in classes.items()
            for name in inspect.signature(inner).parameters
        }

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() - set(known):
                advice = (
                    f"Pass {inner_arguments[name]}."
                    if name in inner_arguments
                    else (renamed or {}).get(name)
                )
                meant = "" if advice else did_you_mean(name, [*known, *inner_arguments])
                raise UsageError(
                    f"{called.__name__} has no argument {name!r}.{meant}",
                    advice=advice or f"It takes {', '.join(known)}.",
                )
            return init(self, *args, **kwargs)

        if not isinstance(called, type):
            return checked  # type: ignore[return-value]
        made.__init__ = checked
        return called

    return decorate
