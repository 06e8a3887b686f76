"""Predictions: exact for jobs made by the model's own rules, and checked against the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.explain.scaling.attribution import Machine, Mode, stretch_of
from paceline.explain.scaling.prediction import (
    HAND_OVER_S,
    Cost,
    check,
    fit,
    fit_cost,
    fit_network,
)
from paceline.explain.scaling.profile import Profile
from paceline.explain.scaling.simulation import NETWORKS, Bucket, Network, exposed_s

MACHINE = Machine(cores=64)
COSTS = {
    "data": Cost(0.001, 0.002),
    "forward": Cost(0.002, 0.02),
    "backward": Cost(0.004, 0.04),
    "optimizer": Cost(0.005, 0.0),
    "other": Cost(0.001, 0.0),
}
NETWORK = Network("made up", 60e-6, 1.5e9)


def made_up(workers: int, mode: Mode, stretch: float = 1.0) -> Profile:
    """What a job of these costs would show on `workers` workers."""
    share = 1 / workers if mode == "strong" else 1.0
    seconds = {phase: stretch * cost.at(share) for phase, cost in COSTS.items()}
    backward = seconds["backward"]
    buckets = tuple(Bucket(backward * part, 4_000_000) for part in (0.4, 0.8, 1.0))
    seconds["waiting"] = 0.0
    seconds["communication"] = exposed_s(buckets, backward, workers, NETWORK)
    return Profile(
        workers=workers,
        step_s=sum(seconds.values()),
        seconds=seconds,
        buckets=buckets,
        samples=96 if mode == "strong" else 96 * workers,
    )


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize("fitted", [2, 3])
def test_sizes_that_were_not_seen_are_predicted_from_two_that_were(mode: Mode, fitted: int) -> None:
    job = fit(made_up(1, mode), made_up(fitted, mode), mode, MACHINE)
    for found in check(job, made_up(1, mode), [made_up(n, mode) for n in (4, 8, 32)], MACHINE):
        assert abs(found.error) < 0.02


def test_shared_cores_make_every_worker_slower() -> None:
    machine = Machine(cores=2)
    job = fit(made_up(1, "strong"), made_up(2, "strong"), "strong", machine)
    crowded = made_up(4, "strong", stretch=2.0)

    (found,) = check(job, made_up(1, "strong"), [crowded], machine)

    assert found.crowding == 2
    assert found.predicted_s == pytest.approx(crowded.step_s + HAND_OVER_S, rel=0.02)


def test_in_a_short_step_three_workers_on_two_cores_are_as_slow_as_four() -> None:
    assert stretch_of(1.5, own_s=0.01) == 2.0
    assert stretch_of(1.5, own_s=1.0) == 1.5
    assert stretch_of(1.0, own_s=0.01) == 1.0


@given(
    st.floats(1e-6, 10),
    st.floats(1e-6, 10),
    st.one_of(st.floats(0.01, 0.9), st.just(1.0)),
)
def test_a_cost_fits_what_several_workers_took_and_is_never_negative(
    alone_s: float, together_s: float, share: float
) -> None:
    cost = fit_cost(alone_s, together_s, share)
    assert cost.at(share) == pytest.approx(together_s)
    assert cost.fixed_s >= -1e-12
    assert cost.per_share_s >= 0


@given(st.floats(1e-5, 1.0), st.integers(2, 16))
def test_the_fitted_network_gives_the_exposure_that_was_measured(
    measured_s: float, size: int
) -> None:
    buckets = [Bucket(0.05, 10**6), Bucket(0.1, 10**6)]
    network = fit_network(buckets, 0.1, size, measured_s)
    assert exposed_s(buckets, 0.1, size, network) == pytest.approx(measured_s, rel=1e-3)


def test_an_uneven_job_waits_longer_for_the_last_of_more_workers() -> None:
    two = made_up(2, "weak")
    seconds = {**two.seconds, "waiting": 0.01}
    uneven = fit(made_up(1, "weak"), replace(two, seconds=seconds), "weak", MACHINE)
    even = fit(made_up(1, "weak"), two, "weak", MACHINE)

    def more(workers: int) -> float:
        network = NETWORKS["100g"]
        return uneven.predict(workers, network).step_s - even.predict(workers, network).step_s

    assert more(2) == pytest.approx(0.01)
    assert 0.01 < more(8) < more(1024) < 0.1


def test_slower_networks_and_more_workers_are_never_more_efficient() -> None:
    job = fit(made_up(1, "weak"), made_up(2, "weak"), "weak", MACHINE)
    by_network = [job.predict(64, network).efficiency for network in NETWORKS.values()]
    by_size = [job.predict(size, NETWORKS["1g"]).efficiency for size in (1, 2, 8, 64, 1024)]

    assert by_network == sorted(by_network, reverse=True)
    assert by_size == sorted(by_size, reverse=True)
    assert by_size[0] == 1.0
    assert job.predict(64, NETWORKS["1g"]).network == "1g"
