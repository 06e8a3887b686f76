"""Weights travel between both kinds of DistributedDataParallel, DataParallel and the bare model."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel, load_weights
from paceline.group.world import World
from paceline.testing import run_processes, seeded


def build(seed: int) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), seed)


def load_train_and_save(world: World, source: str, folder: str) -> list[list[Tensor]]:
    """Once with torch's wrapper and once with ours; what each of them then holds."""
    found = []
    for wrap in (TorchDDP, DistributedDataParallel):
        model: Any = wrap(build(2))
        report = load_weights(model, source)
        assert len(report.loaded) == len(build(0).state_dict())
        model.eval()(torch.ones(2, 3)).sum().backward()
        if world.rank == 0:
            torch.save(model.state_dict(), Path(folder) / f"{wrap.__module__}.pth")
        found.append([value.detach().clone() for value in model.state_dict().values()])
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_file_from_data_parallel_loads_into_ddp_and_back(size: int, tmp_path: Path) -> None:
    source = build(1)
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "dp.pth")
    results = run_processes(size, load_train_and_save, str(tmp_path / "dp.pth"), str(tmp_path))
    for found in (each for by_wrapper in results for each in by_wrapper):
        assert all(map(torch.equal, found, source.state_dict().values()))
    files = [tmp_path / f"{wrap.__module__}.pth" for wrap in (TorchDDP, DistributedDataParallel)]
    for other, path in product((build(3), nn.DataParallel(build(4))), files):
        load_weights(other, path)
        assert all(map(torch.equal, other.state_dict().values(), source.state_dict().values()))
