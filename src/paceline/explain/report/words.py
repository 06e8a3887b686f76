"""The run in sentences: what was trained, how it went, who waited for whom.

Every sentence is derived from numbers that the page also shows. A sentence that the numbers do not
carry is not written.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from paceline.explain.report.collect import OWN_PHASES, Rank, Story
from paceline.explain.report.markup import (
    as_number,
    count,
    duration,
    figure,
    listing,
    percent,
    text,
)

STATUS = {
    "running": "running",
    "silent": "silent",
    "finished": "finished",
    "stopped": "stopped early",
    "failed": "failed",
    "unknown": "unknown",
}
NOTICEABLE_SHARE, NOTICEABLE_S = 0.10, 0.002
"""A worker is called slow when its own work takes longer than the others' by both of these."""
LEAST_STEPS = 20
MUCH_WAITING = 0.2
MEANT_BY_PHASE = {
    "data": "fetching samples",
    "forward": "computing outputs and the loss",
    "backward": "computing gradients",
    "wait": "waiting for slower workers",
    "transfer": "exchanging gradients",
    "optimizer": "updating the weights",
    "other": "anything else in the step",
    "checkpoint": "saving a checkpoint",
}


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
        batches = len(story.pipelines)
        found = [count(batches, "recorded batch", "recorded batches")] if batches else []
        found += ["a scaling study"] if story.scaling else []
        return f"This folder holds {listing(found)}, and no run."
    workers = count(story.workers, "worker") if story.workers else "An unknown number of workers"
    verb = {"running": "is training" if story.workers == 1 else "are training"}.get(
        story.status, "trained"
    )
    model = text(info.model, 80) if info and info.model else "a model"
    size = f" ({count(info.parameters, 'weight')})" if info and info.parameters else ""
    where = f" on {text(info.device, 40)}" if info and info.device else ""
    return f"{workers[:1].upper()}{workers[1:]} {verb} {model}{size}{where}."


def how_far(story: Story) -> str:
    """One sentence: how much of the plan is done, and why no more."""
    info, steps = story.info, story.steps
    if not story.has_run:
        return ""
    whole = info.steps if info else None
    done = count(steps, "step")
    if whole and steps < whole:
        done = f"{figure(steps)} of {count(whole, 'step')} ({percent(steps / whole)})"
    epochs = f" in {count(len(story.epochs), 'epoch')}" if story.epochs else ""
    spent = story.last_t - story.first_t
    took = f" in {duration(spent)}" if spent > 0 and not epochs else ""
    took = f", {duration(spent)} in all" if spent > 0 and epochs else took
    reason = text(story.stops[-1].get("reason", ""), 200) if story.stops else ""
    because = f" It ended because: {reason}." if reason and story.status != "running" else ""
    match story.status:
        case "running":
            return f"It was still running when this page was made: {done}{epochs}{took} so far."
        case "silent":
            silence = f"Nothing had been written for {duration(story.silent_s)}"
            return (
                f"{silence} when this page was made, and it did not say that it ended: it was "
                f"probably killed, after {done}{epochs}{took}."
            )
        case "finished":
            return f"It finished: {done}{epochs}{took}."
        case "stopped":
            return f"It was stopped after {done}{epochs}{took}.{because}"
        case "failed":
            return f"It failed after {done}{epochs}{took}.{because}"
    return f"How it ended is not known; {done}{epochs}{took} were recorded."


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
    points = loss.points(20) if loss else []
    if len(points) > 1:
        first, last = points[0].mean, points[-1].mean
        verb = "fell" if last < first * 0.99 else "rose" if last > first * 1.01 else "stayed"
        said.append(
            f"The loss {verb} from {figure(first)} to {figure(last)}."
            if verb != "stayed"
            else f"The loss stayed near {figure(last)}."
        )
    if (best := best_accuracy(story)) is not None:
        where, value, epoch = best
        said.append(f"Accuracy{where} reached {percent(value)} in epoch {epoch + 1}.")
    return said


def best_accuracy(story: Story) -> tuple[str, float, int] | None:
    """Where the best accuracy was seen, what it was, and in which epoch (from 0)."""
    for events, where in ((story.evaluations, " on held-out data"), (story.epochs, "")):
        found = [
            (value, event["epoch"])
            for event in events
            if (value := metric_of(event, "accuracy")) is not None
            and isinstance(event.get("epoch"), int)
        ]
        if found:
            value, epoch = max(found, key=lambda each: each[0])
            return where, value, epoch
    return None


def metric_of(event: dict[str, object], name: str) -> float | None:
    metrics = event.get("metrics")
    return as_number(metrics.get(name)) if isinstance(metrics, dict) else None


def find_slow(story: Story) -> Slow | None:
    """The worker that holds the others up: as the run said, or as the averages say."""
    by_culprit: dict[tuple[int, str], list[float]] = {}
    for event in story.blames:
        rank, by = event.get("slow_rank"), as_number(event.get("slower_by_s"))
        if type(rank) is int and by is not None:
            by_culprit.setdefault((rank, text(event.get("phase") or "", 40)), []).append(by)
    if by_culprit:
        (rank, phase), times = max(by_culprit.items(), key=lambda each: len(each[1]))
        return Slow(rank, phase, statistics.median(times))
    return _slow_on_average([rank for rank in story.ranks.values() if rank.own_s])


def _slow_on_average(ranks: list[Rank]) -> Slow | None:
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: rank.own_quantile_s(0.5))
    others = [rank for rank in ranks if rank is not slowest]
    usual = statistics.median(rank.own_quantile_s(0.5) for rank in others)
    by = slowest.own_quantile_s(0.5) - usual
    often = statistics.median(rank.own_quantile_s(0.75) for rank in others)
    if by < max(NOTICEABLE_SHARE * usual, NOTICEABLE_S) or slowest.steps < LEAST_STEPS:
        return None
    if slowest.own_quantile_s(0.25) < often:
        return None  # its quick steps are as quick as the others' slow ones: chance

    def beyond(phase: str) -> float:
        usual = statistics.median(rank.phase_s(phase) or 0 for rank in others)
        return (slowest.phase_s(phase) or 0) - usual

    return Slow(slowest.rank, max(OWN_PHASES, key=beyond), by)


def who_waited(story: Story) -> str:
    """The verdict on the workers: who is slow, in what, and what it costs."""
    measured = [rank for rank in story.ranks.values() if rank.own_s]
    if story.workers == 1:
        return "There was one worker, so nobody waited for anybody."
    slow = find_slow(story)
    if slow is not None:
        doing = MEANT_BY_PHASE.get(slow.phase, slow.phase)
        more = f"takes {duration(slow.by_s)} longer in each step than the others"
        by = f"; {slow.phase} ({doing}) makes the difference" if slow.phase else ""
        return f"Worker {slow.rank} holds the others up: its own work {more}{by}."
    if not measured:
        return "Times of single phases were not measured, so nobody can be blamed for waiting."
    if len(measured) < 2:
        return "Only one worker has measured its phases, so there is nobody to compare it with."
    own = [rank.own_quantile_s(0.5) for rank in measured]
    spread = duration(max(own) - min(own))
    said = f"No worker holds the others up: their own work differs by {spread} in a usual step."
    share = shares(measured)
    if share.get("wait", 0) > MUCH_WAITING:
        said += " They wait all the same, because who is last changes from step to step."
    if share.get("transfer", 0) > MUCH_WAITING:
        said += (
            f" All wait for the exchange of gradients, {percent(share['transfer'])} of the time."
        )
    return said


def shares(ranks: list[Rank]) -> dict[str, float]:
    """What part of all workers' time went to which phase."""
    total: Counter[str] = Counter()
    for rank in ranks:
        total.update(rank.phases)
    whole = sum(total.values())
    return {name: value / whole for name, value in total.items()} if whole > 0 else {}


def where_time_went(story: Story) -> str:
    """One sentence: computing, waiting, exchanging."""
    share = shares(list(story.ranks.values()))
    if not share:
        return ""
    computing = sum(share.get(name, 0) for name in ("forward", "backward", "optimizer"))
    parts = [f"{percent(computing)} went to computing"]
    for name, said in (
        ("data", "fetching samples"),
        ("wait", "waiting for other workers"),
        ("transfer", "exchanging gradients"),
    ):
        parts += [f"{percent(share[name])} to {said}"] if share.get(name, 0) >= 0.005 else []
    return f"Of the workers' time, {listing(parts)}."
