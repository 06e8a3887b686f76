"""The fingerprint of parameters: all of them in one period, every bit, equal or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.ddp.buffer import ParamRef
from paceline.ddp.fingerprint import DIGITS, EVERY, PERIOD, Fingerprint, is_different

CPU = torch.device("cpu")


def prints(params: list[nn.Parameter]) -> list[list[float]]:
    """All that are sent in one period."""
    refs = [ParamRef(str(number), param) for number, param in enumerate(params)]
    fingerprint = Fingerprint(refs, CPU)
    found = [fingerprint.words(step) for step in range(0, PERIOD, EVERY)]
    return [words.tolist() for words in found if words is not None]


def has_difference(one: list[list[float]], other: list[list[float]], size: int = 2) -> bool:
    return any(
        is_different([a * (size - 1) + b for a, b in zip(x, y, strict=True)])
        for x, y in zip(one, other, strict=True)
    )


@settings(deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_seen_within_a_period(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=40))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    params = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]
    before = prints(params)
    assert prints(params) == before
    raw = params[data.draw(st.integers(0, len(sizes) - 1))].data.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert has_difference(before, prints(params), size=data.draw(st.sampled_from([2, 3, 4096])))


@pytest.mark.parametrize("numel", [1_000_003, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_equal_and_swapped_layers_are_told_apart(numel: int, dtype: torch.dtype) -> None:
    first, second = (nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(2))
    before = prints([first, second])
    assert not has_difference(before, prints([first, second]))
    assert has_difference(before, prints([second, first]))


def test_the_last_of_many_large_and_small_parameters_is_in_a_period() -> None:
    params = [nn.Parameter(torch.zeros(size)) for size in [10, 2_000_000, *[3] * 600]]
    before = prints(params)
    for param in (params[0], params[1][-1:], params[-1]):
        param.data.add_(1)
        assert has_difference(before, prints(params))
        before = prints(params)


def test_sums_of_many_ranks_are_exact_in_float32() -> None:
    words = torch.tensor([1, *[63] * DIGITS, *[63 * 63] * DIGITS], dtype=torch.float32)
    total = words * 4096
    assert total.double().tolist() == (words.double() * 4096).tolist()
    assert not is_different(total.tolist())
