"""BatchNorm in replicas: torch's way by default, the bare module's by option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.dp import DataParallel, DPOptions
from paceline.errors import UsageError
from paceline.testing import seeded

TWO = ["cpu:0", "cpu:1"]
THREE = [*TWO, "cpu:2"]
WHOLE = DPOptions(batch_norm="whole")


def network(momentum: float | None = 0.1, affine: bool = True) -> nn.Module:
    return seeded(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum, affine=affine), nn.ReLU(),
            nn.Flatten(), nn.Linear(4 * 9, 6), nn.BatchNorm1d(6), nn.Linear(6, 2),
        )
    ).double()  # fmt: skip


def images(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, 5, 5, generator=generator, dtype=torch.float64)


def assert_same_training_state(model: nn.Module, bare: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), bare.state_dict())
    for (name, mine), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_by_default_each_replica_normalises_its_own_rows_and_the_first_keeps_statistics() -> None:
    bare, model = network(), DataParallel(network(), device_ids=THREE)
    chunks = images(8).chunk(3)
    first_only = copy.deepcopy(bare)
    for _ in range(2):
        output = model(images(8))
        expected = torch.cat([first_only(chunks[0]), *(copy.deepcopy(bare)(c) for c in chunks[1:])])
        torch.testing.assert_close(output, expected)
    torch.testing.assert_close(model.state_dict(), first_only.state_dict())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_whole_normalises_as_the_bare_module_does(momentum: float | None, affine: bool) -> None:
    bare = network(momentum, affine)
    model = DataParallel(copy.deepcopy(bare), device_ids=THREE, options=WHOLE)
    for rows in (7, 9):
        expected, output = bare(images(rows)), model(images(rows))
        torch.testing.assert_close(output, expected)
        expected.square().mean().backward()
        output.square().mean().backward()
    assert_same_training_state(model, bare)
    torch.testing.assert_close(model.eval()(images(4)), bare.eval()(images(4)))


def test_whole_works_with_the_loss_on_the_replicas() -> None:
    bare = network()
    model = DataParallel(copy.deepcopy(bare), device_ids=THREE, options=WHOLE)
    for rows in (7, 8):
        bare(images(rows)).square().mean().backward()
        model.backward(lambda output: output.square().mean(), images(rows))
    assert_same_training_state(model, bare)


def test_whole_supports_double_backward() -> None:
    results = []
    for model in (network(), DataParallel(network(), device_ids=THREE, options=WHOLE)):
        x = images(7).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), list(model.parameters())))
    torch.testing.assert_close(results[1], results[0])


def test_whole_computes_half_precision_in_float32() -> None:
    x = images(7).bfloat16()[:, :, 0, 0]
    norm = nn.BatchNorm1d(3)
    model = DataParallel(copy.deepcopy(norm), device_ids=THREE, options=WHOLE)
    assert model(x).dtype == torch.bfloat16
    torch.testing.assert_close(model(x), norm(x), rtol=0.02, atol=0.02)


class Sometimes(nn.Module):
    """Normalises in all replicas but the one whose rows are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Any:
        return x if x[0, 0] < 0 else self.norm(x)


def test_whole_says_which_replica_left_a_layer_out_and_works_again() -> None:
    model = DataParallel(Sometimes(), device_ids=THREE, options=WHOLE)
    rows = torch.ones(6, 3)
    rows[2:4] *= -1
    with pytest.raises(UsageError, match=r"waits in 'norm' for .* replica 1 on cpu:1"):
        model(rows)
    model(torch.rand(6, 3))


def test_whole_passes_on_the_error_of_a_replica_and_not_its_echo() -> None:
    class Fails(Sometimes):
        def forward(self, x: Tensor) -> Any:
            if x[0, 0] < 0:
                raise KeyError("mine")
            return self.norm(x)

    model = DataParallel(Fails(), device_ids=THREE, options=WHOLE)
    rows = torch.ones(6, 3)
    rows[4:] *= -1
    with pytest.raises(KeyError, match="mine"):
        model(rows)
    model(torch.rand(6, 3))


def whole(module: nn.Module, devices: list[str]) -> DataParallel:
    return DataParallel(module, devices, options=WHOLE)


def test_whole_uses_the_statistics_of_the_whole_batch_where_none_were_tracked() -> None:
    module = nn.BatchNorm1d(3, track_running_stats=False).eval()
    x = torch.rand(5, 3)
    torch.testing.assert_close(whole(module, TWO)(x), module(x))


def test_whole_takes_an_empty_batch_and_refuses_a_single_row_as_the_bare_module_does() -> None:
    model = whole(nn.BatchNorm2d(3), TWO)
    assert model(torch.rand(0, 3, 2, 2)).shape == (0, 3, 2, 2)
    assert model(torch.rand(4, 3, 2, 2)).shape == (4, 3, 2, 2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        whole(nn.BatchNorm1d(3), TWO)(torch.rand(1, 3))


def test_whole_continues_where_one_replica_has_no_rows_left_for_a_layer() -> None:
    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x[x[:, 0] > 0])
            return y

    module = Selects().double()
    x = torch.cat([torch.rand(3, 3) + 1, -torch.rand(3, 3), torch.rand(3, 3) + 1]).double()
    alone, together = (copy.deepcopy(module) for _ in range(2))
    expected = alone(x)
    output = whole(together, THREE)(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(together.norm.running_var, alone.norm.running_var)
    (output.square() * output).sum().backward()
    (expected.square() * expected).sum().backward()
    torch.testing.assert_close(together.norm.weight.grad, alone.norm.weight.grad)


@pytest.mark.parametrize("batch_norm", ["first", "whole"])
def test_statistics_are_kept_where_the_first_device_gets_no_rows(batch_norm: Any) -> None:
    norm = nn.BatchNorm1d(3)
    options = DPOptions(batch_norm=batch_norm)
    model = DataParallel(norm, TWO, split=[1, 9], options=options)
    alone = nn.BatchNorm1d(3)
    few, many = torch.rand(3, 3), torch.rand(30, 3)
    model(few)
    alone(few)
    torch.testing.assert_close(norm.running_mean, alone.running_mean)
    model(many)
    alone(many if batch_norm == "whole" else many[:3])
    torch.testing.assert_close(norm.running_var, alone.running_var)
    model.backward(lambda output: output.sum(), few)
    alone(few)
    torch.testing.assert_close(norm.running_var, alone.running_var)
    assert norm.num_batches_tracked == 3
