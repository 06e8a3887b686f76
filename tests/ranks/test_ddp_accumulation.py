"""Accumulating gradients: `no_sync`, weights, several forwards, closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import DistributedDataParallel, World
from paceline.ddp.weight import LossWeight
from paceline.errors import DesyncError, UsageError
from paceline.testing import gradients, run_ranks, seeded

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(23, 6, generator=GENERATOR)
Y = torch.randint(3, (23,), generator=GENERATOR)


def small() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), 0)


def wrap(world: World, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(small(), process_group=world.group, **options)


def whole_gradients(rows: slice | Tensor = slice(None)) -> dict[str, Tensor | None]:
    model = small()
    F.cross_entropy(model(X[rows]), Y[rows]).backward()
    return gradients(model)


def loss(model: Callable[[Tensor], Tensor], rows: Any, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(X[rows]), Y[rows], reduction=reduction)


def copied(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if g is None else g.clone() for name, g in gradients(model).items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sync_keeps_gradients_local_and_the_next_backward_averages_all(size: int) -> None:
    rows = torch.arange(12)

    def body(world: World) -> tuple[Any, Any]:
        model = wrap(world)
        mine = rows[world.rank :: world.size]
        half = len(mine) // 2
        with model.no_sync():
            (loss(model, mine[:half]) / 2).backward()
        local = copied(model)
        (loss(model, mine[half:]) / 2).backward()
        return local, copied(model)

    results = run_ranks(size, body)
    if size > 1:
        assert not torch.equal(results[0][0]["0.weight"], results[1][0]["0.weight"])
    if 12 % (2 * size) == 0:
        for _, averaged in results:
            torch.testing.assert_close(averaged, whole_gradients(rows))


def test_no_sync_can_be_conditional_and_nested() -> None:
    def body(world: World) -> list[bool]:
        model = wrap(world)
        seen = []
        for enabled in (False, True):
            model.zero_grad()
            with model.no_sync(enabled=enabled):
                with model.no_sync(enabled=False):
                    loss(model, slice(world.rank, None, world.size)).backward()
            mine = gradients(model)["0.weight"]
            assert mine is not None
            shared = mine.clone()
            world.group.allreduce([shared]).wait()
            seen.append(torch.allclose(shared / world.size, mine, atol=1e-7))
        return seen

    assert run_ranks(2, body) == [[True, False], [True, False]]


def test_no_sync_is_left_behind_after_an_error() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        with pytest.raises(ArithmeticError), model.no_sync():
            raise ArithmeticError
        loss(model, slice(world.rank, 12, world.size)).backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients(slice(12)))


def test_as_in_torch_the_forward_pass_decides() -> None:
    def body(world: World) -> list[bool]:
        model = wrap(world)
        rows = slice(world.rank, 12, world.size)
        with model.no_sync():
            inside = loss(model, rows)
        inside.backward()  # the forward pass was inside: stays local
        local = copied(model)
        model.zero_grad()
        outside = loss(model, rows)
        with model.no_sync():
            outside.backward()  # the forward pass was outside: averages
        averaged = copied(model)
        expected = whole_gradients(slice(12))
        return [
            torch.allclose(grads["0.weight"], expected["0.weight"], atol=1e-6)
            for grads in (local, averaged)
        ]

    assert run_ranks(2, body) == [[False, True], [False, True]]


def test_a_bypassing_forward_under_no_sync_stays_local() -> None:
    def body(world: World) -> bool:
        model = wrap(world)
        with model.no_sync():
            loss(model.module, slice(world.rank, 12, world.size)).backward()
        expected = whole_gradients(slice(12))["0.weight"]
        assert expected is not None
        got = gradients(model)["0.weight"]
        return got is not None and torch.allclose(got, expected, atol=1e-6)

    assert run_ranks(2, body) == [False, False]


class StepsItself(nn.Module):
    """Its forward pass has the backward inside and returns nothing, as in Lightning's loops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, rows: Tensor) -> None:
        loss(self.inner, rows).backward()


def test_a_backward_inside_the_forward_follows_that_forwards_wish() -> None:
    rows = torch.arange(12)

    def body(world: World) -> Any:
        model = DistributedDataParallel(StepsItself(), process_group=world.group)
        with model.no_sync():
            model(rows[world.rank :: world.size])
        model.zero_grad()
        model(rows[world.rank :: world.size])
        return copied(model.inner)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients(rows))


def test_several_forwards_before_one_backward() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        mine = torch.arange(12)[world.rank :: world.size]
        half = len(mine) // 2
        total = (loss(model, mine[:half]) + loss(model, mine[half:])) / 2
        total.backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients(slice(12)))


def test_a_forward_inside_and_one_outside_no_sync_in_one_backward_synchronise() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        mine = torch.arange(12)[world.rank :: world.size]
        with model.no_sync():
            first = loss(model, mine[:3])
        ((first + loss(model, mine[3:])) / 2).backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients(slice(12)))


def test_each_backward_of_a_retained_graph_synchronises() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        value = loss(model, slice(world.rank, 12, world.size))
        value.backward(retain_graph=True)
        model.zero_grad()
        value.backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients(slice(12)))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_backward_twice_without_zeroing_adds_up(set_to_none: bool) -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        rows = slice(world.rank, 12, world.size)
        loss(model, rows).backward()
        model.zero_grad(set_to_none=set_to_none)
        loss(model, rows).backward()
        loss(model, rows).backward()
        return gradients(model)

    expected = {name: g * 2 for name, g in whole_gradients(slice(12)).items() if g is not None}
    for got in run_ranks(3, body):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weighted_sums_are_exact_for_uneven_shards(size: int) -> None:
    def body(world: World) -> Any:
        model = wrap(world, bucket_cap_mb=1e-4)
        for _ in range(2):
            model.zero_grad()
            start = 0 if world.rank == 0 else 2 + 3 * world.rank
            stop = len(X) if world.rank == world.size - 1 else 2 + 3 * (world.rank + 1)
            with model.weighted(stop - start):
                loss(model, slice(start, stop), "sum").backward()
        return gradients(model)

    for got in run_ranks(size, body):
        torch.testing.assert_close(got, whole_gradients())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weighted_accumulation_is_exact_over_uneven_micro_batches(size: int) -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        mine = torch.arange(len(X))[world.rank :: world.size]
        parts = [mine[:1], mine[1:4], mine[4:]]
        for number, part in enumerate(parts):
            with model.no_sync(enabled=number < 2), model.weighted(len(part)):
                loss(model, part, "sum").backward()
        return gradients(model)

    for got in run_ranks(size, body):
        torch.testing.assert_close(got, whole_gradients())


def test_a_rank_without_items_weighs_nothing() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        rows = slice(0, 12) if world.rank == 0 else slice(0, 0)
        with model.weighted(12 if world.rank == 0 else 0):
            loss(model, rows, "sum").backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients(slice(12)))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_without_a_backward_takes_part_and_touches_no_parameter(size: int) -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        net = nn.ModuleDict({"used": seeded(nn.Linear(6, 3)), "idle": seeded(nn.Linear(6, 3))})
        net.forward = lambda x: net["used"](x)  # type: ignore[method-assign]
        model = DistributedDataParallel(net, process_group=world.group)
        for _ in range(2):  # buckets are planned anew after the first
            model.zero_grad()
            with model.weighted(len(X) if world.rank == 0 else 0.0):
                if world.rank == 0:
                    loss(model, slice(None), "sum").backward()
                else:
                    model.reducer.take_part()
        return gradients(model)

    alone = seeded(nn.Linear(6, 3))
    loss(alone, slice(None)).backward()
    for got in run_ranks(size, body):
        torch.testing.assert_close(got["used.weight"], alone.weight.grad)
        assert got["idle.weight"] is None


def test_a_weighted_block_without_backward_leaves_no_weight() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        with model.weighted(5), torch.no_grad():
            model(X)
        loss(model, slice(world.rank, 12, world.size)).backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients(slice(12)))


def test_weighted_and_unweighted_micro_batches_do_not_mix() -> None:
    def body(world: World) -> None:
        model = wrap(world)
        with model.no_sync(), model.weighted(3):
            loss(model, slice(3), "sum").backward()
        loss(model, slice(3)).backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert "had a weight and some had none" in str(error)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_which_only_some_weigh_their_losses_are_an_error_on_all(size: int) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(nn.Linear(3, 2), process_group=world.group)
        if world.rank == 0:
            with model.weighted(5):
                model(torch.ones(5, 3)).sum().backward()
        else:
            model(torch.ones(5, 3)).mean().backward()

    for error in run_ranks(size, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert says(str(error), "Step 0", 1, size, size - 1)


def test_weighted_gradients_are_not_added_onto_averages() -> None:
    def body(world: World) -> None:
        model = wrap(world)
        for _ in range(2):
            with model.weighted(3):
                loss(model, slice(3), "sum").backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert "zero_grad" in str(error)


def test_lbfgs_closures_train_like_one_process() -> None:
    def train(model: nn.Module, rows: slice) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(model(X[rows].double()), Y[rows])
            value.backward()
            shared = value.detach().clone()
            if isinstance(model, DistributedDataParallel):
                model.process_group.allreduce([shared]).wait()
                shared /= model.process_group.size()
            return shared

        for _ in range(3):
            optimizer.step(closure)
        return [param.detach().clone() for param in model.parameters()]

    def body(world: World) -> list[Tensor]:
        model = DistributedDataParallel(small().double(), process_group=world.group)
        return train(model, slice(world.rank, 12, world.size))

    expected = train(small().double(), slice(12))
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, expected)


class Heads(nn.Module):
    """Two parts of which a backward may reach one, the other, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = seeded(nn.Linear(6, 3), 0), seeded(nn.Linear(6, 3), 1)

    def forward(self, rows: slice, heads: str) -> Tensor:
        """The sum of the losses of these heads, for which "ab" stands for both."""
        scores = [getattr(self, head)(X[rows]) for head in heads]
        return torch.stack([F.cross_entropy(s, Y[rows], reduction="sum") for s in scores]).sum()


def filled(model: nn.Module) -> list[Tensor]:
    """The gradients, zeros where there is none."""
    pairs = ((param, param.grad) for param in model.parameters())
    return [torch.zeros_like(param) if grad is None else grad.clone() for param, grad in pairs]


Loop = list[tuple[str, str, bool]]
"""What happens to the gradients, the heads of a backward, and whether zeroing sets None."""

LOOPS: dict[str, Loop] = {
    "two parts, one after the other": [("sync", "a", True), ("sync", "b", True)],
    "the part that comes second was averaged": [
        *[("sync", "ab", True), ("zero", "", True), ("local", "a", True), ("sync", "a", True)],
        ("sync", "b", True),
    ],
    "a micro-batch is dropped": [("local", "a", True), ("zero", "", True), ("sync", "ab", True)],
    "a micro-batch is zeroed": [("local", "ab", True), ("zero", "", False), ("sync", "a", True)],
    "zeroed inside the block": [
        *[("sync", "ab", True), ("zero_inside", "ab", True), ("zero_inside", "b", False)],
        *[("local", "a", True), ("zero_inside", "b", False), ("sync", "a", True)],
    ],
    "dropped twice": [
        *[("local", "a", True), ("local", "b", True), ("zero", "", False), ("local", "a", True)],
        *[("zero", "", True), ("local", "b", True), ("sync", "a", True)],
    ],
}


@pytest.mark.parametrize("bypass", [False, True], ids=["", "past the wrapper"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=list(LOOPS))
def test_weights_are_those_of_the_gradients_that_are_there(
    loop: Loop, size: int, bypass: bool
) -> None:
    def rows_of(number: int, rank: int) -> slice:
        start = number + rank * 3
        return slice(start, start + 1 + (number + rank) % 3)

    def body(world: World) -> list[Tensor]:
        model = DistributedDataParallel(Heads(), process_group=world.group, bucket_cap_mb=1e-4)
        for number, (event, heads, set_to_none) in enumerate(loop):
            rows = rows_of(number, world.rank)
            if event == "zero":
                model.zero_grad(set_to_none)
                continue
            with model.no_sync(enabled=event == "local"), model.weighted(rows.stop - rows.start):
                if event == "zero_inside":
                    model.zero_grad(set_to_none)
                (model.module if bypass else model)(rows, heads).backward()
        return filled(model)

    whole, accumulated = Heads(), []
    for number, (event, heads, set_to_none) in enumerate(loop):
        if event.startswith("zero"):
            whole.zero_grad(set_to_none)
            accumulated = []
        if heads:
            accumulated += [(rows_of(number, rank), heads) for rank in range(size)]
        if event in ("sync", "zero_inside"):
            items = sum(rows.stop - rows.start for rows, _ in accumulated)
            for rows, reached in accumulated:
                (whole(rows, reached) / items).backward()
            accumulated = []
    for got in run_ranks(size, body):
        torch.testing.assert_close(got, filled(whole))


def test_every_average_inside_a_block_has_its_weight() -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        model = DistributedDataParallel(Heads(), process_group=world.group)
        rows = slice(0, 3) if world.rank == 0 else slice(3, 8)
        with model.weighted(rows.stop - rows.start):
            model(rows, "a").backward()
            model(rows, "b").backward()
        return copied(model)

    whole = Heads()
    (whole(slice(8), "ab") / 8).backward()
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, gradients(whole))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_weighted_gradients_of_which_some_were_zeroed_are_refused(set_to_none: bool) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(Heads(), process_group=world.group)
        with model.no_sync(), model.weighted(3):
            model(slice(3), "ab").backward()
        model.module.a.zero_grad(set_to_none)
        with model.weighted(3):
            model(slice(3), "ab").backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert says(str(error), "Step 0")


@pytest.mark.parametrize("between", ["clipped", "held", "accumulated", "unweighted"])
def test_averages_are_not_added_to_whatever_was_done_with_them(between: str) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(Heads(), process_group=world.group)
        with model.weighted(3) if between != "unweighted" else model.no_sync(enabled=False):
            model(slice(3), "a").backward()
        held = [param.grad for param in model.parameters()] if between == "held" else []
        if between == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with model.no_sync(enabled=between == "accumulated"), model.weighted(3):
            model(slice(3), "a").backward()
        del held

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert "'a." in str(error)


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads one by one, for each of which it would wait."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_weighted_backward_reads_no_gradient_by_itself_to_see_whether_it_was_zeroed(
    value: float,
) -> None:
    params, weight = list(small().parameters()), LossWeight()
    for param in params:
        param.grad = torch.full_like(param, value)
    weight.enter(2)
    with Reads() as reads:
        aside = weight.on_backward(params, None)
        weight.reset(params)
    assert len(aside) == (len(params) if value else 0)
    assert reads.count == 0
