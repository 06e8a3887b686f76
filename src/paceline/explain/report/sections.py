"""The sections of the page that are curves, bars and tables, each a function of the story.

A section is None where there is nothing to show; the page then says why.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from paceline.explain.report.charts import bars, curve, legend, line_chart
from paceline.explain.report.collect import Advice, Rank, Story, StudySize
from paceline.explain.report.markup import (
    Html,
    as_number,
    count,
    data_block,
    duration,
    figure,
    html,
    join,
    note,
    percent,
    sentence,
    size,
    table,
    text,
)
from paceline.explain.report.series import Point, Window
from paceline.explain.report.words import find_slow, metric_of, who_waited
from paceline.explain.scaling.attribution import MEANINGS
from paceline.observe.phases import OWN, Phase
from paceline.observe.units import SHARES

ROWS_LIMIT = 60
"""The most epochs and checkpoints of a table."""
COLUMNS_LIMIT = 8
WORKERS_LIMIT = 32
"""More workers than this are shown by their extremes."""
LANES_LIMIT = 6
SIZES_LIMIT, PREDICTIONS_LIMIT = 32, 64
SCALING_MODES = {
    "strong": "Strong scaling: the batch stays the same, and more workers share it.",
    "weak": "Weak scaling: every worker keeps its part, so more workers mean a larger batch.",
}


def learning(story: Story) -> Html | None:
    """Every metric by step, the speed, and a row for each epoch."""
    order = {"loss": 0, "accuracy": 1}
    names = sorted(story.metrics, key=lambda name: (order.get(name, 2), name))
    charts = [_metric_chart(story, name) for name in names if story.metrics[name]]
    if story.rate:
        speed = [curve("samples per second", "look-rate", story.rate.points())]
        summary = f"{figure(story.rate.points(1)[0].mean)} on average, all workers together."
        charts.append(line_chart("Samples per second", speed, summary=summary, zero=True))
    curves = html('<div class="charts">{}</div>', charts) if charts else None
    return join([curves, _epochs(story)]) or None


def _say_of(story: Story, name: str) -> Callable[[float | None], str]:
    """How to say the values of a metric: shares in percent."""
    if name.lower() not in SHARES:
        return figure
    values = story.metrics[name].values() if name in story.metrics else ()
    return percent if all(0 <= total / weight <= 1.0001 for _, total, weight in values) else figure


def _metric_chart(story: Story, name: str) -> Html:
    column, say = story.metrics[name], _say_of(story, name)
    points = column.points()
    curves = [curve("training", "look-train", points)]
    held_out = [
        Point(event["step"], value, value, value)
        for event in story.events["evaluation"]
        if (value := metric_of(event, name)) is not None and math.isfinite(value)
    ]
    if held_out:
        held_out.sort(key=lambda point: point.x)
        curves.append(curve("held-out data", "look-test", held_out, dots=True))
    means = [point.mean for point in points]
    best = f"highest {say(max(means))}" if say is percent else f"lowest {say(min(means))}"
    summary = f"From {say(means[0])} to {say(means[-1])}; {best}."
    if any(point.high > point.low for point in points):
        summary += " The pale band holds the lowest and highest steps."
    if column.first_bad is not None:
        summary += f" Values that are not numbers, first at step {column.first_bad:,}."
    is_share = say is percent
    zero = is_share or (name == "loss" and min(p.low for p in points) >= 0)
    title = sentence(text(name, 60))
    return line_chart(title, curves, summary=summary, zero=zero, unit="%" if is_share else "")


def _epochs(story: Story) -> Html | None:
    by_epoch: dict[int, dict[str, Any]] = {}
    columns: dict[tuple[str, str], str] = {}
    for kind, where in (("epoch", ""), ("evaluation", " (held-out)")):
        for event in story.events[kind]:
            metrics = event.get("metrics")
            if type(event.get("epoch")) is int:
                by_epoch.setdefault(event["epoch"], {})[kind] = event
                known = metrics if isinstance(metrics, dict) else {}
                columns |= {(kind, name): text(name, 40) + where for name in known}
    if not by_epoch:
        return None
    names = list(columns)[:COLUMNS_LIMIT]
    says = {name: _say_of(story, name) for _, name in names}
    epochs = sorted(by_epoch)
    if len(epochs) > ROWS_LIMIT:  # evenly spread, the first and the last among them
        apart = (len(epochs) - 1) / (ROWS_LIMIT - 1)
        epochs = [epochs[round(k * apart)] for k in range(ROWS_LIMIT)]
    rows = []
    for epoch in epochs:
        row = by_epoch[epoch]
        cells = [says[name](metric_of(row.get(kind, {}), name)) for kind, name in names]
        train = row.get("epoch", {})
        samples, seconds = as_number(train.get("samples")), as_number(train.get("seconds"))
        rows.append([f"{epoch + 1}", *cells, figure(samples), duration(seconds)])
    head = ["epoch", *(columns[each] for each in names), "samples", "time"]
    left = len(by_epoch) - len(rows)
    said = f"{count(left, 'epoch')} between these rows are left out." if left else None
    return join([table(head, rows, caption="Epoch by epoch"), note(said)])


def workers(story: Story) -> Html | None:
    """How each worker's time is spent; waiting belongs to whoever is waited for, so is hatched."""
    everyone = sorted(story.ranks.values(), key=lambda rank: rank.rank)
    worked = [rank for rank in everyone if rank.steps]
    if not worked:
        return None
    ranks, slow = extremes(worked), find_slow(story)
    left = None
    if len(ranks) < len(worked):
        left = (
            f"{figure(len(worked))} workers took part; shown are the {len(ranks)} whose own work "
            "takes longest and shortest."
        )
    return html(
        '<p class="verdict {}">{}</p>{}{}{}',
        "bad" if slow else "good",
        who_waited(story),
        note(left),
        _worker_bars([rank for rank in ranks if rank.phases], slow.rank if slow else None),
        _worker_table(ranks),
    )


def extremes(ranks: Sequence[Rank]) -> list[Rank]:
    """All ranks, or the slowest and fastest ones where there are too many."""
    if len(ranks) <= WORKERS_LIMIT:
        return list(ranks)
    by_work = sorted(ranks, key=lambda rank: -(rank.own_s or 0))
    half = WORKERS_LIMIT // 2
    return sorted([*by_work[:half], *by_work[-half:]], key=lambda rank: rank.rank)


def _worker_bars(ranks: Sequence[Rank], slow: int | None) -> Html | None:
    if not ranks:
        return None
    longest = max(sum(rank.phases.values()) / rank.steps for rank in ranks) or 1.0
    rows = []
    for rank in ranks:
        pieces = [
            (f"look-{phase}", spent / longest, f"{phase}: {duration(spent)}")
            for phase in Phase
            if (spent := rank.phase_s(phase))
        ]
        mark = Html("<em> slow</em>") if rank.rank == slow else None
        name = html("worker {}{}", rank.rank, mark)
        rows.append((name, pieces, duration(sum(rank.phases.values()) / rank.steps)))
    used = [phase for phase in Phase if any(rank.phases.get(phase) for rank in ranks)]
    shown = "<figure><figcaption><strong>An average step of each worker</strong></figcaption>{}{}"
    return html(shown + "</figure>", bars(rows), legend(_entry(phase) for phase in used))


def _entry(phase: Phase) -> tuple[str, str, str]:
    return f"look-{phase}", phase, phase.meaning


def _worker_table(ranks: Sequence[Rank]) -> Html:
    order = [*OWN, *(phase for phase in Phase if phase not in OWN)]
    phases = [phase for phase in order if any(phase in rank.phases for rank in ranks)]
    rows = []
    for rank in ranks:
        waited, whole = rank.phases.get(Phase.WAIT), sum(rank.phases.values())
        times = [duration(rank.phase_s(phase)) for phase in phases]
        own, share = html("<b>{}</b>", duration(rank.own_s)), waited / whole if waited else None
        rows.append([f"{rank.rank}", figure(rank.samples), own, *times, percent(share)])
    head = ["worker", "samples", "own work", *phases, "time waiting"]
    shown = table(head, rows, caption="Times are averages of one step")
    where = {" on ".join(filter(None, (rank.device, rank.host))) for rank in ranks} - {""}
    return join([shown, note(where and f"They ran on: {', '.join(sorted(where)[:8])}.")])


def timeline(story: Story) -> Html | None:
    """Some steps, worker above worker: the spans, which the page's script draws."""
    window = story.window
    if window is None:
        return None
    first, last = window.steps or (None, None)
    what = f"Steps {first:,} to {last:,}" if first and last else "Some steps"
    said = (
        f"{what}, {duration((window.end - window.begin) / 1e6)} in all. Time goes from left to "
        "right. Every worker has a row for computing and one for exchanging gradients: the more of "
        "the exchange lies below computing, the less it costs."
    )
    names = {span.name for spans in window.spans.values() for span in spans}
    entries = [_entry(phase) for phase in Phase if phase in names]
    entries += [("look-ready", "ready", "gradients can be sent")] if "ready" in names else []
    return html(
        '<p>{}</p>{}<div class="timeline">{}</div>{}<p class="note">The files in '
        "<code>timeline/</code> hold the whole run. They are Chrome traces: Perfetto opens them."
        "</p>",
        said,
        [note(each) for each in window.notes],
        data_block(_packed(window)),
        legend(entries),
    )


def _packed(window: Window) -> dict[str, Any]:
    """The spans for the canvas: names once, times in microseconds from the window's beginning."""
    names: dict[str, int] = {}
    ranks = []
    for rank, spans in window.spans.items():
        lanes = sorted({span.lane for span in spans} or {1})[:LANES_LIMIT]
        packed = []
        for span in spans:
            if span.lane in lanes:
                name, begin = names.setdefault(span.name, len(names)), span.begin - window.begin
                place = [lanes.index(span.lane), round(begin, 1), round(span.length, 1)]
                packed.append([name, *place, span.facts])
        labels = [{1: "computing", 2: "exchange"}.get(lane, "thread") for lane in lanes]
        ranks.append({"rank": rank, "lanes": labels, "spans": packed})
    length = round(window.end - window.begin, 1)
    return {"length": length, "names": list(names), "phases": list(Phase), "ranks": ranks}


def scaling(story: Story) -> Html | None:
    """How much faster more workers are, measured and predicted, and where the rest went."""
    study = story.study
    by_how: dict[str, list[StudySize]] = {"measured": []}
    for each in study.sizes[:SIZES_LIMIT] if study else ():
        by_how["measured"] += [each] if each.is_usable else []
    if study is None or not by_how["measured"]:
        return None
    for each in study.predicted[:PREDICTIONS_LIMIT]:
        if each.is_usable:
            how = f"predicted, {text(each.network, 60)}" if each.network else "predicted"
            by_how.setdefault(how, []).append(each)
    rows = []
    for how, sizes in by_how.items():
        sizes.sort(key=lambda each: each.workers)
        for each in sizes:
            numbers = [figure(each.speedup), percent(each.of_ideal), duration(each.step_s)]
            rows.append([figure(each.workers), how, *numbers])
    last = by_how["measured"][-1]
    verdict = "Only one worker was measured, so there is nothing to compare it with."
    if last.workers > 1:
        verdict = f"{count(last.workers, 'worker')} are {figure(last.speedup)} times as fast as "
        verdict += f"one: {percent(last.of_ideal)} of the ideal."
    head = ("workers", "how", "times as fast", "of the ideal", "time of a step")
    return html(
        '<p class="verdict"><strong>{}</strong></p><p>{}</p>{}{}{}{}{}',
        verdict,
        SCALING_MODES.get(study.mode),
        _speedup_chart(by_how),
        table(head, rows, caption="Speed-up by number of workers", words=(0, 1)),
        _losses(by_how["measured"]),
        _told(study.suggestion, "One thing to try"),
        _told(study.check, "How good the prediction is"),
    )


def _told(advice: Advice | None, title: str) -> Html | None:
    if advice is None or not advice.text:
        return None
    return html("<h3>{}</h3><p>{}</p>", title, sentence(text(advice.text, 600)))


def _speedup_chart(by_how: dict[str, list[StudySize]]) -> Html:
    def points(sizes: Sequence[StudySize]) -> list[Point]:
        return [Point(each.workers, each.speedup, each.speedup, each.speedup) for each in sizes]

    measured, *predicted = by_how.items()
    curves = [curve("measured (solid)", "look-measured", points(measured[1]), dots=True)]
    for how, sizes in predicted:
        begin = measured[1][-1:] if sizes[0].workers > measured[1][-1].workers else []
        curves.append(curve(how, "look-predicted", points([*begin, *sizes]), dots=True, named=True))
    marks = sorted({1, 2, *(each.workers for sizes in by_how.values() for each in sizes)})
    ideal = [Point(mark, mark, mark, mark) for mark in marks]
    curves.append(curve("ideal: n workers, n times as fast (dotted)", "look-ideal", ideal))
    return line_chart(
        "How many times as fast as one worker",
        curves,
        summary="Dashed lines are predicted, not measured." if predicted else "",
        x="workers",
        unit="\N{MULTIPLICATION SIGN}",
        marks=marks,
        log=marks[-1] > 16,
        zero=marks[-1] <= 16,
        size=[560, 300],
    )


def _losses(measured: Sequence[StudySize]) -> Html | None:
    found = {name for each in measured for name in each.lost}
    names = [name for name in MEANINGS if name in found]
    rows, bar_rows = [], []
    for each in measured:
        lost = {name: each.lost.get(name, 0.0) for name in names}
        whole = sum(lost.values())
        if not 0 < whole < math.inf or min(lost.values()) < 0:
            continue
        shares = {name: percent(part / whole) for name, part in lost.items()}
        rows.append([figure(each.workers), *shares.values()])
        pieces = [(f"look-{n}", lost[n] / whole, f"{n}: {said}") for n, said in shares.items()]
        value = f"{percent(1 - each.of_ideal)} lost"
        bar_rows.append((count(each.workers, "worker"), pieces, value))
    if not rows:
        return None
    return html(
        "<h3>Where the rest went</h3><p>What keeps the workers from the ideal, as shares of the "
        "time that is lost.</p>{}{}{}",
        bars(bar_rows),
        legend((f"look-{name}", name, MEANINGS[name]) for name in names),
        table(("workers", *names), rows, caption="Shares of the lost time"),
    )


def checkpoints(story: Story) -> Html | None:
    """What was saved, and whether it is still there."""
    found = list(story.events["checkpoint"])
    if not found:
        return None
    rows = [
        [
            html('<span class="keep">{}</span>', text(event.get("name", ""), 80)),
            "there" if event.get("name") in story.kept else "deleted since",
            figure(event["step"]),
            size(as_number(event.get("bytes"))),
            duration(as_number(event.get("seconds"))),
            figure(as_number(event.get("metric"))),
        ]
        for event in found[-ROWS_LIMIT:]
    ]
    kept = sum(event.get("name") in story.kept for event in found)
    said = (
        f"{count(len(found), 'checkpoint')} written, the last one after step "
        f"{figure(found[-1]['step'])}; {figure(kept)} of them still in the folder. "
        "A checkpoint holds everything that a run needs to continue."
    )
    head = ("name", "now", "after step", "size", "time to save", "metric")
    shown = table(head, rows, caption="Checkpoints", words=(0, 1))
    left = len(found) - len(rows)
    return html(
        "<p>{}</p>{}{}", said, shown, note(left and f"{count(left, 'older one')} not shown.")
    )


def details(story: Story) -> Html | None:
    """Settings, what was decided and why, and what the run said."""
    return join([_settings(story), _noise(story), _messages(story)]) or None


def _settings(story: Story) -> Html | None:
    info = story.info
    if info is None:
        return None
    said: dict[str, object] = {
        each.name.replace("_", " "): getattr(info, each.name)
        for each in fields(info)
        if each.name not in ("name", "status", "policy", "versions", "schema")
    }
    said |= {"created": moment(info.created), "updated": moment(info.updated)}
    said |= {text(key, 40): value for key, value in list(info.versions.items())[:8]}
    row = "<div><dt>{}</dt><dd>{}</dd></div>"
    rows = [html(row, key, _setting(value)) for key, value in said.items()]
    policy = [html("<li>{}</li>", text(line, 400)) for line in info.policy[:20]]
    decided = html("<h3>What was decided, and why</h3><ul>{}</ul>", policy) if policy else None
    return html('<dl class="settings">{}</dl>{}', rows, decided)


def _setting(value: object) -> str:
    """A setting as text; a number that nobody knows is a dash."""
    return text(value, 120) if isinstance(value, str) else figure(as_number(value), 6)


def moment(seconds: float) -> str:
    """A time as the clock on the wall says it, in UTC."""
    try:
        when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return "unknown"
    return when.strftime("%Y-%m-%d %H:%M UTC")


def _noise(story: Story) -> Html | None:
    if not story.events["noise"]:
        return None
    last = story.events["noise"][-1]
    said = (
        f"At step {figure(last['step'])} the gradient noise scale was "
        f"{figure(as_number(last.get('noise_scale')))}: larger batches than about that many "
        f"samples bring little more. {text(last.get('advice') or '', 300)}"
    )
    return html("<h3>Is the batch the right size?</h3><p>{}</p>", said)


def _messages(story: Story) -> Html | None:
    shown = sorted(story.messages, key=lambda event: event["t"])
    if not shown:
        return None
    item = (
        '<li class="{}"><span class="when">{}</span><span class="who">worker {}</span>'
        '<span class="text">{}</span></li>'
    )
    lines = []
    for event in shown:
        level = event.get("level") if event.get("level") in ("warning", "error") else None
        when = f"{event['t'] - story.first_t:,.1f} s"
        lines.append(html(item, level, when, event["rank"], text(event.get("text", ""), 500)))
    said = f"The last {len(shown)} of {figure(story.message_count)} messages."
    said = said if len(shown) < story.message_count else ""
    shown_lines = '<h3>What the run said</h3><p>{}</p><ul class="messages">{}</ul>'
    return html(shown_lines, said, lines)
