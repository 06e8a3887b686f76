"""`Progress`: told what happens in a run, and shows it often enough and no oftener.

The life of one: `start`, then `step` for every step, `epoch` and `evaluation` when they end,
`message` at any time and from any thread, `finish` once. A step that nobody will see costs a look
at the clock.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TextIO

from paceline.env import ScreenOffer, read_screen, read_terminal
from paceline.progress.bar import BarPainter
from paceline.progress.json_lines import JsonPainter
from paceline.progress.line import is_possible
from paceline.progress.mode import choose_mode
from paceline.progress.painter import Painter, Sheet, descriptor, terminal_of
from paceline.progress.plain import PlainPainter
from paceline.progress.sending import Channel, SendingPainter
from paceline.progress.silence import SilentPainter
from paceline.progress.state import Facts, State

Metrics = Mapping[str, float] | Callable[[], Mapping[str, float]]
"""Numbers by name, or a function that gives them: it is called only when they will be shown."""

_NO_OFFER = ScreenOffer(-1, "")


class Progress:
    """One run on one terminal.

        made --start--> running --finish--> over
                           └──close, an exception, the end of the process──> over

    Invariant: whatever happens, training goes on. A terminal that is gone makes this one silent.
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
        is_drawn_elsewhere = offer is not None and offer.draws and not has_terminal
        self.mode = choose_mode(
            mode,
            is_terminal=has_terminal or is_drawn_elsewhere,
            settings=settings,
            has_rich=is_possible() or is_drawn_elsewhere,
        )
        self._painter = _painter(
            self.mode, stream if draws else None, settings.has_colour, offer or _NO_OFFER
        )
        self._finalizer = weakref.finalize(self, _close, self._painter, os.getpid())
        self._state: State | None = None
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
        dataset_size: int | None = None,
        step: int = 0,
        lines: Sequence[str] = (),
    ) -> None:
        """A run begins, or goes on after `step` steps of all `steps`; `lines` are shown first."""
        facts = Facts(
            name=name,
            workers=workers,
            epochs=epochs,
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            global_batch=global_batch,
            dataset_size=dataset_size,
            first_step=step,
            lines=tuple(lines),
        )
        now_s = self._clock()
        epoch = step // steps_per_epoch if steps_per_epoch else 0
        state = self._state = State(facts, begin_s=now_s, now_s=now_s, step=step, epoch=epoch)
        state.speed.mark(now_s, step, 0)
        self._due_s = now_s + self._painter.interval_s
        self._turn.take(lambda: self._painter.start(state))

    def step(self, step: int, *, epoch: int, samples: int, metrics: Metrics | None = None) -> None:
        """`step` steps are done; this one was in `epoch`, counted from 0, and had `samples`."""
        state = self._state
        if state is None:
            return
        state.step = step
        state.epoch = epoch
        state.samples += samples
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + self._painter.interval_s
            self._update(state, now_s, metrics)
            self._turn.take(lambda: self._painter.step(state))

    def epoch(
        self,
        epoch: int,
        metrics: Mapping[str, float],
        *,
        seconds: float | None = None,
        samples: int | None = None,
    ) -> None:
        """An epoch, counted from 0, is over: one row of the table."""
        state = self._state
        if state is None:
            return
        row = state.row(epoch)
        row.metrics.update(metrics)
        row.seconds, row.samples = seconds, samples
        self._update(state, self._clock(), metrics)
        self._turn.take(lambda: self._painter.epoch(state, row))

    def evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is over: more columns in the row of its epoch."""
        state = self._state
        if state is None:
            return
        row = state.row(epoch)
        row.evaluation.update(metrics)
        self._turn.take(lambda: self._painter.evaluation(state, row))

    def message(self, text: str, level: str = "info") -> None:
        """Say something; `level` is `info`, `warning` or `error`."""
        self._turn.take(lambda: self._painter.message(self._state, text, level))

    def finish(self, status: str = "finished", *, lines: Sequence[str] = ()) -> None:
        """The run is over: show the table and the summary, then `lines`. Later calls do nothing."""
        state, self._state = self._state, None
        if state is not None:
            state.now_s = self._clock()
            self._turn.take(lambda: self._painter.finish(state, status, lines))
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, without a summary."""
        self._state = None
        self._turn.take(self._let_go)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish("finished" if kind is None else "failed")

    def _let_go(self) -> None:
        self._finalizer()

    def _update(self, state: State, now_s: float, metrics: Metrics | None) -> None:
        state.now_s = now_s
        state.speed.mark(now_s, state.step, state.samples)
        if metrics is not None:
            state.metrics = dict(metrics() if callable(metrics) else metrics)


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
                    _quietly(self._waiting.popleft())
                finally:
                    self._is_busy = False


def _quietly(call: Callable[[], None]) -> None:
    """A picture is not worth a training: a terminal that fails is left alone."""
    try:
        call()
    except (OSError, ValueError):
        return


def _close(painter: Painter, pid: int) -> None:
    """Leave the terminal as it was; a forked copy of this process leaves it alone."""
    if os.getpid() == pid:
        painter.close()


def _painter(mode: str, stream: TextIO | None, has_colour: bool, offer: ScreenOffer) -> Painter:
    if stream is None:  # another process draws, or a program without standard streams
        return SilentPainter(None)
    if mode == "quiet":
        return SilentPainter(None if sys.stderr is None else Sheet(sys.stderr))
    # A stream that does more than pass text on, such as one that keeps a log, gets no marks.
    mark = offer.mark if type(stream) is io.TextIOWrapper else ""
    if mode == "json":
        return JsonPainter(Sheet(stream, mark))
    if mode == "plain":
        return PlainPainter(Sheet(stream))
    if terminal_of(stream) < 0:
        return SendingPainter(Sheet(stream, mark), offer.fd, has_colour=has_colour)
    channel = Channel(offer.fd) if offer.draws else None
    return BarPainter(Sheet(stream), has_colour=has_colour, channel=channel)
