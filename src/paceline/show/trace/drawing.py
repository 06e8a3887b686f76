"""A recorded step as text: boxes for what each worker has, lines for where it goes.

Pure functions: a `Trace` in, lines out, none wider than `width`. `to_ascii` and `paint` change them
afterwards, so that widths are those of the text. A row of `n` boxes divides the width
evenly, so the lines between two rows depend only on their numbers of boxes.
"""

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from paceline.record import (
    Part,
    Sample,
    SamplePrediction,
    Stage,
    TensorFacts,
    Trace,
    TrainedEpochs,
    Weight,
)
from paceline.telemetry import (
    bytes_text,
    count_text,
    list_text,
    seconds_text,
    shape_text,
    table_lines,
)

WIDTH = 80
MARGIN = 4
GAP = 2
LANE = 24
"""The narrowest box. At 80 columns three fit side by side; of more workers the first, the last and
the followed sample's are drawn."""
MOST_BUCKETS, MOST_NUMBERS, MOST_ITEMS, MOST_EXTENTS, MOST_LETTERS = 5, 4, 1000, 8, 1000
"""Limits for values from a file, which may be of any size: lists, shapes, texts."""
DATA_STAGES = {"data", "batch", "split", "forward", "gather"}
"""Stages that show a tensor's dtype and size; others show its name."""

SAMPLE, WEIGHT, GOOD, BAD, BAR, HERE = "●", "◆", "✓", "✗", "█", "»"
BAR_WIDTH, NARROW = 10, 70
_PLAIN = {
    **{ord(fine): plain for fine, plain in zip("┌┐└┘┬┴┼─│▼●◆█»", "+++++++-|v*##>", strict=True)},
    ord(GOOD): "ok",
    ord(BAD): "NO",
}
_COLOURS = {
    r"^ ?\d+  [A-Z].*|^(?:One batch|Training|Prediction)\b.*": "1",
    rf"{SAMPLE}[^│]*": "36",
    rf"{WEIGHT}[^│]*": "35",
    rf"{GOOD}.*": "32",
    rf"{BAD}.*": "1;31",
    r"[┌┐└┘┬┴┼─│▼]+": "2",
}


@dataclass(frozen=True, slots=True)
class TextBox:
    """A title, lines inside, and a remark at the right end of the title's line."""

    title: str
    lines: Sequence[str]
    remark: str = ""


def paint(line: str) -> str:
    """Colour a line for a terminal: titles, marks, marked text, results of checks."""
    for pattern, code in _COLOURS.items():
        line = re.sub(f"({pattern})", f"\x1b[{code}m\\1\x1b[0m", line)
    return line


def to_ascii(line: str) -> str:
    """A line without characters beyond ASCII, for terminals that cannot show them."""
    return line.translate(_PLAIN).encode("ascii", "replace").decode()


def draw(trace: Trace, *, width: int = WIDTH) -> list[str]:
    """The whole picture: heading, stages, followed values, check, training, prediction.

    Every part begins with an empty line.
    """
    trace = bounded(trace)
    lines = [*_heading(trace, width)]
    shown, lanes = _shown_workers(trace, width), 0
    for number, stage in enumerate(trace.stages, start=1):
        boxes = _boxes(trace, stage, shown, width)
        lines += ["", *_stage(trace, stage, number, boxes, lanes, width)]
        lanes = len(boxes) or lanes
    lines += ["", *_conclusions(trace, width)]
    if trace.training is not None:
        lines += ["", *training_lines(trace.training, width)]
    if trace.prediction is not None:
        lines += ["", *_prediction(trace.prediction, width), *_follow_prediction(trace, width)]
    return [_cut(line.rstrip(), width) for line in lines]


def draw_stage(trace: Trace, name: str, *, width: int = WIDTH) -> list[str]:
    """One stage alone."""
    trace = bounded(trace)
    shown = _shown_workers(trace, width)
    return [
        _cut(line.rstrip(), width)
        for number, stage in enumerate(trace.stages, start=1)
        if stage.name == name
        for line in _stage(trace, stage, number, _boxes(trace, stage, shown, width), 0, width)
    ]


def title_of(engine: str) -> str:
    """The first line; it is known before the step is recorded."""
    return f"One batch on its way through {engine}"


def _heading(trace: Trace, width: int) -> Iterator[str]:
    who = f"{count_text(trace.workers, 'worker')}, each a process with its own copy of the model"
    if trace.engine == "DataParallel":
        who = f"One process with {count_text(trace.workers, 'replica')} of the model"
    yield title_of(trace.engine)
    yield from wrap(
        f"{who}. Step {trace.step} of a real training: {count_text(trace.batch_rows, 'row')}, "
        f"model {trace.model.name} with {trace.model.parameters:,} weights, "
        f"{seconds_text(trace.seconds)} in all. {trace.times or 'Times are those of this step.'}",
        width,
    )
    if trace.sample is not None:
        yield f"{SAMPLE} marks one sample: row {trace.sample.index:,} of the data"
    if trace.weight is not None and (trace.has_values or trace.weight.bucket is not None):
        yield f"{WEIGHT} marks one weight: {name_of(trace.weight)}"


def _shown_workers(trace: Trace, width: int) -> list[int]:
    """The workers that get a box: first, last, the followed sample's, and as many as fit."""
    size = max(1, trace.workers)
    lanes = min(most_boxes(width), size)
    stops = trace.sample.stops if trace.sample else []
    owners = [s.worker for s in stops if s.worker is not None and 0 <= s.worker < size]
    wanted = dict.fromkeys([*owners[:1], 0, size - 1, *range(lanes)])
    return sorted(list(wanted)[:lanes])


def _stage(
    trace: Trace, stage: Stage, number: int, boxes: Sequence[TextBox], lanes: int, width: int
) -> Iterator[str]:
    """Title, sentence, lines from the `lanes` above, boxes, and the number of others."""
    cost = [f"{bytes_text(stage.bytes_moved)} moved"] if stage.bytes_moved else []
    cost += [] if stage.seconds is None else [seconds_text(stage.seconds)]
    title, right = f"{number:>2}  {stage.title.upper()}", ", ".join(cost)
    yield f"{title}  {right:>{max(0, width - len(title) - 2)}}"
    yield from wrap(stage.text, width, " " * MARGIN)
    if not boxes:
        return
    if stage.name == "all-reduce" and 1 < lanes == len(boxes):
        yield connect(lanes, 1, width)
        yield "added up, divided, sent to all".center(width + MARGIN)
        yield connect(1, lanes, width)
    elif lanes:
        yield connect(lanes, len(boxes), width)
    yield from side_by_side(boxes, width, is_fed=lanes > 0)
    if trace.workers > len(boxes) > 0 and (len(boxes) > 1 or stage.parts[0].worker is not None):
        kind = "replica" if trace.engine == "DataParallel" else "worker"
        others = count_text(trace.workers - len(boxes), f"other {kind}")
        yield f"{' ' * MARGIN}and {others} in the same way"


def _boxes(trace: Trace, stage: Stage, shown: Sequence[int], width: int) -> list[TextBox]:
    parts = [p for p in stage.parts if p.worker is None or p.worker in shown]
    if stage.name == "buckets":
        room = slots(len(shown), width)[0][1] - 4
        lines = _bucket_lines(parts, trace.weight, room)
        return [TextBox(f"worker {worker}", lines) for worker in shown if lines]
    parts = parts[: most_boxes(width)]
    return [_box(trace, stage, part, slots(len(parts), width)[0][1] - 4) for part in parts]


def _box(trace: Trace, stage: Stage, part: Part, room: int) -> TextBox:
    lines = [line for facts in part.tensors[:2] for line in _tensor(facts, stage, room)]
    if len(part.tensors) > 2:
        lines.append(f"and {count_text(len(part.tensors) - 2, 'tensor')} more")
    lines += wrap(part.text, room)
    for mark in _marks(trace, stage, part):
        lines += wrap(mark, room, "  ", "")
    if part.worker is None:
        return TextBox(part.title, lines)
    title = part.title
    if part.device not in ("", part.title) and room > 30:
        title = f"{part.title} on {part.device}"
    return TextBox(title, lines, "" if part.seconds is None else seconds_text(part.seconds))


def _tensor(facts: TensorFacts, stage: Stage, room: int) -> list[str]:
    """Shape and type on a line, then the first values, or else statistics."""
    if facts.name == "model":
        return [f"model, {bytes_text(facts.bytes)}"]
    if facts.name == "loss" and facts.first:
        return [f"loss {facts.first[0]:.6g}"]
    is_data = stage.name in DATA_STAGES
    what = f"{facts.dtype}," if is_data else facts.name
    lines = wrap(f"{shape_text(facts.shape[:MOST_EXTENTS])} {what}", room)
    if is_data:  # keep a number and its unit on one line
        *above, last = lines
        size = bytes_text(facts.bytes)
        is_short = len(last) + 1 + len(size) <= room
        lines = [*above, f"{last} {size}"] if is_short else [*lines, size]
    if facts.first:
        values = " ".join(map(short_number, facts.first))
        lines.append(textwrap.shorten(f"{values} ...", room, placeholder=" ..."))
    elif facts.stats is not None:
        low, mean, high = map(short_number, (facts.stats.min, facts.stats.mean, facts.stats.max))
        lines += wrap(f"{low} to {high}, mean {mean}", room)
    return lines


def _marks(trace: Trace, stage: Stage, part: Part) -> Iterator[str]:
    """Lines for the followed sample and weight in this box."""
    sample, weight = trace.sample, trace.weight
    for stop in sample.stops if sample else []:
        if sample and (stop.stage, stop.worker) == (stage.name, part.worker):
            values = stop.values if stage.name in ("forward", "gather") else None
            out = f": {' '.join(map(short_number, values[:3]))}" if values else ""
            here = f" is row {stop.row:,} here" if stop.row != sample.index else ""
            yield f"{SAMPLE} row {sample.index:,}{here}{out}"
    for at in weight.stops if weight else []:
        numbers = at.by_worker or [] if at.stage == stage.name else []
        if part.worker is None and len(numbers) > 1:
            yield f"{WEIGHT} {at.what} from each: {' + '.join(f'{n:.4g}' for n in numbers[:4])}"
        elif (part.worker or 0) < len(numbers):
            yield f"{WEIGHT} {at.what} {numbers[part.worker or 0]:.6g}"


def _bucket_lines(parts: Sequence[Part], weight: Weight | None, room: int) -> list[str]:
    """One worker's buckets, a line for each; where there are few, with their contents."""
    lines: list[str] = []
    for part in parts[:MOST_BUCKETS]:
        lines.append(f"{part.title}  {bytes_text(sum(facts.bytes for facts in part.tensors))}")
        lines += wrap(part.text, room) if len(parts) <= 2 else []
    if len(parts) > MOST_BUCKETS:
        lines.append(f"... to {parts[-1].title}")
    if weight is not None and weight.position is not None:
        lines += wrap(f"{WEIGHT} number {weight.position:,} of bucket {weight.bucket}", room)
    return lines


def _some(numbers: Sequence[str]) -> str:
    """All numbers where they are few, else the first ones and how many more there are."""
    more = len(numbers) - MOST_NUMBERS + 1
    return list_text([*numbers[:-more], f"{more} more"] if more > 1 else numbers)


def _conclusions(trace: Trace, width: int) -> Iterator[str]:
    """The followed weight through the step, and the check."""
    if trace.weight is not None:
        values = [
            f"{stop.what} {_some([f'{n:.6g}' for n in dict.fromkeys(stop.by_worker)])}"
            for stop in trace.weight.stops
            if stop.by_worker
        ]
        if values:
            said = f"Weight {name_of(trace.weight)}: {', '.join(values)}."
            yield from _marked(WEIGHT, said, width)
    check = trace.check
    if check is None:
        return
    marks = {True: GOOD, False: BAD, None: "-"}
    reason = f" ({check.reason})" if check.reason else ""
    yield from _marked(marks[check.is_same], check.text + reason, width)
    if check.is_equal_on_all is not None:
        equal = "equal to the last bit" if check.is_equal_on_all else "NOT EQUAL"
        said = f"the {trace.workers} workers' weights are {equal}"
        yield from _marked(marks[check.is_equal_on_all], said, width)


def training_lines(training: TrainedEpochs, width: int) -> Iterator[str]:
    """The table of epochs, the loss as a bar, an observation beside each, and one below."""
    rows = [["epoch", "loss", "", "accuracy", "unseen", "time"]]
    known = [each.loss for each in training.epochs if math.isfinite(each.loss)]
    for each in training.epochs:
        accuracy = "-" if each.accuracy is None else f"{each.accuracy:.1%}"
        unseen = "-" if each.evaluation_loss is None else short_number(each.evaluation_loss)
        share = each.loss / max(known) if each.loss in known and max(known) > 0 else 0.0
        bar = (BAR * max(1, round(share * BAR_WIDTH)) if share > 0 else "").ljust(BAR_WIDTH)
        time = seconds_text(each.seconds) if each.seconds else "-"
        rows.append([str(each.epoch), short_number(each.loss), bar, accuracy, unseen, time])
    if width < NARROW:  # leave the room to the observations
        rows = [row[:2] + row[3:] for row in rows]
    said = ["observation", *(epoch.observation for epoch in training.epochs)]
    yield "Training"
    for line, words in zip(table_lines(rows, ">"), said, strict=True):
        yield from wrap(words or "-", width, " " * (len(line) + 4), f"  {line}  ")
    yield "  unseen: the loss on rows that are not trained on, if there are any"
    yield from wrap(training.observation, width, "  ")


def _prediction(prediction: SamplePrediction, width: int) -> Iterator[str]:
    """One sample through the layers."""
    layers = [("input", facts) for facts in prediction.input[:1]]
    layers += [(f"{each.name} {each.kind}".strip(), each.output) for each in prediction.layers]
    rows = [["layer", "shape", "min", "mean", "max", "zeros"]]
    for name, facts in layers:
        numbers = ["-"] * 4
        if (stats := facts.stats) is not None:
            numbers = [*map(short_number, (stats.min, stats.mean, stats.max)), f"{stats.zeros:.0%}"]
        rows.append([name[-28:], _cut(shape_text(facts.shape[:MOST_EXTENTS]), 16), *numbers])
    yield f"Prediction for sample {prediction.index:,}, layer by layer"
    yield from (f"  {line}" for line in table_lines(rows, "<<>"))
    if any(facts.stats is None for _, facts in layers):
        yield "  -: too few numbers: statistics would reveal them"
    if prediction.answer is not None:
        yield from wrap(f"Answer: {prediction.answer.text}.", width, "  ")


def _follow_prediction(trace: Trace, width: int) -> Iterator[str]:
    """The predicted sample in a batch: through the split, each device, and the gather."""
    prediction = trace.prediction
    if prediction is None or not prediction.stages:
        return
    sample = Sample(index=prediction.index, stops=prediction.stops)
    trace = replace(trace, stages=prediction.stages, sample=sample, weight=None)
    shown, lanes = _shown_workers(trace, width), 0
    yield ""
    yield f"The same sample in a batch of {trace.batch_rows:,}, through every device"
    for stage in trace.stages:
        boxes = _boxes(trace, stage, shown, width)
        if lanes:
            yield connect(lanes, len(boxes), width)
        yield from side_by_side(boxes, width, is_fed=lanes > 0)
        lanes = len(boxes)
    if trace.engine == "DistributedDataParallel":
        yield from wrap("Nothing is gathered: each worker has its own answers.", width, "    ")


def most_boxes(width: int) -> int:
    return max(1, (width - MARGIN) // LANE)


def slots(number: int, width: int) -> list[tuple[int, int]]:
    """Start and width of boxes in one row; what does not divide is left at the right."""
    each = (width - MARGIN - GAP * (number - 1)) // number
    return [(MARGIN + i * (each + GAP), each) for i in range(number)]


def side_by_side(boxes: Sequence[TextBox], width: int, *, is_fed: bool = False) -> list[str]:
    """The boxes in one row, all as high as the highest; `is_fed` draws an arrow into each."""
    size = slots(len(boxes), width)[0][1]
    height = max(len(box.lines) for box in boxes)
    drawn = []
    for box in boxes:
        title, remark = f" {_cut(box.title, size - 5)} ", f" {box.remark} " if box.remark else ""
        if len(title) + len(remark) > size - 4:
            remark = ""
        top = f"┌─{title}{'─' * (size - 3 - len(title) - len(remark))}{remark}┐"
        if is_fed and top[size // 2] == "─":
            top = f"{top[: size // 2]}▼{top[size // 2 + 1 :]}"
        inside = [*box.lines, *[""] * (height - len(box.lines))]
        body = [f"│ {_cut(line, size - 4):<{size - 4}} │" for line in inside]
        drawn.append([top, *body, f"└{'─' * (size - 2)}┘"])
    return [" " * MARGIN + (" " * GAP).join(row) for row in zip(*drawn, strict=True)]


def connect(before: int, after: int, width: int) -> str:
    """The line from a row of `before` boxes to one of `after`: straight, a fork or a join."""
    sources = [start + size // 2 for start, size in slots(before, width)]
    goals = [start + size // 2 for start, size in slots(after, width)]
    left, right = min(sources + goals), max(sources + goals)
    marks = dict.fromkeys(range(left, right + 1), " " if sources == goals else "─")
    for column in (*sources, *goals):
        if sources == goals:
            marks[column] = "│"
        elif column in sources and column in goals:
            marks[column] = "┼"
        else:
            ends = {left: "└┌", right: "┘┐"}.get(column, "┴┬")
            marks[column] = ends[0] if column in sources else ends[1]
    return " " * left + "".join(marks.values())


def wrap(text: str, width: int, indent: str = "", first: str | None = None) -> list[str]:
    """Text wrapped to a width; `first` replaces the first line's indent."""
    return textwrap.wrap(
        text,
        max(width, len(indent) + 10),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _marked(mark: str, text: str, width: int) -> list[str]:
    """Text after a mark, which takes two characters in ASCII."""
    return wrap(text, width - 1, "  ", f"{mark} ")


def short_number(number: float) -> str:
    """A number with three significant digits, in few characters."""
    size = abs(number)
    if number and (size >= 1e5 or size < 1e-3):
        return f"{number:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{number:.3g}" if size < 1000 else f"{number:.0f}"


def numbers_of(trace: Trace, what: str) -> list[float]:
    """The followed weight's numbers by worker, such as its gradient."""
    stops = trace.weight.stops if trace.weight else []
    return next((stop.by_worker or [] for stop in stops if stop.what == what), [])


def name_of(weight: Weight) -> str:
    return f"{weight.name}[{', '.join(map(str, weight.index))}]" if weight.index else weight.name


def _cut(text: str, room: int) -> str:
    """The text, or its beginning and dots."""
    return text if len(text) <= room else f"{text[: max(0, room - 3)]}..."


def bounded(value: Any) -> Any:
    """The value with printable, short texts and short lists: the file is not trusted."""
    if isinstance(value, str):
        text = value[:MOST_LETTERS]
        is_clean = text.isascii() and text.isprintable()
        return text if is_clean else "".join(c if _takes_one_place(c) else "?" for c in text)
    if isinstance(value, list):
        return [bounded(each) for each in value[:MOST_ITEMS]]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: bounded(getattr(value, f.name)) for f in fields(value)})
    return value


def _takes_one_place(char: str) -> bool:
    is_narrow = unicodedata.east_asian_width(char) not in "WF" and char not in GOOD + BAD
    return char.isprintable() and is_narrow and not unicodedata.combining(char)
