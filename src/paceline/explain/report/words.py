"""The run in sentences: what was trained, how it went, who waited for whom.

Every sentence is derived from numbers that the page also shows. A sentence that the numbers do not
carry is not written.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.explain.report.collect import Rank, Story
from paceline.explain.report.markup import (
    as_number,
    count,
    duration,
    figure,
    percent,
    sentence,
    text,
)
from paceline.observe.phases import Phase
from paceline.observe.units import list_text

MUCH_WAITING = 0.2


@dataclass(frozen=True, slots=True)
class Slow:
    """The worker that holds the others up."""

    rank: int
    phase: str
    by_s: float


def what_it_was(story: Story) -> str:
    """One sentence: who trained what on what."""
    info = story.info
    if story.is_empty:
        return "There is nothing in this folder yet."
    if not story.has_run:
        found = [count(len(story.traces), "recorded step")] if story.traces else []
        found += ["a scaling study"] if story.study else []
        return f"This folder holds {list_text(found)}, and no run."
    workers = count(story.workers, "worker") if story.workers else "an unknown number of workers"
    verb = "trained"
    if story.status == "running":
        verb = "is training" if story.workers == 1 else "are training"
    model = text(info.model, 80) if info and info.model else "a model"
    weights = f" ({count(info.parameters, 'weight')})" if info and info.parameters else ""
    where = f" on {text(info.device, 40)}" if info and info.device else ""
    return f"{sentence(workers)} {verb} {model}{weights}{where}."


def how_far(story: Story) -> str:
    """One sentence: how much of the plan is done, and why no more."""
    if not story.has_run:
        return ""
    steps, whole = story.steps, story.info.steps if story.info else None
    done = count(steps, "step")
    if whole and steps < whole:
        done = f"{figure(steps)} of {count(whole, 'step')} ({percent(steps / whole)})"
    if epochs := len(story.events["epoch"]):
        done += f" in {count(epochs, 'epoch')}"
    if (spent := story.last_t - story.first_t) > 0:
        done += f", {duration(spent)} in all"
    stops = story.events["stop"]
    reason = text(stops[-1].get("reason", ""), 200) if stops else ""
    because = f" It ended because: {reason}." if reason else ""
    match story.status:
        case "running":
            return f"It was still running when this page was made: {done} so far."
        case "silent":
            return (
                f"Nothing had been written for {duration(story.silent_s)} when this page was made, "
                f"and it did not say that it ended: it was probably killed, after {done}."
            )
        case "finished":
            return f"It finished: {done}."
        case "stopped":
            return f"It was stopped after {done}.{because}"
        case "failed":
            return f"It failed after {done}.{because}"
    return f"How it ended is not known; {done} were recorded."


def how_it_learned(story: Story) -> list[str]:
    """What became of loss and accuracy."""
    said = []
    for name, column in story.metrics.items():
        if column.first_bad is not None:
            diverged = ": training has diverged there" if name == "loss" else ""
            said.append(
                f"From step {figure(column.first_bad)} on, some values of {text(name, 40)} "
                f"are not numbers{diverged}."
            )
    loss = story.metrics.get("loss")
    points = loss.points() if loss else []
    if len(points) > 1:
        first, last = points[0].mean, points[-1].mean
        if abs(last - first) <= 0.01 * abs(first):
            said.append(f"The loss stayed near {figure(last)}.")
        else:
            verb = "fell" if last < first else "rose"
            said.append(f"The loss {verb} from {figure(first)} to {figure(last)}.")
    if (best := best_accuracy(story)) is not None:
        where, value, epoch = best
        said.append(f"Accuracy{where} reached {percent(value)} in epoch {epoch + 1}.")
    return said


def best_accuracy(story: Story) -> tuple[str, float, int] | None:
    """Where the best accuracy was seen, what it was, and in which epoch (from 0)."""
    for kind, where in (("evaluation", " on held-out data"), ("epoch", "")):
        found = [
            (value, event["epoch"])
            for event in story.events[kind]
            if (value := metric_of(event, "accuracy")) is not None
            and isinstance(event.get("epoch"), int)
        ]
        if found:
            value, epoch = max(found, key=lambda best: (best[0], -best[1]))
            return where, value, epoch
    return None


def metric_of(event: dict[str, object], name: str) -> float | None:
    metrics = event.get("metrics")
    return as_number(metrics.get(name)) if isinstance(metrics, dict) else None


def find_slow(story: Story) -> Slow | None:
    """The worker that the run most often said holds the others up."""
    by_culprit: dict[tuple[int, str], list[float]] = {}
    for event in story.events["blame"]:
        rank, by = event.get("slow_rank"), as_number(event.get("slower_by_s"))
        if type(rank) is int and by is not None:
            by_culprit.setdefault((rank, text(event.get("phase") or "", 40)), []).append(by)
    if not by_culprit:
        return None
    (rank, phase), times = max(by_culprit.items(), key=lambda each: len(each[1]))
    return Slow(rank, phase, statistics.median(times))


def who_waited(story: Story) -> str:
    """The verdict on the workers: who is slow, in what, and what it costs."""
    measured = [rank for rank in story.ranks.values() if rank.own_s]
    if story.workers == 1:
        return "There was one worker, so nobody waited for anybody."
    slow = find_slow(story)
    if slow is not None:
        said = f"Worker {slow.rank} holds the others up: its own work takes "
        said += f"{duration(slow.by_s)} longer in each step than the others"
        meaning = f" ({Phase(slow.phase).meaning})" if slow.phase in set(Phase) else ""
        return said + (f"; {slow.phase}{meaning} makes the difference." if slow.phase else ".")
    if not measured:
        return "Times of single phases were not measured, so nobody can be blamed for waiting."
    if len(measured) < 2:
        return "Only one worker has measured its phases, so there is nobody to compare it with."
    own = [rank.own_s or 0.0 for rank in measured]
    spread = duration(max(own) - min(own))
    said = f"No worker holds the others up: their own work differs by {spread} in an average step."
    share = shares(measured)
    if share[Phase.WAIT] > MUCH_WAITING:
        said += " They wait all the same, because who is last changes from step to step."
    if share[Phase.TRANSFER] > MUCH_WAITING:
        moved = percent(share[Phase.TRANSFER])
        said += f" All wait for the exchange of gradients, {moved} of the time."
    return said


def shares(ranks: Sequence[Rank]) -> dict[Phase, float]:
    """What part of all workers' time went to each phase; empty where nobody measured it."""
    total = {phase: sum(rank.phases.get(phase, 0.0) for rank in ranks) for phase in Phase}
    whole = sum(total.values())
    return {phase: spent / whole for phase, spent in total.items()} if whole > 0 else {}


def where_time_went(story: Story) -> str:
    """One sentence: computing, waiting, exchanging."""
    share = shares(list(story.ranks.values()))
    if not share:
        return ""
    computing = share[Phase.FORWARD] + share[Phase.BACKWARD] + share[Phase.OPTIMIZER]
    parts = [f"{percent(computing)} went to computing"]
    parts += [
        f"{percent(share[phase])} to {phase.meaning}"
        for phase in (Phase.DATA, Phase.WAIT, Phase.TRANSFER)
        if share[phase] >= 0.005
    ]
    return f"Of the workers' time, {list_text(parts)}."
