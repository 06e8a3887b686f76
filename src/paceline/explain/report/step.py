"""The section "one batch, step by step": a recorded step as a picture with words, stage by stage.

What belongs to a worker stands in that worker's column and colour; what belongs to all is as wide
as the picture. So a batch that is cut up fans out, and gradients that are averaged come together,
without the drawing knowing any stage by name. Every stage is in the page with all its details; the
script joins the boxes by lines and folds away the stages that are not being looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.explain.report.collect import Story
from paceline.explain.report.markup import (
    NOTHING,
    Html,
    count,
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
from paceline.observe.units import list_text
from paceline.record.stages import Part, Prediction, Stage, TensorFacts, Trace, Training

COLUMNS = 4
"""More boxes than this do not fit side by side: the last one then says how many there are."""
MORE = -1
COLOURS = 6
"""How many colours workers have; then they repeat."""
PARTS_LIMIT, LAYERS_LIMIT, EPOCHS_LIMIT = 16, 64, 200


def pipeline(story: Story) -> Html | None:
    """The recorded steps with all their stages, or None where no step was recorded."""
    return join(_show(trace, is_only=len(story.traces) == 1) for trace in story.traces) or None


def _show(trace: Trace, *, is_only: bool) -> Html:
    about = (
        f"A real step, as it was recorded (step {figure(trace.step)}): "
        f"{count(trace.batch_rows, 'row')} through {text(trace.model.name, 80)} "
        f"({count(trace.model.parameters, 'weight')}) on {count(trace.workers, _noun(trace))}, "
        f"with {trace.engine}."
    )
    return html(
        "{}<p>{}</p>{}{}{}{}",
        None if is_only else html("<h3>Step {}</h3>", figure(trace.step)),
        about,
        _check(trace),
        _stepper(trace),
        _training(trace.training) if trace.training else None,
        _prediction(trace.prediction) if trace.prediction else None,
    )


def _noun(trace: Trace) -> str:
    """What has a part of the batch: a process of its own, or a copy inside one process."""
    return "worker" if trace.engine == "DistributedDataParallel" else "replica"


def _sign(sign: str) -> Html:
    return html('<span class="followed-sign" aria-hidden="true">{}</span>', sign)


def _check(trace: Trace) -> Html | None:
    check = trace.check
    if check is None:
        return None
    sign, look = {True: ("✓", "good"), False: ("✗", "bad"), None: (NOTHING, "open")}[check.is_same]
    said = sentence(text(check.text, 300))
    if check.is_equal_on_all is not None:
        same = "the same" if check.is_equal_on_all else "not the same"
        said += f"; all {_noun(trace)}s ended with {same} bits"
    how = "The same step was computed once more in one process on the whole batch, and compared."
    return html(
        '<div class="verdict {}"><p><span class="sign" aria-hidden="true">{}</span> '
        "<strong>{}</strong></p>{}{}</div>",
        look,
        sign,
        said,
        note(how if check.how == "whole batch" else None),
        note(text(check.reason, 300)),
    )


def _stepper(trace: Trace) -> Html:
    shapes = [t.shape for s in trace.stages for p in s.parts for t in p.tensors[:1] if t.shape]
    most_rows = max([1, *(shape[0] for shape in shapes)])
    most_rows = min(most_rows, 4 * max(1, trace.batch_rows))
    stops = trace.sample.stops if trace.sample else []
    items = []
    for number, stage in enumerate(trace.stages, start=1):
        followed = {stop.worker for stop in stops if stop.stage == stage.name}
        boxes = [_box(part, most_rows, part.worker in followed) for part in _columns(stage)]
        item = (
            '<li class="stage"><div class="stage-picture"><div class="boxes">{}</div></div>'
            '<div class="stage-words">{}</div></li>'
        )
        items.append(html(item, boxes, _words(trace, stage, number)))
    return html(
        '<div class="stepper" tabindex="0" role="group" aria-label="One batch, stage by stage">'
        '<ol class="stages">{}</ol></div>',
        items,
    )


def _columns(stage: Stage) -> list[Part]:
    """What stands side by side: a part each, or the first ones and how many more there are."""
    parts = stage.parts or [Part(title=stage.title)]
    if len(parts) <= COLUMNS:
        return parts
    left = len(parts) - COLUMNS + 1
    return [*parts[: COLUMNS - 1], Part(title=f"… {left:,} more", worker=MORE, text="alike")]


def _box(part: Part, most_rows: int, is_followed: bool) -> Html:
    look = "look-all" if part.worker is None else f"look-worker{part.worker % COLOURS}"
    look = "look-more" if part.worker == MORE else look
    lines = [html("<b>{}</b>", text(part.title, 60))]
    first = part.tensors[0] if part.tensors else None
    if first is not None:
        is_single = first.first and not first.shape
        shown = figure(first.first[0]) if first.first and is_single else shape_of(first)
        lines.append(html("<code>{}</code>", shown))
    elif part.text:
        lines.append(html("<code>{}</code>", text(part.text, 60)))
    if len(part.tensors) > 1:
        lines.append(html("<small>and {} more</small>", len(part.tensors) - 1))
    elif part.seconds is not None:
        lines.append(html("<small>{}</small>", duration(part.seconds)))
    dot = Html('<span class="followed" aria-hidden="true">●</span>') if is_followed else None
    glyph = _glyph(first, most_rows) if first else None
    return html('<div class="box {}">{}<div>{}</div>{}</div>', look, glyph, lines, dot)


def _glyph(tensor: TensorFacts, most_rows: int) -> Html | None:
    """A small rectangle whose sides follow rows and columns."""
    if len(tensor.shape) < 2 or 0 in tensor.shape:
        return None
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
    high = max(3.0, 50 * math.sqrt(min(1.0, rows / most_rows)))
    wide = max(3.0, 46 * math.sqrt(min(1.0, columns / 100)))
    shown = '<svg width="{}" height="{}" aria-hidden="true"><rect width="{}" height="{}" rx="1.5" '
    return html(shown + 'class="tensor fill"/></svg>', wide, high, wide, high)


def shape_of(tensor: TensorFacts) -> str:
    """A shape as people say it: `50 x 10`, `385 gradients`."""
    if len(tensor.shape) == 1:
        words = tensor.name.split()
        nouns = ("row", "gradient", "weight")
        noun = next((n for n in nouns if any(word.startswith(n) for word in words)), "value")
        return count(tensor.shape[0], noun)
    if tensor.shape:
        return " \N{MULTIPLICATION SIGN} ".join(f"{each:,}" for each in tensor.shape)
    return "one number" if tensor.dtype else f"{text(tensor.name, 40)}, {size(tensor.bytes)}"


def _words(trace: Trace, stage: Stage, number: int) -> Html:
    facts = [f"{size(stage.bytes_moved)} moved"] if stage.bytes_moved else []
    facts += [f"took {duration(stage.seconds)}"] if stage.seconds is not None else []
    details = [_followed_sample(trace, stage), _followed_weight(trace, stage), _parts(stage)]
    return html(
        '<h4><span class="ordinal">{}</span>{}</h4><p>{}</p>{}{}',
        number,
        sentence(text(stage.title, 120)),
        text(stage.text, 600),
        html('<p class="facts">{}</p>', " · ".join(facts)) if facts else None,
        html('<div class="details">{}</div>', details) if any(details) else None,
    )


def _followed_sample(trace: Trace, stage: Stage) -> Html | None:
    sample = trace.sample
    said: list[str] = []
    for stop in sample.stops if sample else ():
        if stop.stage == stage.name and len(said) < COLUMNS:
            where = "" if stop.worker is None else f" of {_noun(trace)} {stop.worker}"
            values = f": {_values(stop.values)}" if stop.values else ""
            said.append(f"row {stop.row}{where}{values}")
    if not sample or not said:
        return None
    told = f"The followed sample (number {figure(sample.index)}) is {'; '.join(said)}"
    return html("<p>{} {}</p>", _sign("●"), told if told.endswith("…") else f"{told}.")


def _followed_weight(trace: Trace, stage: Stage) -> Html | None:
    weight = trace.weight
    equal = {True: " (the same bits everywhere)", False: " (not the same!)", None: ""}
    said: list[str] = []
    for stop in weight.stops if weight else ():
        if stop.stage == stage.name and len(said) < COLUMNS:
            values = [figure(value, 6) for value in (stop.by_worker or [])[:COLUMNS]]
            if len(values) > 1:
                values = [f"{value} on {_noun(trace)} {n}" for n, value in enumerate(values)]
            told = list_text(values) if values else "not recorded"
            said.append(f"{stop.what}: {told}{equal[stop.is_equal]}")
    if not weight or not said:
        return None
    name = f"{text(weight.name, 80)}[{', '.join(map(str, weight.index))}]"
    shown = "<p>{} The followed weight <code>{}</code> has {}.</p>"
    return html(shown, _sign("◆"), name, "; ".join(said))


def _parts(stage: Stage) -> Html | None:
    rows: list[list[object]] = [
        [
            text(part.title, 60),
            html("<code>{}</code>", text(tensor.name, 60)),
            html('<span class="keep">{}</span>', shape_of(tensor)),
            text(tensor.dtype, 30).removeprefix("torch."),
            text(tensor.device, 30),
            _contents(tensor),
            size(tensor.bytes),
        ]
        for part in stage.parts
        for tensor in part.tensors
    ]
    if not rows:
        said = [f"{part.title}: {part.text}" for part in stage.parts[:PARTS_LIMIT] if part.text]
        items = [html("<li>{}</li>", each) for each in said]
        return html("<ul>{}</ul>", items) if len(said) > 1 else None
    head = ("where", "tensor", "shape", "type", "device", "values", "size")
    caption = f"{sentence(text(stage.title, 100))}: what is where"
    shown = table(head, rows[:PARTS_LIMIT], caption=caption, words=range(6))
    left = len(rows) - PARTS_LIMIT
    return join([shown, note(f"… and {left:,} more." if left > 0 else None)])


def _values(values: Sequence[float]) -> str:
    return ", ".join(map(figure, values[:3])) + (" …" if len(values) > 3 else "")


def _contents(tensor: TensorFacts) -> Html:
    """The first values, or what they are like where they themselves were not kept."""
    said, stats = NOTHING, tensor.stats
    if tensor.first:
        said = _values(tensor.first)
    elif stats:
        said = f"{figure(stats.min)} to {figure(stats.max)}, mean {figure(stats.mean)}"
    return html('<span class="values">{}</span>', said)


def _training(training: Training) -> Html:
    """The epochs that were trained after the recorded step."""
    head = ("epoch", "loss", "accuracy", "held-out accuracy", "time", "what the numbers say")
    rows = [
        [
            figure(epoch.epoch),
            figure(epoch.loss),
            percent(epoch.accuracy),
            percent(epoch.evaluation_accuracy),
            duration(epoch.seconds),
            text(epoch.observation, 200),
        ]
        for epoch in training.epochs[:EPOCHS_LIMIT]
    ]
    shown = table(head, rows, caption="Epochs of the trace", words=(0, 5))
    said = text(training.observation, 400)
    return html("<h3>The epochs after it</h3><p>{}</p>{}", said, shown)


def _prediction(prediction: Prediction) -> Html:
    """One sample on its way through the layers, to the answer."""
    shown = [(tensor.name, "input", tensor, 0) for tensor in prediction.input[:4]]
    layers, answer = prediction.layers, prediction.answer
    for layer in layers[:LAYERS_LIMIT]:
        shown.append((layer.name or "(model)", layer.kind, layer.output, layer.parameters))
    rows = [
        [
            html("<code>{}</code>", text(name, 80)),
            text(kind, 60),
            html('<span class="keep">{}</span>', shape_of(output)),
            _contents(output),
            figure(weights or None),
        ]
        for name, kind, output, weights in shown
    ]
    head = ("layer", "what it is", "output", "values", "weights")
    left = len(layers) - LAYERS_LIMIT
    return html(
        "<h3>One sample through the trained model</h3>"
        "<p>Sample {} goes through every layer to the answer.</p>{}{}{}",
        figure(prediction.index),
        table(head, rows, caption="Prediction for one sample, layer by layer", words=range(4)),
        note(f"… and {left:,} more layers." if left > 0 else None),
        html("<p><strong>{}</strong></p>", sentence(text(answer.text, 300))) if answer else None,
    )
