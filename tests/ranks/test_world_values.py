"""`World.gather`, `reduce` and `broadcast`: the same on every worker, mistakes too."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.functional import cross_entropy, normalize

from paceline import DistributedDataParallel
from paceline.errors import DesyncError, UsageError
from paceline.group import Membership, all_gather
from paceline.group.world import World
from paceline.testing import gradients, run_ranks, seeded
from paceline.testing.ranks import gloo_group

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
ROWS = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Pair:
    logits: Tensor
    more: list[Any]


@SIZES
def test_gathered_rows_are_those_of_all_ranks_in_their_order(size: int) -> None:
    def body(world: World) -> tuple[Any, Any]:
        rows = torch.full((world.rank, 2), world.rank)  # none on rank 0
        flags = torch.tensor([True, world.rank == 1])
        value = Pair(rows, [{"n": world.rank, "scalar": torch.tensor(1.5)}, (flags, "text", None)])
        return world.gather(value), world.gather(ROWS[world.rank :: world.size])

    expected = torch.cat([torch.full((rank, 2), rank) for rank in range(size)])
    for found, rows in run_ranks(size, body):
        torch.testing.assert_close(found.logits, expected, rtol=0, atol=0)
        assert found.more[0]["n"].tolist() == list(range(size))
        assert found.more[0]["scalar"].tolist() == [1.5] * size
        flags, text, nothing = found.more[1]
        assert flags.tolist() == [flag for rank in range(size) for flag in (True, rank == 1)]
        assert (text, nothing) == ("text", None)
        torch.testing.assert_close(rows, torch.cat([ROWS[rank::size] for rank in range(size)]))


@SIZES
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduced_values_are_sums_or_means_over_the_ranks(size: int, op: Any) -> None:
    def body(world: World) -> Any:
        value = {"x": ROWS[world.rank], "n": world.rank + 1, "loss": [0.5], "name": "a"}
        return world.reduce(value | {"flag": torch.tensor(True)}, op)

    by = size if op == "mean" else 1
    for found in run_ranks(size, body):
        torch.testing.assert_close(found["x"], ROWS[:size].sum(0) / by)
        assert found["n"] == sum(range(1, size + 1)) / by
        assert found["loss"] == [0.5 * size / by]
        assert found["flag"].item() == size / by
        assert found["name"] == "a"


@SIZES
def test_every_rank_has_what_the_root_broadcasts(size: int) -> None:
    def body(world: World) -> Any:
        root = world.size - 1
        mine = {"rows": ROWS, "name": "weights", "n": [1, 2.5]} if world.rank == root else None
        return world.broadcast(mine, root)

    for found in run_ranks(size, body):
        torch.testing.assert_close(found["rows"], ROWS, rtol=0, atol=0)
        assert (found["name"], found["n"]) == ("weights", [1, 2.5])


def encoder() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))).double()


def contrast(embeddings: Tensor) -> Tensor:
    rows = normalize(embeddings, dim=1)
    return cross_entropy(rows @ rows.T / 0.2, torch.arange(len(rows)))


@SIZES
def test_the_gradient_through_gathered_rows_is_that_of_one_process(size: int) -> None:
    whole = encoder()
    cuts = [0, *(5 + 3 * rank for rank in range(size - 1)), len(ROWS)]  # uneven
    contrast(whole(ROWS)).backward()

    def body(world: World) -> Any:
        model = DistributedDataParallel(encoder(), process_group=world.group)
        mine = model(ROWS[cuts[world.rank] : cuts[world.rank + 1]])
        contrast(world.gather(mine, grad=True)).backward()
        return gradients(model)

    for found in run_ranks(size, body):
        torch.testing.assert_close(found, gradients(whole), rtol=1e-10, atol=1e-12)


def odd(rank: int, value: Any, otherwise: Any) -> Any:
    return value if rank == 1 else otherwise


@pytest.mark.parametrize("method", ["gather", "reduce"])
@pytest.mark.parametrize(
    ("mine", "others", "error", "where"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), DesyncError, "3"),
        (torch.ones(2), torch.ones(2).double(), DesyncError, "float64"),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, DesyncError, "'b'"),
        ({"a": "x"}, {"a": "y"}, DesyncError, "'x'"),
        ([object()], [torch.ones(2)], UsageError, r"\[0\].*rank 1"),
        ([2**70], [1], UsageError, r"\[0\].*rank 1"),
        ([{"a"}], ["a"], UsageError, r"\[0\].*rank 1"),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_on_all(
    method: str, mine: Any, others: Any, error: type[Exception], where: str
) -> None:
    def body(world: World) -> None:
        with pytest.raises(error, match=where):
            getattr(world, method)(odd(world.rank, mine, others))
        assert world.reduce(1) == 3, "they are in step"

    run_ranks(3, body)


def test_a_tensor_that_cannot_travel_is_an_error_on_all() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)

    def body(world: World) -> None:
        with pytest.raises(UsageError, match="rank 1"):
            world.gather(odd(world.rank, quantized, torch.ones(2)))
        assert world.reduce(1) == 2, "they are in step"

    run_ranks(2, body)


def test_what_cannot_be_broadcast_is_an_error_on_all() -> None:
    def body(world: World) -> None:
        with pytest.raises(UsageError, match="rank 1"):
            world.broadcast(odd(world.rank, object(), 3), root=1)
        assert world.broadcast(odd(world.rank, 5, 3), root=1) == 5

    run_ranks(2, body)


def test_a_world_without_a_group_has_its_own_values() -> None:
    world = World(rank=0, size=1)
    assert world.gather([ROWS])[0].shape == ROWS.shape
    assert world.reduce({"n": 3}, "mean") == {"n": 3}
    assert world.broadcast("x") == "x"
    with pytest.raises(UsageError, match="op"):
        world.reduce(1, "max")  # type: ignore[arg-type]


def test_values_are_in_the_order_of_ranks_in_a_group_of_another_order() -> None:
    """As after a death: who is replaced comes last in the group, and keeps its rank."""

    def body(world: World) -> list[Any]:
        members = Membership.of(world.group)
        found: list[Any] = []
        for number, workers in enumerate([(1, 2, 0), (2, 0)]):
            if world.rank not in workers:
                return found
            store = PrefixStore(f"next {number}", world.group.get_group_store())
            group = gloo_group(store, workers.index(world.rank), len(workers), 60.0)
            members.leave()
            members.move_on(group, workers)
            rows = torch.full((world.rank + 1, 1), float(world.rank), requires_grad=True)
            gathered = world.gather(rows, grad=True)
            gathered[0].sum().backward()
            found += [gathered.flatten().tolist(), rows.grad.flatten().tolist()]
            found += [world.broadcast(world.rank, root=2), world.reduce(world.rank)]
            with pytest.raises(UsageError) if 1 not in workers else nullcontext() as caught:
                world.broadcast(world.rank, root=1)
            assert caught is None or "1" in str(caught.value)
        return found

    zero, one, two = run_ranks(3, body)
    rows = [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert zero == [rows, [3.0], 2, 3, [0.0, 2.0, 2.0, 2.0], [2.0], 2, 2]
    assert one == [rows, [0.0, 0.0], 2, 3]
    assert two == [rows, [0.0] * 3, 2, 3, [0.0, 2.0, 2.0, 2.0], [0.0] * 3, 2, 2]


def test_calls_that_do_not_belong_together_are_named_on_all_ranks() -> None:
    def body(world: World) -> None:
        with pytest.raises(DesyncError, match=r"rank 0 is at 'Comparing.*rank 1 at 'Gathering'"):
            world.reduce(1) if world.rank == 0 else world.gather(torch.ones(2))
        assert world.reduce(1) == 3, "they are in step"

    run_ranks(3, body)


@SIZES
def test_tensors_that_are_conjugate_views_are_gathered_as_their_values(size: int) -> None:
    def body(world: World) -> list[Tensor]:
        return all_gather(world.group, torch.tensor([1 + 2j, 3j * world.rank]).conj(), "Gathering")

    for gathered in run_ranks(size, body):
        assert [each.tolist() for each in gathered] == [[1 - 2j, -3j * r] for r in range(size)]
