"""The number of workers changes the speed, never the mathematics."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, QUIET, WIDTH, Rows, Trained, assert_same, losses, mlp, train
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, ProcessGroup
from torch.nn import functional as F

from paceline import DataParallel, DistributedDataParallel, DistributedSampler
from paceline.ddp import DDPOptions
from paceline.errors import UsageError
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import assert_replicas_equal, run_ranks, seeded

SHARDS = 4


class Tied(nn.Module):
    """Embeds a bucketed row and reads it with the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        bucket = (x[:, 0] * 10).long() % CLASSES
        hidden = self.norm(self.inner(x + self.embedding(bucket)))
        return F.linear(hidden, self.embedding.weight)


class Sometimes(nn.Module):
    """Has a layer that only some rows use and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.never = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        if bool((x[:, 0] > 1.5).any()):
            out = out + self.rarely(x) * (x[:, :1] > 1.5)
        return out


def batch_norm() -> nn.Module:
    """Normalises over positions too, so that a shard of one row will do."""
    return seeded(
        nn.Sequential(
            *(nn.Linear(WIDTH, 8), nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()),
            *(nn.ReLU(), nn.Linear(8, CLASSES)),
        )
    )


MODELS = {
    "mlp": mlp,
    "tied": lambda: seeded(Tied()),
    "sometimes": lambda: seeded(Sometimes()),
    "batch norm": batch_norm,
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    return {name: train(build=build, shards=SHARDS) for name, build in MODELS.items()}


@pytest.mark.parametrize(
    ("name", "size"), [*product(MODELS, [2, 3]), ("mlp", 1), ("batch norm", 4)]
)
def test_losses_and_parameters_are_those_of_one_worker(
    size: int, name: str, alone: dict[str, Trained]
) -> None:
    workers = run_ranks(size, lambda world: train(world, MODELS[name], shards=SHARDS))
    expected = alone[name]
    assert losses(workers) == pytest.approx(losses([expected]), rel=1e-4)
    assert_same(workers[0].parameters, expected.parameters, rtol=1e-4, atol=1e-6)
    assert_replicas_equal([each.parameters for each in workers])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "global_batch"), [(50, 8), (17, 16), (12, 5)])
def test_every_sample_is_computed_once_per_epoch(size: int, count: int, global_batch: int) -> None:
    def body(world: World) -> Trained:
        return train(world, dataset=Rows(count), global_batch=global_batch, shards=SHARDS)

    workers = run_ranks(size, body)
    seen = Counter((epoch, index) for each in workers for epoch, _, index in each.ledger)
    assert seen == Counter((epoch, index) for epoch in (0, 1) for index in range(count))
    orders = [[i for e, _, i in workers[0].ledger if e == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def test_one_shard_per_worker_sees_what_a_distributed_sampler_deals() -> None:
    def body(world: World) -> tuple[list[int], list[int]]:
        sampler = DistributedSampler(Rows(48), world.size, world.rank, seed=5)
        mine = train(world, dataset=Rows(48), global_batch=6, epochs=1, seed=5)
        return [index for _, _, index in mine.ledger], list(sampler)

    for got, expected in run_ranks(3, body):
        assert got == expected


def test_a_worker_more_than_there_are_shards_has_nothing_to_do(alone: dict[str, Trained]) -> None:
    workers = run_ranks(5, lambda world: train(world, shards=SHARDS))
    assert workers[4].ledger == []
    assert_same(workers[4].parameters, alone["mlp"].parameters, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_weight_that_is_left_out_is_the_number_of_samples(
    size: int, alone: dict[str, Trained]
) -> None:
    workers = run_ranks(size, lambda world: train(world, shards=SHARDS, weigh=False))
    assert_same(workers[0].parameters, alone["mlp"].parameters, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_that_share_a_forward_pass_give_the_same_result(
    size: int, alone: dict[str, Trained]
) -> None:
    options = RunOptions(progress="quiet", merge_shards=True)
    workers = run_ranks(size, lambda world: train(world, shards=SHARDS, options=options))
    assert_same(workers[0].parameters, alone["mlp"].parameters, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wrapping", ["ours", "replicas", "torch's replicas"])
def test_a_model_may_be_wrapped_already(
    size: int, wrapping: str, alone: dict[str, Trained]
) -> None:
    def body(world: World) -> Trained:
        def build() -> nn.Module:
            net = mlp()
            if wrapping == "ours":
                return DistributedDataParallel(net, process_group=world.group)
            if wrapping == "replicas":
                return DataParallel(net, device_ids=["cpu:0"])
            return nn.DataParallel(net)

        return train(world, build, shards=SHARDS)

    for each in run_ranks(size, body):
        parameters = {name.removeprefix("module."): p for name, p in each.parameters.items()}
        assert_same(parameters, alone["mlp"].parameters, rtol=1e-4, atol=1e-6)


def make_with(net: nn.Module, world: World, ddp: DDPOptions | None = None) -> Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Run(
        net, optimizer, Rows(), global_batch=8, epochs=1, world=world, ddp=ddp, options=QUIET
    )


@pytest.mark.parametrize("size", [1, 2])
def test_options_of_the_engine_arrive_and_those_of_a_wrapper_stay(size: int) -> None:
    options = DDPOptions(check_every=3, transport="c10d")

    def body(world: World) -> None:
        run = make_with(mlp(), world, options)
        assert isinstance(run.model, DistributedDataParallel)
        assert run.model._ddp_options is options
        wrapped = DistributedDataParallel(mlp(), process_group=world.group, options=options)
        assert make_with(wrapped, world).model is wrapped
        with pytest.raises(UsageError, match="options of its own, and ddp= has others"):
            make_with(wrapped, world, DDPOptions())

    run_ranks(size, body)


def test_a_wrapper_over_another_group_is_refused() -> None:
    def body(world: World) -> None:
        alone = ProcessGroup(HashStore(), 0, 1)
        wrapped = DistributedDataParallel(mlp(), process_group=alone)
        with pytest.raises(UsageError, match=r"another process group than.* run's"):
            make_with(wrapped, world)

    run_ranks(2, body)


def tokens_step(model: nn.Module, run: Run, step: Any, reduction: str) -> None:
    """Class 0 stands for padding; the mean of a shard that is all padding is NaN."""
    with step:
        for x, y, _ in step.batches():
            loss = F.cross_entropy(model(x), y, ignore_index=0, reduction=reduction)
            step.backward(loss, items=(y > 0).sum(), reduction=reduction)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_weighted_accumulation_is_exact(size: int, reduction: str) -> None:
    """Against a loop without any of this: one worker, the whole batch, the mean over its tokens."""
    data, net = Rows(), mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    for start in range(0, len(data), 8):
        x, y = data.x[order[start : start + 8]], data.y[order[start : start + 8]]
        optimizer.zero_grad()
        F.cross_entropy(net(x)[y > 0], y[y > 0]).backward()
        optimizer.step()

    def body(world: World) -> dict[str, Tensor]:
        mine = mlp()
        run = Run(
            mine,
            torch.optim.SGD(mine.parameters(), lr=0.1),
            data,
            global_batch=8,
            epochs=1,
            shards=SHARDS,
            world=world,
            options=QUIET,
        )
        for step in run:
            tokens_step(run.model, run, step, reduction)
        return dict(mine.state_dict())

    for parameters in run_ranks(size, body):
        assert_same(parameters, dict(net.state_dict()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mean_is_exact_over_uneven_shards(size: int, alone: dict[str, Trained]) -> None:
    """As everybody writes it, with 8 samples in 3 shards, and 2 in the last step of an epoch."""

    def body(world: World) -> Trained:
        return train(world, shards=3, reduction="mean", weigh=False)

    workers = run_ranks(size, body)
    assert_same(workers[0].parameters, alone["mlp"].parameters, rtol=1e-4, atol=1e-6)
    assert losses(workers) == pytest.approx(losses([alone["mlp"]]), rel=1e-4)


def test_clipping_sees_the_whole_gradient() -> None:
    options = RunOptions(progress="quiet", clip_norm=0.05)
    expected = train(shards=SHARDS, options=options)
    workers = run_ranks(3, lambda world: train(world, shards=SHARDS, options=options))
    assert_same(workers[0].parameters, expected.parameters, rtol=1e-4, atol=1e-6)
    plain = train(shards=SHARDS)
    assert not torch.allclose(plain.parameters["0.weight"], expected.parameters["0.weight"])


def test_clipping_sees_sparse_gradients() -> None:
    rows = torch.arange(24).view(8, 3) % 5

    def body(world: World | None = None, *, is_sparse: bool = True) -> Tensor:
        table = seeded(nn.Embedding(5, 4, sparse=is_sparse))
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        options = RunOptions(progress="quiet", clip_norm=0.05)
        run = Run(table, optimizer, rows, global_batch=8, epochs=2, world=world, options=options)
        for step in run:
            with step:
                for batch in step.batches():
                    step.backward(run.model(batch).square().mean())
        return table.weight.detach()

    expected = body(is_sparse=False)
    for found in (body(), *run_ranks(2, body)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("first", "second", "third", "name"),
    [(3, 2, 1, "mlp"), (1, 4, 2, "batch norm"), (2, 5, 3, "batch norm")],
)
def test_a_run_that_was_stopped_in_mid_epoch_goes_on_at_another_size(
    first: int, second: int, third: int, name: str, tmp_path: Path, alone: dict[str, Trained]
) -> None:
    folder = tmp_path / "run"

    def begin(world: World) -> Trained:
        return train(world, MODELS[name], shards=SHARDS, folder=folder, stop_after=4)

    def middle(world: World) -> Trained:
        return train(world, MODELS[name], folder=folder, stop_after=9)

    def end(world: World) -> Trained:
        return train(world, MODELS[name], folder=folder)

    parts = [run_ranks(first, begin), run_ranks(second, middle), run_ranks(third, end)]
    steps = [sorted(each.losses) for each in (parts[0][0], parts[1][0], parts[2][0])]
    assert steps == [[1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    together = {step: loss for part in parts for step, loss in losses(part).items()}
    assert together == pytest.approx(losses([alone[name]]), rel=1e-4)
    assert_same(parts[2][0].parameters, alone[name].parameters, rtol=1e-4, atol=1e-6)
    assert_replicas_equal([each.parameters for each in parts[2]])
    seen = Counter((e, i) for part in parts for each in part for e, _, i in each.ledger)
    assert seen == Counter((epoch, index) for epoch in (0, 1) for index in range(50))


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_failed_after_some_of_its_shards_is_repeated_exactly(
    size: int, alone: dict[str, Trained]
) -> None:
    """What the shards before the error weighed must not weigh in the second attempt."""

    def body(world: World) -> dict[str, Tensor]:
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        run = Run(
            net, optimizer, Rows(), global_batch=8, epochs=2, shards=SHARDS, scheduler=scheduler,
            world=world, options=QUIET,
        )  # fmt: skip
        failures = 0
        for step in run:
            try:
                with step:
                    for number, (x, y, _) in enumerate(step.batches()):
                        if step.number == 2 and number == 1 and not failures:
                            raise ZeroDivisionError
                        step.backward(F.cross_entropy(run.model(x), y))
            except ZeroDivisionError:
                failures += 1
        assert failures == 1
        return dict(net.state_dict())

    for parameters in run_ranks(size, body):
        assert_same(parameters, alone["mlp"].parameters, rtol=1e-4, atol=1e-6)
