"""Both engines side by side: one process with threads, and a process for each worker.

What they do with the same batch stands in one row, as far as both do it; where only one does
something, the other side says why not.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.explain.trace.drawing import (
    MARGIN,
    TextBox,
    finish,
    most_boxes,
    side_by_side,
    slots,
    wrap,
)
from paceline.observe.units import bytes_text, count_text, seconds_text, shape_text, table_lines
from paceline.record.stages import Stage, Trace

ROWS = (
    ("data", "data"),
    ("", "meet"),
    ("place", "place"),
    ("batch", "sampler"),
    ("split", "batch"),
    ("copy", ""),
    ("forward", "forward"),
    ("gather", ""),
    ("loss", "loss"),
    ("backward", "backward"),
    ("sum", "all-reduce"),
    ("update", "update"),
    ("main", ""),
)
TITLES = {"meet": "meeting", "copy": "copying", "main": "main device"}
MISSING = {
    "meet": "One process has nobody to meet; its replicas are threads.",
    "copy": "Every worker has had its own copy from the beginning.",
    "gather": "Nothing is gathered: each worker keeps its outputs, and computes its own loss.",
    "main": "There is no main device: every worker does the same.",
}
MOST_PARTS = 4


def draw_both(one: Trace, many: Trace, *, width: int, plain: bool = False) -> list[str]:
    """DataParallel at the left, DistributedDataParallel at the right."""
    return finish([*_lines(one, many, width)], width, plain)


def _lines(one: Trace, many: Trace, width: int) -> Iterator[str]:
    yield from wrap(
        f"The same {count_text(one.batch_rows, 'row')} on both engines, with "
        f"{count_text(one.workers, 'replica')} and {count_text(many.workers, 'worker')}",
        width,
    )
    yield ""
    yield from (f"{' ' * MARGIN}{line}" for line in table_lines(_facts(one, many)))
    stage_by_name = [{stage.name: stage for stage in trace.stages} for trace in (one, many)]
    columns = 2 if most_boxes(width) > 1 else 1
    room = slots(columns, width)[0][1] - 4
    for left, right in ROWS:
        boxes = [
            _box(stages.get(name), left or right, room)
            for stages, name in zip(stage_by_name, (left, right), strict=True)
        ]
        if columns == 1:
            yield from (line for box in boxes for line in side_by_side([box], width))
        else:
            yield from side_by_side(boxes, width)
    for trace in (one, many):
        if trace.check is not None:
            yield from wrap(f"{trace.engine}: {trace.check.text}", width)


def _facts(one: Trace, many: Trace) -> list[list[str]]:
    """What differs, in numbers."""

    def gathered(trace: Trace) -> str:
        moved = [stage.bytes_moved for stage in trace.stages if stage.name == "gather"]
        return bytes_text(sum(moved))

    return [
        ["", "DataParallel", "DistributedDP"],
        ["processes", "1, with threads", str(many.workers)],
        ["gradients meet", f"on {one.devices[0]}", "in every process"],
        ["outputs to one device", gathered(one), gathered(many)],
        ["this step", seconds_text(one.seconds), seconds_text(many.seconds)],
    ]


def _box(stage: Stage | None, name: str, room: int) -> TextBox:
    if stage is None:
        return TextBox(f"no {TITLES.get(name, name)}", wrap(MISSING.get(name, ""), room))
    lines = wrap(stage.text, room)
    for part in stage.parts[:MOST_PARTS]:
        if part.tensors and part.tensors[0].shape:
            is_flat = len(part.tensors[0].shape) == 1  # told by what it holds: 385 gradients
            facts = part.tensors[-1 if is_flat else 0]
            what = f" {facts.name}" if is_flat else ""
            lines += wrap(f"{part.title}: {shape_text(facts.shape)}{what}", room)
    if len(stage.parts) > MOST_PARTS:
        lines.append(f"and {len(stage.parts) - MOST_PARTS} more")
    return TextBox(stage.title, lines)
