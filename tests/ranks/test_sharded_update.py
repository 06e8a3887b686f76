"""An update that is shared out gives the parameters, and the state, of one that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from zoo import CASES, Case, named, shard

from paceline import DDPOptions, DistributedDataParallel, World, shard_update
from paceline.testing import assert_replicas_equal, run_ranks

ROWS = 12
Make = Callable[[Any], optim.Optimizer]
FUSED, ROUGH = "fused momentum", {"mixed", "rough", "sparse"}
"""torch refuses it for sparse gradients, and in 16 bits leaves some of the momentum to chance."""

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: optim.SGD(params, lr=0.05),
    "momentum": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "fused momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
    "fused adamw": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: optim.Adadelta(params),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
    "asgd": lambda params: optim.ASGD(params, lr=0.01),
    "adafactor": lambda params: optim.Adafactor(params, lr=0.01),
}


def train(
    world: World, case: Case, make: Make, *, shards: bool, transport: str, steps: int = 3
) -> dict[str, Any]:
    """Parameters after some steps, and the optimizer's state."""
    options = DDPOptions(transport=transport)
    model = DistributedDataParallel(
        case.build(), process_group=world.group, bucket_cap_mb=1e-3, options=options
    )
    optimizer = make(model.parameters())
    if shards:
        shard_update(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = shard(case.batch(ROWS + step * 12), world.rank, world.size)
        case.loss(model, inputs).backward()
        optimizer.step()
    return {**params_of(model), **state_of(optimizer)}


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def state_of(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state, by parameter and name."""
    return {
        f"{number}: {key}": torch.as_tensor(value if value is not None else -1.0).clone()
        for number, state in sorted(optimizer.state_dict()["state"].items())
        for key, value in sorted(state.items())
    }


@pytest.mark.parametrize(
    ("case", "name", "size", "transport"),
    [
        *((case, "sgd" if "sparse" in case.traits else "adamw", 2, "auto") for case in CASES[::2]),
        *((case, FUSED, 3, "c10d") for case in CASES[::6] if not case.traits & ROUGH),
        *((named("dtypes mixed"), name, 3, "auto") for name in [*OPTIMIZERS][3::2]),
        *((named("tied weights"), name, 4, "auto") for name in [*OPTIMIZERS][::2]),
    ],
    ids=str,
)
def test_parameters_and_state_equal_those_of_the_whole_update_to_the_last_bit(
    case: Case, name: str, size: int, transport: str
) -> None:

    def body(world: World) -> list[dict[str, Any]]:
        make = OPTIMIZERS[name]
        return [
            train(world, case, make, shards=shards, transport=transport) for shards in (False, True)
        ]

    for whole, sharded in run_ranks(size, body):
        assert_replicas_equal([whole, sharded])
