"""The trailer: written by each rank, read from the sum."""

from __future__ import annotations

import pytest
import torch

from paceline.ddp.fingerprint import LENGTH
from paceline.ddp.trailer import CONTROL_WORDS, Trailer, Words

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_trailers_says_who_used_what_and_how_much_it_weighs(dtype: torch.dtype) -> None:
    trailer = Trailer(3, dtype, CPU)
    first, second = (torch.zeros(3 + CONTROL_WORDS, dtype=dtype) for _ in range(2))
    trailer.write(first, [0, 2], Words(weight=7.0, label=9.0))
    trailer.write(second, [2], Words(weight=5.0, votes=1.0, aborts=1.0, label=9.0))
    total = first + second
    assert trailer.used(total) == [True, True, False]
    assert trailer.words(total).tolist() == [
        12.0,
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        2.0,
        18.0,
        *[0.0] * LENGTH,
    ]


def test_the_plain_trailer_is_what_writing_it_out_gives() -> None:
    trailer = Trailer(2, torch.float32, CPU)
    plain = torch.zeros(2 + CONTROL_WORDS)
    trailer.write(plain, [], Words(label=5.0))
    assert plain.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 5.0, *[0.0] * LENGTH]


def test_token_counts_of_millions_are_exact() -> None:
    trailer = Trailer(0, torch.float32, CPU)
    target = torch.zeros(CONTROL_WORDS)
    trailer.write(target, [], Words(weight=float(2**24 - 1)))
    assert trailer.words(target)[0].item() == 2**24 - 1
