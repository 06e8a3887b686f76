"""A model of which every rank has a part is refused by name, before anything is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from paceline import DistributedDataParallel, Run, RunOptions
from paceline.ddp import NaiveEngine
from paceline.errors import UsageError
from paceline.group.world import World
from paceline.testing import run_processes
from tests.sentences import says


def refused(world: World) -> list[str]:
    """What a run, and the wrapper, say of it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(net, mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(8, 4))

    def error_of(make: Any) -> str:
        try:
            make()
        except UsageError as error:
            return str(error)
        return "not refused"

    def run(model: Any, *rest: Any, **given: Any) -> str:
        return error_of(lambda: Run(model, *rest, global_batch=4, epochs=1, **given))

    return [
        run(net, optimizer, data),
        run(net, optimizer, data, options=RunOptions(same_bits=True)),
        run(net, optimizer, data, engine=NaiveEngine),
        run({"net": (net, optimizer)}, data),
        error_of(lambda: DistributedDataParallel(net)),
    ]


def test_a_model_that_fully_shard_has_cut_is_refused_on_every_rank() -> None:
    for said in run_processes(2, refused):
        for text in said:
            assert says(text, "0.weight", "fully_shard", "update=", "shard_update"), text
