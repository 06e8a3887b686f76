"""A recorded step as lines of text: boxes for what each worker has, lines for where it goes.

Pure: a `Trace` in, lines out, none wider than asked. `plain` has no character beyond ASCII. Colour
is a style beside the text, so that a width is always that of the text.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from paceline.explain.trace.boxes import Box, connect, meet, room_inside, side_by_side
from paceline.explain.trace.lines import WIDTH, Line, Style, cut, paragraph, short_number
from paceline.explain.trace.tables import draw_prediction, draw_training
from paceline.observe.units import bytes_text, count_text, seconds_text, shape_text
from paceline.record.stages import (
    Part,
    Sample,
    Stage,
    TensorFacts,
    Trace,
    Weight,
)

LANE = 24
"""The narrowest box. At 80 columns three fit side by side; of more workers the first, the last and
the followed sample's are drawn."""
MOST_BUCKETS = 5
MARGIN = 4

SAMPLE, WEIGHT, GOOD, BAD = "●", "◆", "✓", "✗"
_PLAIN: dict[int, str] = {
    **{ord(fine): plain for fine, plain in zip("┌┐└┘┬┴┼─│▼●◆", "+++++++-|v*#", strict=True)},
    ord(GOOD): "ok",
    ord(BAD): "NO",
}


def draw(trace: Trace, *, width: int = WIDTH, plain: bool = False) -> list[Line]:
    """The whole picture: heading, stages, what was followed, the check, training, prediction."""
    lines = [*_heading(trace, width), Line("")]
    shown = _shown_workers(trace, width)
    lanes_before = 0
    for number, stage in enumerate(trace.stages, start=1):
        drawn, lanes_before = _stage(trace, stage, number, shown, lanes_before, width)
        lines += [*drawn, Line("")]
    lines += _followed(trace, width)
    lines += _check(trace, width)
    if trace.training is not None:
        lines += [Line(""), *draw_training(trace.training, width)]
    if trace.prediction is not None:
        lines += [Line(""), *draw_prediction(trace.prediction, width)]
    return [_fit(line, width, plain) for line in lines]


def _heading(trace: Trace, width: int) -> list[Line]:
    if trace.engine == "DataParallel":
        copies = "1 copy" if trace.workers == 1 else f"{trace.workers} copies"
        who = f"One process with {copies} of the model"
    else:
        who = f"{trace.workers} workers, each a process with its own copy of the model"
        who = "One worker: one process" if trace.workers == 1 else who
    lines = [
        *paragraph(f"One batch on its way through {trace.engine}", width, "", "title"),
        *paragraph(f"{who}.", width, ""),
    ]
    facts = (
        f"Step {trace.step} of a real training, recorded: {count_text(trace.batch_rows, 'row')}, "
        f"model {trace.model.name} with {trace.model.parameters:,} weights, "
        f"{seconds_text(trace.seconds)} in all."
    )
    lines += paragraph(facts, width, "", "quiet")
    if trace.sample is not None:
        where = f"row {trace.sample.index:,} of the data"
        lines.append(Line(f"{SAMPLE} marks one sample: {where}", "sample"))
    if trace.weight is not None and (trace.has_values or trace.weight.bucket is not None):
        lines.append(Line(f"{WEIGHT} marks one weight: {_weight_name(trace.weight)}", "weight"))
    return lines


def _shown_workers(trace: Trace, width: int) -> list[int]:
    """Which workers get a box of their own."""
    lanes = max(1, min(3, (width - MARGIN) // LANE))
    if trace.workers <= lanes:
        return list(range(trace.workers))
    owners = [s.worker for s in trace.sample.stops if s.worker is not None] if trace.sample else []
    owner = next((o for o in owners if 0 <= o < trace.workers), 1)
    first, last = 0, trace.workers - 1
    middle = owner if first < owner < last else 1
    chosen = {1: [owner], 2: [first, owner if owner != first else last], 3: [first, middle, last]}
    return sorted(chosen[lanes])


def _stage(
    trace: Trace, stage: Stage, number: int, shown: Sequence[int], lanes_before: int, width: int
) -> tuple[list[Line], int]:
    """The lines of one stage, and how many lanes leave it."""
    cost = []
    if stage.bytes_moved:
        cost.append(f"{bytes_text(stage.bytes_moved)} moved")
    if stage.seconds is not None:
        cost.append(seconds_text(stage.seconds))
    title = f"{number:>2}  {stage.title.upper()}"
    right = ", ".join(cost)
    gap = max(2, width - len(title) - len(right))
    lines = [Line(f"{title}{' ' * gap}{right}".rstrip(), "title")]
    lines += paragraph(stage.text, width, " " * MARGIN)
    boxes = _boxes(trace, stage, shown, width)
    if not boxes:
        return lines, lanes_before
    if lanes_before:
        way = connect(lanes_before, len(boxes), MARGIN, width)
        if stage.name == "all-reduce":
            way = meet(len(boxes), "added up, divided, sent to all", MARGIN, width)
        lines += [Line(text, "quiet") for text in way]
    lines += [Line(text) for text in side_by_side(boxes, MARGIN, width, is_fed=lanes_before > 0)]
    hidden = trace.workers - len(shown)
    if hidden > 0 and (len(boxes) > 1 or stage.parts[0].worker is not None):
        others = [w for w in range(trace.workers) if w not in shown]
        lines.append(Line(f"{' ' * MARGIN}and {_ranges(others)} in the same way", "quiet"))
    return lines, len(boxes)


def _boxes(trace: Trace, stage: Stage, shown: Sequence[int], width: int) -> list[Box]:
    if stage.name == "buckets":
        room = room_inside(len(shown), MARGIN, width)
        lines = _bucket_lines(stage.parts, trace.weight, room)
        return [Box(f"worker {worker}", lines) for worker in shown] if stage.parts else []
    parts = [p for p in stage.parts if p.worker is None or p.worker in shown]
    room = room_inside(max(1, len(parts)), MARGIN, width)
    return [_box(trace, stage, part, room) for part in parts]


def _box(trace: Trace, stage: Stage, part: Part, room: int) -> Box:
    lines = []
    for facts in part.tensors[:2]:
        lines += _tensor(facts, stage.name, room)
    if len(part.tensors) > 2:
        lines.append(f"and {count_text(len(part.tensors) - 2, 'tensor')} more")
    if part.text:
        lines += textwrap.wrap(part.text, room)
    for mark in _marks(trace, stage, part):
        lines += textwrap.wrap(mark, room, subsequent_indent="  ")
    is_somewhere = part.device and part.device != part.title and part.worker is not None
    title = f"{part.title} on {part.device}"
    title = title if is_somewhere and room > 30 else part.title
    took = "" if part.seconds is None or part.worker is None else seconds_text(part.seconds)
    return Box(title, [cut(line, room) for line in lines], took)


_OBVIOUS = {"input", "inputs", "output", "batch"}


def _tensor(facts: TensorFacts, stage: str, room: int) -> list[str]:
    """Shape, dtype and size on a line, then the first values or else their statistics."""
    if facts.name == "model":
        return [f"model, {bytes_text(facts.bytes)}"]
    if facts.name == "loss" and facts.first:
        return [f"loss {facts.first[0]:.6g}"]
    shape = shape_text(facts.shape)
    if facts.name in _OBVIOUS or stage == "batch":
        words = [shape, facts.dtype, bytes_text(facts.bytes)]
    else:
        words = [f"{shape} {facts.name}"]
    first = words[0]
    for word in words[1:]:
        first = f"{first}  {word}" if len(first) + len(word) + 2 <= room else first
    head = textwrap.wrap(first, room)
    if facts.first:
        return [*head, _values(facts.first, facts.shape, room)]
    if facts.stats is not None:
        low, mean, high = (
            short_number(v) for v in (facts.stats.min, facts.stats.mean, facts.stats.max)
        )
        told = f"{low} to {high}, mean {mean}"
        return [*head, told if len(told) <= room else f"{low} to {high}"]
    return head


def _values(first: Sequence[float], shape: Sequence[int], room: int) -> str:
    """As many of the first values as fit, with dots if there are more."""
    total = 1
    for extent in shape:
        total *= extent
    shown: list[str] = []
    for number in first:
        word = short_number(number)
        rest = " ..." if len(shown) + 1 < total else ""
        if len(" ".join([*shown, word])) + len(rest) > room:
            break
        shown.append(word)
    return " ".join(shown) + (" ..." if len(shown) < total else "")


def _marks(trace: Trace, stage: Stage, part: Part) -> Iterator[str]:
    """Where the followed sample and weight are in this box."""
    for stop in trace.sample.stops if trace.sample else []:
        if stop.stage == stage.name and stop.worker == part.worker:
            says = ""
            if stop.values and stage.name in ("forward", "gather"):
                says = f": {' '.join(short_number(v) for v in stop.values[:3])}"
            is_moved = stage.name in ("sampler", "batch", "split") and trace.sample is not None
            if is_moved and trace.sample and trace.sample.stops[0].stage == "data":
                yield f"{SAMPLE} row {trace.sample.index:,} is row {stop.row:,} here"
            else:
                yield f"{SAMPLE} row {stop.row:,}{says}"
    for each in trace.weight.stops if trace.weight else []:
        if each.stage != stage.name or not each.by_worker:
            continue
        if part.worker is None:
            if len(each.by_worker) == 1:
                yield f"{WEIGHT} {each.what} {each.by_worker[0]:.6g}"
            else:
                listed = " + ".join(f"{number:.4g}" for number in each.by_worker[:4])
                yield f"{WEIGHT} {each.what} from each: {listed}"
        elif part.worker < len(each.by_worker):
            what = {"averaged gradient": "averaged"}.get(each.what, each.what)
            yield f"{WEIGHT} {what} {each.by_worker[part.worker]:.6g}"


def _bucket_lines(parts: Sequence[Part], weight: Weight | None, room: int) -> list[str]:
    """What one worker packs: a line for each bucket, with what is in it where there are few."""
    lines: list[str] = []
    for number, part in enumerate(parts):
        if MOST_BUCKETS <= number < len(parts) - 1:
            continue
        if number == len(parts) - 1 and len(parts) > MOST_BUCKETS + 1:
            lines.append(f"... {len(parts) - MOST_BUCKETS - 1} more ...")
        size = bytes_text(part.tensors[0].bytes) if part.tensors else ""
        lines.append(f"{part.title}  {size}")
        if len(parts) <= 2:
            lines += textwrap.wrap(part.text, room)
    if weight is not None and weight.bucket is not None:
        where = f" of bucket {weight.bucket}" if len(parts) > 1 else ""
        lines += textwrap.wrap(f"{WEIGHT} number {weight.position:,}{where}", room)
    return [cut(line, room) for line in lines]


def _followed(trace: Trace, width: int) -> Iterator[Line]:
    """The ways of the sample and the weight once more, each in one sentence."""
    if trace.sample is not None and trace.sample.stops:
        yield from paragraph(_sample_story(trace, trace.sample), width, "  ", "sample", SAMPLE)
    if trace.weight is not None:
        story = _weight_story(trace.weight)
        if story:
            yield from paragraph(story, width, "  ", "weight", WEIGHT)


def _sample_story(trace: Trace, sample: Sample) -> str:
    owner = next((stop for stop in sample.stops if stop.worker is not None), None)
    out = next((s.values for s in sample.stops if s.stage == "forward" and s.values), None)
    if owner is None:
        return f"Sample {sample.index:,} was in this batch."
    place = f"worker {owner.worker}"
    if trace.engine == "DataParallel":
        place = trace.devices[owner.worker or 0]
    said = f", and came out as {' '.join(short_number(v) for v in out[:3])}" if out else ""
    return f"Sample {sample.index:,} went to {place} as row {owner.row:,} there{said}."


def _weight_story(weight: Weight) -> str:
    stops = {stop.what: stop for stop in weight.stops}
    words = [f"Weight {_weight_name(weight)}"]
    value, new = stops.get("value"), stops.get("new value")
    own = stops.get("gradient")
    total = stops.get("averaged gradient") or stops.get("summed gradient")
    if value and value.by_worker:
        words.append(f"was {value.by_worker[0]:.6g}" + _everywhere(value.by_worker))
    if own and own.by_worker and len(own.by_worker) > 1:
        listed = ", ".join(f"{number:.4g}" for number in own.by_worker[:4])
        more = ", ..." if len(own.by_worker) > 4 else ""
        words.append(f"had the gradients {listed}{more}")
    if total and total.by_worker:
        kind = total.what.removesuffix(" gradient")
        words.append(f"{kind} to {_numbers(total.by_worker)}")
    if new and new.by_worker:
        words.append(f"and is now {_numbers(new.by_worker)}" + _everywhere(new.by_worker))
    elif new and new.is_equal is not None:
        words.append("is now the same everywhere" if new.is_equal else "is now NOT the same")
    return f"{words[0]} {', '.join(words[1:])}." if len(words) > 1 else ""


def _numbers(numbers: Sequence[float]) -> str:
    if len(set(numbers)) == 1:
        return f"{numbers[0]:.6g}"
    return " / ".join(f"{number:.6g}" for number in numbers[:4])


def _everywhere(numbers: Sequence[float]) -> str:
    if len(numbers) < 2:
        return ""
    return " everywhere" if len(set(numbers)) == 1 else " (NOT EQUAL)"


def _check(trace: Trace, width: int) -> Iterator[Line]:
    check = trace.check
    if check is None:
        return
    if check.is_same is not None or check.reason:
        text = check.text + (f" ({check.reason})" if check.reason else "")
        style: Style = "good" if check.is_same else "quiet" if check.is_same is None else "bad"
        mark = GOOD if check.is_same else BAD if check.is_same is False else "-"
        yield from paragraph(text, width, "  ", style, mark)
    if check.is_equal_on_all is True:
        told = f"the {trace.workers} workers' weights are equal to the last bit"
        yield from paragraph(told, width, "  ", "good", GOOD)
    elif check.is_equal_on_all is False:
        yield from paragraph("the workers' weights are NOT EQUAL", width, "  ", "bad", BAD)


def _weight_name(weight: Weight) -> str:
    return f"{weight.name}[{', '.join(map(str, weight.index))}]" if weight.index else weight.name


def _ranges(numbers: Sequence[int]) -> str:
    """`workers 2 to 6` for those that are not drawn."""
    if len(numbers) == 1:
        return f"worker {numbers[0]}"
    if len(numbers) == 2:
        return f"workers {numbers[0]} and {numbers[1]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"workers {numbers[0]} to {numbers[-1]}"
    return f"{len(numbers)} more"


def _takes_one_place(char: str) -> bool:
    is_narrow = unicodedata.east_asian_width(char) not in "WF"
    return char.isprintable() and is_narrow and not unicodedata.combining(char)


def _fit(line: Line, width: int, plain: bool) -> Line:
    """The line as a terminal may get it: names in it come from a file, and could be anything."""
    text = "".join(char if _takes_one_place(char) else "?" for char in line.text)
    if plain:
        text = text.translate(_PLAIN).encode("ascii", "replace").decode()
    return Line(cut(text.rstrip(), width), line.style)
