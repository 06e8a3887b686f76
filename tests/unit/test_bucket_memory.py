"""A bucket's memory: lent while nobody looks at it, and never under a gradient that is kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.ddp.buffer import Bucket, ParamRef
from paceline.ddp.layout import plan_buckets
from paceline.transport.interface import Flat


def make(sizes: list[int]) -> tuple[Bucket, list[nn.Parameter]]:
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    flats = [Flat(p.numel(), p.dtype, p.device) for p in params]
    (plan,) = plan_buckets(flats, range(len(flats)), [2**20])
    return Bucket(plan, [ParamRef(str(n), p) for n, p in enumerate(params)]), params


def backward(bucket: Bucket, params: list[nn.Parameter], value: float) -> list[Tensor | None]:
    for param in params:
        param.grad = torch.full_like(param, value)
    assert bucket.fill() == []
    bucket.hand_out([], is_untouched=True)
    return [param.grad for param in params]


def held(bucket: Bucket) -> int:
    return bucket.buffer.untyped_storage().nbytes()


def test_memory_is_lent_once_the_gradients_are_gone_and_comes_back() -> None:
    bucket, params = make([3, 40, 1])  # with gaps between them
    for value in (1.0, 2.0):
        grads = backward(bucket, params, value)
        places = [id(grad) for grad in grads]
        bucket.lend()
        assert held(bucket) > 0, "gradients are alive"
        for param in params:
            param.grad = None
        bucket.lend()
        assert held(bucket) > 0, "the caller keeps them"
        del grads
        bucket.lend()
        assert held(bucket) == 0
    assert [id(grad) for grad in backward(bucket, params, 3.0)] == places, "views are made once"
    assert all(bool((param.grad == 3.0).all()) for param in params if param.grad is not None)
    assert float(bucket.flat.sum()) == 3.0 * 44, "zeros between the gradients"


def test_a_rank_without_gradients_takes_lent_memory_back() -> None:
    bucket, params = make([5])
    backward(bucket, params, 1.0)
    params[0].grad = None
    bucket.lend()
    assert bucket.fill_zeros() == [0]
    assert not bucket.flat.any()
