"""The section "one batch, step by step": the picture with its words, stage by stage.

Every stage is in the page with all its details; the script only folds away those that are not
being looked at. A run of which no batch was followed gets the same picture without values.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.pipeline.stages import (
    Layer,
    Model,
    Part,
    Prediction,
    Stage,
    Stats,
    TensorFacts,
    Trace,
    Training,
    Weight,
)
from paceline.report.markup import (
    NOTHING,
    Html,
    count,
    duration,
    figure,
    join,
    listing,
    percent,
    sentence,
    size,
    table,
    tag,
    text,
)
from paceline.report.picture import Box, draw_rest, draw_row, lay_out, shape
from paceline.run_folder import RunInfo

PARTS_LIMIT = 16
RECORD = "paceline trace --model FILE:FUNCTION --folder RUN"
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
LAYERS_LIMIT = 64
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
        "batch here, record one: "
    )
    return join(
        [
            tag("p", said, tag("code", RECORD), ".", class_="note"),
            _stepper(trace),
        ]
    )


def imagined(info: RunInfo) -> Trace:
    """The stages of any step of this run, from its settings alone."""
    workers, batch = info.workers, info.global_batch
    share = [batch // workers + (rank < batch % workers) for rank in range(workers)]

    def each(title: str, lines: Sequence[str]) -> list[Part]:
        return [
            Part(title=f"{title} {rank}", worker=rank, text=lines[rank]) for rank in range(workers)
        ]

    def same(line: str) -> list[str]:
        return [line] * workers

    samples = count(batch, "sample")
    stages = [
        Stage(
            name="batch",
            title="A batch is drawn",
            text=f"Each step trains on {samples}.",
            parts=[Part(title="batch", text=samples)],
        ),
        Stage(
            name="split",
            title="It is dealt out",
            text=f"{count(workers, 'worker')} share it; no sample goes to two of them.",
            parts=each("worker", [count(n, "sample") for n in share]),
        ),
        Stage(
            name="forward",
            title="Every worker computes the loss",
            text="All have the same model, and each computes on its own samples.",
            parts=each("worker", same("loss")),
        ),
        Stage(
            name="backward",
            title="Every worker computes gradients",
            text="They say how to change each weight; each worker finds different ones.",
            parts=each("worker", same("gradients")),
        ),
        Stage(
            name="reduce",
            title="The gradients are averaged",
            text="Workers exchange them, and all end with the same average.",
            parts=[Part(title="average", text="of all gradients")],
        ),
        Stage(
            name="update",
            title="All make the same update",
            text="Equal weights and equal gradients give equal weights: the copies stay in step.",
            parts=each("worker", same("same weights")),
        ),
    ]
    return Trace(
        engine="DistributedDataParallel",
        step=0,
        created=info.created,
        workers=workers,
        devices=[info.device] * workers,
        model=Model(name=info.model, parameters=info.parameters, bytes=0),
        batch_rows=batch,
        stages=stages,
    )


def _show(trace: Trace, *, is_only: bool) -> Html:
    head = None if is_only else tag("h3", f"Step {figure(trace.step)}")
    about = (
        f"A real step, as it was recorded (step {figure(trace.step)}): "
        f"{count(trace.batch_rows, 'row')} through {text(trace.model.name, 80)} "
        f"({count(trace.model.parameters, 'weight')}) on {count(trace.workers, 'worker')}, "
        f"with {trace.engine}."
    )
    return join(
        [
            head,
            tag("p", about),
            _key(trace),
            _check(trace),
            _stepper(trace),
            _training(trace.training) if trace.training else None,
            _prediction(trace.prediction) if trace.prediction else None,
        ]
    )


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
        said += f"; all workers ended with {same} bits"
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
        where = f"row {stop.row}" + (f" of worker {stop.worker}" if stop.worker is not None else "")
        values = f": {_values(stop.values)}" if stop.values else ""
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
                [f"{figure(v, 6)} on worker {w}" for w, v in enumerate(stop.by_worker[:4])]
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
    values = _values(tensor.first) if tensor.first else _stats(tensor.stats)
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


def _values(values: Sequence[float]) -> str:
    return ", ".join(figure(value, 3) for value in values[:3]) + (" …" if len(values) > 3 else "")


def _stats(stats: Stats | None) -> str:
    if stats is None:
        return NOTHING
    return f"{figure(stats.min)} to {figure(stats.max)}, mean {figure(stats.mean)}"


def _training(training: Training) -> Html:
    has_accuracy = any(epoch.accuracy is not None for epoch in training.epochs)
    has_test = any(epoch.evaluation_accuracy is not None for epoch in training.epochs)
    head = ["epoch", "loss", *(["accuracy"] * has_accuracy), *(["held-out accuracy"] * has_test)]
    rows = []
    for epoch in training.epochs[:200]:
        row: list[object] = [figure(epoch.epoch), figure(epoch.loss)]
        row += [percent(epoch.accuracy)] if has_accuracy else []
        row += [percent(epoch.evaluation_accuracy)] if has_test else []
        rows.append([*row, duration(epoch.seconds), text(epoch.observation, 200)])
    last = len(head) + 1
    return join(
        [
            tag("h3", "The epochs after it"),
            tag("p", text(training.observation, 400)) if training.observation else None,
            table(
                [*head, "time", "what the numbers say"],
                rows,
                caption="Epochs of the trace",
                words=(0, last),
            ),
        ]
    )


def _prediction(prediction: Prediction) -> Html:
    answer = prediction.answer
    layers = prediction.layers
    rows = [_input_row(tensor) for tensor in prediction.input[:4]]
    rows += [_layer_row(layer) for layer in layers[:LAYERS_LIMIT]]
    left = len(layers) - LAYERS_LIMIT
    return join(
        [
            tag("h3", "One sample through the trained model"),
            tag("p", f"Sample {figure(prediction.index)} goes through every layer to the answer."),
            table(
                ("layer", "what it is", "output", "values", "weights"),
                rows,
                caption="Prediction for one sample, layer by layer",
                words=range(4),
            ),
            tag("p", f"… and {left:,} more layers.", class_="note") if left > 0 else None,
            tag("p", tag("strong", sentence(text(answer.text, 300)))) if answer else None,
        ]
    )


def _input_row(tensor: TensorFacts) -> list[object]:
    values = _values(tensor.first) if tensor.first else _stats(tensor.stats)
    return [text(tensor.name, 80), "input", shape(tensor), values, NOTHING]


def _layer_row(layer: Layer) -> list[object]:
    output = layer.output
    values = _values(output.first) if output.first else _stats(output.stats)
    return [
        tag("code", text(layer.name, 80) or "(model)"),
        text(layer.kind, 60),
        tag("span", shape(output), class_="keep"),
        tag("span", values, class_="values"),
        figure(layer.parameters) if layer.parameters else NOTHING,
    ]
