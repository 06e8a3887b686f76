"""The section "one batch, step by step": the picture with its words, stage by stage.

Every stage is in the page with all its details; the script only folds away those that are not
being looked at. A run of which no batch was followed gets the same picture without values.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.report.imagined import imagined
from paceline.explain.report.learned import (
    prediction_table,
    stats_in_words,
    training_table,
    values_in_words,
)
from paceline.explain.report.markup import (
    NOTHING,
    Html,
    count,
    duration,
    figure,
    join,
    listing,
    sentence,
    size,
    table,
    tag,
    text,
)
from paceline.explain.report.picture import Box, draw_rest, draw_row, lay_out, shape
from paceline.observe.run_folder import RunInfo
from paceline.record.stages import (
    Part,
    Stage,
    TensorFacts,
    Trace,
    Weight,
)

PARTS_LIMIT = 16
RECORD = "paceline.explain.trace.record_step"
PLAIN = {
    "data": "what there is to learn from",
    "sampler": "who gets which rows",
    "batch": "what this step learns from",
    "split": "a part for each worker",
    "copy": "everyone gets the same weights",
    "forward": "the model makes its guesses",
    "gather": "the guesses come together",
    "loss": "how wrong they are",
    "backward": "which way to change each weight",
    "buckets": "gradients packed for the journey",
    "all-reduce": "gradients averaged over all workers",
    "update": "the same change everywhere",
}
"""What a stage is, for somebody who does not know its name."""
WORKERS_LIMIT = 4096


def section(traces: Sequence[Trace], info: RunInfo | None) -> Html | None:
    """The section's content, or None where not even a picture without values is possible."""
    if traces:
        return join(_show(trace, is_only=len(traces) == 1) for trace in traces)
    if info is None or not info.global_batch or not 0 < info.workers <= WORKERS_LIMIT:
        return None
    trace = imagined(info)
    said = (
        "No batch of this run was recorded, so there are no values here. The picture shows how "
        "every one of its steps works, with the sizes from the run's settings. To see a real "
        "batch here, record a step with "
    )
    return join(
        [
            tag("p", said, tag("code", RECORD), ".", class_="note"),
            _stepper(trace),
        ]
    )


def _show(trace: Trace, *, is_only: bool) -> Html:
    head = None if is_only else tag("h3", f"Step {figure(trace.step)}")
    about = (
        f"A real step, as it was recorded (step {figure(trace.step)}): "
        f"{count(trace.batch_rows, 'row')} through {text(trace.model.name, 80)} "
        f"({count(trace.model.parameters, 'weight')}) on {count(trace.workers, noun_of(trace))}, "
        f"with {trace.engine}."
    )
    return join(
        [
            head,
            tag("p", about),
            _key(trace),
            _check(trace),
            _stepper(trace),
            training_table(trace.training) if trace.training else None,
            prediction_table(trace.prediction) if trace.prediction else None,
        ]
    )


def noun_of(trace: Trace) -> str:
    """What has a part of the batch: a process of its own, or a copy inside one process."""
    return "worker" if trace.engine == "DistributedDataParallel" else "replica"


def _key(trace: Trace) -> Html | None:
    """What the signs in the picture mean."""
    signs = []
    if trace.sample and trace.sample.stops:
        signs.append(("●", f"where sample {figure(trace.sample.index)} is"))
    if trace.weight and trace.weight.stops:
        signs.append(("◆", f"what becomes of one weight, {_weight_name(trace.weight)}"))
    said = [
        join([tag("span", sign, class_="followed-sign", aria_hidden="true"), f" {what}. "])
        for sign, what in signs
    ]
    return tag("p", *said, class_="note") if said else None


def _weight_name(weight: Weight) -> str:
    return f"{text(weight.name, 80)}[{', '.join(map(str, weight.index))}]"


def _check(trace: Trace) -> Html | None:
    check = trace.check
    if check is None:
        return None
    sign, look = {True: ("✓", "good"), False: ("✗", "bad"), None: (NOTHING, "open")}[check.is_same]
    said = sentence(text(check.text, 300))
    if check.is_equal_on_all is not None:
        same = "the same" if check.is_equal_on_all else "not the same"
        said += f"; all {noun_of(trace)}s ended with {same} bits"
    reason = tag("p", text(check.reason, 300), class_="note") if check.reason else None
    how = (
        "The same step was computed once more in one process on the whole batch, and compared."
        if check.how == "whole batch"
        else None
    )
    return tag(
        "div",
        tag("p", tag("span", sign, class_="sign", aria_hidden="true"), " ", tag("strong", said)),
        tag("p", how, class_="note") if how else None,
        reason,
        class_=f"verdict {look}",
    )


def _stepper(trace: Trace) -> Html:
    largest = max(
        (t.shape[0] for s in trace.stages for p in s.parts for t in p.tensors[:1] if t.shape),
        default=1,
    )
    largest = min(largest, 4 * max(1, trace.batch_rows))
    items: list[Html] = []
    before: list[Box] = []
    for index, stage in enumerate(trace.stages):
        boxes = lay_out(stage, largest)
        marks = (
            [s.worker for s in trace.sample.stops if s.stage == stage.name] if trace.sample else []
        )
        items.append(
            tag(
                "li",
                tag(
                    "div",
                    draw_row(stage, boxes, before, marks=marks),
                    draw_rest(boxes) if index + 1 < len(trace.stages) else None,
                    class_="stage-picture",
                ),
                tag("div", *_words(trace, stage, index), class_="stage-words"),
                class_="stage",
            )
        )
        before = boxes
    controls = tag(
        "div",
        tag(
            "button",
            "◀",
            tag("span", " Back", class_="word"),
            type="button",
            class_="back",
            aria_label="Back",
        ),
        tag("span", "", class_="place", role="status"),
        tag(
            "button",
            tag("span", "Next ", class_="word"),
            "▶",
            type="button",
            class_="next",
            aria_label="Next",
        ),
        tag("button", "Show all", type="button", class_="all", aria_pressed="false"),
        tag("span", "or use the arrow keys", class_="hint"),
        class_="controls",
        hidden=True,
    )
    return tag(
        "div",
        controls,
        tag("ol", *items, class_="stages"),
        class_="stepper",
        tabindex=0,
        role="group",
        aria_label="One batch, stage by stage",
    )


def _words(trace: Trace, stage: Stage, index: int) -> list[Html | None]:
    facts = []
    if stage.bytes_moved:
        facts.append(f"{size(stage.bytes_moved)} moved")
    if stage.seconds is not None:
        facts.append(f"took {duration(stage.seconds)}")
    title, plain = text(stage.title, 120), PLAIN.get(stage.name) if trace.step else None
    details = [_followed_sample(trace, stage), _followed_weight(trace, stage), _parts(stage)]
    return [
        tag(
            "h4",
            tag("span", str(index + 1), class_="ordinal"),
            sentence(title),
            tag("span", f": {plain}", class_="plain") if plain else None,
        ),
        tag("p", text(stage.text, 600)),
        tag("p", " · ".join(facts), class_="facts") if facts else None,
        tag("div", *details, class_="details") if any(details) else None,
    ]


def _followed_sample(trace: Trace, stage: Stage) -> Html | None:
    sample = trace.sample
    stops = [stop for stop in sample.stops if stop.stage == stage.name] if sample else []
    if not sample or not stops:
        return None
    said = []
    for stop in stops[:4]:
        where = f"row {stop.row}" + (
            f" of {noun_of(trace)} {stop.worker}" if stop.worker is not None else ""
        )
        values = f": {values_in_words(stop.values)}" if stop.values else ""
        said.append(where + values)
    dot = tag("span", "●", class_="followed-sign", aria_hidden="true")
    told = f" The followed sample (number {figure(sample.index)}) is {'; '.join(said)}"
    return tag("p", dot, told if told.endswith("…") else f"{told}.")


def _followed_weight(trace: Trace, stage: Stage) -> Html | None:
    weight = trace.weight
    stops = [stop for stop in weight.stops if stop.stage == stage.name] if weight else []
    if not weight or not stops:
        return None
    said = []
    for stop in stops[:4]:
        if stop.by_worker is None:
            values = "not recorded"
        elif len(stop.by_worker) == 1:
            values = figure(stop.by_worker[0], 6)
        else:
            values = listing(
                [
                    f"{figure(v, 6)} on {noun_of(trace)} {w}"
                    for w, v in enumerate(stop.by_worker[:4])
                ]
            )
        equal = {True: " (the same bits everywhere)", False: " (not the same!)", None: ""}
        said.append(f"{stop.what}: {values}{equal[stop.is_equal]}")
    sign = tag("span", "◆", class_="followed-sign", aria_hidden="true")
    return tag(
        "p",
        sign,
        " The followed weight ",
        tag("code", _weight_name(weight)),
        f" has {'; '.join(said)}.",
    )


def _parts(stage: Stage) -> Html | None:
    rows = [_tensor_row(part, tensor) for part in stage.parts for tensor in part.tensors]
    if not rows:
        said = [f"{part.title}: {part.text}" for part in stage.parts[:PARTS_LIMIT] if part.text]
        return tag("ul", *(tag("li", each) for each in said)) if len(said) > 1 else None
    left = len(rows) - PARTS_LIMIT
    shown = table(
        ("where", "tensor", "shape", "type", "device", "values", "size"),
        rows[:PARTS_LIMIT],
        caption=f"{sentence(text(stage.title, 100))}: what is where",
        words=range(6),
    )
    return join([shown, tag("p", f"… and {left:,} more.", class_="note") if left > 0 else None])


def _tensor_row(part: Part, tensor: TensorFacts) -> list[object]:
    values = values_in_words(tensor.first) if tensor.first else stats_in_words(tensor.stats)
    kind = text(tensor.dtype, 30).removeprefix("torch.")
    name = tag("code", text(tensor.name, 60))
    return [
        text(part.title, 60),
        name,
        tag("span", shape(tensor), class_="keep"),
        kind,
        text(tensor.device, 30),
        tag("span", values, class_="values"),
        size(tensor.bytes),
    ]
