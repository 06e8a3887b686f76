"""Answers about islands: what is averaged when, how the training differs, when they pay."""

from __future__ import annotations

from paceline.islands import forecast_islands
from paceline.show.learn.lab import Lab
from paceline.show.learn.question import Found
from paceline.show.learn.runs import EVERY
from paceline.telemetry import list_text

NETWORKS_PAYING = {
    (True, True): "on both",
    (False, True): "only on the slow one",
    (True, False): "only on the fast one",
    (False, False): "on neither",
}
TWICE = 2.0


def average_of_islands(lab: Lab) -> Found:
    apart = lab.train_apart(EVERY)
    return Found(
        apart.average,
        [f"before the round: {list_text([format(each, '.6g') for each in apart.locals])}"],
    )


def rounds_of_a_training(lab: Lab) -> Found:
    rounds = lab.train_apart(EVERY).rounds
    return Found(len(rounds), [f"after the steps {list_text(rounds)}"])


def a_round_in_every_step(lab: Lab) -> Found:
    distance, change = lab.compare_with_one(every=1)
    return Found(
        distance < 1e-4 * change, [f"{distance:.2g} apart; change of weights: {change:.3g}"]
    )


def rare_rounds(lab: Lab) -> Found:
    distance, change = lab.compare_with_one(EVERY)
    return Found(
        distance < 1e-4 * change, [f"{distance:.2g} apart; change of weights: {change:.3g}"]
    )


def times_fewer_bytes(lab: Lab) -> Found:
    found = forecast_islands(step_s=0.15, parameters=34e6, bytes_per_s=2.5e6)
    return Found(
        round(found.step_bytes * found.options.every / found.round_bytes),
        [
            f"in every step {found.step_bytes / 1e6:.0f} MB, "
            f"or {found.round_bytes / 1e6:.0f} MB every {found.options.every} steps"
        ],
    )


def where_islands_pay(lab: Lab) -> Found:
    fast, slow = (
        forecast_islands(step_s=0.15, parameters=34e6, bytes_per_s=bits / 8)
        for bits in (100e9, 20e6)
    )
    return Found(
        NETWORKS_PAYING[fast.gain >= TWICE, slow.gain >= TWICE],
        [fast.sentence, slow.sentence],
    )
