"""Questions about one process with several devices: the split, the copies, the main device."""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module

from paceline.dp import DataParallel
from paceline.learn import scripts
from paceline.learn.lab import Lab, numbers_of, rows_of, stage_of, verdict_of
from paceline.learn.question import YES_NO, Found, ask
from paceline.learn.runs import NAP_S
from paceline.observe.units import list_text

PLACES = ("torch.distributed", "torch.utils.data", "torch.nn", "torch.optim")


@ask("split", "1", kind="numbers")
def rows_by_worker(lab: Lab) -> Found:
    """{batch} rows are shared among {workers} workers, each a process of its own. How many rows
    does each get, from rank 0 up?"""
    rows = rows_of(stage_of(lab.ddp, "batch"))
    return Found(
        rows,
        f"Rows are dealt one by one, so shares differ by at most one: {list_text(rows)}.",
        stage=("ddp", "batch"),
    )


@ask("split", "1", kind="numbers")
def rows_by_device(lab: Lab) -> Found:
    """DataParallel cuts the same {batch} rows for {workers} devices in one process. How many rows
    does each device get?"""
    rows = rows_of(stage_of(lab.dp, "split"))
    why = "Equal parts: each device has as much to do as the others."
    if len(set(rows)) > 1:
        why = (
            f"It cuts where torch.chunk does: as many rows as {lab.batch} / {lab.workers} rounded "
            "up, and the last part has what is left. Dealing one by one would be more even."
        )
    return Found(rows, why, stage=("dp", "split"))


@ask("split", "pipeline", kind="shape")
def batch_shape(lab: Lab) -> Found:
    """The dataset has the shape {dataset_shape}, and a step takes {pipeline_batch} rows of it.
    What is the shape of the batch?"""
    shape = stage_of(lab.pipeline, "batch").parts[0].tensors[0].shape
    return Found(
        shape,
        "The first dimension counts rows; all others stay as they are.",
        stage=("pipeline", "batch"),
    )


@ask("split", "1", "pipeline", kind="shape")
def first_part_shape(lab: Lab) -> Found:
    """{pipeline_batch} rows of a dataset of shape {dataset_shape} are split over {workers} devices.
    What is the shape of the first device's part?"""
    shape = stage_of(lab.pipeline, "split").parts[0].tensors[0].shape
    return Found(
        shape,
        "Rows are split, features are not: every device sees whole rows.",
        stage=("pipeline", "split"),
    )


@ask("split", "5", kind="choice", choices=PLACES)
def home_of_data_parallel(lab: Lab) -> Found:
    """From which module does torch's own DataParallel come?"""
    homes = [place for place in PLACES if hasattr(import_module(place), "DataParallel")]
    return Found(
        homes[0],
        "It wraps a module and is one itself. Ours is paceline.DataParallel, with the same "
        "arguments. It needs no launcher and no second process.",
        [f"{homes[0]}.DataParallel: found", f"paceline.DataParallel: {DataParallel.__module__}"],
    )


@ask("split", "5", kind="number", unit="lines")
def changed_lines(lab: Lab) -> Found:
    """A training loop runs on one device. How many lines have to change, or to be added, for
    DataParallel?"""
    before, after = map(inspect.getsource, (scripts.plain_loop, scripts.parallel_loop))
    changed = [
        line
        for line in difflib.ndiff(before.splitlines()[2:], after.splitlines()[2:])
        if line.startswith("+ ")
    ]
    scripts.plain_loop(lab.make_task(), lab.devices)
    scripts.parallel_loop(lab.make_task(), lab.devices)
    return Found(
        len(changed),
        "Wrapping the model is all. The loop, the loss and the optimizer stay as they are; both "
        "loops have just been run.",
        changed,
    )


@ask("split", "1", kind="number", unit="devices", breaks=True)
def devices_with_rows(lab: Lab) -> Found:
    """Break it: the last batch has only {few_rows_text}. How many of the {workers} devices have
    something to do?"""
    counting = lab.count_calls(lab.few_rows)
    return Found(
        len(counting.rows),
        "A row cannot be split, so a device without rows is left out. That is not an error: the "
        "outputs are complete.",
        [f"rows by device: {list_text(sorted(counting.rows, reverse=True))}"],
    )


@ask("split", "1", "6", kind="choice", choices=YES_NO, breaks=True)
def uneven_is_exact(lab: Lab) -> Found:
    """Break it: {batch} rows on {other_workers} devices. Is the step still the one that a single
    process would take on the whole batch?"""
    is_same, said = verdict_of(lab.uneven)
    why = (
        "Outputs are joined before the loss, which is one mean over all rows, so the sizes of the "
    )
    why += "parts do not matter."
    return Found(
        is_same,
        why if is_same else "This model does something that depends on how rows are grouped.",
        [f"rows by device: {list_text(rows_of(stage_of(lab.uneven, 'split')))}", said],
        stage=("uneven", "split"),
    )


@ask("replicas", "2", kind="number", unit="copies")
def copies(lab: Lab) -> Found:
    """How many copies of {model_name} compute on {workers} devices?"""
    return Found(
        len(stage_of(lab.dp, "forward").parts),
        "One for each device that has rows: the same architecture, the same weights.",
        stage=("dp", "copy"),
    )


@ask("replicas", "2", "multi-gpu", kind="number", unit="bytes")
def bytes_by_device(lab: Lab) -> Found:
    """The weights are {model_bytes} bytes. How many bytes of weights does each of the {workers}
    devices need?"""
    parts = stage_of(lab.dp, "copy").parts
    return Found(
        parts[-1].tensors[0].bytes,
        "All of them, on every device. More devices train faster; they do not need less memory "
        "each.",
        stage=("dp", "copy"),
    )


@ask("replicas", "3", "multi-gpu", kind="choice", choices="nap_choices")
def at_the_same_time(lab: Lab) -> Found:
    """A forward pass that only waits takes 50 ms on one device. How long does it take on {workers}
    devices at once, a part of the batch on each?"""
    all_s = lab.nap_s
    alone, in_turns = lab.nap_choices
    is_parallel = all_s < NAP_S * (lab.workers + 1) / 2
    return Found(
        alone if is_parallel else in_turns,
        "All copies run at the same time, each on its own part. That is why one uses several "
        "devices: to save time.",
        [f"measured: {all_s * 1e3:.0f} ms for {lab.workers} devices"],
    )


@ask("replicas", "4", "12", kind="shape")
def output_shape(lab: Lab) -> Found:
    """A batch of shape {input_shape} goes through {model_name} on {workers} devices. What is the
    shape of what comes back?"""
    shape = stage_of(lab.dp, "gather").parts[0].tensors[0].shape
    return Found(
        shape,
        "As if there were one device: the parts' outputs are joined, all rows, in order.",
        stage=("dp", "gather"),
    )


@ask("replicas", "4", kind="choice", choices="devices")
def output_device(lab: Lab) -> Found:
    """DataParallel runs on {devices}. Which device holds the joined outputs?"""
    part = stage_of(lab.dp, "gather").parts[0]
    return Found(
        part.device,
        "The first in the list, called the main device. The loss is computed there too.",
        stage=("dp", "gather"),
    )


@ask("replicas", "4", "prediction", kind="number")
def row_after_gather(lab: Lab) -> Found:
    """Row {sample_row} of the batch is computed on {sample_device}, as row {sample_own_row} there.
    Which row of the joined outputs belongs to it?"""
    stop = lab.sample_at("gather")
    values = ", ".join(f"{value:.3g}" for value in stop.values or [])
    return Found(
        stop.row,
        "Parts are joined in the order in which they were cut, so every row is back in its place.",
        [f"its outputs: {values}"],
        stage=("dp", "gather"),
    )


@ask("replicas", "6", "13", kind="number", unit="bytes")
def gathered_bytes(lab: Lab) -> Found:
    """The outputs are {output_text}. How many bytes of outputs are brought together on the main
    device in one forward pass?"""
    return Found(
        stage_of(lab.dp, "gather").bytes_moved,
        "Every output of every device, in every step; then the gradients. The others only see "
        "their own part. So the main device is the bottleneck, and its memory fills first.",
        stage=("dp", "main"),
    )


@ask("replicas", "2", kind="choice", choices=YES_NO)
def copies_are_kept(lab: Lab) -> Found:
    """A model in DataParallel is called twice, without an update in between. Are the copies of the
    second call the same objects as those of the first?"""
    first, second, _ = lab.calls
    return Found(
        sorted(first) == sorted(second),
        "torch's class makes new copies in every forward pass. Ours are kept, and take over the "
        "weights that have changed since.",
        [f"objects in the first call: {len(set(first))}; in both calls: {len({*first, *second})}"],
    )


@ask(
    "replicas",
    "5",
    "multi-gpu",
    kind="choice",
    choices=("torch moves the rows", "an error"),
    breaks=True,
)
def rows_elsewhere(lab: Lab) -> Found:
    """Break it: the weights are on one device and the rows on another, and nobody called .to().
    What happens in the forward pass?"""
    return Found(
        "an error" if lab.displaced else "torch moves the rows",
        "Model and rows have to be brought to the device first: model.to(device), x.to(device). "
        "DataParallel then sends parts of the rows to the other devices by itself.",
        [lab.displaced],
    )


@ask("replicas", "3", kind="number", unit="copies", breaks=True)
def past_the_wrapper(lab: Lab) -> Found:
    """Break it: a script calls model.module(x) in place of model(x). How many copies compute?"""
    return Found(
        len(lab.calls[2]),
        "The module inside knows nothing of the devices: it computes the whole batch alone, and "
        "no error says so. Call the wrapper.",
        [f"model(x): {len(lab.calls[0])} copies; model.module(x): {len(lab.calls[2])}"],
    )


@ask("gradients", "6", kind="number")
def summed_gradient(lab: Lab) -> Found:
    """DataParallel: the copies contribute the gradients {contributions} to the weight
    {weight_name}. What does its .grad hold after backward()?"""
    return Found(
        numbers_of(lab.dp, "summed gradient")[0],
        "Their sum. The loss is a mean over the whole batch, so each copy's part is already "
        "divided by all rows.",
        stage=("dp", "sum"),
    )


@ask("gradients", "10", kind="number")
def averaged_gradient(lab: Lab) -> Found:
    """DistributedDataParallel: the workers' own gradients of {weight_name} are {own_gradients}.
    What does every worker have after backward()?"""
    return Found(
        numbers_of(lab.ddp, "averaged gradient")[0],
        "Their average. Where workers have more or fewer rows than others, their gradients are "
        "already weighted by them, so it is the mean over all rows.",
        stage=("ddp", "all-reduce"),
    )
