"""The plain sections: curves with epochs, checkpoints, settings and messages."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

from paceline.explain.report.charts import POINTS_LIMIT, Chart, Line, draw
from paceline.explain.report.collect import Story
from paceline.explain.report.markup import (
    Html,
    as_number,
    count,
    duration,
    figure,
    join,
    percent,
    size,
    table,
    tag,
    text,
)
from paceline.explain.report.series import Column, Point
from paceline.explain.report.words import metric_of

EPOCHS_LIMIT = 60
CHECKPOINTS_LIMIT = 60
SHARES = {"accuracy", "acc", "top1", "top5", "precision", "recall", "f1"}
"""Metrics that are between 0 and 1 and read best as percent."""


def curves(story: Story) -> Html | None:
    """Every metric by step, and the speed."""
    names = sorted(story.metrics, key=lambda name: ({"loss": 0, "accuracy": 1}.get(name, 2), name))
    charts = [chart for name in names if (chart := _metric_chart(story, name))]
    if story.rate:
        points = story.rate.points(POINTS_LIMIT)
        mean = _mean(story.rate)
        charts.append(
            draw(
                Chart(
                    "Samples per second",
                    [Line("samples per second", "rate", points)],
                    from_zero=True,
                    summary=f"{figure(mean)} on average, all workers together.",
                )
            )
        )
    return tag("div", *charts, class_="charts") if charts else None


def _mean(column: Column) -> float:
    total = weight = 0.0
    for _, each, cell_weight in column.values():
        total, weight = total + each, weight + cell_weight
    return total / weight if weight else math.nan


def is_share(story: Story, name: str) -> bool:
    """Whether a metric is a share, and so said in percent."""
    if name.lower() not in SHARES:
        return False
    column = story.metrics.get(name)
    return not column or all(0 <= total / weight <= 1.0001 for _, total, weight in column.values())


def _metric_chart(story: Story, name: str) -> Html | None:
    column = story.metrics[name]
    points = column.points(POINTS_LIMIT)
    shown = text(name, 60)
    if not points:
        return None
    say = percent if is_share(story, name) else figure
    lines = [Line("training", "train", points)]
    held_out = [
        Point(event["step"], value, value, value)
        for event in story.evaluations
        if (value := metric_of(event, name)) is not None and math.isfinite(value)
    ]
    if held_out:
        lines.append(Line("held-out data", "test", sorted(held_out, key=lambda p: p.step), True))
    last, best = points[-1].mean, (max if say is percent else min)(p.mean for p in points)
    extreme = "highest" if say is percent else "lowest"
    summary = f"From {say(points[0].mean)} to {say(last)}; {extreme} {say(best)}."
    if any(point.high > point.low for point in points):
        summary += " The pale band holds the lowest and highest steps."
    notes = []
    if column.first_bad is not None:
        notes.append(f"Values that are not numbers, first at step {figure(column.first_bad)}.")
    return draw(
        Chart(
            shown[:1].upper() + shown[1:],
            lines,
            say=say,
            from_zero=name == "loss" and min(p.low for p in points) >= 0,
            ceiling=1.0 if say is percent else None,
            summary=summary,
            notes=notes,
        )
    )


def epochs(story: Story) -> Html | None:
    """One row for each epoch: training and held-out metrics, time."""
    if not story.epochs and not story.evaluations:
        return None
    by_epoch: dict[int, dict[str, Any]] = {}
    for kind, events in (("train", story.epochs), ("test", story.evaluations)):
        for event in events:
            if isinstance(event.get("epoch"), int):
                by_epoch.setdefault(event["epoch"], {})[kind] = event
    names: list[tuple[str, str]] = []
    for row in by_epoch.values():
        for kind, event in row.items():
            metrics = event.get("metrics")
            for name in metrics if isinstance(metrics, dict) else ():
                if (kind, name) not in names and len(names) < 8:
                    names.append((kind, name))
    names.sort(key=lambda each: each[0] != "train")
    head = ["epoch", *(text(n, 40) + (" (held-out)" if k == "test" else "") for k, n in names)]
    rows = []
    for epoch in thin(sorted(by_epoch), EPOCHS_LIMIT):
        row = by_epoch[epoch]
        cells: list[object] = [f"{epoch + 1}"]
        for kind, name in names:
            say = percent if is_share(story, name) else figure
            cells.append(say(metric_of(row.get(kind, {}), name)))
        train = row.get("train", {})
        seconds, samples = as_number(train.get("seconds")), as_number(train.get("samples"))
        cells += [figure(samples), duration(seconds)]
        rows.append(cells)
    left = len(by_epoch) - len(rows)
    note = f"{count(left, 'epoch')} between these rows are left out."
    return join(
        [
            table([*head, "samples", "time"], rows, caption="Epoch by epoch"),
            tag("p", note, class_="note") if left else None,
        ]
    )


def thin(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the items, evenly spread, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return [items[round(k * (len(items) - 1) / (limit - 1))] for k in range(limit)]


def checkpoints(story: Story) -> Html | None:
    """What was saved."""
    if not story.checkpoints:
        return None
    found = list(story.checkpoints)
    shown = found[-CHECKPOINTS_LIMIT:]
    has_metric = any(as_number(event.get("metric")) is not None for event in shown)
    rows = [
        [
            tag("span", text(event.get("name", ""), 80), class_="keep"),
            "there" if event.get("name") in story.kept else "deleted since",
            figure(event["step"]),
            size(as_number(event.get("bytes"))),
            duration(as_number(event.get("seconds"))),
            *([figure(as_number(event.get("metric")))] if has_metric else []),
        ]
        for event in shown
    ]
    left = len(found) - len(rows)
    kept = sum(event.get("name") in story.kept for event in found)
    said = (
        f"{count(len(found), 'checkpoint')} written, the last one after step "
        f"{figure(found[-1]['step'])}; {figure(kept)} of them still in the folder. "
        "A checkpoint holds everything that a run needs to go on."
    )
    return join(
        [
            tag("p", said),
            table(
                (
                    *("name", "now", "after step", "size", "time to save"),
                    *(["metric"] if has_metric else []),
                ),
                rows,
                caption="Checkpoints",
                words=(0, 1),
            ),
            tag("p", f"{count(left, 'older one')} not shown.", class_="note") if left else None,
        ]
    )


def details(story: Story) -> Html:
    """Settings, what was decided and why, and what the run said."""
    parts: list[Html | None] = []
    if story.info:
        parts.append(_settings(story))
        if story.info.policy:
            parts.append(tag("h3", "What was decided, and why"))
            parts.append(
                tag("ul", *(tag("li", text(line, 400)) for line in story.info.policy[:20]))
            )
    if story.noises:
        parts.append(_noise(story))
    if story.messages:
        parts.append(_messages(story))
    return join(parts)


def _settings(story: Story) -> Html:
    info = story.info
    said: dict[str, str] = {}
    if info is not None:
        said = {
            "model": info.model,
            "weights": figure(as_number(info.parameters)),
            "batch": count(info.global_batch, "sample"),
            "shards of a batch": figure(as_number(info.shards)),
            "dataset": count(info.dataset_size, "sample") if info.dataset_size else "unknown size",
            "steps in an epoch": figure(as_number(info.steps_per_epoch)),
            "epochs planned": figure(as_number(info.epochs)),
            "seed": str(info.seed),
            "device": info.device,
            "host": info.host,
            "started": moment(info.created),
            "last written": moment(info.updated),
        }
        said |= {text(k, 40): text(v, 40) for k, v in list(info.versions.items())[:8]}
    rows = [tag("div", tag("dt", key), tag("dd", text(value, 120))) for key, value in said.items()]
    return tag("dl", *rows, class_="settings")


def moment(seconds: object) -> str:
    """A time as the clock on the wall says it, in UTC."""
    try:
        when = datetime.datetime.fromtimestamp(float(str(seconds)), datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return "unknown"
    return when.strftime("%Y-%m-%d %H:%M UTC")


def _noise(story: Story) -> Html:
    last = story.noises[-1]
    scale = as_number(last.get("noise_scale"))
    return join(
        [
            tag("h3", "Is the batch the right size?"),
            tag(
                "p",
                f"At step {figure(last['step'])} the gradient noise scale was {figure(scale)}: "
                "larger batches than about that many samples bring little more. ",
                text(last.get("advice") or "", 300),
            ),
        ]
    )


def _messages(story: Story) -> Html:
    shown = sorted(story.messages, key=lambda event: event["t"])
    lines = [
        tag(
            "li",
            tag("span", f"{event['t'] - story.first_t:,.1f} s", class_="when"),
            tag("span", f"worker {event['rank']}", class_="who"),
            tag("span", text(event.get("text", ""), 500), class_="text"),
            class_=level if (level := str(event.get("level"))) in {"warning", "error"} else None,
        )
        for event in shown
    ]
    left = story.message_count - len(shown)
    return join(
        [
            tag("h3", "What the run said"),
            tag("p", f"The last {len(shown)} of {figure(story.message_count)} messages.")
            if left
            else None,
            tag("ul", *lines, class_="messages"),
        ]
    )
