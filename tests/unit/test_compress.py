"""Names of compressions, and the arithmetic that needs no second rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import HookError, UsageError
from paceline.gradients import compress
from paceline.gradients.compress import BF16, FP16, PowerSGD
from paceline.gradients.compress.deferred import Deferred
from paceline.gradients.compress.power_sgd import first_directions, matrix_shape, orthonormal
from paceline.gradients.compress.traffic import BucketTraffic, Traffic


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("bf16", BF16()),
        ("fp16", FP16()),
        ("powersgd", PowerSGD()),
        ("powersgd:rank=2", PowerSGD(rank=2)),
        ("powersgd:rank=4,start_step=10", PowerSGD(rank=4, start_step=10)),
        (" powersgd: min_ratio = 1.5 , seed=7 ", PowerSGD(min_ratio=1.5, seed=7)),
        (PowerSGD(rank=3), PowerSGD(rank=3)),
    ],
)
def test_a_name_stands_for_a_dataclass(text: str | compress.Spec, spec: compress.Spec) -> None:
    assert compress.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("bf61", "'bf16'"),
        ("bfloat16", "'bf16'"),
        ("half", "'fp16'"),
        ("FP16", "'fp16'"),
        ("power_sgd", "'powersgd'"),
        ("powersdg:rank=2", "'powersgd'"),
        ("powersgd:rnak=2", "'rank'"),
        ("powersgd:start=2", "'start_step'"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(
    text: str, suggestion: str
) -> None:
    with pytest.raises(UsageError, match=f"Did you mean {suggestion}"):
        compress.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zstd", "'bf16', 'fp16', 'powersgd'"),
        ("", "there is no ''"),
        ("bf16:rank=2", "It has no options"),
        ("powersgd:rank", "rank has no value"),
        ("powersgd:rank=two", "'two' is not a number"),
        ("powersgd:rank=1.5", "'1.5' is not a number"),
        ("powersgd:rank=1,rank=2", "twice"),
        ("powersgd:rank=0", "rank is 0"),
        ("powersgd:start_step=-1", "start_step is -1"),
        ("powersgd:min_ratio=nan", "min_ratio is nan"),
        (16, "neither a name"),
        (None, "neither a name"),
    ],
)
def test_an_impossible_compression_is_refused_with_what_is_possible(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compress.parse(text)


def test_a_bucket_without_names_is_refused() -> None:
    with pytest.raises(HookError, match=r"paceline\.DistributedDataParallel"):
        compress.hook(None, object())  # type: ignore[arg-type]


def test_traffic_adds_up_messages_and_starts_buckets_anew_in_each_step() -> None:
    traffic = Traffic()
    assert traffic.ratio == 1.0
    traffic.begin_step()
    traffic.record(0, 100, 0)
    traffic.record(0, 0, 10)
    traffic.record(0, 0, 15)
    traffic.begin_step()
    traffic.record(1, 100, 25)
    assert traffic.by_bucket == {1: BucketTraffic(100, 25)}
    assert (traffic.bytes_before, traffic.bytes_sent, traffic.ratio) == (200, 50, 4.0)


def test_a_deferred_future_is_finished_once_by_whoever_waits_first() -> None:
    calls = []

    def finish() -> torch.Tensor:
        calls.append(1)
        return torch.ones(2)

    future = Deferred(finish)
    assert not future.done()
    assert not calls
    doubled = future.then(lambda done: done.value() * 2)
    assert doubled.wait().tolist() == [2.0, 2.0]
    assert future.wait().tolist() == [1.0, 1.0]
    assert future.value().tolist() == [1.0, 1.0]
    assert future.done()
    assert len(calls) == 1


def test_a_deferred_future_fails_with_the_error_of_its_work() -> None:
    def finish() -> torch.Tensor:
        raise UsageError("no")

    future = Deferred(finish)
    with pytest.raises(UsageError, match="no"):
        future.wait()
    with pytest.raises(RuntimeError):
        future.wait()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 64), (64, 64)),
        ((32, 16, 3, 3), (32, 144)),
        ((64,), None),  # a vector
        ((), None),
        ((8, 8), None),  # 4 columns of 8 + 8 would be 64 elements again
        ((0, 64), None),
        ((2, 1000), None),
    ],
)
def test_only_what_shrinks_enough_is_sent_as_factors(
    shape: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    assert matrix_shape(shape, PowerSGD(rank=4)) == expected


def test_the_first_directions_depend_on_name_and_seed_alone() -> None:
    one = first_directions("layer.weight", 8, 2, seed=0)
    assert torch.equal(one, first_directions("layer.weight", 8, 2, seed=0))
    assert not torch.equal(one, first_directions("layer.bias", 8, 2, seed=0))
    assert not torch.equal(one, first_directions("layer.weight", 8, 2, seed=1))
    assert first_directions("x", 3, 1, seed=-1).shape == (3, 1)


@settings(deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 4),
    copies=st.booleans(),
    exponent=st.integers(-30, 15),
    seed=st.integers(0, 1000),
)
def test_orthonormal_columns_stay_orthonormal_and_span_the_given_ones(
    rows: int, columns: int, copies: bool, exponent: int, seed: int
) -> None:
    columns = min(rows, columns)
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if copies:
        matrix = matrix[:, :1].repeat(1, columns)
    matrix = matrix * 10.0**exponent
    q = orthonormal(matrix)
    torch.testing.assert_close(q.T @ q, torch.eye(columns), atol=1e-5, rtol=0)
    size = matrix.abs().max().item()
    torch.testing.assert_close(q @ (q.T @ matrix), matrix, atol=1e-5 * size, rtol=1e-4)


def test_orthonormal_columns_of_zeros_exist_and_of_nan_are_nan() -> None:
    q = orthonormal(torch.zeros(5, 2))
    torch.testing.assert_close(q.T @ q, torch.eye(2))
    for bad in (float("nan"), float("inf")):
        assert orthonormal(torch.tensor([[1.0], [bad]])).isnan().all()
