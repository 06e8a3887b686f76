"""Mistakes that a run refuses before the first step, on every worker, instead of going wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import QUIET, Rows, Told, mlp, train
from sentences import says
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import default_collate

from paceline.checkpoint import Checkpoints
from paceline.ddp import DDPOptions
from paceline.errors import DesyncError, UsageError
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(net: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adam(net: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.1)


def sgd_in_two_groups(net: Any) -> torch.optim.Optimizer:
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def run_through(
    folder: Path | None,
    make_optimizer: MakeOptimizer = sgd,
    dataset: Any = None,
    make_scheduler: Callable[[Any], Any] | None = None,
    **arguments: Any,
) -> int:
    net = mlp()
    optimizer = make_optimizer(net)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    arguments = {"global_batch": 4, "epochs": 1, "options": QUIET, **arguments}
    data = Rows(16) if dataset is None else dataset
    run = Run(net, optimizer, data, folder=folder, scheduler=scheduler, **arguments)
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
    return run.step


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"folder": "run"}, "folder"),
        ({"options": RunOptions(progress="quiet", clip_norm=0.1)}, "clip_norm"),
        ({"options": RunOptions(progress="quiet", noise_every=1)}, "noise_every"),
        ({"options": RunOptions(progress="quiet", checkpoint_every=1)}, "checkpoint_every"),
        ({"options": RunOptions(progress="quiet", check_finite="off")}, "check_finite"),
        ({"lr": 0.5}, "settings of the optimizer"),
    ],
)
def test_what_only_one_worker_was_given_is_refused_by_all(
    mine: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "folder" in mine:
        mine = {"folder": tmp_path / "run"}

    def body(world: World) -> None:
        train(world, shards=2, **(mine if world.rank == 0 else {}))

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError), error
        assert "different arguments" in str(error)
        assert f"First difference: {message}" in str(error)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"make_optimizer": sgd}, {"make_optimizer": adam}, "optimizer.* 'SGD' "),
        ({"make_optimizer": adam}, {"make_optimizer": sgd}, "optimizer.* 'Adam' "),
        ({}, {"make_optimizer": sgd_in_two_groups}, "does not fit.* optimizer"),
        (
            {"make_scheduler": lambda optimizer: StepLR(optimizer, 2)},
            {"make_scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 8)},
            "scheduler.* 'StepLR' ",
        ),
    ],
)
def test_going_on_with_another_optimizer_or_scheduler_is_refused(
    before: dict[str, Any], after: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run_through(tmp_path / "run", **before)
    with pytest.raises(UsageError, match=message) as raised:
        run_through(tmp_path / "run", epochs=2, **after)
    assert raised.value.advice


def test_checkpoints_that_no_run_has_written_are_refused(tmp_path: Path) -> None:
    net = mlp()
    state = {"model": net.state_dict(), "optimizer": sgd(net).state_dict()}
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(3, state, facts={})
    with pytest.raises(UsageError, match="was not written by a Run"):
        run_through(tmp_path / "run")


def test_an_optimizer_that_computes_its_own_loss_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LBFGS calls.* model itself") as raised:
        run_through(None, lambda net: torch.optim.LBFGS(net.parameters()))
    assert raised.value.advice


def test_an_empty_dataset_is_refused_with_advice_that_fits() -> None:
    with pytest.raises(UsageError, match=r"dataset.* empty") as raised:
        run_through(None, dataset=torch.utils.data.TensorDataset(torch.empty(0)))
    assert "whole number" not in (raised.value.advice or "")


@pytest.mark.parametrize(
    "dataset",
    [
        torch.utils.data.DataLoader(Rows(16), 4),
        "rows.csv",
        {"train": Rows(16)},
        (torch.ones(16, 10), torch.ones(16)),  # two samples, of 16 rows each
        (row for row in Rows(16)),  # who reads it again, after a death, gets nothing
    ],
)
def test_what_has_batches_or_no_samples_is_not_a_dataset(dataset: Any) -> None:
    with pytest.raises(UsageError, match=type(dataset).__name__) as raised:
        run_through(None, dataset=dataset)
    assert ("loader=" in raised.value.advice) == isinstance(dataset, torch.utils.data.DataLoader)
    net = mlp()
    run = Run(net, sgd(net), Rows(16), global_batch=4, epochs=1, options=QUIET)
    with pytest.raises(UsageError, match=type(dataset).__name__):
        run.evaluate(lambda batch: {}, dataset)


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (RunOptions, "clip_nrm", "'clip_norm'"),
        (DDPOptions, "transprot", "'transport'"),
        (run_through, "num_workers", "'loader_workers'"),
        (run_through, "workers", "loader_workers="),
        (run_through, "clip_norm", "options=RunOptions(clip_norm=...)"),
        (run_through, "check_every", "ddp=DDPOptions(check_every=...)"),
    ],
)
def test_an_argument_that_does_not_exist_is_answered_with_what_was_meant(
    kind: Any, given: str, meant: str
) -> None:
    with pytest.raises(UsageError) as raised:
        kind(**({"folder": None} if kind is run_through else {}), **{given: 1})
    assert says(str(raised.value), repr(given), meant) or meant in raised.value.advice


def test_evaluate_answers_the_old_name_of_its_loading_processes() -> None:
    net = mlp()
    run = Run(net, sgd(net), Rows(16), global_batch=4, epochs=1, options=QUIET)
    with pytest.raises(UsageError, match="workers") as raised:
        run.evaluate(lambda batch: {}, workers=2)  # type: ignore[call-arg]
    assert "loader_workers=" in raised.value.advice


@pytest.mark.parametrize("use", ["batches", "joint", "backward"])
def test_a_step_without_its_block_is_answered_with_the_block(use: str) -> None:
    net = mlp()
    run = Run(net, sgd(net), Rows(16), global_batch=4, epochs=1, options=QUIET)
    step = next(iter(run))
    calls: dict[str, Callable[[], Any]] = {
        "batches": lambda: next(step.batches()),
        "joint": lambda: step.joint(net, torch.sum),
        "backward": lambda: step.backward(torch.ones((), requires_grad=True)),
    }
    with pytest.raises(UsageError, match=use) as raised:
        calls[use]()
    assert "`with step:`" in raised.value.advice


class Stream(torch.utils.data.IterableDataset[Any]):
    """So many samples, in so many passes; afterwards nothing, as a generator has nothing left."""

    def __init__(self, count: int, passes: int) -> None:
        self.count, self.passes = count, passes

    def __iter__(self) -> Iterator[Any]:
        self.passes -= 1
        yield from (Rows(16)[i] for i in range(self.count if self.passes >= 0 else 0))


@pytest.mark.parametrize(
    ("dataset", "drop_last", "message"),
    [
        (Stream(0, 1), False, "Epoch 1 .*no samples"),
        (Stream(8, 1), False, "Epoch 2 .*no samples"),
        (Stream(3, 9), True, "or too few to fill one"),
    ],
)
def test_a_stream_without_samples_is_refused(
    dataset: Stream, drop_last: bool, message: str
) -> None:
    options = RunOptions(progress="quiet", drop_last=drop_last)
    with pytest.raises(UsageError, match=message) as raised:
        run_through(None, dataset=dataset, epochs=2, options=options)
    assert raised.value.advice


class Exhausted(Rows):
    """Its sixth row comes from an iterator that is exhausted."""

    def __getitem__(self, index: int) -> Any:
        return next(iter([])) if index == 5 else super().__getitem__(index)


class ExhaustedTogether(Exhausted):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def collate_exhausted(rows: list[Any]) -> Any:
    return next(iter([])) if any(row[2] == 5 for row in rows) else default_collate(rows)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [(Exhausted(16), None), (ExhaustedTogether(16), None), (Rows(16), collate_exhausted)],
)
def test_a_dataset_that_raises_stop_iteration_is_refused_and_not_cut_short(
    dataset: Any, collate_fn: Any, processes: int
) -> None:
    options = RunOptions(progress="quiet", collate_fn=collate_fn)
    with pytest.raises(UsageError, match="StopIteration"):
        run_through(None, dataset=dataset, loader_workers=processes, options=options)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((8, 12), "Rank 0 has 4 samples, the last of the epoch, rank 1 4 samples"),
        ((8, 7), "Rank 0 has 4 samples, the last of the epoch, rank 1 3 samples"),
        ((4, 0), "Rank 0 has 4 samples, the last of the epoch, rank 1 0 samples"),
    ],
)
def test_streams_of_different_lengths_are_told_by_every_worker(
    counts: tuple[int, int], message: str
) -> None:
    def body(world: World) -> None:
        run_through(None, dataset=Stream(counts[world.rank], 9), world=world, shards=2)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError), error
        assert message in str(error)


def habits(
    habit: Callable[[Any, Any, Any], None],
    *,
    between: bool = False,
    size: int = 1,
    shards: int = 4,
) -> list[Any]:
    """What becomes of a run whose loop has a line more, in the block or behind it."""

    def body(world: World) -> int:
        net = mlp()
        optimizer = sgd(net)
        scheduler = StepLR(optimizer, 2)
        run = Run(
            net,
            optimizer,
            Rows(16),
            global_batch=8,
            epochs=1,
            shards=shards,
            scheduler=scheduler,
            world=world,
            options=QUIET,
        )
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
                    if not between:
                        habit(net, optimizer, scheduler)
            if between:
                habit(net, optimizer, scheduler)
        return run.step

    return run_ranks(size, body, return_exceptions=True)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("habit", "message"),
    [
        (lambda net, optimizer, _: optimizer.zero_grad(), "changed or cleared"),
        (
            lambda net, optimizer, _: optimizer.zero_grad(set_to_none=False),
            "changed or cleared",
        ),
        (
            lambda net, *_: torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
            "changed or cleared",
        ),
        (lambda net, optimizer, _: optimizer.step(), r"optimizer.step\(\) was called inside"),
    ],
)
def test_what_a_loop_for_torch_does_in_every_batch_is_refused(
    habit: Any, message: str, size: int, shards: int
) -> None:
    # A worker's last shard, which may be its only one, is no exception.
    for error in habits(habit, size=size, shards=shards):
        assert isinstance(error, UsageError), error
        assert re.search(message, str(error))
        assert error.advice


def test_a_scheduler_that_is_stepped_twice_is_refused() -> None:
    (error,) = habits(lambda net, optimizer, scheduler: scheduler.step(), between=True)
    assert isinstance(error, UsageError)
    assert "scheduler was stepped between two steps" in str(error)


def test_clearing_gradients_between_two_steps_does_no_harm() -> None:
    assert habits(lambda net, optimizer, _: optimizer.zero_grad(), between=True) == [2]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_the_run_does_not_weigh_is_refused(size: int) -> None:
    def body(world: World) -> None:
        net = mlp()
        run = Run(net, sgd(net), Rows(16), global_batch=8, epochs=1, shards=4, world=world)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    out = run.model(x)
                    out.square().mean().backward(retain_graph=True)
                    step.backward(F.cross_entropy(out, y))

    for error in run_ranks(size, body, return_exceptions=True):
        assert isinstance(error, UsageError), error
        assert says(str(error), "there are gradients that no step.backward() has computed")


@pytest.mark.parametrize("foreign", [False, True])
def test_parameters_of_a_group_that_is_added_in_mid_run_are_clipped_or_refused(
    foreign: bool,
) -> None:
    def train_with(added: int | None, seen: list[float]) -> Any:
        net: Any = mlp()
        optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
        group = {"params": nn.Linear(2, 2).parameters() if foreign else net[0].parameters()}
        if added == 0:
            optimizer.add_param_group(group)
        options = RunOptions(progress="quiet", clip_norm=1e-3)
        run = Run(net, optimizer, Rows(16), global_batch=8, epochs=2, options=options)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            seen.append(sum(float((p.grad**2).sum()) for p in net.parameters()) ** 0.5)
            if step.number == added:
                optimizer.add_param_group(group)

    norms: list[float] = []
    if foreign:
        with pytest.raises(UsageError, match="not the model's"):
            train_with(1, norms)
        return
    train_with(1, norms)
    assert norms[-1] == pytest.approx(1e-3, rel=1e-3)
    assert norms[0] > 1e-3, "the first layer was not trained yet"


def test_a_loss_that_reaches_no_parameter_of_the_model_is_refused() -> None:
    net, copy = mlp(), mlp()
    run = Run(net, sgd(net), Rows(8), global_batch=4, epochs=1, options=QUIET)

    def go_on() -> None:
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(copy(x), y))

    with pytest.raises(UsageError, match="Step 1"):
        go_on()
    assert run.step == 0


@pytest.mark.parametrize(("t_max", "is_told"), [(2, True), (8, False), (9, False)])
def test_a_cosine_that_rises_again_within_the_run_is_told(t_max: int, is_told: bool) -> None:
    told = Told()
    run_through(
        None,
        make_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, t_max),
        epochs=2,
        sinks=[told],
    )
    lines = [line for _, _, lines in told.of("start") for line in lines]
    assert any("T_max=8" in line for line in lines) == is_told
