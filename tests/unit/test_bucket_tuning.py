"""The search for a bucket capacity: what is tried, for how long, and what is chosen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.gradients.tuning import (
    CPU_CANDIDATES_BYTES,
    SCORED_STEPS,
    WARM_UP_STEPS,
    BucketTuner,
    choose,
    report,
)

SECONDS = st.floats(1e-6, 10)


def test_every_candidate_is_tried_for_a_known_number_of_steps() -> None:
    tuner = BucketTuner([[1], [2], [3]])
    tried = []
    for step in range(3 * (WARM_UP_STEPS + SCORED_STEPS)):
        tried.append(tuner.trial)
        if tuner.note(float(step)):
            tuner.next_candidate()
    assert tuner.trial == 3
    assert [tried.count(trial) for trial in range(3)] == [WARM_UP_STEPS + SCORED_STEPS] * 3
    assert tried == sorted(tried)


def test_steps_of_the_warm_up_and_one_hiccup_do_not_count() -> None:
    tuner = BucketTuner([[1]])
    for seconds in [9.0] * WARM_UP_STEPS + [1.0] * (SCORED_STEPS - 1) + [50.0]:
        tuner.note(seconds)
    assert tuner.scores() == [1.0]


@given(st.lists(st.lists(SECONDS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_choice_is_never_slower_than_the_default_and_the_same_in_any_order_of_ranks(
    scores: list[list[float]],
) -> None:
    chosen = choose(scores)
    slowest = [max(each) for each in zip(*scores, strict=True)]
    assert slowest[chosen] <= slowest[0]
    assert choose(scores[::-1]) == chosen


def test_the_default_stays_unless_another_is_clearly_faster_on_the_slowest_rank() -> None:
    assert choose([[1.0, 0.9, 1.2]]) == 0
    assert choose([[1.0, 0.7, 1.2]]) == 1
    assert choose([[1.0, 0.7, 1.2], [1.0, 2.0, 0.1]]) == 0
    assert choose([[1.0, 0.7, 0.8], [1.0, 2.0, 0.1]]) == 2


def test_the_report_names_what_was_tried_and_chosen() -> None:
    text = report(CPU_CANDIDATES_BYTES, [0.002, 0.001, 0.003], chosen=1)
    assert text.startswith("buckets of 1 MiB")
    assert "4 MiB 2.00 ms, 1 MiB 1.00 ms, 16 MiB 3.00 ms" in text
