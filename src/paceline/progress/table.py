"""The table of epochs and the summary: ASCII, narrow enough to paste anywhere.

Lines keep to `WIDTH` columns, so that they fit into 80 also behind a launcher's label.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.progress import numbers
from paceline.progress.state import Row, State

WIDTH = 70
GAP = "  "
ALL = 2**30
"""A limit that leaves nothing out; see `fit`."""
_MOST_ROWS = 24
_SHOWN_AT_THE_START = 4


def epoch_table(rows: Sequence[Row]) -> list[str]:
    """One line per epoch under a line of names; of a long table the middle is left out.

    Columns that no longer fit are left out, from the right.
    """
    if not rows:
        return []
    columns = _columns(rows)
    shown = list(rows)
    if len(rows) > _MOST_ROWS:
        shown = [*rows[:_SHOWN_AT_THE_START], *rows[_SHOWN_AT_THE_START - _MOST_ROWS + 1 :]]
    cells = [[title for title, _ in columns]]
    cells += [[text(row) for _, text in columns] for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + 3 * len(widths) > WIDTH and len(widths) > 2:
        widths.pop()
    lines = [
        "  " + "   ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=False))
        for line in cells
    ]
    if len(shown) < len(rows):
        left_out = len(rows) - len(shown)
        lines.insert(1 + _SHOWN_AT_THE_START, f"  ... {left_out} more ...")
    return lines


def summary(state: State, status: str, lines: Sequence[str] = ()) -> list[str]:
    """How the run ended, its table, and what else there is to say."""
    first = textwrap.wrap(headline(state, status), WIDTH, subsequent_indent="  ")
    return [*first, *_spaced(epoch_table(state.rows)), *_spaced(wrapped(lines))]


def headline(state: State, status: str) -> str:
    """`digits finished on 2 workers: 50 steps, 5,000 samples (4,170/s), 1.20 s`."""
    facts = state.facts
    steps = numbers.count(state.step - facts.first_step, "step")
    samples = numbers.count(state.samples, "sample")
    if state.elapsed_s > 0 and state.samples:
        samples += f" ({numbers.speed(state.samples / state.elapsed_s)}/s)"
    workers = numbers.count(facts.workers, "worker")
    done = f"{steps}, {samples}, {numbers.duration(state.elapsed_s)}"
    return f"{facts.name or 'run'} {status} on {workers}: {done}"


def opening(state: State) -> list[str]:
    """What is about to happen."""
    facts = state.facts
    parts = [numbers.count(facts.workers, "worker")]
    if facts.epochs is not None:
        parts.append(numbers.count(facts.epochs, "epoch"))
    if facts.steps is not None:
        parts.append(numbers.count(facts.steps, "step"))
    if facts.global_batch is not None:
        parts.append(f"global batch {facts.global_batch:,}")
    lines = [f"{facts.name or 'run'}: {', '.join(parts)}"]
    if facts.first_step:
        lines.append(f"  goes on after step {facts.first_step:,}")
    return [*lines, *wrapped(facts.lines)]


def wrapped(lines: Sequence[str]) -> list[str]:
    """Lines of text that people wrote, indented, and broken where they are too long."""
    broken = (textwrap.wrap(line, WIDTH - 2, break_long_words=False) for line in lines)
    return [f"  {part}" for parts in broken for part in parts]


def status_line(state: State) -> str:
    """Where the run is, in one line."""
    return GAP.join(fit(status(state), WIDTH)[0])


def status(state: State) -> list[tuple[int, str]]:
    """Where the run is: epoch, step, metrics, speed, time left, each with how dispensable it is.

    The first metric matters most, then the time left.
    """
    facts = state.facts
    of_steps = "" if facts.steps is None else f"/{facts.steps}"
    of_epochs = "" if facts.epochs is None else f"/{facts.epochs}"
    parts = [(2, f"epoch {state.epoch + 1}{of_epochs}"), (5, f"step {state.step}{of_steps}")]
    for number, (name, value) in enumerate(state.metrics.items()):
        parts.append((number * 3, f"{name} {numbers.metric(name, value)}"))
    samples_per_s = state.speed.samples_per_s
    if samples_per_s is not None:
        parts.append((4, f"{numbers.speed(samples_per_s)} samples/s"))
    left_s = state.speed.time_left_s(state.steps_left)
    if left_s is not None and state.steps_left:
        parts.append((1, f"{numbers.duration(left_s)} left"))
    return parts


def fit(parts: Sequence[tuple[int, str]], width: int, limit: int = ALL) -> tuple[list[str], int]:
    """Of the parts below `limit` those that fit into `width` columns, and the new limit.

    Whoever passes the limit on keeps a line from changing with every digit that comes and goes.
    """
    kept = [part for part in parts if part[0] < limit]
    while kept and numbers.columns(GAP.join(text for _, text in kept)) > width:
        limit = max(kept)[0]
        kept = [part for part in kept if part[0] < limit]
    return [text for _, text in kept], limit


def _columns(rows: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    trained = _names(row.metrics for row in rows)
    evaluated = _names(row.evaluation for row in rows)
    columns: list[tuple[str, Callable[[Row], str]]] = [("epoch", lambda row: str(row.epoch + 1))]
    columns += [(name, _from(name, is_evaluation=False)) for name in trained]
    columns += [(f"eval {name}", _from(name, is_evaluation=True)) for name in evaluated]
    if any(row.seconds is not None for row in rows):
        columns.append(("seconds", _seconds))
    if any(row.seconds and row.samples for row in rows):
        columns.append(("samples/s", _samples_per_s))
    return columns


def _names(metrics: Iterable[Mapping[str, float]]) -> list[str]:
    """Every name once, in the order of its first appearance."""
    return list(dict.fromkeys(name for some in metrics for name in some))


def _from(name: str, *, is_evaluation: bool) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        metrics = row.evaluation if is_evaluation else row.metrics
        return numbers.metric(name, metrics[name]) if name in metrics else "-"

    return text


def _seconds(row: Row) -> str:
    if row.seconds is None:
        return "-"
    return f"{row.seconds:.3f}" if row.seconds < 10 else f"{row.seconds:,.1f}"


def _samples_per_s(row: Row) -> str:
    return numbers.speed(row.samples / row.seconds) if row.seconds and row.samples else "-"


def _spaced(lines: Sequence[str]) -> list[str]:
    return ["", *lines] if lines else []
