"""A run's current state: the small part of the page that changes several times a second."""

from __future__ import annotations

from typing import Any

from paceline.files import read_log
from paceline.show.report import sentences
from paceline.show.report.document import extremes, generations
from paceline.show.report.pace import RecentStep
from paceline.show.report.run_data import RECENT_STEPS, RankTotals, RunData
from paceline.show.watch.machine import Machine, Usage
from paceline.telemetry import OWN, Phase

MESSAGES_LIMIT = 50
LOG_LINES, LOG_BYTES = 100, 2**15
"""How much of the output's end is shown."""
ORDER = (*OWN, Phase.WAIT, Phase.TRANSFER)

Json = dict[str, Any]


def build(data: RunData, machine: Machine | None = None) -> Json:
    """The section `live` of one run, as described in docs/watch.md."""
    machine = machine or Machine()
    info, worked = data.info, [data.ranks[rank] for rank in sorted(data.ranks)]
    shown = extremes([rank for rank in worked if rank.recent])
    steps_per_s, samples_per_s = _pace(worked)
    steps, is_running = info.steps if info else None, data.status == "running"
    left = steps - data.steps if steps is not None else None
    eta_s = None  # unknown while no step is applied
    if is_running and left is not None and steps_per_s and not data.late_s:
        eta_s = left / steps_per_s
    died, alive = generations(data), [_is_alive(rank, data.status) for rank in worked]
    epochs = [rank.recent[-1].epoch for rank in shown]
    return {
        "t": data.read_t,
        "state": data.status,
        "silent_s": data.silent_s,
        "late_s": data.late_s,
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
        "workers": _workers(shown, data.status, machine),
        "phases": {phase: phase.meaning for phase in ORDER},
        "last_steps": _last_steps(shown),
        "blame": sentences.waiting_verdict(data) if shown else "",
        "blame_look": sentences.verdict_style(data),
        "generations": died["events"] if died else [],
        "islands": sentences.rounds_sentence(data),
        "messages": sorted(data.events["message"], key=lambda event: event["t"])[-MESSAGES_LIMIT:],
        "log": read_log(data.folder, LOG_LINES, tail_bytes=LOG_BYTES),
    }


def _is_alive(rank: RankTotals, status: str) -> bool | None:
    """Whether a worker's process exists; None where that is unknown.

    A process on another machine is assumed to exist while the run writes.
    """
    if status == "silent" and not rank.is_here:
        return None
    return status in ("running", "silent") and not rank.is_gone


def _pace(ranks: list[RankTotals]) -> tuple[float | None, float | None]:
    """Steps and samples per second of all workers, over the last steps."""
    clock = next((rank.recent for rank in ranks if len(rank.recent) > 1), None)
    if clock is None or (passed_s := clock[-1].t - clock[0].t) <= 0:
        return None, None
    first, last = clock[0].step, clock[-1].step
    samples = sum(each.samples for r in ranks for each in r.recent if first < each.step <= last)
    return (last - first) / passed_s, samples / passed_s


def _workers(ranks: list[RankTotals], status: str, machine: Machine) -> list[Json]:
    """Each worker in the newest step that all have written; one that lags, in its own last step.

    The worker that came last in that step waited only for the transfer. The others waited for the
    transfer as long, and the rest of their wait was for that worker.
    """
    alive = [rank for rank in ranks if not rank.is_gone] or ranks
    written = [{recent.step for recent in rank.recent} for rank in alive]
    common = max(set.intersection(*written), default=0) if written else 0
    recents = [
        next((each for each in reversed(rank.recent) if each.step == common), rank.recent[-1])
        for rank in ranks
    ]
    pairs = list(zip(ranks, recents, strict=True))
    together = [(_waited(recent), rank.rank) for rank, recent in pairs if recent.step == common]
    least_s, last = min(together, default=(0.0, -1))
    found = []
    for rank, recent in pairs:
        is_alive, phases = _is_alive(rank, status), dict(recent.phases)
        is_together = len(together) > 1 and recent.step == common
        waits = is_together and last != rank.rank
        waited_s = max(0.0, _waited(recent) - least_s) if waits else 0.0
        if is_together and least_s and Phase.TRANSFER not in phases:
            phases |= {Phase.WAIT: waited_s, Phase.TRANSFER: least_s}
        found.append(
            {
                "worker": rank.rank,
                "pid": rank.pid,
                "where": " on ".join(filter(None, (rank.device, rank.host))),
                "is_alive": is_alive,
                "step": recent.step,
                "phases": [[phase, phases[phase]] for phase in ORDER if phases.get(phase)],
                "seconds": sum(recent.phases.values()),
                "waits_for": last if waits else None,
                "waited_s": waited_s,
                **(machine.measure(rank) if is_alive else Usage())._asdict(),
                "queued": recent.queued,
            }
        )
    return found


def _waited(recent: RecentStep) -> float:
    return recent.phases.get(Phase.WAIT, 0.0)


def _last_steps(ranks: list[RankTotals]) -> Json:
    """The last steps of these workers, as columns of own work and of waiting."""
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
