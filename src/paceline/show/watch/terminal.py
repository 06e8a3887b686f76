"""`paceline watch --terminal`: a head line, and one row for each worker, for people on ssh.

On a terminal it is redrawn in place; elsewhere a line is written when something has changed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.show.watch.follow import Followed
from paceline.telemetry import bytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Group

PERIOD_S, LINE_PERIOD_S = 0.5, 5.0
LEAST_BAR, MOST_BAR, BESIDE_BAR = 8, 40, 58
"""The columns of a bar, and of the text beside it."""
STYLES = ("cyan", "blue", "magenta", "green", "white", "yellow", "red")
"""The styles of the phases, in their order."""


def show(run: Followed) -> int:
    """Show the run until it ends; returns the exit code."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        return _write_lines(run)
    run.read()
    first = draw(run.build_live(), console.width)
    with Live(first, console=console, auto_refresh=False) as shown:
        while run.state == "running":
            time.sleep(PERIOD_S)
            run.read()
            run.read_exactly()
            shown.update(draw(run.build_live(), console.width), refresh=True)
    return 0


def _write_lines(run: Followed) -> int:
    said = ""
    while True:
        run.read()
        line = head(run.build_live())
        if line != said:
            print(line, flush=True)
        if run.state != "running":
            return 0
        said = line
        time.sleep(LINE_PERIOD_S)


def head(live: dict[str, Any]) -> str:
    """The state of the run in one line."""
    steps = f"step {live['step']:,}" + (f" of {live['steps']:,}" if live["steps"] else "")
    parts = [live["run"], live["state"], steps]
    if live["epochs"]:
        parts.append(f"epoch {live['epoch'] + 1} of {live['epochs']}")
    if live["eta_s"] is not None:
        parts.append(f"{seconds_text(live['eta_s'])} left")
    if live["samples_per_s"]:
        parts.append(f"{rate_text(live['samples_per_s'])} samples/s")
    if live["state"] == "running":
        parts.append(f"{live['alive']} of {live['workers_in_all']} workers")
    return " · ".join(parts)


def draw(live: dict[str, Any], width: int) -> Group:
    """The head line, a row for each worker and the verdict on slow ones, in `width` columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("worker", "step", "last step", "", "waits for", "memory", "queue"):
        is_left = name in ("", "waits for")
        table.add_column(name, justify="left" if is_left else "right", no_wrap=True)
    bar_width = max(LEAST_BAR, min(MOST_BAR, width - BESIDE_BAR))
    longest_s = max((each["seconds"] for each in live["workers"]), default=0.0) or 1.0
    style_by_phase = dict(zip(live["phases"], STYLES, strict=False))
    for worker in live["workers"]:
        bar, passed_s = Text(), 0.0
        for phase, seconds in worker["phases"]:
            passed_s += seconds
            cells = round(bar_width * passed_s / longest_s) - len(bar)
            bar.append("█" * cells, style_by_phase.get(phase, ""))
        waits = "" if worker["waits_for"] is None else f"{worker['waits_for']}, "
        memory = worker["memory_bytes"]
        is_gone = live["state"] == "running" and worker["is_alive"] is False
        table.add_row(
            f"{worker['worker']}" + (" gone" if is_gone else ""),
            f"{worker['step']:,}",
            seconds_text(worker["seconds"]),
            bar,
            waits and waits + seconds_text(worker["waited_s"]),
            "" if memory is None else bytes_text(memory),
            "" if worker["queued"] is None else str(worker["queued"]),
        )
    used = {phase for worker in live["workers"] for phase, _ in worker["phases"]}
    legend = Text(" ").join(
        Text(f"█ {phase}", style) for phase, style in style_by_phase.items() if phase in used
    )
    said = [Text(text) for text in (live["blame"], live["islands"]) if text]
    return Group(Text(head(live), "bold"), table, legend, *said)
