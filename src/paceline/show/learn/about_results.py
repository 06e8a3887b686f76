"""Answers about batch size and learning rate, epochs, saved files, and speed."""

from __future__ import annotations

from itertools import pairwise

from paceline.policy import LearningRate, plan_batch
from paceline.show.learn.lab import Lab
from paceline.show.learn.question import Found
from paceline.show.scaling import SpeedUp, speedup
from paceline.show.scaling.attribution import MEANINGS
from paceline.telemetry import Phase, list_text, percentages, table_lines


def global_batch(lab: Lab) -> Found:
    plan = plan_batch(lab.single_batch, lab.many, keep="device")
    return Found(
        plan.global_batch,
        [f"{lab.single_batch} x {lab.many} = {plan.global_batch}"],
        why=plan.sentence,
    )


def rows_each(lab: Lab) -> Found:
    plan = plan_batch(lab.single_batch, lab.many, keep="device")
    return Found(plan.rows_per_worker, [f"rows by worker: {list_text(plan.rows_by_worker)}"])


def learning_rate(lab: Lab) -> Found:
    whole = plan_batch(lab.single_batch, lab.many, keep="device").global_batch
    rate = LearningRate(single_batch=lab.single_batch, global_batch=whole, rule="linear")
    root = LearningRate(single_batch=lab.single_batch, global_batch=whole, rule="sqrt")
    return Found(rate.scale, [rate.sentence, f"Adam: {root.sentence}"])


def kept_batch(lab: Lab) -> Found:
    plan = plan_batch(lab.single_batch, lab.many, keep="global")
    return Found(
        plan.rows_by_worker, [f"rows in all: {sum(plan.rows_by_worker)}"], why=plan.sentence
    )


def kept_is_the_same(lab: Lab) -> Found:
    losses = lab.epoch_losses
    is_same = abs(losses["one"] - losses["kept"]) <= 1e-4 * abs(losses["one"])
    return Found(
        is_same, [f"one device {losses['one']:.6f}, {lab.many} devices {losses['kept']:.6f}"]
    )


def effective_batch(lab: Lab) -> Found:
    losses, updates = lab.epoch_losses, lab.updates
    is_same = abs(losses["one"] - losses["grown"]) <= 1e-4 * abs(losses["one"])
    return Found(
        is_same,
        [
            f"one device:  {updates[0]} updates in an epoch, mean loss {losses['one']:.4f}",
            f"{lab.many} devices:   {updates[1]} updates in an epoch, mean loss "
            f"{losses['grown']:.4f}",
        ],
    )


def epochs_that_help(lab: Lab) -> Found:
    epochs = lab.training.epochs
    fell = sum(now.loss < before.loss for before, now in pairwise(epochs))
    return Found(fell, lab.epoch_table, why=lab.training.observation)


def final_accuracy(lab: Lab) -> Found:
    last = lab.training.epochs[-1]
    return Found(round(100 * (last.accuracy or 0.0), 1), lab.epoch_table)


def device_of_a_prediction(lab: Lab) -> Found:
    worker = next(stop.worker for stop in lab.prediction.stops if stop.stage == "forward")
    answer = lab.prediction.answer.text if lab.prediction.answer else ""
    return Found(worker, [*lab.prediction_way, f"answer: {answer}"])


def loss_of_a_larger_batch(lab: Lab) -> Found:
    one, grown = lab.epoch_losses["one"], lab.epoch_losses["grown"]
    change = grown / one - 1
    return Found(
        "about the same" if abs(change) < 0.02 else "higher" if change > 0 else "lower",
        [f"mean loss of the epoch: {one:.4f} with the small batch, {grown:.4f} with the large one"],
    )


def name_in_the_file(lab: Lab) -> Found:
    return Found(lab.saved.names[0], [f"in the file: {list_text(lab.saved.names[:4])}"])


def torch_loads_it(lab: Lab) -> Found:
    saved = lab.saved
    refusal = lab.saved.refusal
    return Found(
        not refusal,
        refusal.splitlines()[:4],
        why=f"Of the model's {len(saved.bare)} keys the file has "
        f"{len(set(saved.bare) & set(saved.names))}. All weights are there, under other names.",
    )


def loaded_by_ours(lab: Lab) -> Found:
    saved = lab.saved
    pairs = [f"{old} -> {new}" for old, new in list(saved.renamed.items())[:4]]
    equal = "the same bits" if saved.is_equal else "NOT the same bits"
    return Found(len(saved.loaded), [*pairs, f"{equal} as were saved"])


def the_other_way(lab: Lab) -> Found:
    back = lab.saved.back
    return Found(not back, back.splitlines()[:3])


def minutes_compared(lab: Lab) -> SpeedUp:
    one, many = lab.minutes
    return speedup(before=one, after=many, workers=lab.many)


def ratio(lab: Lab) -> Found:
    found = minutes_compared(lab)
    return Found(found.ratio, [str(found)])


def efficiency(lab: Lab) -> Found:
    found = minutes_compared(lab)
    return Found(
        100 * found.efficiency,
        [str(found)],
        why=f"The speed-up divided by the number of devices: {found.ratio:.2f} / {lab.many}.",
    )


def lost_share(lab: Lab) -> Found:
    found = minutes_compared(lab)
    return Found(100 * found.lost, [str(found)])


def own_speedup(lab: Lab) -> Found:
    size = lab.study["sizes"][-1]
    return Found(size["speedup"], lab.study_table, is_sure=lab.is_quiet)


def largest_loss(lab: Lab) -> Found:
    lost = lab.study["sizes"][-1]["lost"]
    shares = percentages(lost)
    worst = max(lost, key=lambda name: lost[name])
    rows = [[f"{share} %", MEANINGS[name]] for name, share in shares.items() if share]
    return Found(
        MEANINGS[worst] if lost[worst] else "nothing was lost",
        table_lines(rows, "><") if rows else [],
        is_sure=lab.is_quiet and sorted(shares.values())[-1] - sorted(shares.values())[-2] >= 10,
    )


def wait_for_a_slow_worker(lab: Lab) -> Found:
    profile, said = lab.slow_run
    waits_ms = profile.seconds[Phase.WAIT] * 1e3
    usual_ms = lab.study["sizes"][-1]["seconds"]["waiting"] * 1e3
    return Found(
        waits_ms,
        [
            f"waiting in a step: {usual_ms:.1f} ms before, {waits_ms:.1f} ms with a slow worker",
            *said,
        ],
        is_sure=lab.is_quiet and usual_ms < 5,
    )
