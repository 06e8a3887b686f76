"""The noise meter in training: the same estimate at any world size, and nothing disturbed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import DistributedDataParallel, World
from paceline.errors import UsageError
from paceline.files.run_folder import Event, RunFolder, read_events
from paceline.policy import NoiseEstimate, NoiseMeter
from paceline.policy.noise import from_shards
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks, seeded
from paceline.testing.ranks import gloo_group

ROWS = [7, 2, 5, 6]  # of each shard
STEPS = 6


def small() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), 0)


def shards_of(step: int) -> Sequence[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(ROWS), 6, generator=generator)
    y = torch.randint(3, (sum(ROWS),), generator=generator)
    return list(zip(x.split(ROWS), y.split(ROWS), strict=True))


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def expected_noise() -> float:
    """From each shard's gradient alone, without the meter."""
    signals, noises = [], []
    for step in range(STEPS):
        means = []
        for x, y in shards_of(step):
            model = small()
            (loss_sum(model, x, y) / len(y)).backward()
            means.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))  # type: ignore[union-attr]
        whole = sum(n * mean for n, mean in zip(ROWS, means, strict=True)) / sum(ROWS)
        weighted = sum(n * mean.square().sum() for n, mean in zip(ROWS, means, strict=True))
        signal, noise = from_shards(
            len(ROWS), sum(ROWS), float(weighted), float(whole.square().sum())
        )
        signals.append(signal)
        noises.append(noise)
    return sum(noises) / sum(signals)


def train(world: World) -> tuple[NoiseEstimate | None, list[Tensor]]:
    model = DistributedDataParallel(small(), process_group=world.group)
    meter = NoiseMeter(model.parameters(), every=1)
    for step in range(STEPS):
        model.zero_grad()
        meter.begin(step)
        mine = shards_of(step)[world.rank :: world.size]
        for number, (x, y) in enumerate(mine):
            with model.no_sync(enabled=number < len(mine) - 1), model.weighted(len(y)):
                loss_sum(model, x, y).backward()
            meter.add(len(y))
        meter.end()
    return meter.read(world.group), [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_world_size_measures_the_same_noise(size: int) -> None:
    for estimate, _ in run_ranks(size, train):
        assert estimate is not None
        assert estimate.noise_scale == pytest.approx(expected_noise(), rel=1e-4)
        assert estimate.batch == sum(ROWS)
        assert estimate.measurements == STEPS


def test_measuring_leaves_the_gradients_and_no_hooks_behind() -> None:
    model, measured = small(), small()
    meter = NoiseMeter(measured.parameters(), every=2)
    for step in range(3):
        meter.begin(step)
        assert meter.is_measuring == (step != 1)
        for x, y in shards_of(step):
            loss_sum(model, x, y).backward()
            loss_sum(measured, x, y).backward()
            meter.add(len(y))
        meter.end()
    for ours, theirs in zip(measured.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        assert not ours._backward_hooks


@pytest.mark.parametrize(("is_mean", "scale"), [(True, 1.0), (False, 1024.0), (True, 0.5)])
def test_mean_losses_and_scaled_losses_measure_the_same(is_mean: bool, scale: float) -> None:
    model = small()
    meter = NoiseMeter(model.parameters(), every=1)
    for step in range(STEPS):
        meter.begin(step)
        for x, y in shards_of(step):
            (loss_sum(model, x, y) * scale / (len(y) if is_mean else 1)).backward()
            meter.add(len(y), is_mean=is_mean)
        whole = small()
        for x, y in shards_of(step):
            (loss_sum(whole, x, y) * scale / sum(ROWS)).backward()
        for ours, averaged in zip(model.parameters(), whole.parameters(), strict=True):
            ours.grad = averaged.grad
        meter.end(scale=scale)
    estimate = meter.read(None)
    assert estimate is not None
    assert estimate.noise_scale == pytest.approx(expected_noise(), rel=1e-4)


def test_a_known_noise_scale_is_found() -> None:
    """Linear regression at w = 0: one row's gradient is -x(xw* + e), whose moments are known."""
    generator = torch.Generator().manual_seed(3)
    true = torch.tensor([0.6, -0.5, 0.4])
    weight = nn.Parameter(torch.zeros(3))
    meter = NoiseMeter([weight], every=1)
    meter.scale.horizon = math.inf
    estimate = None
    for step in range(2_000):
        meter.begin(step)
        weight.grad = None
        for rows in (1, 4, 11):
            x = torch.randn(rows, 3, generator=generator)
            y = x @ true + torch.randn(rows, generator=generator)
            (x @ weight - y).square().mul(0.5).sum().backward()
            meter.add(rows)
        assert weight.grad is not None
        weight.grad /= 16
        meter.end()
        if step % 20 == 19:
            estimate = meter.read(None)
    signal = true.square().sum().item()
    # E|x|^2 (x.w)^2 = (d + 2)|w|^2 and E|x|^2 e^2 = d for unit normal x of dimension d.
    noise = (3 + 2) * signal + 3 - signal
    assert estimate is not None
    assert estimate.noise_scale == pytest.approx(noise / signal, rel=0.1)


def test_one_shard_alone_has_nothing_to_compare_with() -> None:
    weight = nn.Parameter(torch.ones(3))
    meter = NoiseMeter([weight], every=1)
    for step in range(8):
        meter.begin(step)
        weight.square().sum().backward()
        meter.add(4)
        meter.end()
    assert meter.read(None) is None


def test_a_step_that_breaks_off_is_forgotten() -> None:
    weight = nn.Parameter(torch.ones(3))
    meter = NoiseMeter([weight], every=1)
    meter.begin(0)
    weight.square().sum().backward()
    meter.add(4)
    meter.cancel()
    assert not weight._backward_hooks
    meter.end()
    assert meter.read(None) is None


def test_a_gradient_that_comes_in_pieces_is_not_measured() -> None:
    weight = nn.Parameter(torch.ones(3))
    meter = NoiseMeter([weight], every=1)
    for step in range(8):
        meter.begin(step)
        for _ in range(2):
            weight.sum().backward()
            (2 * weight).sum().backward()
            meter.add(4)
        meter.end()
    assert meter.read(None) is None


def test_sparse_half_and_frozen_parameters_are_measured_or_left_out() -> None:
    table = nn.Embedding(9, 4, sparse=True)
    half = nn.Parameter(torch.full((4,), 200.0, dtype=torch.float16))
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    meter = NoiseMeter([*table.parameters(), half, frozen], every=1)
    for step in range(6):
        meter.begin(step)
        for index in (1, 2):
            (table(torch.tensor([index, index])).sum() + (half * 300).sum()).backward()
            meter.add(2)
        meter.end()
        table.weight.grad = half.grad = None
    estimate = meter.read(None)
    assert estimate is not None
    assert math.isfinite(estimate.noise_scale)


def test_a_meter_that_never_measures_is_refused() -> None:
    with pytest.raises(UsageError, match=r"every.* 0"):
        NoiseMeter([], every=0)


def noise_of_a_run(
    world: World, folder: str, shards: int | None = 4, stop_after: int = 0, goes_to: int = 0
) -> None:
    """`stop_after` a step, or then go on as `goes_to` ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(75, 6, generator=generator)
    data = TensorDataset(x, torch.randint(3, (75,), generator=generator))
    net = small()
    run = Run(
        net,
        torch.optim.SGD(net.parameters(), lr=0.05),
        data,
        global_batch=15,
        epochs=2,
        shards=shards,
        folder=folder,
        world=world,
        options=RunOptions(noise_every=1, progress="quiet", handle_signals=False),
    )
    for step in run:
        with step:
            for x_part, y_part in step.batches():
                loss = loss_sum(run.model, x_part, y_part)
                step.backward(loss, items=len(y_part), reduction="sum")
        if step.number == stop_after:
            if not goes_to:
                run.save()
            if world.rank >= goes_to:
                break
            store = PrefixStore("next", world.group.get_group_store())
            run.membership.move_on(gloo_group(store, world.rank, goes_to, 60.0))


def noises_in(folder: Path) -> list[Event]:
    return [event for event in read_events(RunFolder(folder)) if event["kind"] == "noise"]


def test_a_run_measures_the_same_noise_with_any_number_of_workers(tmp_path: Path) -> None:
    found = []
    for size in (1, 2, 3):
        folder = tmp_path / str(size)
        run_ranks(size, noise_of_a_run, str(folder))
        events = noises_in(folder)
        assert [event["step"] for event in events] == [5, 10]
        found.append([event["noise_scale"] for event in events])
    assert found[0][-1] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[2] == pytest.approx(found[0], rel=1e-3)


def test_noise_is_measured_where_the_shards_of_a_run_become_more(tmp_path: Path) -> None:
    """A worker that joins later knows nothing of a time when there was nothing to measure."""
    run_ranks(1, noise_of_a_run, str(tmp_path), None, 2)
    run_ranks(3, noise_of_a_run, str(tmp_path), None)
    assert noises_in(tmp_path)


def test_measurements_in_which_workers_had_a_part_that_are_gone_do_not_count(
    tmp_path: Path,
) -> None:
    run_ranks(3, noise_of_a_run, str(tmp_path), 6, 4, 2)
    assert [event["step"] for event in noises_in(tmp_path)] == [10]  # not of 4 steps and one
