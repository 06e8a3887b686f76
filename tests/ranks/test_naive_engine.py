"""The naive engine, and `DistributedDataParallel` held against it."""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Breaks, Case, shard, train_some

from paceline import DistributedDataParallel, World
from paceline.ddp import Engine, NaiveEngine, check_engine
from paceline.group import Membership
from paceline.testing import assert_replicas_equal, gradients, run_ranks

ROWS = 12
Grads = dict[str, Tensor | None]


def wrap(kind: type, module: nn.Module, world: World) -> Any:
    if kind is NaiveEngine:
        return NaiveEngine(module, world)
    return DistributedDataParallel(module, process_group=world.group, broadcast_buffers=False)


def dense(model: Any) -> Grads:
    found = gradients(model.module)
    return {name: None if g is None else g.to_dense().clone() for name, g in found.items()}


def both(size: int, body: Any) -> tuple[list[Any], list[Any]]:
    """What every rank got from `body(wrapped, world)` with either engine."""

    def run(kind: type) -> list[Any]:
        return run_ranks(size, lambda world: body(lambda net: wrap(kind, net, world), world))

    return run(NaiveEngine), run(DistributedDataParallel)


def assert_same(naive: list[Grads], ddp: list[Grads], *, is_exact: bool, rough: float = 0) -> None:
    for expected, got in zip(naive, ddp, strict=True):
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            other = got[name]
            assert (other is None) == (grad is None), name
            if grad is None or other is None:
                continue
            if is_exact:
                assert torch.equal(other, grad), name
            else:
                wide = torch.complex128 if grad.is_complex() else torch.float64
                bound = {"rtol": rough or 1e-5, "atol": rough or 1e-6}
                torch.testing.assert_close(other.to(wide), grad.to(wide), msg=name, **bound)


@pytest.mark.parametrize(("case", "size"), [*product(CASES, [1, 2, 3])], ids=str)
def test_both_engines_give_the_same_gradients(case: Case, size: int) -> None:
    def body(wrapped: Any, world: World) -> Grads:
        model = wrapped(case.build())
        for _ in range(2):
            model.zero_grad()
            case.loss(model, shard(case.batch(ROWS), world.rank, world.size)).backward()
        return dense(model)

    naive, ddp = both(size, body)
    # Of two numbers the sum is the same in any order, and halves are exact; rows of a sparse
    # gradient are added one by one.
    is_exact = size < 3 and "sparse" not in case.traits
    assert_same(naive, ddp, is_exact=is_exact, rough=0.02 if "rough" in case.traits else 0)
    assert_replicas_equal(naive)


def double(case: Case) -> nn.Module:
    return case.build().double()


PLAIN = [case for case in CASES if case.name in {"mlp", "tiny GPT", "unused depending on the rows"}]


def loss_sum(case: Case, model: Any, rows: tuple[Tensor, ...]) -> Tensor:
    rows = tuple(part.double() if part.is_floating_point() else part for part in rows)
    return case.loss(model, rows) * len(rows[0])


@pytest.mark.parametrize(("case", "size"), [*product(PLAIN, [2, 3])], ids=str)
def test_weighted_losses_are_divided_by_all_items(case: Case, size: int) -> None:
    whole = double(case)
    (loss_sum(case, whole, case.batch(ROWS)) / ROWS).backward()

    def body(wrapped: Any, world: World) -> Grads:
        model = wrapped(double(case))
        begin = [0, 2, 5, ROWS][world.rank]  # shards of different sizes
        end = ROWS if world.rank == size - 1 else [0, 2, 5, ROWS][world.rank + 1]
        rows = tuple(part[begin:end] for part in case.batch(ROWS))
        model.begin_step(0)
        model.weigh(end - begin)
        loss_sum(case, model, rows).backward()
        return dense(model)

    naive, ddp = both(size, body)
    assert_same(naive, ddp, is_exact=False)
    assert_same([gradients(whole)] * size, naive, is_exact=False)


@pytest.mark.parametrize(("case", "size"), [*product(PLAIN, [1, 2, 3])], ids=str)
def test_gradients_accumulate_under_no_sync(case: Case, size: int) -> None:
    def body(wrapped: Any, world: World) -> list[Grads]:
        model, seen = wrapped(double(case)), []
        rows = shard(case.batch(ROWS), world.rank, world.size)
        with model.no_sync():
            loss_sum(case, model, tuple(part[:2] for part in rows)).backward()
        seen.append(dense(model))
        loss_sum(case, model, tuple(part[2:] for part in rows)).backward()
        return [*seen, dense(model)]

    naive, ddp = both(size, body)
    for step in range(2):
        assert_same([r[step] for r in naive], [r[step] for r in ddp], is_exact=size < 3)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_without_a_shard_gets_what_the_others_have(size: int) -> None:
    def body(wrapped: Any, world: World) -> Grads:
        model = wrapped(double(PLAIN[0]))
        model.begin_step(3)
        if world.rank == 0:
            model.take_part()
        else:
            model.weigh(4)
            rows = tuple(part[world.rank :: size][:4] for part in PLAIN[0].batch(4 * size))
            loss_sum(PLAIN[0], model, rows).backward()
        return dense(model)

    naive, ddp = both(size, body)
    assert_same(naive, ddp, is_exact=False)


@pytest.mark.parametrize("size", [2, 3])
def test_where_nothing_weighs_anything_gradients_are_zero(size: int) -> None:
    def body(wrapped: Any, _world: World) -> float:
        model = wrapped(nn.Linear(2, 1))
        model.weigh(0)
        model(torch.ones(1, 2)).sum().backward()
        return float(model.module.weight.grad.abs().sum())

    assert both(size, body) == ([0.0] * size, [0.0] * size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_used_by_one_rank_gets_its_share_and_one_used_by_none_keeps_none(
    size: int,
) -> None:
    def body(wrapped: Any, world: World) -> Any:
        heads = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
        for head in heads:
            nn.init.constant_(head.weight, 2.0)

        class Heads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.heads = heads

            def forward(self, x: Tensor) -> Any:
                return self.heads[0](x) + (self.heads[1](x) if world.rank == 1 else 0)

        model = wrapped(Heads())
        model(torch.full((1, 1), float(size))).sum().backward()
        return [None if p.grad is None else p.grad.item() for p in model.parameters()]

    expected = [[float(size), 1.0, None]] * size
    assert both(size, body) == (expected, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_buffers_and_identity_begin_as_rank_0s(size: int) -> None:
    def body(world: World) -> Any:
        module = nn.BatchNorm1d(2)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(world.rank + 7)
        model = NaiveEngine(module, Membership.of(world.group))
        return [model.identity, *(t.tolist() for t in module.state_dict().values())]

    ranks = run_ranks(size, body)
    assert all(got == ranks[0] for got in ranks)
    assert ranks[0][1:] == [[7.0, 7.0]] * 4 + [7]


@pytest.mark.parametrize("kind", [NaiveEngine, DistributedDataParallel])
def test_a_parameter_unfrozen_later_is_averaged(kind: type) -> None:
    def body(world: World) -> float:
        model = wrap(kind, nn.Linear(1, 1), world)
        model.module.weight.requires_grad_(False)
        model(torch.ones(1, 1)).sum().backward()
        model.module.weight.requires_grad_(True)
        model.zero_grad()
        (model(torch.ones(1, 1)) * (world.rank + 1)).sum().backward()
        return float(model.module.weight.grad)

    assert run_ranks(2, body) == [1.5, 1.5]


@pytest.mark.parametrize("kind", [NaiveEngine, DistributedDataParallel])
def test_training_with_momentum_keeps_replicas_equal(kind: type) -> None:
    def body(world: World) -> dict[str, Tensor]:
        model = wrap(kind, PLAIN[-1].build(), world)
        return train_some(model, PLAIN[-1], world, lr=0.1, momentum=0.9)

    assert_replicas_equal(run_ranks(3, body))


def test_a_backward_that_raised_is_forgotten_by_the_next_forward() -> None:
    def body(world: World) -> float:
        first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        model = NaiveEngine(nn.Sequential(first, last), world)
        with pytest.raises(MemoryError, match="broken"):
            model(Breaks.apply(torch.ones(1, 1, requires_grad=True))).sum().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        (model(torch.ones(1, 1)) * world.rank).sum().backward()
        return float(last.weight.grad / first.weight.detach())  # type: ignore[operator]

    assert run_ranks(2, body) == pytest.approx([0.5, 0.5])


def test_it_is_an_engine_names_are_the_models_and_it_goes_with_the_last_reference() -> None:
    def body(world: World) -> Any:
        model = NaiveEngine(nn.Linear(1, 1), world)
        engine: Engine = model
        check_engine(engine).on_generation()
        model(torch.ones(1, 1)).sum().backward()
        names, gone = list(model.state_dict()), weakref.ref(model)
        del model, engine
        gc.collect()
        return names, gone() is None

    assert run_ranks(2, body) == [(["weight", "bias"], True)] * 2
