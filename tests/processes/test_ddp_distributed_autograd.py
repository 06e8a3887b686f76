"""Gradients that `torch.distributed.autograd` keeps to itself are refused, not left local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd, rpc

from paceline import DistributedDataParallel, World
from paceline.errors import UsageError
from paceline.testing import run_processes


def train(world: World, folder: str) -> Any:
    """What raised with the forward pass inside a context, and outside; and a gradient without."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/{world.rank}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=world.group)
    rows = torch.full((1, 2), float(world.rank + 1))
    with autograd.context(), pytest.raises(UsageError, match=r"distributed\.autograd"):
        model(rows)
    output = model(rows)
    with autograd.context() as context, pytest.raises(RuntimeError):
        autograd.backward(context, [output.sum()])
    model(rows).sum().backward()
    rpc.shutdown()
    return model.module.weight.grad[0, 0].item()


@pytest.mark.skipif(not rpc.is_available(), reason="torch was built without RPC")
def test_a_context_of_distributed_autograd_is_refused(tmp_path: Path) -> None:
    assert run_processes(2, train, str(tmp_path)) == [1.5, 1.5]
