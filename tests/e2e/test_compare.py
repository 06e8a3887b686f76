"""The comparison of the two engines: as a function and as a command."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.explain import compare as command
from paceline.explain.compare import compare

pytestmark = pytest.mark.usefixtures("_half_of_torch")

NAMES = ["bare", "DataParallel", "DataParallel, loss on replicas", "DistributedDataParallel"]


def made_here() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], object]:
    return nn.Linear(8, 4), (torch.rand(6, 8), torch.arange(6) % 4), F.cross_entropy


def test_every_engine_has_a_row_with_what_it_costs() -> None:
    module, batch, loss_fn = made_here()
    before = [param.clone() for param in module.parameters()]
    found = compare(module, batch, loss_fn, device_ids=["cpu:0", "cpu:1"], steps=2)  # type: ignore[arg-type]
    assert [row.name for row in found.rows] == NAMES
    assert [row.processes for row in found.rows] == [1, 1, 1, 2]
    assert all(row.step_s > 0 for row in found.rows)
    text = str(found)
    assert all(part in text for part in (*NAMES, "of bare", "1.00", "B on cpu", "Fastest here: "))
    assert max(map(len, text.splitlines())) <= 100
    assert all(param.grad is None for param in module.parameters())
    torch.testing.assert_close(list(module.parameters()), before)


class Two(nn.Module):
    """Takes two inputs and returns a container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.linear(a), "b": self.linear(b)}


def two_without_targets() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], None]:
    return Two(), (torch.rand(5, 3), torch.rand(5, 3)), None


def test_the_command_compares_what_it_is_told_to_with_or_without_targets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    target = f"{__name__}:two_without_targets"
    args = parser.parse_args([target, "--steps", "1", "--devices", "cpu:0,cpu:1,cpu:2"])
    assert command.main(args) == 0
    last = capsys.readouterr().out.splitlines()[-2].split()
    assert last[:2] == ["DistributedDataParallel", "3"]


def test_mistakes_are_answered() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(UsageError, match="cannot be imported"):
        command.main(parser.parse_args(["nowhere:nothing"]))
    with pytest.raises(UsageError, match="a pair of inputs and targets"):
        compare(nn.Linear(1, 1), torch.zeros(3, 1), F.mse_loss)
    for devices in ("gpu9", "cuda:9", "9"):
        with pytest.raises(UsageError, match=r"device_ids\[0\] is"):
            command.main(parser.parse_args(["--devices", devices]))
    with pytest.raises(UsageError, match="steps is 0"):
        compare(nn.Linear(1, 1), torch.zeros(3, 1), steps=0)
    with pytest.raises(UsageError, match="is not a module"):
        compare("linear", torch.zeros(3, 1))  # type: ignore[arg-type]
