"""How a run stops: signals ask for it, and the workers agree on the step.

The first Ctrl-C, SIGTERM or SIGHUP asks the run to stop after a step, the second ends it at once. A
SIGTERM that the launcher did not send is for one worker, where the others can do without it.
Other signals reach one worker or all of them, at different steps; all must leave after the same
one. So now and then, in the same steps everywhere, they add up what each one wants. How often
follows from numbers that are themselves agreed on: about ten times a second, and never every step
of a fast training.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dis import get_instructions, opname
from inspect import CO_GENERATOR
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline import env
from paceline.errors import CheckpointError, NotFiniteError, PeerError, describe_failure, summarize
from paceline.files import RunFolder, find_info, record_end
from paceline.group import Cadence, Membership, Pending, start_all_reduce
from paceline.telemetry import Sinks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_PRESS_S = 0.5
"""A terminal and a launcher may both pass one Ctrl-C on; so soon after the first it is the same."""
BY_SCRIPT, BY_RATING, BY_OTHERS = 1000, 1001, 1002
"""What a run may stop for besides signals, whose numbers are lower."""
PERIOD_S = 0.1
# However fast the steps are, a request is heard within so many.
MOST_STEPS = 1000


def name_signal(number: int) -> str:
    """What a person calls it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def describe_signal(number: int) -> str:
    """Why a run stops; in the words of the launcher, if that has got a signal."""
    with suppress(OSError, ValueError), open(env.signal_file(), encoding="utf-8") as file:
        return file.read() or f"stopped by {name_signal(number)}"
    return f"stopped by {name_signal(number)}"


class End(NamedTuple):
    """How a loop ended: its status is `finished`, `stopped` or `failed`."""

    status: str
    reason: str
    is_outlived: bool = False
    """Whether other workers continue, and so does the run."""


LEFT = End("stopped", "the loop was left")
UNKNOWN = BaseException("an exception or sys.exit() left the loop")


def describe_end(
    error: BaseException | None, rank: int, step: int, *, is_late: bool = False
) -> End:
    """The end of a loop that an error has left."""
    match error:
        case None | SystemExit(code=None | 0):
            return LEFT
        case _ if error is UNKNOWN:
            return End("stopped", str(UNKNOWN))
        case KeyboardInterrupt():
            return End("stopped", describe_signal(signal.SIGINT))
        case SystemExit():
            code = error.code if isinstance(error.code, int) else 1
            return End("failed", f"worker {rank} ended with exit code {code} in step {step}")
    named = getattr(error, "rank", None) if isinstance(error, NotFiniteError) else None
    worker = rank if named is None else named
    return End("failed", describe_failure(worker, summarize(error), step, is_late=is_late))


def find_thrown(frame: FrameType | None) -> BaseException | None:
    """The exception that leaves `frame`, in which a generator is closed; None at a `break`."""
    # Python tells a generator nothing of the exception that closes it. But the frame has executed
    # nothing since, and the traceback refers to it, and to the traceback the exception: from Python
    # 3.12 on. Before, `UNKNOWN` stands for it, unless it can be seen to be an exit.
    while frame is not None and opname[frame.f_code.co_code[frame.f_lasti]] != "POP_TOP":
        traces = [each for each in gc.get_referrers(frame) if type(each) is TracebackType]
        if traces and not frame.f_code.co_flags & CO_GENERATOR:
            found = [e for e in gc.get_referrers(*traces) if issubclass(type(e), BaseException)]
            known = next((e for e in found if e.__traceback__ in traces), None)
            return known or _find_exit(traces[0]) or UNKNOWN
        frame = frame.f_back if traces else None  # out of the generator of a progress bar
    return None


def _find_exit(trace: TracebackType) -> SystemExit | None:
    """What `sys.exit(code)` or `raise SystemExit(code)` at the end of a traceback is about to be.

    Of such an exit nothing is left when the program ends, unlike of an error. Its code is known if
    it is a constant or a name.
    """
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    done = [e for e in get_instructions(frame.f_code) if e.offset <= trace.tb_lasti]
    if done[-1].opname not in _CALLS:  # the last of which calls by itself in code that is warm
        return None
    for last in _CALLS:
        done = done[:-1] if done[-1].opname == last else done
    if len(done) < 2:  # a bare `raise`
        return None
    called, given = done[-2:]
    if given.opname != "LOAD_CONST" and given.argval in _EXITS:
        return SystemExit()
    is_exit = called.opname != "LOAD_CONST" and called.argval in _EXITS
    if not is_exit or given.opname not in _PLAIN_LOADS:
        return None
    names = {**frame.f_globals, **frame.f_locals}
    return SystemExit(given.argval if given.opname == "LOAD_CONST" else names.get(given.argval))


_CALLS, _EXITS = ("RAISE_VARARGS", "CALL", "PRECALL"), ("exit", "SystemExit")
_PLAIN_LOADS = ("LOAD_CONST", "LOAD_NAME", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF")


def tell_end(sinks: Sinks, end: End, rank: int, step: int) -> None:
    """Tell how a loop has ended. Where Python has not said which exception has left it, the
    terminal is told when the program ends, which is soon, unless a person sits at it."""
    if end.reason != str(UNKNOWN) or hasattr(sys, "ps1"):
        sinks.tell("stop", step, end.status, end.reason)
    elif (finish := sinks.stop_all_but_terminal(step, end.status, end.reason)) is not None:
        atexit.register(_finish, finish, rank, step, os.getpid())


def _finish(finish: Callable[..., None], rank: int, step: int, pid: int) -> None:
    if os.getpid() == pid:
        end = describe_end(getattr(sys, "last_value", UNKNOWN), rank, step)
        finish(step, end.status, end.reason)


def record_error_at_exit(
    folder: str | os.PathLike[str] | None, rank: int, step: int, *, is_late: bool
) -> None:
    """If an exception ends this program, have the folder of its newest run say so: a loop that is
    over does not know. A launcher of ours does that for its workers."""
    atexit.unregister(_record_error)
    if folder is not None and not env.read_launched().hears_of_failures:
        atexit.register(_record_error, RunFolder(folder), rank, step, os.getpid(), is_late)


def _record_error(folder: RunFolder, rank: int, step: int, pid: int, is_late: bool) -> None:
    error = getattr(sys, "last_value", None)
    if error is None and (reason := read_unsaved()):
        error = CheckpointError(reason)
    if error is None or os.getpid() != pid:
        return
    if hasattr(sys, "ps1"):  # of an interactive session this is the last error, and not the end
        return
    end, found = describe_end(error, rank, step, is_late=is_late), find_info(folder)
    if end.status != "failed" or found is None or found.failed_worker is not None:
        return
    is_primary = not isinstance(error, PeerError)
    if not is_primary and found.status != "running":  # the leader is there to say more
        return
    text = "".join(traceback.format_exception(error)) if is_primary else ""
    who = rank if is_primary else -1
    with suppress(OSError):
        record_end(folder, "failed", end.reason, worker=who, step=step, traceback=text)


def describe_unsaved(step: int, saved: int, problem: str) -> str:
    """What is said where a loop was left after `step`, and the last save is of another one."""
    advice = "Call run.save() on every worker before leaving it, to continue from there."
    text = f"The loop was left after step {step}, and step {saved} is the last that is saved."
    return f"{text} {problem or advice}"


def note_unsaved(reason: str) -> None:
    """Have this process end with a code that is not 0, for this reason; without one, no longer.

    A worker of a launcher looks at the variable. Elsewhere Python ends with 120 where a stream
    cannot be flushed in the end, which it says; nothing else changes its exit code so late.
    """
    env.put(env.UNSAVED_VARIABLE, f"{os.getpid()} {reason}" if reason else None)
    atexit.unregister(_spoil_output)
    atexit.register(_spoil_output)


def read_unsaved() -> str:
    pid, _, reason = env.read(env.UNSAVED_VARIABLE).partition(" ")
    return reason if pid == str(os.getpid()) else ""


def _spoil_output() -> None:
    if read_unsaved():
        sys.stdout = _Unsaved(sys.stdout)


class _Unsaved:
    """The standard output of a process whose last save has failed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __repr__(self) -> str:
        return "<the checkpoints of this run>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("the last steps of the run are not saved")


def not_saved(reason: str) -> CheckpointError:
    """What ends a run whose last steps no checkpoint holds."""
    return CheckpointError(
        f"The run is {reason}",
        advice="Make room and call run.save() on every worker, or start again: the run continues "
        "from its newest checkpoint.",
    )


class StopRequest:
    """Whether this worker was asked to stop, and with which signal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal = 0
        self.is_asked = False
        """Whether the script has asked, on this worker."""
        self.is_leaving = False
        """Whether this worker alone was asked, and the others can continue without it."""
        self.leave: Callable[[], bool] = lambda: False
        """Ask to be let go; False where that cannot be."""
        self.hears_of_failures = True
        """Whether no other worker can have failed without this one's knowledge."""
        self._since_s = 0.0
        self._pid = 0
        self._is_said = False
        self._say = say
        self.before: dict[int, Any] = {}
        """Who handled the signals before; empty where they are not handled here."""

    def listen(self) -> None:
        """From now on signals are requests. Only the main thread can listen."""
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        for number in SIGNALS:
            # What was started to ignore an interrupt, as by nohup, still ignores it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Put back the handlers of before; does nothing where there are none of ours."""
        while self.before:
            number, handler = self.before.popitem()
            # None: a handler that was not installed from Python cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that the script has forked: Ctrl-C reaches all, and may be one too many for
            # what loads data for the step.
            self.ignore()
            return
        now_s = time.monotonic()
        is_for_all = env.is_ending()
        if not self.signal or (self.is_leaving and is_for_all):
            self.signal, self._since_s = number, now_s
            self.is_leaving = number == signal.SIGTERM and not is_for_all and self.leave()
            self._is_said = False
            if not self.is_leaving:
                # Another one ends the process even where Python, about to sleep, does not see it.
                for other in self.before.keys() - {number}:
                    signal.signal(other, signal.SIG_DFL)
            if number == signal.SIGINT or self.hears_of_failures:
                self.say()
        elif number != self.signal or now_s - self._since_s > SAME_PRESS_S:
            self.ignore()
            # No handler: whatever hangs, this ends it, with the right exit code.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def say(self) -> None:
        """Say once what will be done, where a step can be finished: when no worker has failed.

        Other launchers do not tell, and end the others with SIGTERM; so this is said later there.
        """
        if self.signal and not self._is_said:
            self._is_said = True
            if not self.is_leaving and not env.has_failed_peer():
                name = name_signal(self.signal)
                self._say(f"{name}: finishing the step and saving; once more ends it at once.")


def _hold_sigterm() -> None:
    """Before a fork: Python forgets signals that reach the child before its first line."""
    held = {signal.SIGTERM} if _is_sigterm_ours() else set()
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, held)


def _let_sigterm_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _obey_sigterm() -> None:
    """In a process that the script has forked, such as one of a pool: who ends one means it."""
    # A handler of Python's would not be called where the signal comes just before a wait.
    if _is_sigterm_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_sigterm_through()


def _is_sigterm_ours() -> bool:
    return getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is StopRequest._on_signal


_forking = threading.local()
os.register_at_fork(
    before=_hold_sigterm, after_in_parent=_let_sigterm_through, after_in_child=_obey_sigterm
)


class Requests(NamedTuple):
    """What was asked of this worker, or the sum of that over all workers."""

    interrupt: float = 0.0
    """How many were asked to stop by SIGINT."""
    terminate: float = 0.0
    hangup: float = 0.0
    """How many by SIGTERM, and by SIGHUP."""
    generation: float = 0.0
    """How many have heard of a generation that begins between two steps."""
    record: float = 0.0
    """How many were asked to record the next step."""
    stop: float = 0.0
    """How many were asked to stop by their script."""
    leaving: float = 0.0
    """How many were asked to leave alone. Where that is all of them, it was meant for the run."""
    save: float = 0.0
    evaluation: float = 0.0
    """How many have a callback that asks for it."""

    @property
    def number(self) -> int:
        """The signal that stops all workers, the same on each of them; 0 for none."""
        if self.terminate or self.hangup:
            return signal.SIGTERM if self.terminate else signal.SIGHUP
        return signal.SIGINT if self.interrupt else 0


class Vote:
    """Adds up requests in some steps, the same on every worker.

        start, when gradients have arrived --(optimizer)--> result, after the commit

    All workers have just waited for each other when it starts, and the sum travels while they
    update their parameters, so none waits for it. Where it has to travel through a GPU, its
    result is read one step later.
    """

    def __init__(self, membership: Membership, request: StopRequest) -> None:
        self.cadence = Cadence(membership)
        self._membership, self._request = membership, request
        self.is_due: Callable[[], bool] = lambda: False
        """Whether a new generation waits to be joined."""
        self.is_asked_to_record: Callable[[], bool] = lambda: False
        self.asked: set[str] = set()
        """What callbacks on this worker have asked for: `save`, `evaluation`."""
        self._told: set[str] = set()
        """What of it the vote has that is under way."""
        self._last_s, self._last_step = time.monotonic(), 0
        self._period = 1
        """How many steps after the last vote this one is."""
        self.pending: tuple[int, Tensor, Pending] | None = None
        """The vote whose result was not asked for yet."""

    def start(self, step: int) -> None:
        """Say what this worker wants, if it is time to; called by several workers only."""
        members = self._membership
        if self.pending is not None or not self.cadence.is_due(step):
            return
        now_s = time.monotonic()
        step_s = (now_s - self._last_s) / max(1, step - self._last_step)
        self._last_s, self._last_step = now_s, step
        mine = [*self._own(), step_s]
        words = torch.tensor(mine, dtype=torch.float32, device=members.word_device)
        what = f"Step {step}: asking whether to stop"
        self.pending = step, words, start_all_reduce(members.group, words, what)

    def result(self, step: int) -> Requests:
        """What all workers want, where that is known; alone, what this one wants."""
        if self.pending is None:
            own = self._own()
            self.asked -= self._told
            return own
        started, words, reduction = self.pending
        if started == step and words.device.type != "cpu":
            return Requests()
        self.pending = None
        reduction.wait()
        self.asked -= self._told
        *requests, seconds = words.tolist()
        step_s = max(seconds / self._membership.size, 1e-6)
        # At most doubled: steps in which nothing is waited for say little about how long others
        # take, and nothing is heard before the next vote.
        wanted = max(1, int(PERIOD_S / step_s))
        self._period = min(MOST_STEPS, 2 * self._period, wanted)
        self.cadence.agree(step, self._period)
        return Requests(*requests)

    def _own(self) -> Requests:
        """What this worker wants; asked when no other has failed."""
        self._request.say()
        number = self._request.signal
        if self._request.is_leaving and self._membership.size > 1:
            number = 0
        self._told = set(self.asked)
        return Requests(
            float(number == signal.SIGINT),
            float(number == signal.SIGTERM),
            float(number == signal.SIGHUP),
            float(self.is_due()),
            # The folder, in which a person asks, may be on rank 0's disk alone.
            float(self._membership.leads and self.is_asked_to_record()),
            float(self._request.is_asked),
            float(self._request.is_leaving),
            float("save" in self._told),
            float("evaluation" in self._told),
        )

    def on_generation(self) -> None:
        """What was asked in another generation gets no answer."""
        self.pending, self._period = None, 1
