"""Questions about several processes: gradients, the meeting, the sampler."""

from __future__ import annotations

import inspect
import warnings

from paceline.data import DistributedSampler
from paceline.learn import scripts
from paceline.learn.lab import Lab, rows_of, stage_of, verdict_of
from paceline.learn.question import YES_NO, Found, ask
from paceline.observe.units import count_text, list_text

FATES = (
    "all of them wait forever",
    "training continues with different models",
    "an error on the last worker alone",
    "an error on every worker",
)


def script_lines() -> list[str]:
    """The prepared script as one would write it, without the notes that it takes."""
    lines = inspect.getsource(scripts.prepared).partition("steps = []\n")[2].splitlines()
    lines = lines[: next(i for i, line in enumerate(lines) if "return" in line)]
    notes = ("steps", "before", "after", "draw_weights")
    return [line[4:] for line in lines if not line.strip().startswith(notes)]


@ask("gradients", "10", "13", kind="number")
def sent_gradients(lab: Lab) -> Found:
    """{model_name} has {parameters} weights. How many gradients does each worker send to the
    others in a step, however many rows it has?"""
    part = stage_of(lab.ddp, "backward").parts[0]
    return Found(
        part.tensors[0].shape[0],
        "One for each weight, and with them a few numbers to check that all agree. Rows and "
        "outputs stay where they are; what is sent depends on the model alone.",
        stage=("ddp", "all-reduce"),
    )


@ask("gradients", "10", kind="choice", choices=YES_NO)
def copies_stay_equal(lab: Lab) -> Found:
    """DistributedDataParallel, after the update: are the weights of all {workers} workers equal to
    the last bit?"""
    check = lab.ddp.check
    return Found(
        bool(check and check.is_equal_on_all),
        "They began equal and added the same change. Nothing else keeps them together.",
        stage=("ddp", "update"),
    )


@ask("gradients", "10", kind="choice", choices=YES_NO)
def same_as_one_process(lab: Lab) -> Found:
    """{workers} workers of DistributedDataParallel share {batch} rows. Is their update the one that
    a single process would make with all of them?"""
    is_same, said = verdict_of(lab.ddp)
    why = "The mean over all rows is the same, whoever computes which part of it. What differs is "
    why += "rounding, because numbers are added in another order."
    return Found(
        is_same,
        why if is_same else "This model does something that depends on how rows are grouped.",
        [said],
    )


@ask("gradients", "6", "multi-gpu", kind="number", unit="lines")
def lines_by_hand(lab: Lab) -> Found:
    """A script meets, wraps, deals, trains and saves. How many of its lines collect gradients from
    other workers, or average them?"""
    lines = script_lines()
    by_hand = [line for line in lines if "all_reduce" in line or ".grad" in line]
    assert len(lab.meeting) == lab.workers  # it has run, on that many workers
    return Found(
        len(by_hand),
        "Both engines combine gradients by themselves, in backward(). A loop says nothing of it.",
        lines,
    )


@ask("gradients", "10", kind="choice", choices=YES_NO, breaks=True)
def equal_without_averaging(lab: Lab) -> Found:
    """Break it: one step inside model.no_sync(), which leaves the average out. Are the copies
    still equal after the update?"""
    said = lab.not_averaged
    return Found(
        not all(said),
        "Each has followed its own rows. From here on they are different models; a comparison of "
        "the copies says so.",
        said[0].splitlines(),
    )


@ask("meeting", "7", "13", kind="numbers")
def processes(lab: Lab) -> Found:
    """{workers} devices. How many processes train under DataParallel, and how many under
    DistributedDataParallel?"""
    replicas, many = lab.count_calls(lab.batch).pids, {each["pid"] for each in lab.meeting}
    return Found(
        [len(replicas), len(many)],
        "DataParallel is one process with a thread for each device. DistributedDataParallel is a "
        "process for each, on one machine or on many.",
        [
            f"process ids of the copies: {list_text(sorted(replicas))}",
            f"process ids of the workers: {list_text(sorted(many))}",
        ],
    )


@ask("meeting", "7", kind="choice", choices=("threads", "processes", "about the same"))
def faster_in_python(lab: Lab) -> Found:
    """A forward pass is plain Python for some milliseconds, and two run at once. What is faster:
    two threads of one process, or two processes?"""
    threads_s, processes_s = lab.python_s
    ratio = threads_s / processes_s
    why = (
        "Threads of one process take turns at running Python; processes do not. This is why one "
        "process per device scales better."
    )
    if ratio < 1.2:
        why += " Here and now others keep the cores busy, so nothing is gained by a second one."
    return Found(
        "processes" if ratio > 1.2 else "about the same",
        why,
        [f"threads {threads_s * 1e3:.0f} ms, processes {processes_s * 1e3:.0f} ms"],
    )


@ask("meeting", "8", kind="numbers")
def ranks(lab: Lab) -> Found:
    """{workers} workers have called init_process_group(). Which rank does each say it has, from
    the first to the last?"""
    told = [each["rank"] for each in lab.meeting]
    sizes = sorted({each["size"] for each in lab.meeting})
    return Found(
        told,
        "Ranks count from 0, and no two are the same. All know the same size, "
        f"{list_text(sizes)}. Rank and size are all that one needs to find one's own part.",
        stage=("ddp", "meet"),
    )


@ask("meeting", "8", kind="number")
def weight_of_the_last(lab: Lab) -> Found:
    """Each worker has drawn weights of its own; the first are {first_weights}, by rank. Then all
    wrap their model in DistributedDataParallel. What is the first weight of the last worker now?"""
    return Found(
        lab.meeting[-1]["after"],
        "Rank 0's weights are sent to all. Otherwise equal changes would be made to different "
        "models.",
        [f"afterwards, by rank: {list_text([format(e['after'], '.4g') for e in lab.meeting])}"],
        stage=("ddp", "place"),
    )


@ask("meeting", "11", kind="order", choices="script_steps")
def script_order(lab: Lab) -> Found:
    """Put the steps of a script for DistributedDataParallel in order."""
    return Found(
        lab.meeting[0]["steps"],
        "Meeting comes first: wrapping, dealing and saving all need to know who takes part.",
        script_lines(),
    )


@ask("meeting", "11", kind="number", unit="files")
def files_written(lab: Lab) -> Found:
    """The {workers} workers run the same script, which saves with `if world.is_main`. How many
    files are there in the end?"""
    files = lab.meeting[0]["files"]
    return Found(
        len(files),
        "Every copy is the same, so one file says it all. Without the condition all workers would "
        "write, perhaps at once to the same file.",
        [f"in the folder: {list_text(files)}"],
    )


@ask("meeting", "13", kind="numbers")
def places_of_gradients(lab: Lab) -> Found:
    """After backward, how many copies of the combined gradients are there: under DataParallel, and
    under DistributedDataParallel?"""
    places = [len(stage_of(lab.dp, "sum").parts), len(stage_of(lab.ddp, "all-reduce").parts)]
    return Found(
        places,
        "DataParallel has them on the main device, and the other devices get the new weights "
        "later. DistributedDataParallel has them in every process, and each updates its own "
        "model.",
        stage=("ddp", "all-reduce"),
    )


@ask("meeting", "13", kind="numbers")
def bytes_through_one_device(lab: Lab) -> Found:
    """How many bytes of outputs are brought to one device in a step: under DataParallel, and under
    DistributedDataParallel?"""
    found = [
        sum(stage.bytes_moved for stage in trace.stages if stage.name == "gather")
        for trace in (lab.dp, lab.ddp)
    ]
    return Found(
        found,
        "Workers compute the loss where the outputs are. There is no main device, so nothing "
        "grows with their number in one place.",
        stage=("dp", "main"),
    )


@ask("meeting", "8", kind="choice", choices=FATES, breaks=True)
def another_model(lab: Lab) -> Found:
    """Break it: the last worker builds a model with one more output. What happens when all wrap
    their models?"""
    raised = [bool(said) for said in lab.other_model]
    fate = FATES[3] if all(raised) else FATES[2] if any(raised) else FATES[1]
    return Found(
        fate,
        "Workers compare their models when they meet. An error that one finds is raised by all, "
        "so that none waits for one that has left.",
        lab.other_model[0].splitlines(),
    )


@ask("sampler", "9", kind="numbers")
def shares(lab: Lab) -> Found:
    """The data have {rows} rows. How many does each of the {workers} workers see in an epoch, if
    none is to be seen twice?"""
    dealt = lab.deal(lab.rows, pad=False)
    return Found(
        [len(rows) for rows in dealt],
        "An epoch is one pass of all workers together, not one of each.",
        stage=("ddp", "sampler"),
    )


@ask("sampler", "9", kind="numbers")
def own_rows(lab: Lab) -> Found:
    """An epoch's order begins {order_text}, and is dealt like cards to {workers} workers. Which are
    the first {own_count} rows of the worker with rank 1?"""
    mine = lab.deal(lab.batch)[1]
    return Found(
        mine[: lab.own_count],
        f"Rank 1 begins with the second row, and takes one in {lab.workers}.",
        [
            f"rank {rank}: {list_text(rows[:3])} ..."
            for rank, rows in enumerate(lab.deal(lab.batch))
        ],
    )


@ask("sampler", "9", kind="number", unit="rows")
def shared_rows(lab: Lab) -> Found:
    """A DistributedSampler deals {rows} rows to {workers} workers. How many rows are seen by more
    than one of them in an epoch?"""
    taken = [row for rows in lab.deal(lab.rows, pad=False) for row in rows]
    return Found(
        len(taken) - len(set(taken)),
        "None: every row has one owner.",
        stage=("ddp", "sampler"),
    )


@ask("sampler", "9", kind="number", unit="rows")
def rows_left_out(lab: Lab) -> Found:
    """And how many of the {rows} rows does none of the {workers} workers see in an epoch?"""
    taken = {row for rows in lab.deal(lab.rows, pad=False) for row in rows}
    return Found(
        lab.rows - len(taken),
        "None either. Together the workers see what one alone would.",
        [f"{count_text(len(taken), 'different row')} of {lab.rows:,} seen"],
    )


@ask("sampler", "9", "1", kind="numbers")
def evaluation_rows(lab: Lab) -> Found:
    """An evaluation on {batch} rows (shuffle=False). How many rows does each of {workers} workers
    get?"""
    dealt = lab.deal(lab.batch, shuffle=False)
    return Found(
        [len(rows) for rows in dealt],
        "Each row once, so that an accuracy counts nobody twice. The first ranks may have one "
        "more.",
        [f"rank {rank}: {list_text(rows)}" for rank, rows in enumerate(dealt) if len(rows) < 20],
    )


@ask("sampler", "9", kind="number", unit="rows")
def repeated_rows(lab: Lab) -> Found:
    """Training on {batch} rows (shuffle=True): each of {workers} workers has to take as many steps
    as the others. How many rows are given out a second time?"""
    taken = [row for rows in lab.deal(lab.batch) for row in rows]
    return Found(
        len(taken) - len(set(taken)),
        "As many as it takes to fill the last round; nothing where the rows divide evenly.",
        [f"{len(taken)} given out, {len(set(taken))} different"],
    )


@ask("sampler", "9", kind="number", unit="rows", breaks=True)
def rows_without_sampler(lab: Lab) -> Found:
    """Break it: no sampler, so each of {workers} workers takes the first {rows_each} rows. How many
    different rows does the step learn from?"""
    stage = stage_of(lab.same_rows, "sampler")
    return Found(
        max(rows_of(stage)),
        "All average the same gradients: several workers do the work of one, and no error says "
        "so. The recorded step does.",
        stage=("same_rows", "sampler"),
    )


@ask("sampler", "9", kind="choice", choices=YES_NO, breaks=True)
def same_order_again(lab: Lab) -> Found:
    """Break it: nobody calls sampler.set_epoch(epoch). Is the order of the second epoch the same as
    that of the first?"""
    sampler = DistributedSampler(range(lab.batch), lab.workers, 0, seed=lab.seed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first, second = list(sampler), list(sampler)
    sampler.set_epoch(1)
    return Found(
        first == second,
        "The order is a function of seed and epoch, so that all workers draw the same one "
        "without communicating. The script has to tell it the epoch.",
        [
            f"first epoch:    {list_text(first[:8])}",
            f"second epoch:   {list_text(second[:8])}",
            f"set_epoch(1):   {list_text(list(sampler)[:8])}",
            *(str(each.message) for each in warned[:1]),
        ],
    )
