"""The document from which the page is drawn: everything it shows, as plain JSON.

The numbers are as measured, and the page's panels are pure functions of them. Long lists are cut
here, and the page says by how much.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from paceline import __version__
from paceline.errors import WireError
from paceline.files import Event, open_plain, read_log
from paceline.record import Trace
from paceline.show.report import sentences
from paceline.show.report.bounds import amount, bounded, number, whole
from paceline.show.report.curves import CurvePoint
from paceline.show.report.run_data import RankTotals, RunData
from paceline.show.scaling.attribution import MEANINGS
from paceline.telemetry import OWN, SHARES, Phase, count_text, percentages

SCHEMA = 1
DIGITS = 6
"""The digits of a point that are kept, which are enough to draw it."""
WORKERS_LIMIT = 32
"""Of more workers than this only the slowest and the fastest are shown."""
PARTS_LIMIT, LAYERS_LIMIT, EPOCHS_LIMIT = 16, 64, 200
MISSING_LIMIT, TRACEBACK_LINES, TRACEBACK_BYTES, LOG_LINES = 20, 60, 2**14, 1000
LEAST_SPEEDUP = 1e-9
AVERAGED = "ema_"
"""The prefix of metrics of the averaged weights."""
ISLANDS = "island_"
"""The prefix of metrics of rounds between islands."""

Json = dict[str, Any]


def build(data: RunData) -> Json:
    """The whole document; a section is None where there is nothing to show."""
    document = {
        "schema": SCHEMA,
        "version": __version__,
        "made": data.read_t,
        "folder": data.folder.name,
        "name": data.name,
        "status": data.status if data.has_run else None,
        "sentences": sentences.overview(data),
        "traceback": traceback(data),
        "tiles": sentences.tiles(data),
        "missing": data.missing[:MISSING_LIMIT],
        "learning": learning(data),
        "pipeline": [pipeline(trace) for trace in data.traces] or None,
        "workers": workers(data),
        "generations": generations(data),
        "islands": islands(data),
        "timeline": data.timeline,
        "scaling": scaling(data),
        "checkpoints": checkpoints(data),
        "details": details(data),
    }
    result: Json = bounded(document)
    return result


def traceback(data: RunData) -> list[str]:
    """The last lines of the run's tracebacks, if an exception ended it."""
    if data.info is None or not data.info.traceback:
        return []
    with suppress(OSError, WireError), open_plain(data.folder.errors) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TRACEBACK_BYTES))
        return file.read().decode(errors="replace").splitlines()[-TRACEBACK_LINES:]
    return []


def learning(data: RunData) -> Json | None:
    """Every metric by step, the speed, and the results of each epoch and evaluation."""
    epochs, evaluations = data.events["epoch"], data.events["evaluation"]
    names = dict.fromkeys(data.metrics)
    for event in (*epochs, *evaluations):
        names |= dict.fromkeys(event["metrics"] if isinstance(event.get("metrics"), dict) else ())
    # A metric of the averaged weights belongs into the chart of the same metric.
    names = dict.fromkeys(n if n in data.metrics else n.removeprefix(AVERAGED) for n in names)
    names = {each: None for each in names if not each.startswith(ISLANDS)}
    order = {"loss": 0, "accuracy": 1}
    charts = [_chart(data, name) for name in sorted(names, key=lambda each: order.get(each, 2))]
    noise = [
        CurvePoint(event["step"], scale, scale, scale)
        for event in data.events["noise"]
        if (scale := number(event.get("noise_scale"))) is not None and math.isfinite(scale)
    ]
    for line in (
        _line("learning rate", "train", data.lr.points()),
        _line("gradient noise scale", "train", noise, dots=True),
        _line("samples per second", "rate", data.rate.points(), smooth=True),
    ):
        charts.append({"name": line["label"], "curves": [line] if line["columns"] else []})
    charts = [chart for chart in charts if chart["curves"]]
    if not charts and not epochs:
        return None
    shown = [{**each, "metrics": _without_rounds(each.get("metrics"))} for each in epochs]
    return {"charts": charts, "epochs": shown, "evaluations": _by_epoch(evaluations)}


def _without_rounds(metrics: Any) -> Json:
    """Metrics except those of rounds between islands, which have their own section."""
    return {name: v for name, v in _dict(metrics).items() if not str(name).startswith(ISLANDS)}


def _by_epoch(events: Sequence[Event]) -> list[Json]:
    """Each epoch's evaluations as one: with averaged weights and without, the newest of a name."""
    found: dict[str, Json] = {}
    for event in events:
        epoch = str(event.get("epoch"))  # a file may have any value here
        before = found.get(epoch, {})
        metrics = {**_dict(before.get("metrics")), **_dict(event.get("metrics"))}
        found[epoch] = {**event, "metrics": metrics}
    return list(found.values())


def _chart(data: RunData, name: str) -> Json:
    """One metric's chart: in training, by step or else by epoch; and on held-out data."""
    curve = data.metrics.get(name)
    training = curve.points() if curve else _points_of(data, "epoch", name)
    held_out = _points_of(data, "evaluation", name)
    by_step = {"dots": curve is None, "smooth": curve is not None}
    curves = [_line("training", "train", training, **by_step)] if training else []
    curves += [_line("held-out data", "test", held_out, dots=True)] if held_out else []
    averaged = _points_of(data, "evaluation", AVERAGED + name)
    if averaged:
        curves.append(_line("held-out, averaged weights", "average", averaged, dots=True))
    values = [point.mean for point in (*training, *held_out, *averaged)]
    return {
        "name": name,
        "curves": curves,
        "is_share": name.lower() in SHARES and all(0 <= value <= 1.0001 for value in values),
        "first_bad": curve.first_bad if curve else None,
    }


def _points_of(data: RunData, kind: str, name: str) -> list[CurvePoint]:
    known = sorted(sentences.values_of(data, kind, name, by="step"))
    return [CurvePoint(step, value, value, value) for step, value in known]


def _line(
    label: str, look: str, points: Sequence[CurvePoint], *, dots: bool = False, smooth: bool = False
) -> Json:
    """One curve, as columns: x, mean, lowest, highest.

    `dots`: separate measurements; `smooth`: noisy, so a running mean is drawn.
    """
    columns = [[_rounded(value) for value in column] for column in zip(*points, strict=True)]
    return {"label": label, "look": look, "columns": columns, "dots": dots, "smooth": smooth}


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def pipeline(trace: Trace) -> Json:
    """A recorded step with all its stages, and limited numbers of parts, layers and epochs."""
    document = asdict(trace)
    for stage in document["stages"]:
        stage["parts_in_all"] = len(stage["parts"])
        stage["parts"] = stage["parts"][:PARTS_LIMIT]
    if prediction := document["prediction"]:
        prediction["layers_in_all"] = len(prediction["layers"])
        prediction["layers"] = prediction["layers"][:LAYERS_LIMIT]
    if training := document["training"]:
        training["epochs"] = training["epochs"][:EPOCHS_LIMIT]
    return document


def workers(data: RunData) -> Json | None:
    """Where each worker's time goes in an average step."""
    worked = [data.ranks[rank] for rank in sorted(data.ranks) if data.ranks[rank].steps]
    if not worked:
        return None
    return {
        "verdict": " ".join([sentences.waiting_verdict(data), *sentences.pauses(data)]),
        "look": sentences.verdict_style(data),
        "slow_ranks": sorted({span.rank for span in data.slow}),
        "phases": {phase: phase.meaning for phase in (*OWN, Phase.WAIT, Phase.TRANSFER)},
        "ranks": [
            {
                "rank": rank.rank,
                "where": " on ".join(filter(None, (rank.device, rank.host))),
                "samples": rank.samples,
                "own_s": rank.own_s or None,
                "phases_s": {phase: spent / rank.steps for phase, spent in rank.phases.items()},
            }
            for rank in extremes(worked)
        ],
        "ranks_in_all": len(worked),
    }


def generations(data: RunData) -> Json | None:
    """The number of workers over time: which died, how, and which joined."""
    events = sorted(data.events["generation"], key=lambda event: event["t"])
    if not events:
        return None
    size, died, joined = data.workers, 0, 0
    points, rows = [(0.0, size)], []
    for event in events:
        after_s = max(0.0, event["t"] - data.first_t)
        gone = [_dict(each) for each in _list(event.get("died"))]
        new = [each for each in map(whole, _list(event.get("joined"))) if each is not None]
        changes = [f"worker {each.get('worker')} {each.get('how')}" for each in gone]
        changes += [f"worker {each} joined" for each in new]
        points.append((after_s, size))
        size = whole(event.get("workers"), 1) or size
        points.append((after_s, size))
        died, joined = died + len(gone), joined + len(new)
        what = "; ".join(changes) or "the same workers formed another group"
        step = next((each.get("step") for each in gone), event["step"])
        rows.append({"after_s": after_s, "step": step, "what": what, "workers": size})
    points.append((max(points[-1][0], data.last_t - data.first_t), size))
    verdict = f"{count_text(died, 'worker')} died during the run, and {joined} joined."
    verdict += "" if data.redone else " No step was lost."
    times, sizes = [time for time, _ in points], [each for _, each in points]
    return {"verdict": verdict, "columns": [times, sizes, sizes, sizes], "events": rows}


def islands(data: RunData) -> Json | None:
    """What was exchanged with other islands: how much, how long, and how far apart they were."""
    charts = []
    for name in ("drift", "bytes", "round_s"):
        points = curve.points() if (curve := data.metrics.get(ISLANDS + name)) else []
        lines = [_line("each round", "measured", points, dots=True)] if points else []
        charts.append({"name": ISLANDS + name, "curves": lines})
    charts = [chart for chart in charts if chart["curves"]]
    return {"verdict": sentences.rounds_sentence(data), "charts": charts} if charts else None


def extremes(ranks: Sequence[RankTotals]) -> list[RankTotals]:
    """All ranks, or the slowest and fastest where there are too many."""
    if len(ranks) <= WORKERS_LIMIT:
        return list(ranks)
    by_work = sorted(ranks, key=lambda rank: -rank.own_s)
    half = WORKERS_LIMIT // 2
    return sorted([*by_work[:half], *by_work[-half:]], key=lambda rank: rank.rank)


def scaling(data: RunData) -> Json | None:
    """The speed-up of more workers, measured and predicted, and where the rest is lost."""
    study = data.study or {}
    measured = _sizes(study.get("sizes"))
    if not measured:
        return None
    return {
        "mode": study.get("mode"),
        "measured": measured,
        "predicted": _sizes(study.get("predicted")),
        "meanings": MEANINGS,
        "suggestion": _dict(study.get("suggestion")).get("text"),
        "check": _dict(study.get("check")).get("text"),
    }


def _sizes(sizes: Any) -> list[Json]:
    """The sizes that can be drawn, with their losses in percent."""
    found = []
    for size in map(_dict, sizes if isinstance(sizes, list) else ()):
        count, speedup = whole(size.get("workers"), 1), amount(size.get("speedup"))
        if count is None or speedup < LEAST_SPEEDUP:
            continue
        given = _dict(size.get("lost"))
        lost = {name: amount(given[name]) for name in MEANINGS if name in given}
        found.append(
            {
                "workers": count,
                "speedup": speedup,
                "of_ideal": number(size.get("efficiency")) or speedup / count,
                "step_s": number(size.get("step_s")),
                "network": str(size.get("network") or ""),
                "lost": percentages(lost) if any(lost.values()) else {},
            }
        )
    return sorted(found, key=lambda size: size["workers"])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def checkpoints(data: RunData) -> Json | None:
    """The checkpoints: which still exist, which is best, and the command to continue."""
    found = list(data.events["checkpoint"])
    kept = set(data.kept)
    there = [event for event in found if str(event.get("name")) in kept]
    rated = [
        (metric if event.get("better") == "lower" else -metric, -index, event)
        for index, event in enumerate(there)
        if (metric := number(event.get("metric"))) is not None and math.isfinite(metric)
        if event.get("better") in ("lower", "higher")
    ]
    best = min(rated)[2] if rated else None
    saved = [
        {**event, "is_there": str(event.get("name")) in kept, "is_best": event is best}
        for event in found
    ]
    return {"saved": saved, "command": data.info.command if data.info else ""} if saved else None


def details(data: RunData) -> Json | None:
    """Settings, decisions with reasons, messages and output."""
    noise, messages = data.events["noise"], data.events["message"]
    log = read_log(data.folder, LOG_LINES)
    if not (data.info or noise or messages or log):
        return None
    return {
        "log": log,
        "info": asdict(data.info) if data.info else None,
        "noise": noise[-1] if noise else None,
        "began": data.first_t,
        "messages": sorted(messages, key=lambda event: event["t"]),
        "messages_limit": messages.maxlen,
    }
