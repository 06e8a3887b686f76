"""`Progress`: told what happens in a run, and shows it often enough.

The life of one: `start`, then `step` for every step, `epoch` and `evaluation` when they end,
`message` at any time and from any thread, `finish` once. A step that nobody will see costs a look
at the clock.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from paceline.env import read_screen, read_terminal
from paceline.progress.live import LivePainter, SendingPainter, choose_mode, has_rich
from paceline.progress.painters import (
    JsonPainter,
    LineStream,
    Painter,
    PlainPainter,
    descriptor,
    terminal_of,
)
from paceline.progress.text import ProgressState

Metrics = Mapping[str, float] | Callable[[], Mapping[str, float]]
"""Numbers by name, or a function that gives them: it is called only when they will be shown."""


class Progress:
    """One run on one terminal.

        made --start--> running --finish--> over
                           └──close, an exception, the end of the process──> over

    Invariant: whatever happens, training continues. A terminal that is gone makes this one silent.
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
        self._clock = clock
        stream = sys.stdout if stream is None else stream
        settings = read_terminal(environ)
        offer = read_screen(descriptor(stream), environ)
        has_terminal = terminal_of(stream) >= 0
        # A launcher that draws has a terminal, and `rich`.
        is_drawn_elsewhere = offer is not None and offer.fd >= 0 and not has_terminal
        self.mode = choose_mode(
            mode,
            is_terminal=has_terminal or is_drawn_elsewhere,
            settings=settings,
            has_rich=has_rich() or is_drawn_elsewhere,
        )
        # A stream that does more than pass text on, such as one that keeps a log, gets no marks.
        is_plain_file = type(stream) is io.TextIOWrapper
        self._painter = _painter(
            self.mode,
            stream if draws else None,
            mark=offer.mark if offer is not None and is_plain_file else "",
            fd=offer.fd if offer is not None else -1,
            has_colour=settings.has_colour,
        )
        self._finalizer = weakref.finalize(self, _close, self._painter, os.getpid())
        self._state = ProgressState()
        self._is_running = False
        self._due_s = 0.0
        self._turn = _Turn()

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
        facts: dict[str, Any] = {"name": name, "workers": workers, "epochs": epochs}
        facts |= {"steps": steps, "global_batch": global_batch, "step": step, "lines": tuple(lines)}
        epoch = step // steps_per_epoch if steps_per_epoch else 0
        self._state = ProgressState(**facts, first_step=step, begin_s=now_s, epoch=epoch)
        self._state.mark(now_s)
        self._is_running = True
        self._due_s = now_s + self._painter.interval_s
        self._show("start", **facts)

    def step(self, step: int, *, epoch: int, samples: int, metrics: Metrics | None = None) -> None:
        """`step` steps are done; this one was in `epoch`, counted from 0, and had `samples`."""
        if not self._is_running:
            return
        state = self._state
        state.step = step
        state.epoch = epoch
        state.samples += samples
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + self._painter.interval_s
            state.mark(now_s)
            if metrics is not None:
                state.metrics = dict(metrics() if callable(metrics) else metrics)
            names = ("step", "epoch", "samples", "metrics", "samples_per_s", "time_left_s")
            self._show("step", **{name: getattr(state, name) for name in names})

    def epoch(
        self,
        epoch: int,
        metrics: Mapping[str, float],
        *,
        seconds: float | None = None,
        samples: int | None = None,
    ) -> None:
        """An epoch, counted from 0, is over: one row of the table."""
        if self._is_running:
            state = self._state
            row = state.row(epoch)
            row.metrics.update(metrics)
            row.seconds, row.samples = seconds, samples
            state.mark(self._clock())
            state.metrics = dict(metrics)
            what = {"metrics": row.metrics, "seconds": seconds, "samples": samples}
            self._show("epoch", epoch=epoch, step=state.step, **what)

    def evaluation(
        self, epoch: int, metrics: Mapping[str, float], *, step: int | None = None
    ) -> None:
        """An evaluation is over, after `step` steps: more columns in the row of its epoch."""
        if self._is_running:
            row = self._state.row(epoch)
            row.evaluation.update(metrics)
            step = self._state.step if step is None else step
            self._show("evaluation", epoch=epoch, step=step, metrics=row.evaluation)

    def message(self, text: str, level: str = "info") -> None:
        """Say something; `level` is `info`, `warning` or `error`."""
        self._show("message", text=text, level=level)

    def finish(self, status: str = "finished", *, lines: Sequence[str] = ()) -> None:
        """The run is over: show the table and the summary, then `lines`. Later calls do nothing."""
        state = self._state
        if self._is_running:
            self._is_running = False
            state.now_s = self._clock()
            what = {"status": status, "step": state.step, "samples": state.samples}
            self._show("finish", **what, seconds=state.elapsed_s, lines=list(lines))
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, without a summary."""
        self._is_running = False
        self._turn.take(lambda: self._finalizer() and None)

    def _show(self, kind: str, **facts: Any) -> None:
        state = self._state
        self._turn.take(lambda: self._painter.show(state, kind, facts))

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish("finished" if kind is None else "failed")


class _Turn:
    """One caller draws at a time.

    A signal handler may interrupt a drawing of its own thread; waiting for that would be for ever,
    so its call is made as soon as the interrupted one is over.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_busy = False
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(call)
            # The lock lets its own thread in again: busy means that this is a signal handler's.
            while self._waiting and not self._is_busy:
                self._is_busy = True
                try:
                    # A picture is not worth a training: a terminal that fails is left alone.
                    with contextlib.suppress(OSError, ValueError):
                        self._waiting.popleft()()
                finally:
                    self._is_busy = False


def _close(painter: Painter, pid: int) -> None:
    """Leave the terminal as it was; a forked copy of this process leaves it alone."""
    if os.getpid() == pid:
        painter.close()


def _painter(mode: str, stream: TextIO | None, *, mark: str, fd: int, has_colour: bool) -> Painter:
    if stream is None:  # another process draws, or a program without standard streams
        return Painter(None)
    if mode == "quiet":
        return Painter(None if sys.stderr is None else LineStream(sys.stderr))
    if mode == "json":
        return JsonPainter(LineStream(stream, mark))
    if mode == "plain":
        return PlainPainter(LineStream(stream))
    if terminal_of(stream) < 0:
        return SendingPainter(LineStream(stream, mark), has_colour=has_colour, fd=fd)
    return LivePainter(LineStream(stream), has_colour=has_colour, fd=fd)
