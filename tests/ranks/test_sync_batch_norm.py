"""SyncBatchNorm against plain BatchNorm on the whole batch, in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.ddp import DistributedDataParallel
from paceline.ddp.sync_batch_norm import SyncBatchNorm
from paceline.errors import PeerError, UsageError
from paceline.group.world import World
from paceline.testing import gradients, run_ranks, seeded

CHANNELS = 4
# Rows per rank: equal, uneven, one rank without any.
SPLITS = [[6], [3, 3], [5, 1], [4, 0], [2, 2, 2], [4, 1, 3], [0, 5, 2]]
SHAPES = {"rows": (), "sequence": (5,), "image": (3, 2), "volume": (2, 2, 3)}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def plain_norm(dims: int, **options: Any) -> _BatchNorm:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims]
    norm: _BatchNorm = kind(CHANNELS, dtype=torch.float64, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(random(CHANNELS, seed=1))
            norm.bias.copy_(random(CHANNELS, seed=2))
    return norm


def train(
    norm: Callable[[Tensor], Tensor], batch: Tensor, targets: Tensor, steps: int = 1
) -> tuple[Tensor, Tensor]:
    """Outputs and input gradients of a loss that is a sum over rows."""
    batch = batch.clone().requires_grad_()
    for _ in range(steps):
        output = norm(batch)
        (output * targets).sum().backward()
    assert batch.grad is not None
    return output.detach(), batch.grad


def summed(parts: list[Tensor | None]) -> Tensor | None:
    """What DistributedDataParallel makes of the gradients, up to a division."""
    present = [part for part in parts if part is not None]
    return torch.stack(present).sum(0) if present else None


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_everything_equals_plain_batch_norm_on_the_whole_batch(
    split: list[int], shape: tuple[int, ...]
) -> None:
    batch = random(sum(split), CHANNELS, *shape, seed=3) * 3 + 7
    targets = random(*batch.shape, seed=4)
    whole = plain_norm(batch.dim())
    expected = train(whole, batch, targets, steps=2)

    def body(world: World) -> Any:
        norm = SyncBatchNorm.convert_sync_batchnorm(plain_norm(batch.dim()), world.group)
        output, grad = train(
            norm, batch.split(split)[world.rank], targets.split(split)[world.rank], steps=2
        )
        return output, grad, norm.weight.grad, norm.bias.grad, norm.state_dict()

    outputs, grads, weight_grads, bias_grads, states = zip(
        *run_ranks(len(split), body), strict=True
    )
    torch.testing.assert_close(torch.cat(outputs), expected[0])
    torch.testing.assert_close(torch.cat(grads), expected[1])
    torch.testing.assert_close(summed(list(weight_grads)), whole.weight.grad)
    torch.testing.assert_close(summed(list(bias_grads)), whole.bias.grad)
    for state in states:
        torch.testing.assert_close(state, whole.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.5},
    ],
    ids=str,
)
def test_the_options_mean_what_they_mean_for_plain_batch_norm(options: dict[str, Any]) -> None:
    split = [4, 1, 3]
    batch, targets = random(8, CHANNELS, 3, seed=3), random(8, CHANNELS, 3, seed=4)
    whole = plain_norm(3, **options)
    expected = train(whole, batch, targets, steps=3)

    def body(world: World) -> Any:
        norm = SyncBatchNorm.convert_sync_batchnorm(plain_norm(3, **options), world.group)
        own = batch.split(split)[world.rank], targets.split(split)[world.rank]
        return *train(norm, *own, steps=3), norm.state_dict()

    outputs, grads, states = zip(*run_ranks(3, body), strict=True)
    torch.testing.assert_close((torch.cat(outputs), torch.cat(grads)), expected)
    for state in states:
        assert list(state) == list(whole.state_dict())
        torch.testing.assert_close(state, whole.state_dict())


def test_a_mean_far_from_zero_does_not_cost_the_variance_its_digits() -> None:
    # float32 holds numbers around 10,000 to a thousandth, and their squares only to eight.
    batch = (random(400, CHANNELS, seed=3) + 10_000).float()
    expected = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(batch.double()).float()

    def body(world: World) -> Tensor:
        norm = SyncBatchNorm(CHANNELS, process_group=world.group)
        return norm(batch[world.rank :: 2]).detach()

    for rank, output in enumerate(run_ranks(2, body)):
        torch.testing.assert_close(output, expected[rank::2], atol=5e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("module_dtype", ["same", "float32"])
def test_half_precision_is_as_close_as_plain_batch_norm_in_float32(
    dtype: torch.dtype, module_dtype: str
) -> None:
    batch = random(60, CHANNELS, 4, seed=3, dtype=dtype) * 2 + 1
    targets = random(60, CHANNELS, 4, seed=4, dtype=dtype)
    expected = train(plain_norm(3).float(), batch.float(), targets.float())

    def body(world: World) -> Any:
        norm = SyncBatchNorm.convert_sync_batchnorm(plain_norm(3), world.group)
        norm.to(dtype if module_dtype == "same" else torch.float32)
        output, grad = train(norm, batch[world.rank :: 2], targets[world.rank :: 2])
        assert output.dtype == grad.dtype == dtype
        assert norm.weight.grad is not None
        assert norm.weight.grad.dtype == norm.weight.dtype
        return output.float(), grad.float()

    precision = 8 * torch.finfo(dtype).eps
    for rank, (output, grad) in enumerate(run_ranks(2, body)):
        torch.testing.assert_close(output, expected[0][rank::2], atol=precision, rtol=precision)
        torch.testing.assert_close(grad, expected[1][rank::2], atol=precision, rtol=precision)


def test_channels_last_stays_channels_last() -> None:
    batch = random(4, CHANNELS, 3, 5).contiguous(memory_format=torch.channels_last)
    expected = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)(batch)

    def body(world: World) -> Tensor:
        norm = SyncBatchNorm(CHANNELS, process_group=world.group, dtype=torch.float64)
        output: Tensor = norm(batch[world.rank * 2 :][:2])
        assert output.is_contiguous(memory_format=torch.channels_last)
        return output.detach()

    torch.testing.assert_close(torch.cat(run_ranks(2, body)), expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_layer_used_twice_in_one_forward_equals_plain_batch_norm(size: int) -> None:
    batch, targets = random(6, CHANNELS, seed=3), random(6, CHANNELS, seed=4)
    whole = plain_norm(2)
    expected = train(lambda x: whole(whole(x).tanh()), batch, targets)

    def body(world: World) -> Any:
        norm = SyncBatchNorm.convert_sync_batchnorm(plain_norm(2), world.group)
        own = batch.chunk(size)[world.rank], targets.chunk(size)[world.rank]
        return *train(lambda x: norm(norm(x).tanh()), *own), norm.state_dict()

    outputs, grads, states = zip(*run_ranks(size, body), strict=True)
    torch.testing.assert_close((torch.cat(outputs), torch.cat(grads)), expected)
    for state in states:
        torch.testing.assert_close(state, whole.state_dict())


def test_a_frozen_layer_and_an_input_without_gradient_need_no_backward_of_theirs() -> None:
    def body(world: World) -> Tensor:
        norm = SyncBatchNorm(CHANNELS, process_group=world.group)
        norm.weight.requires_grad_(False)
        norm(random(3, CHANNELS, dtype=torch.float32)).sum().backward()
        assert norm.weight.grad is None
        assert norm.bias.grad is not None
        return norm.bias.grad

    for grad in run_ranks(2, body):
        torch.testing.assert_close(grad, torch.full((CHANNELS,), 3.0))


def test_a_batch_without_rows_anywhere_leaves_the_statistics_alone() -> None:
    def body(world: World) -> dict[str, Tensor]:
        norm = SyncBatchNorm(CHANNELS, process_group=world.group)
        empty = torch.zeros(0, CHANNELS, requires_grad=True)
        norm(empty).sum().backward()
        return norm.state_dict()

    for state in run_ranks(2, body):
        torch.testing.assert_close(state["running_mean"], torch.zeros(CHANNELS))
        torch.testing.assert_close(state["running_var"], torch.ones(CHANNELS))


@pytest.mark.parametrize("size", [1, 2])
def test_evaluation_normalises_alone_with_the_running_statistics(size: int) -> None:
    plain = plain_norm(2).eval()
    plain.running_mean = random(CHANNELS, seed=5)

    def body(world: World) -> None:
        norm = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), world.group)
        assert not norm.training
        if world.rank == 0:  # no other rank takes part
            batch = random(3, CHANNELS)
            torch.testing.assert_close(norm(batch), plain(batch))

    run_ranks(size, body)


def test_without_a_process_group_it_is_plain_batch_norm() -> None:
    batch = random(5, CHANNELS)
    norm, plain = SyncBatchNorm(CHANNELS, dtype=torch.float64), plain_norm(2, affine=False)
    torch.testing.assert_close(norm(batch), plain(batch))


def test_a_compiled_model_gives_the_same() -> None:
    batch = random(6, CHANNELS)
    expected = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(batch)

    def body(world: World) -> Tensor:
        norm = SyncBatchNorm(CHANNELS, process_group=world.group, dtype=torch.float64)
        model = nn.Sequential(nn.Identity(), norm)
        # One rank compiles: the other shows that both take part in the same collectives.
        run = torch.compile(model, backend="eager") if world.rank == 0 else model
        output: Tensor = run(batch[world.rank * 3 :][:3])
        return output.detach()

    torch.testing.assert_close(torch.cat(run_ranks(2, body)), expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_wrapped_model_trains_as_one_process_on_the_whole_batch(size: int) -> None:
    def model() -> nn.Module:
        layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
        return seeded(nn.Sequential(*layers)).double()

    batch = random(12, 4, seed=3)
    whole = model()
    whole(batch).tanh().square().mean().backward()

    def body(world: World) -> Any:
        converted = SyncBatchNorm.convert_sync_batchnorm(model(), world.group)
        # Every gradient in a bucket of its own, so that buckets leave between the statistics.
        wrapped = DistributedDataParallel(converted, process_group=world.group, bucket_cap_mb=1e-5)
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(batch.chunk(size)[world.rank]).tanh().square().mean().backward()
        return gradients(wrapped)

    for got in run_ranks(size, body):
        torch.testing.assert_close(got, gradients(whole))


class TestConverting:
    @staticmethod
    def model() -> nn.Sequential:
        shared = nn.BatchNorm1d(2)
        return nn.Sequential(
            nn.Linear(2, 2), shared, nn.Sequential(nn.BatchNorm1d(2, affine=False), shared)
        )

    def test_replaces_every_batch_norm_and_keeps_parameters_and_names(self) -> None:
        model = self.model()
        parameters, names = list(model.parameters()), list(model.state_dict())
        converted = SyncBatchNorm.convert_sync_batchnorm(model)
        assert converted is model
        assert list(map(id, model.parameters())) == list(map(id, parameters))
        assert list(model.state_dict()) == names
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        assert all(type(norm) is SyncBatchNorm for norm in norms)

    def test_keeps_a_shared_layer_shared(self) -> None:
        model = SyncBatchNorm.convert_sync_batchnorm(self.model())
        assert model[1] is model[2][1]  # type: ignore[index]

    def test_replaces_torchs_own(self) -> None:
        converted = SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3))
        assert type(converted) is SyncBatchNorm

    def test_leaves_other_normalisations_alone(self) -> None:
        norm = nn.InstanceNorm1d(3)
        assert SyncBatchNorm.convert_sync_batchnorm(norm) is norm

    def test_refuses_a_layer_that_does_not_know_its_channels(self) -> None:
        with pytest.raises(UsageError, match=r"'0'.* LazyBatchNorm1d"):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_it_is_a_batch_norm_to_code_that_asks() -> None:
    norm = SyncBatchNorm(3)
    assert isinstance(norm, _BatchNorm)
    assert isinstance(norm, nn.SyncBatchNorm)


def test_it_can_be_copied_and_pickled() -> None:
    norm = SyncBatchNorm(3)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        torch.testing.assert_close(twin.state_dict(), norm.state_dict())


@pytest.mark.parametrize("shape", [(3,), (3, 5), (2, 0)])
def test_an_input_of_the_wrong_shape_is_refused_before_anything_is_sent(
    shape: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match=r"2D input|made for 4"):
        SyncBatchNorm(CHANNELS)(torch.zeros(shape))


def test_a_rank_that_fails_is_named_to_those_that_wait_for_its_statistics() -> None:
    def body(world: World) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2))
        SyncBatchNorm.convert_sync_batchnorm(model, world.group)
        if world.rank == 1:
            raise KeyError("no such file")
        model(torch.ones(2, 2))

    first, second = run_ranks(2, body, return_exceptions=True)
    assert isinstance(second, KeyError)
    assert isinstance(first, PeerError)
    assert says(str(first), "batch statistics of '0'")
