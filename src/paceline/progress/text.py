"""What is known of a run so far, and the words about it: opening, status, table, summary.

Words are ASCII, and at most `WIDTH` columns, so that lines fit into 80 also behind a launcher's
label.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.observe.units import count_text, metric_text, rate_text, seconds_text, table_lines

WIDTH = 70
GAP = "  "
_MOST_ROWS = 24
_ROWS_AT_THE_START = 4
WINDOW_S = 20.0
"""Speed and time left come from so much of the recent past."""
_MOST_MARKS = 256


@dataclass(slots=True)
class EpochRow:
    """One line of the table of epochs."""

    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    samples: int | None = None


@dataclass(slots=True, kw_only=True)
class ProgressState:
    """A run as it stands. What is None is not known."""

    name: str = ""
    workers: int = 1
    epochs: int | None = None
    steps: int | None = None
    """In all, those before a resume included."""
    global_batch: int | None = None
    first_step: int = 0
    """How many steps were done before this process began."""
    lines: tuple[str, ...] = ()
    """What else to say at the start, such as the policy."""
    begin_s: float = 0.0
    now_s: float = 0.0
    step: int = 0
    epoch: int = 0
    samples: int = 0
    """Since this process began."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: list[EpochRow] = field(default_factory=list)
    marks: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
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
        """None until there is something to divide by."""
        return self._rate(2)

    @property
    def time_left_s(self) -> float | None:
        """None while unknown: no total, or no speed yet."""
        rate = self._rate(1)
        return None if self.steps is None or not rate else max(self.steps - self.step, 0) / rate

    def row(self, epoch: int) -> EpochRow:
        """The row of this epoch, made if it is new."""
        found = next((row for row in reversed(self.rows) if row.epoch == epoch), None)
        if found is None:
            found = EpochRow(epoch)
            self.rows.append(found)
        return found

    def _rate(self, index: int) -> float | None:
        if len(self.marks) < 2:
            return None
        first, last = self.marks[0], self.marks[-1]
        elapsed_s = last[0] - first[0]
        return (last[index] - first[index]) / elapsed_s if elapsed_s > 0 else None


def opening(state: ProgressState) -> list[str]:
    """What is about to happen."""
    parts = [count_text(state.workers, "worker")]
    if state.epochs is not None:
        parts.append(count_text(state.epochs, "epoch"))
    if state.steps is not None:
        parts.append(count_text(state.steps, "step"))
    if state.global_batch is not None:
        parts.append(f"global batch {state.global_batch:,}")
    lines = [f"{state.name or 'run'}: {', '.join(parts)}"]
    if state.first_step:
        lines.append(f"  continues after step {state.first_step:,}")
    return [*lines, *_wrapped(state.lines)]


def summary(state: ProgressState, status: str, lines: Sequence[str] = ()) -> list[str]:
    """How the run ended, its table, and what else there is to say."""
    samples = count_text(state.samples, "sample")
    if state.elapsed_s > 0 and state.samples:
        samples += f" ({rate_text(state.samples / state.elapsed_s)}/s)"
    steps = count_text(state.step - state.first_step, "step")
    done = f"{steps}, {samples}, {seconds_text(state.elapsed_s)}"
    first = f"{state.name or 'run'} {status} on {count_text(state.workers, 'worker')}: {done}"
    paragraphs = [
        textwrap.wrap(first, WIDTH, subsequent_indent="  "),
        epoch_table(state.rows),
        _wrapped(lines),
    ]
    return [line for part in paragraphs if part for line in ["", *part]][1:]


def epoch_table(rows: Sequence[EpochRow]) -> list[str]:
    """One line per epoch under a line of names; of a long table the middle is left out.

    Columns that no longer fit are left out, from the right.
    """
    if not rows:
        return []
    trained = list(dict.fromkeys(name for row in rows for name in row.metrics))
    evaluated = list(dict.fromkeys(name for row in rows for name in row.evaluation))
    shown = list(rows)
    if len(rows) > _MOST_ROWS:
        shown = [*rows[:_ROWS_AT_THE_START], *rows[_ROWS_AT_THE_START - _MOST_ROWS + 1 :]]
    head = ["epoch", *trained, *(f"eval {name}" for name in evaluated), "seconds", "samples/s"]
    cells = [head, *(_cells(row, trained, evaluated) for row in shown)]
    kept = [column for column in zip(*cells, strict=True) if set(column[1:]) != {"-"}]
    while sum(3 + max(map(len, column)) for column in kept) > WIDTH and len(kept) > 2:
        kept.pop()
    lines = [f"  {line}" for line in table_lines(list(zip(*kept, strict=True)), ">", gap="   ")]
    if len(shown) < len(rows):
        lines.insert(1 + _ROWS_AT_THE_START, f"  ... {len(rows) - len(shown)} more ...")
    return lines


def status(state: ProgressState) -> list[tuple[int, str]]:
    """Where the run is, in parts, each with how dispensable it is.

    The first metric matters most, then the time left.
    """
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


def status_line(state: ProgressState) -> str:
    """Where the run is, in one line."""
    return fit(status(state), WIDTH)


def fit(parts: Sequence[tuple[int, str]], width: int) -> str:
    """The parts side by side; where the width is too small, the most dispensable are left out."""
    kept = list(parts)
    while kept and columns_of(line := GAP.join(part for _, part in kept)) > width:
        kept.remove(max(kept, key=lambda part: part[0]))
    return line if kept else ""


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: letters of East Asia take two."""
    if text.isascii():
        return len(text)
    letters = (letter for letter in text if not unicodedata.combining(letter))
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in letters)


def encodable(text: str, encoding: str) -> str:
    """The text with escapes for letters that the encoding does not have."""
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "backslashreplace").decode()


def message_lines(text: str, level: str) -> list[str]:
    """The lines of a message, with its level in front if that is worth saying."""
    return (text if level == "info" else f"{level}: {text}").splitlines()


def _cells(row: EpochRow, trained: list[str], evaluated: list[str]) -> list[str]:
    both = [(row.metrics, name) for name in trained]
    both += [(row.evaluation, name) for name in evaluated]
    values = [metric_text(name, some[name]) if name in some else "-" for some, name in both]
    seconds = samples = "-"
    if row.seconds is not None:
        seconds = f"{row.seconds:.3f}" if row.seconds < 10 else f"{row.seconds:,.1f}"
        if row.seconds and row.samples:
            samples = rate_text(row.samples / row.seconds)
    return [str(row.epoch + 1), *values, seconds, samples]


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Lines of text that people wrote, indented, and broken where they are too long."""
    broken = (textwrap.wrap(line, WIDTH - 2, break_long_words=False) for line in lines)
    return [f"  {part}" for parts in broken for part in parts]
