"""How a run is right now: the small part of the page that changes several times a second."""

from __future__ import annotations

import contextlib
import os
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import WireError
from paceline.explain.report import sentences
from paceline.explain.report.document import extremes, generations
from paceline.explain.report.run_data import RECENT_STEPS, RankTotals, RecentStep, RunData
from paceline.observe.phases import OWN, Phase
from paceline.observe.run_folder import open_plain
from paceline.observe.units import seconds_text

MESSAGES_LIMIT = 50
LOG_FILES, LOG_LINES, LOG_BYTES = 8, 20, 4096
"""The newest files, and of each the last lines in so many bytes."""
LOOKED_AT = 1000
LEAST_BLAME_S, LEAST_BLAME = 1e-3, 0.15
"""By how much more own work, in seconds and as a share of the others', a worker holds them up."""
ORDER = (*OWN, Phase.WAIT, Phase.TRANSFER)

Json = dict[str, Any]


def build(data: RunData) -> Json:
    """The section `live`, as the docstring of `server` has it, of one run alone."""
    info, worked = data.info, [data.ranks[rank] for rank in sorted(data.ranks)]
    shown = extremes([rank for rank in worked if rank.recent])
    steps_per_s, samples_per_s = _pace(worked)
    steps, is_running = info.steps if info else None, data.status == "running"
    left = steps - data.steps if steps is not None else None
    eta_s = left / steps_per_s if is_running and left is not None and steps_per_s else None
    died, alive = generations(data), [_is_alive(rank, data.status) for rank in worked]
    epochs = [rank.recent[-1].epoch for rank in shown]
    return {
        "t": data.read_t,
        "state": data.status,
        "silent_s": data.silent_s,
        "epoch": max(epochs, default=0),
        "epochs": info.epochs or None if info else None,
        "step": data.steps,
        "steps": steps,
        "steps_per_epoch": info.steps_per_epoch if info else None,
        "elapsed_s": max(0.0, data.last_t - data.first_t) if data.ranks else 0.0,
        "eta_s": eta_s,
        "samples_per_s": samples_per_s,
        "steps_per_s": steps_per_s,
        "alive": None if None in alive else alive.count(True),
        "workers_in_all": data.workers,
        "workers": _workers(shown, data.status),
        "phases": {phase: phase.meaning for phase in ORDER},
        "last_steps": _last_steps(shown),
        "blame": _blame(data, shown) if shown else "",
        "generations": died["events"] if died else [],
        "messages": sorted(data.events["message"], key=lambda event: event["t"])[-MESSAGES_LIMIT:],
        "log": _log_lines(data.folder.logs),
    }


def _is_alive(rank: RankTotals, status: str) -> bool | None:
    """Whether a worker's process is there; None where nobody can know.

    One on another machine is taken to be there as long as the run writes.
    """
    if status == "silent" and not rank.is_here:
        return None
    return status in ("running", "silent") and not rank.is_gone


def _pace(ranks: list[RankTotals]) -> tuple[float | None, float | None]:
    """Steps and samples of all workers by second, over the last steps."""
    first = next((rank.recent for rank in ranks if len(rank.recent) > 1), None)
    if first is None or (passed_s := first[-1].t - first[0].t) <= 0:
        return None, None
    steps_per_s = (first[-1].step - first[0].step) / passed_s
    samples = sum(rank.recent[-1].samples for rank in ranks if rank.recent)
    return steps_per_s, steps_per_s * samples


def _blame(data: RunData, ranks: list[RankTotals]) -> str:
    """Who holds the others up in the last steps: by their medians, so that a pause is no reason."""
    usual = {rank.rank: _usual_s(rank) for rank in ranks}
    own = {rank: sum(phases.values()) for rank, phases in usual.items()}
    if len(own) < 2:
        return sentences.who_waited(data)
    slow = max(own, key=own.__getitem__)
    others = [rank for rank in own if rank != slow]
    others_s = statistics.median(own[rank] for rank in others)
    if own[slow] - others_s > max(LEAST_BLAME_S, LEAST_BLAME * others_s):
        more = {
            phase: usual[slow][phase] - statistics.median(usual[rank][phase] for rank in others)
            for phase in OWN
        }
        phase = max(more, key=more.__getitem__)
        return (
            f"Worker {slow} holds the others up: in the last steps its own work takes "
            f"{seconds_text(own[slow] - others_s)} longer than that of the others; {phase} "
            f"({phase.meaning}) makes the difference."
        )
    spread = seconds_text(max(own.values()) - min(own.values()))
    return f"No worker holds the others up: in the last steps their own work differs by {spread}."


def _usual_s(rank: RankTotals) -> dict[Phase, float]:
    """The phases of a worker's own work in its last steps, each by its median."""
    return {
        phase: statistics.median(recent.phases.get(phase, 0.0) for recent in rank.recent)
        for phase in OWN
    }


def _common_step(ranks: list[RankTotals]) -> int:
    """The newest step that all workers have written; 0 for none."""
    alive = [rank for rank in ranks if not rank.is_gone] or ranks
    written = [{recent.step for recent in rank.recent} for rank in alive]
    return max(set.intersection(*written), default=0) if written else 0


def _workers(ranks: list[RankTotals], status: str) -> list[Json]:
    """Each worker in the newest step that all have written; who has not got so far, in its last."""
    common = _common_step(ranks)
    recents = [
        next((each for each in reversed(rank.recent) if each.step == common), rank.recent[-1])
        for rank in ranks
    ]
    waits = [
        (recent.phases.get(Phase.WAIT, 0.0), rank.rank)
        for rank, recent in zip(ranks, recents, strict=True)
        if recent.step == common
    ]
    least_s, last = min(waits, default=(0.0, -1))
    are_several = len(waits) > 1
    return [
        _worker(
            rank, recent, last, least_s if are_several and recent.step == common else None, status
        )
        for rank, recent in zip(ranks, recents, strict=True)
    ]


def _worker(
    rank: RankTotals, recent: RecentStep, last: int, least_s: float | None, status: str
) -> Json:
    """One worker; `last` came last in its step and waited `least_s`, for the sums alone.

    So long, the others waited for the sums too, and the rest of the time for it.
    """
    is_alive, phases = _is_alive(rank, status), dict(recent.phases)
    waits = least_s is not None and last != rank.rank
    waited_s = max(0.0, phases.get(Phase.WAIT, 0.0) - (least_s or 0.0)) if waits else 0.0
    if least_s and Phase.TRANSFER not in phases:
        phases |= {Phase.WAIT: waited_s, Phase.TRANSFER: least_s}
    return {
        "worker": rank.rank,
        "pid": rank.pid,
        "where": " on ".join(filter(None, (rank.device, rank.host))),
        "is_alive": is_alive,
        "step": recent.step,
        "phases": [[phase, phases[phase]] for phase in ORDER if phases.get(phase)],
        "seconds": sum(recent.phases.values()),
        "waits_for": last if waits else None,
        "waited_s": waited_s,
        "memory_bytes": _memory_bytes(rank) if is_alive else None,
        "queued": recent.queued,
    }


def _log_lines(logs: Path) -> list[str]:
    """The last lines of the newest log files, each with the file's name: `0/stderr: ...`."""
    found, folders = list[tuple[float, Path]](), [] if logs.is_symlink() else [logs]
    while folders and len(found) < LOOKED_AT:
        with contextlib.suppress(OSError):
            for entry in islice(os.scandir(folders.pop()), LOOKED_AT):
                if entry.is_dir(follow_symlinks=False) and len(folders) < LOOKED_AT:
                    folders.append(Path(entry))
                elif entry.is_file(follow_symlinks=False) and entry.name.endswith(".log"):
                    found.append((entry.stat().st_mtime, Path(entry)))
    lines = []
    for _, path in sorted(found)[-LOG_FILES:]:
        with contextlib.suppress(OSError, WireError), open_plain(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            tail = file.read(LOG_BYTES).decode(errors="replace").splitlines()[-LOG_LINES:]
            lines += [f"{path.parent.name}/{path.stem}: {line}" for line in tail]
    return lines


def _memory_bytes(rank: RankTotals) -> int | None:
    """What a process on this machine holds in memory; asked of the system, not of the run."""
    if not rank.is_here:
        return None
    try:
        pages = int(Path(f"/proc/{rank.pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _last_steps(ranks: list[RankTotals]) -> Json:
    """The last steps of these workers, as columns: own work, and waiting."""
    by_step = [{recent.step: recent for recent in rank.recent} for rank in ranks]
    steps = sorted({step for each in by_step for step in each})[-RECENT_STEPS:]
    waiting = (Phase.WAIT, Phase.TRANSFER)

    def ms(phases: dict[Phase, float], wanted: tuple[Phase, ...]) -> float:
        return round(1e3 * sum(phases.get(phase, 0.0) for phase in wanted), 3)

    def column(wanted: tuple[Phase, ...]) -> list[list[float | None]]:
        return [
            [ms(each[step].phases, wanted) if step in each else None for step in steps]
            for each in by_step
        ]

    return {
        "steps": steps,
        "workers": [rank.rank for rank in ranks],
        "ms": column(OWN),
        "waited_ms": column(waiting),
    }
