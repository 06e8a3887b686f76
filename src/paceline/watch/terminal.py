"""`paceline watch --terminal`: a head line, and one row for each worker, for people on ssh.

On a terminal it is redrawn in place; elsewhere a line is written when something has changed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.observe.units import bytes_text, rate_text, seconds_text
from paceline.watch.follow import Followed

if TYPE_CHECKING:
    from rich.console import Group

PERIOD_S, LINE_PERIOD_S = 0.5, 5.0
BAR_WIDTH = 30
STYLES = ("cyan", "blue", "magenta", "green", "white", "yellow", "red")
"""Of the phases, in their order."""


def show(run: Followed) -> int:
    """Show the run until it ends; the exit code."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        return _write_lines(run)
    run.read()
    with Live(draw(run.build_live()), console=console, auto_refresh=False) as shown:
        while run.state == "running":
            time.sleep(PERIOD_S)
            run.read()
            shown.update(draw(run.build_live()), refresh=True)
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


def draw(live: dict[str, Any]) -> Group:
    """The head line, a row for each worker and who holds the others up."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("worker", "step", "last step", "", "waits", "memory"):
        table.add_column(name, justify="left" if name in ("", "waits") else "right")
    longest_s = max((each["seconds"] for each in live["workers"]), default=0.0) or 1.0
    style_by_phase = dict(zip(live["phases"], STYLES, strict=False))
    for worker in live["workers"]:
        bar = Text()
        for phase, seconds in worker["phases"]:
            bar.append("█" * round(BAR_WIDTH * seconds / longest_s), style_by_phase.get(phase, ""))
        waits = "" if worker["waits_for"] is None else f"for {worker['waits_for']}, "
        memory = worker["memory_bytes"]
        is_gone = live["state"] == "running" and worker["is_alive"] is False
        table.add_row(
            f"{worker['worker']}" + (" gone" if is_gone else ""),
            f"{worker['step']:,}",
            seconds_text(worker["seconds"]),
            bar,
            waits and waits + seconds_text(worker["waited_s"]),
            "" if memory is None else bytes_text(memory),
        )
    legend = Text(" ").join(Text(f"█ {phase}", style_by_phase[phase]) for phase in live["phases"])
    return Group(Text(head(live), "bold"), table, legend, Text(live["blame"]))
