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

THREE = ["cpu:0", "cpu:1", "cpu:2"]
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


def test_an_unknown_way_to_normalise_is_refused() -> None:
    with pytest.raises(UsageError, match="'first' or 'whole'"):
        DPOptions(batch_norm="all")  # type: ignore[arg-type]
