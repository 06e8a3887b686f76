"""Answers about both engines: split, replicas, gradients, process group, sampler."""

from __future__ import annotations

import difflib
import inspect
import warnings
from importlib import import_module

from paceline.data import DistributedSampler
from paceline.dp import DataParallel
from paceline.launcher import count_cores
from paceline.show.learn import scripts
from paceline.show.learn.lab import FATES, GROUPED, PLACES, Lab, rows_of, stage_of, verdict_of
from paceline.show.learn.question import Found
from paceline.show.learn.runs import NAP_S
from paceline.show.trace.drawing import numbers_of
from paceline.telemetry import count_text, list_text


def rows_by_worker(lab: Lab) -> Found:
    rows = rows_of(stage_of(lab.ddp, "batch"))
    return Found(
        rows, why=f"Rows are dealt one by one, so shares differ by at most one: {list_text(rows)}."
    )


def rows_by_device(lab: Lab) -> Found:
    rows = rows_of(stage_of(lab.dp, "split"))
    uneven = (
        f"It cuts where torch.chunk does: as many rows as {lab.batch} / {lab.workers} rounded up, "
        "and the last part has what is left. Dealing one by one would be more even."
    )
    return Found(rows, why=uneven if len(set(rows)) > 1 else "")


def batch_shape(lab: Lab) -> Found:
    return Found(stage_of(lab.pipeline, "batch").parts[0].tensors[0].shape)


def first_part_shape(lab: Lab) -> Found:
    return Found(stage_of(lab.pipeline, "split").parts[0].tensors[0].shape)


def home_of_data_parallel(lab: Lab) -> Found:
    homes = [place for place in PLACES if hasattr(import_module(place), "DataParallel")]
    return Found(
        homes[0],
        [f"{homes[0]}.DataParallel: found", f"paceline.DataParallel: {DataParallel.__module__}"],
    )


def changed_lines(lab: Lab) -> Found:
    before, after = map(inspect.getsource, (scripts.plain_loop, scripts.parallel_loop))
    changed = [
        line
        for line in difflib.ndiff(before.splitlines()[2:], after.splitlines()[2:])
        if line.startswith("+ ")
    ]
    scripts.plain_loop(lab.make_task(), lab.devices)
    scripts.parallel_loop(lab.make_task(), lab.devices)
    return Found(len(changed), changed)


def devices_with_rows(lab: Lab) -> Found:
    counting = lab.count_calls(lab.few_rows)
    return Found(
        len(counting.rows), [f"rows by device: {list_text(sorted(counting.rows, reverse=True))}"]
    )


def uneven_is_exact(lab: Lab) -> Found:
    is_same, said = verdict_of(lab.uneven)
    return Found(
        is_same,
        [f"rows by device: {list_text(rows_of(stage_of(lab.uneven, 'split')))}", said],
        why="" if is_same else GROUPED,
    )


def copies(lab: Lab) -> Found:
    return Found(len(stage_of(lab.dp, "forward").parts))


def bytes_by_device(lab: Lab) -> Found:
    parts = stage_of(lab.dp, "copy").parts
    return Found(parts[-1].tensors[0].bytes)


def at_the_same_time(lab: Lab) -> Found:
    all_s = lab.nap_s
    alone, in_turns = lab.nap_choices
    is_parallel = all_s < NAP_S * (lab.workers + 1) / 2
    return Found(
        alone if is_parallel else in_turns,
        [f"measured: {all_s * 1e3:.0f} ms for {lab.workers} devices"],
        is_sure=is_parallel,
    )


def output_shape(lab: Lab) -> Found:
    return Found(stage_of(lab.dp, "gather").parts[0].tensors[0].shape)


def output_device(lab: Lab) -> Found:
    part = stage_of(lab.dp, "gather").parts[0]
    return Found(part.device)


def row_after_gather(lab: Lab) -> Found:
    stop = lab.sample_at("gather")
    values = ", ".join(f"{value:.3g}" for value in stop.values or [])
    return Found(stop.row, [f"its outputs: {values}"])


def gathered_bytes(lab: Lab) -> Found:
    return Found(stage_of(lab.dp, "gather").bytes_moved)


def copies_are_kept(lab: Lab) -> Found:
    first, second, _ = lab.calls
    return Found(
        sorted(first) == sorted(second),
        [f"objects in the first call: {len(set(first))}; in both calls: {len({*first, *second})}"],
    )


def rows_elsewhere(lab: Lab) -> Found:
    return Found("an error" if lab.displaced else "torch moves the rows", [lab.displaced])


def past_the_wrapper(lab: Lab) -> Found:
    return Found(
        len(lab.calls[2]),
        [f"model(x): {len(lab.calls[0])} copies; model.module(x): {len(lab.calls[2])}"],
    )


def summed_gradient(lab: Lab) -> Found:
    return Found(numbers_of(lab.dp, "summed gradient")[0])


def averaged_gradient(lab: Lab) -> Found:
    return Found(numbers_of(lab.ddp, "averaged gradient")[0])


def script_lines() -> list[str]:
    """The prepared script as a user would write it, without the lines that record its steps."""
    lines = inspect.getsource(scripts.prepared).partition("steps = []\n")[2].splitlines()
    lines = lines[: next(i for i, line in enumerate(lines) if "return" in line)]
    notes = ("steps", "before", "after", "draw_weights")
    return [line[4:] for line in lines if not line.strip().startswith(notes)]


def sent_gradients(lab: Lab) -> Found:
    part = stage_of(lab.ddp, "backward").parts[0]
    return Found(part.tensors[0].shape[0])


def copies_stay_equal(lab: Lab) -> Found:
    check = lab.ddp.check
    return Found(bool(check and check.is_equal_on_all))


def same_as_one_process(lab: Lab) -> Found:
    is_same, said = verdict_of(lab.ddp)
    return Found(is_same, [said], why="" if is_same else GROUPED)


def lines_by_hand(lab: Lab) -> Found:
    lines = script_lines()
    by_hand = [line for line in lines if "all_reduce" in line or ".grad" in line]
    assert len(lab.meeting) == lab.workers  # it has run, on that many workers
    return Found(len(by_hand), lines)


def equal_without_averaging(lab: Lab) -> Found:
    said = lab.not_averaged
    return Found(not all(said), said[0].splitlines())


def processes(lab: Lab) -> Found:
    replicas, many = lab.count_calls(lab.batch).pids, {each["pid"] for each in lab.meeting}
    return Found(
        [len(replicas), len(many)],
        [
            f"process ids of the copies: {list_text(sorted(replicas))}",
            f"process ids of the workers: {list_text(sorted(many))}",
        ],
    )


def faster_in_python(lab: Lab) -> Found:
    threads_s, processes_s = lab.python_s
    ratio = threads_s / processes_s
    return Found(
        "processes" if ratio > 1.2 else "about the same",
        [f"threads {threads_s * 1e3:.0f} ms, processes {processes_s * 1e3:.0f} ms"],
        why=""
        if ratio > 1.2
        else "The cores are busy with other work, so a second one does not help.",
        is_sure=ratio > 1.5 or count_cores() == 1,
    )


def ranks(lab: Lab) -> Found:
    return Found([each["rank"] for each in lab.meeting])


def weight_of_the_last(lab: Lab) -> Found:
    return Found(
        lab.meeting[-1]["after"],
        [f"afterwards, by rank: {list_text([format(e['after'], '.4g') for e in lab.meeting])}"],
    )


def script_order(lab: Lab) -> Found:
    return Found(lab.meeting[0]["steps"], script_lines())


def files_written(lab: Lab) -> Found:
    files = lab.meeting[0]["files"]
    return Found(len(files), [f"in the folder: {list_text(files)}"])


def places_of_gradients(lab: Lab) -> Found:
    return Found([len(stage_of(lab.dp, "sum").parts), len(stage_of(lab.ddp, "all-reduce").parts)])


def bytes_through_one_device(lab: Lab) -> Found:
    found = [
        sum(stage.bytes_moved for stage in trace.stages if stage.name == "gather")
        for trace in (lab.dp, lab.ddp)
    ]
    return Found(found)


def another_model(lab: Lab) -> Found:
    raised = [bool(said) for said in lab.other_model]
    fate = FATES[3] if all(raised) else FATES[2] if any(raised) else FATES[1]
    return Found(fate, lab.other_model[0].splitlines())


def shares(lab: Lab) -> Found:
    dealt = lab.deal(lab.rows, pad=False)
    return Found([len(rows) for rows in dealt])


def own_rows(lab: Lab) -> Found:
    mine = lab.deal(lab.batch)[1]
    return Found(
        mine[: lab.own_count],
        [
            f"rank {rank}: {list_text(rows[:3])} ..."
            for rank, rows in enumerate(lab.deal(lab.batch))
        ],
    )


def shared_rows(lab: Lab) -> Found:
    taken = [row for rows in lab.deal(lab.rows, pad=False) for row in rows]
    return Found(len(taken) - len(set(taken)))


def rows_left_out(lab: Lab) -> Found:
    taken = {row for rows in lab.deal(lab.rows, pad=False) for row in rows}
    return Found(
        lab.rows - len(taken), [f"{count_text(len(taken), 'different row')} of {lab.rows:,} seen"]
    )


def evaluation_rows(lab: Lab) -> Found:
    dealt = lab.deal(lab.batch, shuffle=False)
    return Found(
        [len(rows) for rows in dealt],
        [f"rank {rank}: {list_text(rows)}" for rank, rows in enumerate(dealt) if len(rows) < 20],
    )


def repeated_rows(lab: Lab) -> Found:
    taken = [row for rows in lab.deal(lab.batch) for row in rows]
    return Found(
        len(taken) - len(set(taken)), [f"{len(taken)} given out, {len(set(taken))} different"]
    )


def rows_without_sampler(lab: Lab) -> Found:
    stage = stage_of(lab.same_rows, "sampler")
    return Found(max(rows_of(stage)))


def same_order_again(lab: Lab) -> Found:
    sampler = DistributedSampler(range(lab.batch), lab.workers, 0, seed=lab.seed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first, second = list(sampler), list(sampler)
    sampler.set_epoch(1)
    return Found(
        first == second,
        [
            f"first epoch:    {list_text(first[:8])}",
            f"second epoch:   {list_text(second[:8])}",
            f"set_epoch(1):   {list_text(list(sampler)[:8])}",
            *(str(each.message) for each in warned[:1]),
        ],
    )
