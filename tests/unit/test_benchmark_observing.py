"""The arithmetic of the benchmark of observing: small differences among large ones are found."""

from __future__ import annotations

import random

from benchmarks.observing import costs, median_and_error


def test_a_small_cost_is_found_among_steps_that_vary_far_more() -> None:
    chance = random.Random(0)
    weather = [chance.gauss(40_000_000, 4_000_000) for _ in range(2000)]

    def kind(extra_ns: int) -> list[tuple[int, int]]:
        noisy = [round(each + chance.gauss(0, 300_000)) + extra_ns for each in weather]
        return [(ns, ns) for ns in noisy]

    found = costs(
        {"nobody": kind(0), "still nobody": kind(0), "blame": kind(0), "timeline": kind(40_000)}
    )
    assert abs(found["still nobody"].cpu_us) < 3 * found["still nobody"].cpu_error_us
    assert found["timeline"].cpu_us > 3 * found["timeline"].cpu_error_us
    assert abs(found["timeline"].cpu_us - 40) < 4 * found["timeline"].cpu_error_us
    assert found["timeline"].cpu_error_us < 15


def test_one_wild_step_changes_neither_the_median_nor_its_error() -> None:
    calm = [float(each % 7) for each in range(99)]
    assert median_and_error([*calm, 1e9])[0] < 7
    assert median_and_error([*calm, 1e9])[1] < 1
