"""The simulated exchange: exact where it can be worked out by hand, and monotonic everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.explain.scaling.simulation import NETWORKS, Bucket, Network, exposed_s, ring_s

SECOND = Network("a byte a second", 0.0, 1.0)

networks = st.builds(
    Network, st.just("some"), st.floats(0, 1e-2), st.floats(min_value=1e3, max_value=1e12)
)
buckets = st.lists(
    st.builds(Bucket, st.floats(0, 1), st.integers(0, 10**9)), min_size=1, max_size=8
)


def test_a_ring_sends_almost_twice_the_bytes_in_twice_the_neighbours() -> None:
    assert ring_s(8, 4, SECOND) == 2 * 3 / 4 * 8
    assert ring_s(8, 4, Network("slow to start", 1.0, 1e30)) == pytest.approx(2 * 3)
    assert ring_s(8, 1, SECOND) == 0


def test_what_fits_into_backward_is_hidden() -> None:
    # Two workers: a bucket of n bytes takes n seconds.
    assert exposed_s([Bucket(1.0, 3), Bucket(5.0, 2)], 10.0, 2, SECOND) == 0


def test_the_last_bucket_is_exposed_if_it_is_ready_at_the_end() -> None:
    assert exposed_s([Bucket(1.0, 3), Bucket(10.0, 2)], 10.0, 2, SECOND) == 2


def test_buckets_queue_in_their_order() -> None:
    # 0 is under way from 2 to 9, so 1, ready at 3, from 9 to 13, and 2, ready at 10, to 14.
    queue = [Bucket(2.0, 7), Bucket(3.0, 4), Bucket(10.0, 1)]
    assert exposed_s(queue, 10.0, 2, SECOND) == 4


def test_one_worker_exchanges_nothing() -> None:
    assert exposed_s([Bucket(5.0, 100)], 1.0, 1, SECOND) == 0


@given(buckets, st.floats(0, 2), st.integers(2, 2000), networks, st.floats(1, 100))
def test_more_workers_a_slower_network_or_more_bytes_are_never_faster(
    some: list[Bucket], backward_s: float, size: int, network: Network, factor: float
) -> None:
    slower = Network("slower", network.latency_s * factor, network.bytes_per_s / factor)
    more = [Bucket(bucket.ready_s, round(bucket.nbytes * factor)) for bucket in some]
    now = exposed_s(some, backward_s, size, network)

    assert exposed_s(some, backward_s, size + 1, network) >= now
    assert exposed_s(some, backward_s, size, slower) >= now
    assert exposed_s(more, backward_s, size, network) >= now - 1e-9


@given(buckets, st.floats(0, 2), st.integers(2, 2000), networks)
def test_exposure_is_at_least_the_last_bucket_and_at_most_all_of_them(
    some: list[Bucket], backward_s: float, size: int, network: Network
) -> None:
    late = [*some, Bucket(backward_s, 10**6)]
    found = exposed_s(late, backward_s, size, network)
    alone = [ring_s(bucket.nbytes, size, network) for bucket in late]

    assert alone[-1] - 1e-9 <= found <= sum(alone) + 1e-9


def test_presets_are_ordered_from_fast_to_slow() -> None:
    steps = [ring_s(1e8, 8, network) for network in NETWORKS.values()]
    assert steps == sorted(steps)
