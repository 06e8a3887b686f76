"""Questions about what comes of it: batch and learning rate, learning, files, speed."""

from __future__ import annotations

from itertools import pairwise

from paceline.explain.scaling import SpeedUp, speedup
from paceline.explain.scaling.attribution import MEANINGS
from paceline.learn.lab import Lab
from paceline.learn.question import YES_NO, Found, ask
from paceline.observe.phases import Phase
from paceline.observe.units import list_text, percentages, table_lines
from paceline.policy import LearningRate, plan_batch

TRENDS = ("lower", "about the same", "higher")


@ask("batch", "14", kind="number", unit="rows")
def global_batch(lab: Lab) -> Found:
    """One device takes {single_batch} rows at a time. With {many} devices, each with as many: how
    large is the batch in all?"""
    plan = plan_batch(lab.single_batch, lab.many, keep="device")
    return Found(
        plan.global_batch, plan.sentence, [f"{lab.single_batch} x {lab.many} = {plan.global_batch}"]
    )


@ask("batch", "14", kind="number", unit="rows")
def rows_each(lab: Lab) -> Found:
    """The batch grows from {single_batch} rows on one device to as many on each of {many} devices.
    How many rows does each device have in a step?"""
    plan = plan_batch(lab.single_batch, lab.many, keep="device")
    return Found(
        plan.rows_per_worker,
        "As before. What one device holds does not change; there are more of them.",
        [f"rows by worker: {list_text(plan.rows_by_worker)}"],
    )


@ask("batch", "14", kind="number", unit="times")
def learning_rate(lab: Lab) -> Found:
    """{many} devices take {single_batch} rows each: the batch is {many} times as large as on one.
    By how much is the learning rate multiplied, by the usual rule for SGD?"""
    whole = plan_batch(lab.single_batch, lab.many, keep="device").global_batch
    rate = LearningRate(single_batch=lab.single_batch, global_batch=whole, rule="linear")
    root = LearningRate(single_batch=lab.single_batch, global_batch=whole, rule="sqrt")
    return Found(
        rate.scale,
        "There are fewer steps in an epoch, each with a better estimate, so each may go further. "
        "It is a rule of thumb, and a warm-up helps.",
        [rate.sentence, f"Adam: {root.sentence}"],
    )


@ask("batch", "14", kind="numbers")
def kept_batch(lab: Lab) -> Found:
    """The other way: the batch stays at {single_batch} rows in all, as on one device. How many rows
    does each of {many} devices get?"""
    plan = plan_batch(lab.single_batch, lab.many, keep="global")
    return Found(plan.rows_by_worker, plan.sentence, [f"rows in all: {sum(plan.rows_by_worker)}"])


@ask("batch", "14", kind="choice", choices=YES_NO)
def kept_is_the_same(lab: Lab) -> Found:
    """{many} devices share a batch of {single_batch} rows that one device had before, with the same
    learning rate. After an epoch, is the loss the same as on one device?"""
    losses = lab.epoch_losses
    is_same = abs(losses["one"] - losses["kept"]) <= 1e-4 * abs(losses["one"])
    return Found(
        is_same,
        "Every update is the same, so the training is; only the time changes.",
        [f"one device {losses['one']:.6f}, {lab.many} devices {losses['kept']:.6f}"],
    )


@ask("batch", "epochs", kind="number", unit="epochs")
def epochs_that_help(lab: Lab) -> Found:
    """Before training, the loss is {first_loss}. How many of the five epochs that follow lower
    it?"""
    epochs = lab.epochs
    fell = sum(now.loss < before.loss for before, now in pairwise(epochs))
    return Found(
        fell,
        lab.pipeline.training.observation if lab.pipeline.training else "",
        lab.epoch_table,
    )


@ask("batch", "epochs", kind="number", unit="%", tolerance=0.08, needs="first_accuracy")
def final_accuracy(lab: Lab) -> Found:
    """Before training, {first_accuracy} of the rows are predicted right. What share is it in the
    fifth epoch, in percent?"""
    last = lab.epochs[-1]
    return Found(
        round(100 * (last.accuracy or 0.0), 1),
        "Most is learned early; the last few percent take longest.",
        lab.epoch_table,
    )


@ask("batch", "prediction", kind="number")
def device_of_a_prediction(lab: Lab) -> Found:
    """After training, row {predicted_row} of the data is predicted, as row {predicted_in_batch} of
    a batch of {pipeline_batch} on {workers} devices. Which device computes it (0 is the first)?"""
    prediction = lab.pipeline.prediction
    worker = next(stop.worker for stop in lab.prediction_stops if stop.stage == "forward")
    answer = prediction.answer.text if prediction and prediction.answer else ""
    return Found(
        worker,
        "Follow it: its row, the part that has it, its output there, and its place after the "
        "gather.",
        [*lab.prediction_way, f"answer: {answer}"],
    )


@ask("batch", "14", kind="choice", choices=TRENDS, breaks=True)
def loss_of_a_larger_batch(lab: Lab) -> Found:
    """Break it: the batch grows {many} times and the learning rate stays. After one epoch, is the
    loss lower or higher than with {single_batch} rows?"""
    one, grown = lab.epoch_losses["one"], lab.epoch_losses["grown"]
    change = grown / one - 1
    return Found(
        "about the same" if abs(change) < 0.02 else "higher" if change > 0 else "lower",
        "An epoch has fewer steps now, and each goes as far as before. That is what the learning "
        "rate has to make up for.",
        [f"mean loss of the epoch: {one:.4f} with the small batch, {grown:.4f} with the large one"],
    )


@ask("saving", "15", kind="choice", choices="name_choices")
def name_in_the_file(lab: Lab) -> Found:
    """torch's nn.DataParallel wraps a model whose first weight is called {bare_name!r}. Under which
    name does torch.save(wrapped.state_dict()) keep it?"""
    return Found(
        lab.saved.names[0],
        "The wrapper is a module that has yours as its attribute `module`, and names begin "
        "outside.",
        [f"in the file: {list_text(lab.saved.names[:4])}"],
    )


@ask("saving", "15", kind="choice", choices=YES_NO)
def torch_loads_it(lab: Lab) -> Found:
    """A file that was saved with torch's nn.DataParallel around the model: does it load into the
    model without the wrapper, with load_state_dict()?"""
    refusal = lab.saved.refusal
    return Found(
        not refusal,
        f"Of the model's {len(lab.saved.bare)} keys the file has "
        f"{len(set(lab.saved.bare) & set(lab.saved.names))}. All weights are there, under other "
        "names.",
        refusal.splitlines()[:4],
    )


@ask("saving", "15", kind="number")
def loaded_by_ours(lab: Lab) -> Found:
    """paceline.load_weights(model, file) compares names without wrappers' prefixes. How many
    tensors does it load?"""
    saved = lab.saved
    pairs = [f"{old} -> {new}" for old, new in list(saved.renamed.items())[:4]]
    equal = "the same bits" if saved.is_equal else "NOT the same bits"
    return Found(
        len(saved.loaded),
        "All. And what our own wrappers save has no prefix in the first place.",
        [*pairs, f"{equal} as were saved"],
    )


@ask("saving", "15", kind="choice", choices=YES_NO, breaks=True)
def the_other_way(lab: Lab) -> Found:
    """Break it the other way: a file without `module.` is loaded into torch's wrapped model. Does
    that work?"""
    back = lab.saved.back
    return Found(
        not back,
        "The same mismatch, the other way round. A file should hold the model's own names; then "
        "it does not matter who wrapped what.",
        back.splitlines()[:3],
    )


def minutes_compared(lab: Lab) -> SpeedUp:
    one, many = lab.minutes
    return speedup(before=one, after=many, workers=lab.many)


@ask("speedup", "16", kind="number", unit="x")
def ratio(lab: Lab) -> Found:
    """A training takes {one_minutes} minutes on one device and {many_minutes} on {many}. How many
    times as fast is it?"""
    found = minutes_compared(lab)
    return Found(found.ratio, f"{lab.minutes[0]} / {lab.minutes[1]}.", [str(found)])


@ask("speedup", "16", kind="number", unit="%")
def efficiency(lab: Lab) -> Found:
    """A training takes {one_minutes} minutes on one device and {many_minutes} on {many}. What share
    of the ideal, {many} times as fast, is that, in percent?"""
    found = minutes_compared(lab)
    return Found(
        100 * found.efficiency,
        f"The speed-up divided by the number of devices: {found.ratio:.2f} / {lab.many}.",
        [str(found)],
    )


@ask("speedup", "16", kind="number", unit="%")
def lost_share(lab: Lab) -> Found:
    """A training takes {one_minutes} minutes on one device and {many_minutes} on {many}. What share
    of the ideal is lost, in percent?"""
    found = minutes_compared(lab)
    return Found(
        100 * found.lost,
        "It went to communication, to waiting for each other, and to work that is not divided. "
        "The two times alone do not say which; a measurement does.",
        [str(found)],
    )


@ask("speedup", "16", kind="number", unit="x", tolerance=0.15)
def own_speedup(lab: Lab) -> Found:
    """Now measured here, on {cores} cores: a small network on one worker, then on {workers}, with
    the same batch in all. How many times as fast are {workers}?"""
    size = lab.study["sizes"][-1]
    return Found(
        size["speedup"],
        f"Each worker has 1/{lab.workers} of the rows, and the rest of the step stays.",
        lab.study_table,
    )


@ask("speedup", "16", kind="choice", choices="losses")
def largest_loss(lab: Lab) -> Found:
    """A small network is trained on one worker, then on {workers}, on {cores} cores. Where does
    most of the lost time go?"""
    lost = lab.study["sizes"][-1]["lost"]
    shares = percentages(lost)
    worst = max(lost, key=lambda name: lost[name])
    rows = [[f"{share} %", MEANINGS[name]] for name, share in shares.items() if share]
    return Found(
        MEANINGS[worst] if lost[worst] else "nothing was lost",
        "Every phase of a step is timed on every worker, and what is longer than the ideal is "
        "taken apart.",
        table_lines(rows, "><") if rows else [],
    )


@ask("speedup", "16", "13", kind="number", unit="ms", tolerance=0.35, breaks=True)
def wait_for_a_slow_worker(lab: Lab) -> Found:
    """Break it: the last worker takes 20 ms longer in every step. How many milliseconds does each
    of the others wait for it in a step?"""
    profile, said = lab.slow_run
    waits_ms = profile.seconds[Phase.WAIT] * 1e3
    usual_ms = lab.study["sizes"][-1]["seconds"]["waiting"] * 1e3
    return Found(
        waits_ms,
        "All finish a step together, so all are as slow as the slowest. One slow device costs as "
        "much as if all were.",
        [
            f"waiting in a step: {usual_ms:.1f} ms before, {waits_ms:.1f} ms with a slow worker",
            *said,
        ],
    )
