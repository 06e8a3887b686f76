"""A recorded step as lines of text: boxes for what each worker has, lines for where it goes.

Pure: a `Trace` in, lines out, none wider than asked. `plain` has no character beyond ASCII. Colour
is a style beside the text, so that a width is always that of the text. A row of `n` boxes divides
the width evenly, so the lines from one row to the next follow from the numbers of boxes alone.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from paceline.observe.units import (
    bytes_text,
    count_text,
    seconds_text,
    shape_text,
    table_lines,
)
from paceline.record.stages import (
    Part,
    Prediction,
    Stage,
    TensorFacts,
    Trace,
    Training,
    Weight,
)

WIDTH = 80
MARGIN = 4
GAP = 2
LANE = 24
"""The narrowest box. At 80 columns three fit side by side; of more workers the first, the last and
the followed sample's are drawn."""
MOST_BUCKETS = 5

SAMPLE, WEIGHT, GOOD, BAD = "●", "◆", "✓", "✗"
_PLAIN = {
    **{ord(fine): plain for fine, plain in zip("┌┐└┘┬┴┼─│▼●◆", "+++++++-|v*#", strict=True)},
    ord(GOOD): "ok",
    ord(BAD): "NO",
}

Style = Literal["", "title", "quiet", "good", "bad", "sample", "weight"]


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line, and what it is."""

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True)
class TextBox:
    """A title, what is inside, and a remark at the right end of the title's line."""

    title: str
    lines: Sequence[str]
    remark: str = ""


def draw(trace: Trace, *, width: int = WIDTH, plain: bool = False) -> list[TextLine]:
    """The whole picture: heading, stages, what was followed, the check, training, prediction."""
    lines = [*_heading(trace, width), TextLine("")]
    shown = _shown_workers(trace, width)
    lanes = 0
    for number, stage in enumerate(trace.stages, start=1):
        boxes = _boxes(trace, stage, shown, width)
        lines += [*_stage(trace, stage, number, boxes, lanes, shown, width), TextLine("")]
        lanes = len(boxes) or lanes
    lines += _conclusions(trace, width)
    if trace.training is not None:
        lines += [TextLine(""), *_training(trace.training, width)]
    if trace.prediction is not None:
        lines += [TextLine(""), *_prediction(trace.prediction, width)]
    return [TextLine(_fit(line.text, width, plain), line.style) for line in lines]


def _heading(trace: Trace, width: int) -> Iterator[TextLine]:
    who = f"{trace.workers} workers, each a process with its own copy of the model"
    if trace.engine == "DataParallel":
        copies = "1 copy" if trace.workers == 1 else f"{trace.workers} copies"
        who = f"One process with {copies} of the model"
    elif trace.workers == 1:
        who = "One worker: one process"
    yield from _paragraph(f"One batch on its way through {trace.engine}", width, "", "title")
    yield from _paragraph(f"{who}.", width, "")
    facts = (
        f"Step {trace.step} of a real training, recorded: {count_text(trace.batch_rows, 'row')}, "
        f"model {trace.model.name} with {trace.model.parameters:,} weights, "
        f"{seconds_text(trace.seconds)} in all."
    )
    yield from _paragraph(facts, width, "", "quiet")
    if trace.sample is not None:
        yield TextLine(
            f"{SAMPLE} marks one sample: row {trace.sample.index:,} of the data", "sample"
        )
    if trace.weight is not None and (trace.has_values or trace.weight.bucket is not None):
        yield TextLine(f"{WEIGHT} marks one weight: {_name_of(trace.weight)}", "weight")


def _shown_workers(trace: Trace, width: int) -> list[int]:
    """Which workers get a box of their own: first, last, and the followed sample's."""
    everyone = range(max(1, trace.workers))
    lanes = max(1, min(3, (width - MARGIN) // LANE, len(everyone)))
    stops = trace.sample.stops if trace.sample else []
    owners = [s.worker for s in stops if s.worker is not None and s.worker in everyone]
    wanted = dict.fromkeys([*owners[:1], 0, everyone[-1], *everyone[:3]])
    return sorted(list(wanted)[:lanes])


def _stage(
    trace: Trace,
    stage: Stage,
    number: int,
    boxes: Sequence[TextBox],
    lanes: int,
    shown: Sequence[int],
    width: int,
) -> Iterator[TextLine]:
    """Title, sentence, the lines from the `lanes` above, the boxes, and who is not drawn."""
    cost = [f"{bytes_text(stage.bytes_moved)} moved"] if stage.bytes_moved else []
    cost += [] if stage.seconds is None else [seconds_text(stage.seconds)]
    title, right = f"{number:>2}  {stage.title.upper()}", ", ".join(cost)
    gap = max(2, width - len(title) - len(right))
    yield TextLine(f"{title}{' ' * gap}{right}", "title")
    yield from _paragraph(stage.text, width, " " * MARGIN)
    if not boxes:
        return
    if stage.name == "all-reduce" and 1 < lanes == len(boxes):
        yield TextLine(connect(lanes, 1, width), "quiet")
        yield TextLine("added up, divided, sent to all".center(width + MARGIN)[:width], "quiet")
        yield TextLine(connect(1, lanes, width), "quiet")
    elif lanes:
        yield TextLine(connect(lanes, len(boxes), width), "quiet")
    yield from map(TextLine, side_by_side(boxes, width, is_fed=lanes > 0))
    if len(boxes) > 1 or stage.parts[0].worker is not None:
        hidden = trace.workers - len(shown)
        if hidden > 0:
            others = count_text(hidden, "other worker")
            yield TextLine(f"{' ' * MARGIN}and {others} in the same way", "quiet")


def _boxes(trace: Trace, stage: Stage, shown: Sequence[int], width: int) -> list[TextBox]:
    if stage.name == "buckets" and stage.parts:
        room = slots(len(shown), width)[0][1] - 4
        lines = _bucket_lines(stage.parts, trace.weight, room)
        return [TextBox(f"worker {worker}", lines) for worker in shown]
    parts = [p for p in stage.parts if p.worker is None or p.worker in shown]
    return [_box(trace, stage, part, slots(len(parts), width)[0][1] - 4) for part in parts]


def _box(trace: Trace, stage: Stage, part: Part, room: int) -> TextBox:
    lines = [line for facts in part.tensors[:2] for line in _tensor(facts, stage.name, room)]
    if len(part.tensors) > 2:
        lines.append(f"and {count_text(len(part.tensors) - 2, 'tensor')} more")
    lines += textwrap.wrap(part.text, room)
    for mark in _marks(trace, stage, part):
        lines += textwrap.wrap(mark, room, subsequent_indent="  ")
    title, remark = part.title, ""
    if part.worker is not None and part.device not in ("", part.title) and room > 30:
        title = f"{part.title} on {part.device}"
    if part.worker is not None and part.seconds is not None:
        remark = seconds_text(part.seconds)
    return TextBox(title, lines, remark)


def _tensor(facts: TensorFacts, stage: str, room: int) -> list[str]:
    """Shape, dtype and size on a line, then the first values or else their statistics."""
    if facts.name == "model":
        return [f"model, {bytes_text(facts.bytes)}"]
    if facts.name == "loss" and facts.first:
        return [f"loss {facts.first[0]:.6g}"]
    head = shape_text(facts.shape)
    if facts.name in ("input", "inputs", "output", "batch") or stage == "batch":
        for word in (facts.dtype, bytes_text(facts.bytes)):
            head = f"{head}  {word}" if len(head) + len(word) + 2 <= room else head
    else:
        head = f"{head} {facts.name}"
    said = ""
    if facts.first:
        said = _first_values(facts.first, prod(facts.shape), room)
    elif facts.stats is not None:
        low, high = short_number(facts.stats.min), short_number(facts.stats.max)
        mean = f", mean {short_number(facts.stats.mean)}"
        said = f"{low} to {high}{mean if len(low + high + mean) + 4 <= room else ''}"
    return [*textwrap.wrap(head, room), *([said] if said else [])]


def _first_values(first: Sequence[float], total: int, room: int) -> str:
    """As many of the first values as fit, with dots if there are more."""
    said = ""
    for number, value in enumerate(first):
        longer = f"{said} {short_number(value)}".strip()
        if len(longer) + (4 if number + 1 < total else 0) > room:
            return f"{said} ..."
        said = longer
    return said + (" ..." if len(first) < total else "")


def _marks(trace: Trace, stage: Stage, part: Part) -> Iterator[str]:
    """Where the followed sample and weight are in this box."""
    sample, weight = trace.sample, trace.weight
    for stop in sample.stops if sample else []:
        if sample and stop.stage == stage.name and stop.worker == part.worker:
            if stage.name in ("sampler", "batch", "split") and sample.stops[0].stage == "data":
                yield f"{SAMPLE} row {sample.index:,} is row {stop.row:,} here"
            else:
                is_output = stop.values and stage.name in ("forward", "gather")
                yield f"{SAMPLE} row {stop.row:,}" + (f": {_few(stop.values)}" if is_output else "")
    for told in weight.stops if weight else []:
        if told.stage != stage.name or not told.by_worker:
            continue
        if part.worker is None and len(told.by_worker) > 1:
            listed = " + ".join(f"{number:.4g}" for number in told.by_worker[:4])
            yield f"{WEIGHT} {told.what} from each: {listed}"
        elif (part.worker or 0) < len(told.by_worker):
            what = "averaged" if told.what == "averaged gradient" else told.what
            yield f"{WEIGHT} {what} {told.by_worker[part.worker or 0]:.6g}"


def _bucket_lines(parts: Sequence[Part], weight: Weight | None, room: int) -> list[str]:
    """What one worker packs: a line for each bucket, with what is in it where there are few."""
    lines: list[str] = []
    hidden = range(MOST_BUCKETS, len(parts) - 1)
    for number, part in enumerate(parts):
        if number in hidden:
            lines += [f"... {len(hidden)} more ..."] if number == hidden.start else []
            continue
        lines.append(f"{part.title}  {bytes_text(part.tensors[0].bytes) if part.tensors else ''}")
        lines += textwrap.wrap(part.text, room) if len(parts) <= 2 else []
    if weight is not None and weight.bucket is not None:
        where = f" of bucket {weight.bucket}" if len(parts) > 1 else ""
        lines += textwrap.wrap(f"{WEIGHT} number {weight.position:,}{where}", room)
    return lines


def _conclusions(trace: Trace, width: int) -> Iterator[TextLine]:
    """What became of the weight, and the check."""
    if trace.weight is not None and (story := _weight_story(trace.weight)):
        yield from _paragraph(story, width, "  ", "weight", WEIGHT)
    check = trace.check
    if check is None:
        return
    if check.is_same is not None or check.reason:
        styles: dict[bool | None, tuple[Style, str]] = {
            True: ("good", GOOD),
            False: ("bad", BAD),
            None: ("quiet", "-"),
        }
        reason = f" ({check.reason})" if check.reason else ""
        yield from _paragraph(check.text + reason, width, "  ", *styles[check.is_same])
    if check.is_equal_on_all is True:
        told = f"the {trace.workers} workers' weights are equal to the last bit"
        yield from _paragraph(told, width, "  ", "good", GOOD)
    elif check.is_equal_on_all is False:
        yield from _paragraph("the workers' weights are NOT EQUAL", width, "  ", "bad", BAD)


def _weight_story(weight: Weight) -> str:
    """The followed weight's way in one sentence; nothing where its numbers were not kept."""
    by_what: dict[str, list[float]] = {stop.what: stop.by_worker or [] for stop in weight.stops}
    words = []
    if value := by_what.get("value"):
        words.append(f"was {_numbers(value)}")
    if len(own := by_what.get("gradient", [])) > 1:
        listed = ", ".join(f"{number:.4g}" for number in own[:4])
        words.append(f"had the gradients {listed}{', ...' if own[4:] else ''}")
    for kind in ("averaged", "summed"):
        if total := by_what.get(f"{kind} gradient"):
            words.append(f"{kind} to {total[0]:.6g}")
    if new := by_what.get("new value"):
        words.append(f"and is now {_numbers(new)}")
    return f"Weight {_name_of(weight)} {', '.join(words)}." if words else ""


def _training(training: Training, width: int) -> Iterator[TextLine]:
    """The table of epochs, an observation beside each, and one below."""
    has_evaluation = any(epoch.evaluation_loss is not None for epoch in training.epochs)
    rows = [["epoch", "loss", "accuracy", "seconds"] + ["unseen"] * has_evaluation]
    for each in training.epochs:
        accuracy = "-" if each.accuracy is None else f"{each.accuracy:.1%}"
        row = [str(each.epoch), short_number(each.loss), accuracy, f"{each.seconds:.3f}"]
        new = "-" if each.evaluation_loss is None else short_number(each.evaluation_loss)
        rows.append([*row, new] if has_evaluation else row)
    yield TextLine("Training", "title")
    said = ["what it says", *(epoch.observation for epoch in training.epochs)]
    for number, (line, words) in enumerate(zip(table_lines(rows, ">"), said, strict=True)):
        wrapped = textwrap.wrap(words, max(10, width - len(line) - 4)) or [""]
        yield TextLine(f"  {line}  {wrapped[0]}", "" if number else "quiet")
        for more in wrapped[1:]:
            yield TextLine(" " * (len(line) + 4) + more)
    if has_evaluation:
        yield TextLine("  unseen: the loss on rows that are not trained on", "quiet")
    yield TextLine("")
    yield from _paragraph(training.observation, width, "  ")


def _prediction(prediction: Prediction, width: int) -> Iterator[TextLine]:
    """One sample on its way through the layers."""
    layers = [("input", facts) for facts in prediction.input[:1]]
    layers += [(f"{each.name} {each.kind}".strip(), each.output) for each in prediction.layers]
    rows = [["layer", "shape", "min", "mean", "max", "zeros"]]
    for name, facts in layers:
        name = name if len(name) <= 28 else f"...{name[-25:]}"  # its end says more
        row, stats = [name, _cut(shape_text(facts.shape), 16)], facts.stats
        if stats is None:
            rows.append([*row, "-", "-", "-", "-"])
        else:
            numbers = [short_number(number) for number in (stats.min, stats.mean, stats.max)]
            rows.append([*row, *numbers, f"{stats.zeros:.0%}"])
    yield TextLine(f"Prediction for sample {prediction.index:,}, layer by layer", "title")
    for number, line in enumerate(table_lines(rows, "<<>")):
        yield TextLine(f"  {line}", "" if number else "quiet")
    if any(facts.stats is None for _, facts in layers):
        yield TextLine("  -: too few numbers to hide them in statistics", "quiet")
    if prediction.answer is not None:
        yield TextLine("")
        yield from _paragraph(f"Answer: {prediction.answer.text}.", width, "  ")


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
    """The line from a row of `before` boxes to one of `after`: straight on, a fork or a join."""
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


def _paragraph(
    text: str, width: int, indent: str, style: Style = "", mark: str = ""
) -> list[TextLine]:
    """Text wrapped to a width; a mark takes the place of the first line's indent."""
    head = f"{mark} " if mark else indent
    room = width - 1 if mark else width  # in ASCII some marks take two characters
    wrapped = textwrap.wrap(
        text, room, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
    return [TextLine(line, style) for line in wrapped]


def short_number(number: float) -> str:
    """Three digits, in as few characters as that takes."""
    size = abs(number)
    if number and (size >= 1e5 or size < 1e-3):
        return f"{number:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{number:.3g}" if size < 1000 else f"{number:.0f}"


def _few(numbers: Sequence[float] | None) -> str:
    return " ".join(short_number(number) for number in (numbers or [])[:3])


def _numbers(numbers: Sequence[float]) -> str:
    """The number that all workers have, or those that they have instead."""
    if len(set(numbers)) > 1:
        return f"{' / '.join(f'{number:.6g}' for number in numbers[:4])} (NOT EQUAL)"
    return f"{numbers[0]:.6g}{' everywhere' if len(numbers) > 1 else ''}"


def _name_of(weight: Weight) -> str:
    return f"{weight.name}[{', '.join(map(str, weight.index))}]" if weight.index else weight.name


def _cut(text: str, room: int) -> str:
    """The text, or its beginning and dots."""
    return text if len(text) <= room else f"{text[: max(0, room - 3)]}..."


def _fit(text: str, width: int, plain: bool) -> str:
    """The line as a terminal may get it: names in it come from a file, and could be anything."""
    text = "".join(char if _takes_one_place(char) else "?" for char in text)
    if plain:
        text = text.translate(_PLAIN).encode("ascii", "replace").decode()
    return _cut(text.rstrip(), width)


def _takes_one_place(char: str) -> bool:
    is_narrow = unicodedata.east_asian_width(char) not in "WF"
    return char.isprintable() and is_narrow and not unicodedata.combining(char)
