"""The run in sentences: what was trained, how it ended, which worker was slow.

Every sentence is derived from numbers that the page also shows, and omitted where these do not
support it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from paceline.show.report.bounds import number, text, whole
from paceline.show.report.pace import SlowSpan
from paceline.show.report.run_data import LONGEST_STEPS, LongStep, RankTotals, RunData
from paceline.telemetry import (
    ALL_APPLIED,
    Phase,
    bytes_text,
    count_text,
    list_text,
    metric_text,
    percentages,
    rate_text,
    seconds_text,
    share_text,
)

MUCH_WAITING = 0.2
PAUSE_S, PAUSE_STEPS = 0.25, 3
"""The shortest pause worth a sentence, in seconds and in usual steps."""
TOO_EARLY = ("killed", "silent", "stopped", "failed")
"""The states of a run that ended before its last step; their sentence comes first."""
PAUSES_LIMIT = SPANS_LIMIT = 3
WARM_UP_STEPS = 2
"""The first steps of a process are slow, because they allocate and learn; they are not pauses."""


def overview(data: RunData) -> list[str]:
    """All sentences, in reading order."""
    said = [what_was_trained(data), progress(data)]
    if data.status in TOO_EARLY:
        said = [*reversed(said), how_to_continue(data)]
    said += learning_sentences(data)
    said.append(rounds_sentence(data))
    if data.ranks:
        said.append(time_by_phase(data))
        said += [waiting_verdict(data), *pauses(data)] if data.workers > 1 else []
    return [each for each in said if each]


def what_was_trained(data: RunData) -> str:
    """One sentence: the workers, the model and the devices."""
    info = data.info
    if not data.has_run:
        found = [count_text(len(data.traces), "recorded step")] if data.traces else []
        found += ["a scaling study"] if data.study else []
        found += ["a timeline"] if data.timeline else []
        return f"This folder has {list_text(found)}, but no run." if found else ""
    workers = count_text(data.workers, "worker") if data.workers else "Some workers"
    verb = "trained"
    if data.status == "running":
        verb = "is training" if data.workers == 1 else "are training"
    model = text(info.model, 80) if info and info.model else "a model"
    weights = f" ({count_text(info.parameters, 'weight')})" if info and info.parameters else ""
    where = f" on {text(info.device, 40)}" if info and info.device else ""
    return f"{workers} {verb} {model}{weights}{where}."


def progress(data: RunData) -> str:
    """One sentence: how much of the plan is done, and why the run ended."""
    if not data.has_run:
        return ""
    steps, planned = data.steps, data.info.steps if data.info else None
    done = count_text(steps, "step")
    if planned and steps < planned:
        done = f"{steps:,} of {count_text(planned, 'step')} ({share_text(steps / planned)})"
    if epochs := len(data.events["epoch"]):
        done += f" in {count_text(epochs, 'epoch')}"
    if (spent := data.last_t - data.first_t) > 0:
        done += f", {seconds_text(spent)} in all"
    reason = end_reason(data).rstrip(".")
    because = f"{reason[0].upper()}{reason[1:]}. " if reason else ""
    silence = seconds_text(data.silent_s)
    late = f", the last of them {seconds_text(data.late_s)} before" if data.late_s else ""
    endings = {
        "running": f"It was still running when this page was made: {done} so far{late}.",
        "killed": f"It was killed after {done}: its processes ended without giving a reason.",
        "silent": f"Nothing had been written for {silence} when this page was made, and no end was "
        f"recorded: it was probably killed, after {done}.",
        "finished": f"It finished: {done}.",
        "stopped": f"{because}It was stopped after {done}.",
        "failed": f"{because}It failed after {done}.",
    }
    return endings.get(data.status, f"How it ended is not known; {done} were recorded.")


def end_reason(data: RunData) -> str:
    """The recorded reason of the run's end; empty if there is none, or it ended as planned."""
    stops = data.events["stop"]
    reason = getattr(data.info, "reason", "") or (stops[-1].get("reason", "") if stops else "")
    return text(reason) if reason != ALL_APPLIED else ""


def how_to_continue(data: RunData) -> str:
    """One sentence: what to do with a run that ended too early."""
    found = data.events["checkpoint"]
    saved = [event["step"] for event in found if event.get("name") in data.kept]
    if not saved:
        return "There is no checkpoint: the same command would start from the beginning."
    return f"The same command continues it after step {max(saved):,}, its newest checkpoint."


def learning_sentences(data: RunData) -> list[str]:
    """How loss and accuracy developed."""
    said = []
    for name, curve in data.metrics.items():
        if curve.first_bad is not None:
            diverged = ": training has diverged there" if name == "loss" else ""
            said.append(
                f"From step {curve.first_bad:,} on, some values of {text(name, 40)} are not "
                f"numbers{diverged}."
            )
    if ends := loss_ends(data):
        (first, begin), (last, end) = ends
        if abs(last - first) <= 0.01 * abs(first):  # a change below 1 % is not worth a direction
            said.append(f"The training loss stayed near {metric_text('loss', last)}.")
        else:
            verb = "fell" if last < first else "rose"
            first_said, last_said = metric_text("loss", first), metric_text("loss", last)
            said.append(f"The training loss {verb} from {first_said} {begin} to {last_said} {end}.")
    if (best := best_accuracy(data)) is not None:
        where, value, epoch = best
        said.append(f"Accuracy on {where} reached {share_text(value, 1)} in epoch {epoch + 1}.")
    return said


def loss_ends(data: RunData) -> tuple[tuple[float, str], tuple[float, str]] | None:
    """The training loss at the beginning and at the end, and where: the means of two epochs.

    Before two epochs have ended: the first step, and the last point of the curve.
    """
    means = values_of(data, "epoch", "loss", by="epoch")
    epochs = [(loss, f"in epoch {epoch + 1}") for epoch, loss in means]
    if len(epochs) > 1:
        return epochs[0], epochs[-1]
    points = data.metrics["loss"].points() if "loss" in data.metrics else []
    if len(points) < 2:
        return None
    return (points[0].mean, "in the first step"), (points[-1].mean, "in the last steps")


def best_accuracy(data: RunData) -> tuple[str, float, int] | None:
    """The data with the best accuracy, the accuracy, and the epoch (from 0)."""
    for kind, where in (("evaluation", "held-out data"), ("epoch", "training data")):
        if found := values_of(data, kind, "accuracy", by="epoch"):
            epoch, value = max(found, key=lambda best: (best[1], -best[0]))
            return where, value, epoch
    return None


def values_of(data: RunData, kind: str, name: str, by: str) -> list[tuple[int, float]]:
    """A metric in the events of a kind where it is a number, by their step or epoch."""
    found = []
    for event in data.events[kind]:
        metrics, at = event.get("metrics"), whole(event.get(by))
        value = number(metrics.get(name)) if isinstance(metrics, dict) else None
        if value is not None and math.isfinite(value) and at is not None:
            found.append((at, value))
    return found


def rounds_sentence(data: RunData) -> str:
    """The cost of rounds with other islands; empty for a run without any."""
    drift, sent, waited = (data.metrics.get(f"island_{n}") for n in ("drift", "bytes", "round_s"))
    if not (drift and sent and waited) or not (points := drift.points()):
        return ""
    (sent_bytes, rounds), (waited_s, _) = sent.totals(), waited.totals()
    spent_s, count = data.last_t - data.first_t, max(1, round(rounds))
    share = f", {share_text(waited_s / spent_s)} of its time" if spent_s > 0 else ""
    each = f", {bytes_text(sent_bytes / count)} in each" if count > 1 else ""
    return (
        f"This island sent {bytes_text(sent_bytes)} in {count_text(count, 'round')}{each}. It "
        f"waited {seconds_text(waited_s / count)} for a round{share}. Before the last one the "
        f"islands were {metric_text('drift', points[-1].mean)} from their average, "
        f"{metric_text('drift', max(point.high for point in points))} at most."
    )


def describe_slow_span(span: SlowSpan, data: RunData) -> str:
    """The sentence about a slow worker, and the steps in which it was slow."""
    count = span.last - span.first + 1
    meaning = f"{span.phase} ({span.phase.meaning})"
    by = seconds_text(span.slower_by_s)
    if span.is_now and data.status == "running":
        since = f" since step {span.first:,}" if span.first > 1 else ""
        return (
            f"Worker {span.rank} holds the others up{since}: its own work takes {by} longer in an "
            f"average step than the others'; {meaning} makes the difference."
        )
    when = f"in all {count:,} steps"
    if count < data.steps:
        when = f"in steps {span.first:,} to {span.last:,}, {count:,} of {data.steps:,}"
    return (
        f"Worker {span.rank} held the others up {when}: its own work took {by} longer in an "
        f"average one of these than the others'; {meaning} made the difference."
    )


def waiting_verdict(data: RunData) -> str:
    """The verdict on the workers: which is slow, in which phase, and what that costs."""
    if data.workers == 1:
        return "There was one worker, so there was no waiting for others."
    if data.slow:
        found = [describe_slow_span(span, data) for span in data.slow[:SPANS_LIMIT]]
        shards = data.info.shards if data.info else 0
        if shards > data.workers and shards % data.workers:
            found.append(
                f"{shards} shards do not divide evenly among {data.workers} workers, so some "
                "compute one more than others in every step."
            )
        return " ".join(found)
    measured = [rank for rank in data.ranks.values() if rank.own_s]
    if len(measured) < 2:
        return "Too few workers have recorded their phases to tell which one was slow."
    own = [rank.own_s for rank in measured]
    spread = seconds_text(max(own) - min(own))
    said = f"No worker holds the others up: their own work differs by {spread} in an average step."
    share = shares(measured)
    if share.get(Phase.WAIT, 0) > MUCH_WAITING:
        has_deaths = any(event.get("died") for event in data.events["generation"])
        why = "who is last changes from step to step."
        why = f"one of them died, or {why}" if has_deaths else why
        said += f" They wait all the same, because {why}"
    if share.get(Phase.TRANSFER, 0) > MUCH_WAITING:
        moved = percents_of_time(data)[Phase.TRANSFER.meaning]
        said += f" All wait for the exchange of gradients, {moved} % of the time."
    return said


def verdict_style(data: RunData) -> str:
    """The style of the verdict: `good`, `bad`, or `past` where a worker no longer is slow."""
    if not data.slow:
        return "good"
    is_past = data.status == "running" and not data.slow[0].is_now
    return "past" if is_past else "bad"


def pauses(data: RunData) -> list[str]:
    """The longest pauses of a single worker, which do not make it a slow one."""
    # A pause makes either a worker's own work in a step long, or the whole step: a worker that is
    # stopped while it waits ends the step later than the others. In the next step these wait for
    # it, possibly in a message that does not count as waiting, so the step after a pause is left
    # out.
    ranks = list(data.ranks.values())
    left_out = {done + step for _, done in data.starts for step in range(1, WARM_UP_STEPS + 1)}
    left_out |= {trace.step + step for trace in data.traces for step in range(2)}
    found = _alone({rank.rank: rank.longest_whole for rank in ranks}, left_out)
    found |= _alone({rank.rank: rank.longest_own for rank in ranks}, left_out)
    after = {step + 1 for _, step in found}
    own = [(key, long) for key, long in found.items() if key[1] not in after]
    longest = sorted(own, key=lambda each: -each[1].seconds)[:PAUSES_LIMIT]
    return [
        f"Worker {rank} stood still for {seconds_text(long.seconds)} in step {step:,} "
        f"({long.phase}), and the others waited."
        for (rank, step), long in longest
    ]


def _alone(
    heaps: Mapping[int, Sequence[LongStep]], left_out: Collection[int]
) -> dict[tuple[int, int], LongStep]:
    """By rank and step: how much longer one rank's step was than that of any other."""
    usual_s = max((_usual_s(heap) for heap in heaps.values() if heap), default=0.0)
    by_step: dict[int, list[tuple[LongStep, int]]] = {}
    for rank, heap in heaps.items() if len(heaps) > 1 else ():
        for long in heap:
            by_step.setdefault(long.step, []).append((long, rank))
    found = {}
    for step, longs in by_step.items():
        (long, rank), *others = sorted(longs, reverse=True)
        alone_s = long.seconds - max([usual_s, *(other.seconds for other, _ in others)])
        least_s = max(PAUSE_S, PAUSE_STEPS * usual_s, long.seconds / 2)
        if alone_s >= least_s and step not in left_out:
            found[rank, step] = long._replace(seconds=alone_s)
    return found


def _usual_s(heap: Sequence[LongStep]) -> float:
    """The time of a usual step: the shortest of the longest steps, in a short run the median."""
    seconds = sorted(long.seconds for long in heap)
    return seconds[0] if len(seconds) >= LONGEST_STEPS else seconds[len(seconds) // 2]


def shares(ranks: Iterable[RankTotals]) -> dict[Phase, float]:
    """The share of all workers' time in each phase; empty where it was not recorded."""
    total: dict[Phase, float] = {}
    for rank in ranks:
        for phase, spent in rank.phases.items():
            total[phase] = total.get(phase, 0.0) + spent
    everything = sum(total.values())
    return {phase: spent / everything for phase, spent in total.items()} if everything else {}


def percents_of_time(data: RunData) -> dict[str, int]:
    """What the workers' time went to, in percents that add up to 100; empty if unknown."""
    spent = {"computing": 0.0}
    for phase, share in shares(data.ranks.values()).items():
        is_computing = phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
        name = "computing" if is_computing else phase.meaning
        spent[name] = spent.get(name, 0.0) + share
    return percentages(spent) if any(spent.values()) else {}


def time_by_phase(data: RunData) -> str:
    """One sentence: computing, fetching, waiting, exchanging, and the rest."""
    parts = [f"{share} % to {name}" for name, share in percents_of_time(data).items() if share]
    return f"The workers' time went {list_text(parts)}." if parts else ""


def tiles(data: RunData) -> list[tuple[str, str, str]]:
    """The key numbers: label, value and remark of each."""
    info, found = data.info, list[tuple[str, str, str]]()
    if data.workers:
        found.append(("workers", f"{data.workers:,}", f"on {info.device}" if info else ""))
    if data.steps:
        batch = f"of {count_text(info.global_batch, 'sample')}" if info else ""
        found.append(("steps", f"{data.steps:,}", batch))
    if speed := data.rate.points(1):
        note = "all workers, per elapsed second"
        found.append(("samples per second", rate_text(speed[0].mean), note))
    if ends := loss_ends(data):
        (first, begin), (last, end) = ends
        note = f"{end}; {metric_text('loss', first)} {begin}"
        found.append(("training loss", metric_text("loss", last), note))
    if best := best_accuracy(data):
        where, value, epoch = best
        found.append(("best accuracy", share_text(value, 1), f"{where}, epoch {epoch + 1}"))
    if data.last_t > data.first_t:
        restarts = count_text(len(data.starts) - 1, "restart")
        note = f"{restarts}, {count_text(data.redone, 'step')} redone"
        spent = seconds_text(data.last_t - data.first_t)
        found.append(("time", spent, note if len(data.starts) > 1 else ""))
    return found
