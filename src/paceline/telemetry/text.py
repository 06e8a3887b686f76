"""A run's progress and the text about it: opening, status, table, summary.

Text is ASCII and at most `WIDTH` columns wide, so that it fits into 80 behind a launcher's label.
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.telemetry.units import count_text, metric_text, rate_text, seconds_text, table_lines

WIDTH = 70
GAP = "  "
_MOST_ROWS = 24
WINDOW_S = 20.0
"""Speed and time left are computed from this much of the recent past."""

Part = tuple[int, str]
"""Its rank when there is no room (the highest is left out first), and its text."""


@dataclass(slots=True, kw_only=True)
class ProgressState:
    """How far a run is. None means unknown."""

    name: str = "run"
    workers: int = 1
    epochs: int | None = None
    steps: int | None = None
    """In total, including those before a resume."""
    global_batch: int | None = None
    first_step: int = 0
    """How many steps were done before this process began."""
    begin_s: float = 0.0
    now_s: float = 0.0
    step: int = 0
    epoch: int = 0
    samples: int = 0
    """Since this process began."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: dict[int, dict[str, str]] = field(default_factory=dict)
    """The table: text by column, by epoch."""
    marks: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=256))
    """Times with the steps and samples done by then, the oldest about `WINDOW_S` ago."""

    def mark(self, now_s: float) -> None:
        """Remember how far the run is now; forget what lies outside the window."""
        self.now_s = now_s
        self.marks.append((now_s, self.step, self.samples))
        while len(self.marks) > 2 and now_s - self.marks[1][0] >= WINDOW_S:
            self.marks.popleft()

    @property
    def elapsed_s(self) -> float:
        return self.now_s - self.begin_s

    @property
    def samples_per_s(self) -> float | None:
        """None until two marks are apart in time."""
        return self._rate(2)

    @property
    def time_left_s(self) -> float | None:
        """None while unknown: no total, or no speed yet."""
        rate = self._rate(1)
        return None if self.steps is None or not rate else max(self.steps - self.step, 0) / rate

    def add_row(
        self, epoch: int, metrics: Mapping[str, float], seconds: float | None, samples: int | None
    ) -> None:
        row = self.rows.setdefault(epoch, {})
        row |= {name: metric_text(name, value) for name, value in metrics.items()}
        if seconds is not None:
            row["seconds"] = f"{seconds:.3f}" if seconds < 10 else f"{seconds:,.1f}"
            if seconds and samples:
                row["samples/s"] = rate_text(samples / seconds)

    def _rate(self, index: int) -> float | None:
        if len(self.marks) < 2:
            return None
        first, last = self.marks[0], self.marks[-1]
        elapsed_s = last[0] - first[0]
        return (last[index] - first[index]) / elapsed_s if elapsed_s > 0 else None


def opening(state: ProgressState, lines: Sequence[str], width: int = WIDTH) -> list[str]:
    """What the run is about to do; `lines` are added."""
    things = {"worker": state.workers, "epoch": state.epochs, "step": state.steps}
    parts = [count_text(number, thing) for thing, number in things.items() if number is not None]
    if state.global_batch is not None:
        parts.append(f"global batch {state.global_batch:,}")
    said = [f"{state.name}: {', '.join(parts)}"]
    if state.first_step:
        said.append(f"  continues after step {state.first_step:,}")
    return wrapped(said[0], width) + said[1:] + _indented(lines, width)


def summary(
    state: ProgressState, status: str, lines: Sequence[str], width: int = WIDTH
) -> list[str]:
    """How the run ended, its table, and `lines`."""
    samples = count_text(state.samples, "sample")
    if state.elapsed_s > 1e-6 and state.samples:
        samples += f" ({rate_text(state.samples / state.elapsed_s)}/s)"
    steps = count_text(state.step - state.first_step, "step")
    # Keep a number and its unit on one line.
    elapsed = seconds_text(state.elapsed_s).replace(" ", "\xa0")
    done = f"{steps}, {samples}, {elapsed}"
    first = f"{state.name} {status} on {count_text(state.workers, 'worker')}: {done}"
    head = [part.replace("\xa0", " ") for part in wrapped(first, width)]
    paragraphs = [head, table(state.rows, width), _indented(lines, width)]
    return [line for part in paragraphs if part for line in ["", *part]][1:]


def table(rows: Mapping[int, Mapping[str, str]], width: int = WIDTH) -> list[str]:
    """One line for each of the newest epochs; columns that do not fit are left out on the right."""
    if not rows:
        return []
    shown = list(rows.items())[-_MOST_ROWS:]
    names = list(dict.fromkeys(name for _, row in shown for name in row))
    # An evaluation may be reported before the end of its epoch, but its columns come last.
    names.sort(key=lambda name: (name in ("seconds", "samples/s"), name.startswith("eval ")))
    cells = [[str(epoch + 1), *(row.get(name, "-") for name in names)] for epoch, row in shown]
    columns = list(zip(["epoch", *names], *cells, strict=True))
    while sum(3 + max(map(len, column)) for column in columns) > width and len(columns) > 2:
        columns.pop()
    lines = [f"  {line}" for line in table_lines(list(zip(*columns, strict=True)), ">", gap="   ")]
    if len(shown) < len(rows):
        lines.insert(1, f"  ... {count_text(len(rows) - len(shown), 'epoch')} before ...")
    return lines


def status(state: ProgressState) -> list[Part]:
    """Where the run is. The first metric matters most, then the time left."""
    of_steps = "" if state.steps is None else f"/{state.steps}"
    of_epochs = "" if state.epochs is None else f"/{state.epochs}"
    parts = [(2, f"epoch {state.epoch + 1}{of_epochs}"), (5, f"step {state.step}{of_steps}")]
    for number, (name, value) in enumerate(state.metrics.items()):
        parts.append((number * 3, f"{name} {metric_text(name, value)}"))
    if state.samples_per_s is not None:
        parts.append((4, f"{rate_text(state.samples_per_s)} samples/s"))
    if state.time_left_s:
        parts.append((1, f"{seconds_text(state.time_left_s)} left"))
    return parts


def fit(parts: Sequence[Part], width: int, length: Callable[[str], int] = len) -> str:
    """The parts side by side; where the width is too small, those of highest rank are left out."""
    kept = list(parts)
    while kept and length(line := GAP.join(part for _, part in kept)) > width:
        kept.remove(max(kept, key=lambda part: part[0]))
    return line if kept else ""


def wrapped(line: str, width: int) -> list[str]:
    """The line, broken between words where it is too long; with a width of 0 as it is."""
    if not width or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _indented(lines: Sequence[str], width: int) -> list[str]:
    """Lines of text that people wrote, indented, and broken where they are too long."""
    room = max(width - 2, 1)
    broken = (textwrap.wrap(line, room, break_long_words=False) for line in lines)
    return [f"  {part}" for parts in broken for part in parts]
