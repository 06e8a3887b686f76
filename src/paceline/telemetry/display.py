"""`Progress`: shows a run on a terminal, as a bar, as lines or as JSON.

The life of one: `start`, then `step` for every step, `epoch` and `evaluation` when they end,
`message` at any time and from any thread, `finish` once. A step that is not shown costs one reading
of the clock.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from paceline.errors import SettingError
from paceline.files import plain_json
from paceline.telemetry import text
from paceline.telemetry.screen import (
    RunStatus,
    Screen,
    ScreenPipe,
    TerminalSettings,
    columns_of,
    descriptor,
    encode,
    has_rich,
    read_screen,
    read_terminal,
    terminal_of,
    write_bytes,
)
from paceline.telemetry.text import ProgressState, wrapped
from paceline.telemetry.units import printable

Metrics = Mapping[str, float] | Callable[[], Mapping[str, float]]
"""Numbers by name, or a function that returns them: it is called only when they will be shown."""

MODES = ("auto", "bar", "plain", "json", "quiet")
_STEP_S = {"bar": 0.2, "plain": 10.0, "json": 1.0, "quiet": math.inf}
"""The shortest time between two steps that are shown."""
_EPOCH_S = {"bar": 0.2, "plain": 1.0, "json": math.inf, "quiet": math.inf}
"""The shortest time between two ends of epochs for which the status is shown; the final table has
every epoch."""
_COLOURS = {"warning": "33", "error": "1;31"}


def choose_mode(wanted: str, settings: TerminalSettings, *, can_draw: bool) -> str:
    """`bar`, `plain`, `json` or `quiet`.

    An explicit choice comes first, then the environment. A bar needs a terminal that can move its
    cursor and a person who looks at it; CI has neither.
    """
    chosen, source = wanted, "progress"
    if wanted == "auto" and settings.progress:
        chosen, source = settings.progress, "PACELINE_PROGRESS"
    if chosen not in MODES:
        raise SettingError(f"{source} is {chosen!r}.", advice=f"Choose one of {', '.join(MODES)}.")
    if chosen in ("plain", "json", "quiet"):
        return chosen
    is_able = can_draw and not settings.is_dumb
    return "bar" if is_able and (chosen == "bar" or not settings.is_ci) else "plain"


class Progress:
    """One run on one terminal.

        made --start--> running --finish--> over
                           └──close, an exception, the end of the process──> over

    Invariant: whatever fails here, training continues. When the terminal is gone, nothing is shown.
    """

    def __init__(
        self,
        mode: str = "auto",
        *,
        draws: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Show on `stream`, or on standard output; `draws` is False in all processes but one.

        `mode` is `auto`, `bar`, `plain`, `json` or `quiet`; `auto` is what PACELINE_PROGRESS says,
        or a bar on a terminal and plain lines elsewhere.
        """
        stream = sys.stdout if stream is None else stream
        settings = read_terminal(environ)
        offer = read_screen(descriptor(stream), environ)
        pipe = ScreenPipe(offer.fd) if offer is not None and offer.fd >= 0 else None
        has_terminal = terminal_of(stream) >= 0
        # A launcher that offers to draw has a terminal, and `rich`.
        can_draw = has_rich() if has_terminal else pipe is not None
        self.mode = choose_mode(mode, settings, can_draw=can_draw)
        self._stream = sys.stderr if self.mode == "quiet" else stream
        # A stream that the script has replaced, for example by one that also keeps a log, must not
        # get marks: they would end up in the log.
        is_plain_file = type(stream) is io.TextIOWrapper and not has_terminal
        self._mark = (
            offer.mark if offer is not None and is_plain_file and self.mode != "quiet" else ""
        )
        self._draws = draws and self._stream is not None
        # Without a mark the launcher copies the line to a log file, where colours are noise.
        self._has_colour = settings.has_colour and (bool(self._mark) or has_terminal)
        self._screen: Screen | None = None
        self._bars: list[Screen | ScreenPipe] = []
        if self._draws and self.mode == "bar":
            if has_terminal:
                self._screen = Screen(stream, has_colour=settings.has_colour, redirects_prints=True)
            self._bars = [bar for bar in (self._screen, pipe) if bar is not None]
        self._columns = columns_of(terminal_of(stream)) or (offer.columns if offer else 0)
        """The width of the terminal that this process or its launcher writes to; 0 if none."""
        self._clock = clock
        self._state = ProgressState()
        self._is_running = False
        self._shown_s = 0.0
        self._calls = _CallQueue()
        self._finalizer = weakref.finalize(self, _close, self._bars, os.getpid())

    def start(
        self,
        *,
        name: str = "",
        workers: int = 1,
        epochs: int | None = None,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
        global_batch: int | None = None,
        step: int = 0,
        lines: Sequence[str] = (),
    ) -> None:
        """A run begins, or continues after `step` steps of `steps`; `lines` are shown first."""
        now_s = self._clock()
        facts: dict[str, Any] = {"name": name or "run", "workers": workers, "epochs": epochs}
        facts |= {"steps": steps, "global_batch": global_batch, "step": step}
        epoch = step // steps_per_epoch if steps_per_epoch else 0
        state = ProgressState(**facts, first_step=step, begin_s=now_s, epoch=epoch)
        self._state = state
        state.mark(now_s)
        self._is_running = True
        self._shown_s = now_s
        self._say("start", facts | {"lines": lines}, text.opening(state, lines, self._width))
        if self._bars:
            self._show_status()

    def join_late(self, first_step: int, samples: int, seconds: float) -> None:
        """This worker joined a run that began after `first_step`, `seconds` ago, and has processed
        `samples` since."""
        state = self._state
        state.first_step, state.samples = first_step, samples
        state.begin_s -= seconds
        state.marks.clear()
        state.mark(self._clock())

    def count_workers(self, workers: int) -> None:
        """Show this number of workers from now on."""
        self._state.workers = workers

    def take_over(self, silent: Progress) -> None:
        """Continue from another `Progress`, which has followed the run silently."""
        self._state, self._is_running = silent._state, silent._is_running
        self._shown_s = self._clock()
        if self._bars:
            self._show_status()

    def step(self, step: int, *, epoch: int, samples: int, metrics: Metrics | None = None) -> None:
        """Step number `step` is done; it was in `epoch`, counted from 0, and had `samples`."""
        if not self._is_running:
            return
        state = self._state
        state.step = step
        state.epoch = epoch
        state.samples += samples
        now_s = self._clock()
        if now_s - self._shown_s >= _STEP_S[self.mode]:
            state.mark(now_s)
            if metrics is not None:
                state.metrics = dict(metrics() if callable(metrics) else metrics)
            self._show_status()

    def epoch(
        self,
        epoch: int,
        metrics: Mapping[str, float],
        *,
        seconds: float | None = None,
        samples: int | None = None,
    ) -> None:
        """An epoch, counted from 0, has ended: it becomes one row of the table."""
        if self._is_running:
            state = self._state
            state.add_row(epoch, metrics, seconds, samples)
            state.metrics = dict(metrics)
            state.mark(self._clock())
            facts = {"metrics": metrics, "seconds": seconds, "samples": samples}
            self._say("epoch", {"epoch": epoch, "step": state.step, **facts}, ())
            if state.now_s - self._shown_s >= _EPOCH_S[self.mode]:
                self._show_status()

    def evaluation(
        self, epoch: int, metrics: Mapping[str, float], *, step: int | None = None
    ) -> None:
        """An evaluation after `step` steps has ended: it adds columns to the row of its epoch."""
        if self._is_running:
            named = {f"eval {name}": value for name, value in metrics.items()}
            self._state.add_row(epoch, named, None, None)
            step = self._state.step if step is None else step
            self._say("evaluation", {"epoch": epoch, "step": step, "metrics": metrics}, ())

    def message(self, text: str, level: str = "info") -> None:
        """Show a text; `level` is `info`, `warning` or `error`."""
        said = text if level == "info" else f"{level}: {text}"
        lines = [part for line in said.splitlines() for part in wrapped(line, self._columns)]
        self._say("message", {"text": text, "level": level}, lines, level)

    def finish(
        self, status: str = "finished", *, lines: Sequence[str] = (), reason: str = ""
    ) -> None:
        """Show the table and the summary of the run, then `lines`. Later calls do nothing.

        `reason` appears in JSON output only.
        """
        was_running, state = self._is_running, self._state
        self.close()
        if was_running:
            state.now_s = self._clock()
            facts = {"status": status, "step": state.step, "samples": state.samples}
            facts |= {"seconds": state.elapsed_s, "reason": reason, "lines": lines}
            self._say("finish", facts, text.summary(state, status, lines, self._width))

    def close(self) -> None:
        """Remove the bar, without a summary."""
        self._is_running = False
        self.hold()

    def hold(self) -> None:
        """Remove the bar; the summary is still to come."""
        self._calls.run(self._finalizer)

    @property
    def _width(self) -> int:
        """The width of what should paste well and not be wrapped by a narrow terminal."""
        return min(text.WIDTH, self._columns or text.WIDTH)

    def _show_status(self) -> None:
        state = self._state
        self._shown_s = state.now_s
        for bar in self._bars:
            self._calls.run(partial(bar.show, RunStatus.of(state)))
        if not self._bars:
            names = ("step", "epoch", "samples", "metrics", "samples_per_s", "time_left_s")
            facts = {name: getattr(state, name) for name in names}
            self._say("step", facts, [text.fit(text.status(state), self._width)])

    def _say(
        self, kind: str, facts: Mapping[str, Any], lines: Sequence[str], level: str = "info"
    ) -> None:
        """Write permanent output: `lines` for people, or `facts` for programs."""
        if not self._draws or (self.mode == "quiet" and level == "info"):
            return
        lines = [printable(line) for line in lines]
        if self.mode == "json":
            lines = [json.dumps(plain_json({"kind": kind, "t": time.time(), **facts}))]
        elif self._bars and self._has_colour and level in _COLOURS:
            lines = [f"\x1b[{_COLOURS[level]}m{line}\x1b[0m" for line in lines]
        if lines:
            data = "".join(f"{self._mark}{line}\n" for line in lines)
            self._calls.run(partial(self._write, data))

    def _write(self, data: str) -> None:
        if self._screen is not None:
            self._screen.write_above(encode(self._stream, data))
        else:
            write_bytes(self._stream, encode(self._stream, data))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish("finished" if kind is None else "failed")


class _CallQueue:
    """Runs drawing calls one after another, also where a signal handler interrupts one."""

    # A signal handler may interrupt a drawing of its own thread; waiting for it would deadlock,
    # so the handler's call runs as soon as the interrupted one has ended. Or the handler
    # interrupts a `print` of the script that is blocked on a full pipe, where Python refuses a
    # reentrant write: then its call runs with the next one.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_busy = False
        self._waiting: deque[Callable[[], object]] = deque()

    def run(self, call: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(call)
            # The lock is reentrant: if it is busy here, a signal handler has interrupted a call.
            while self._waiting and not self._is_busy:
                self._is_busy, next_call = True, self._waiting.popleft()
                try:
                    # A terminal that fails must not stop training.
                    with contextlib.suppress(OSError, ValueError):
                        next_call()
                except RuntimeError as error:
                    if "reentrant" not in str(error):
                        raise
                    self._waiting.appendleft(next_call)
                    return
                finally:
                    self._is_busy = False


def _close(bars: Sequence[Screen | ScreenPipe], pid: int) -> None:
    """Remove the bars; a forked copy of this process must not touch them."""
    if os.getpid() == pid:
        for bar in bars:
            bar.clear()
