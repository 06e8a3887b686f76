"""Islands on a GPU: packed there, copied while it computes, and equal afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import CLASSES, WIDTH, Rows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import Islands
from paceline.group.world import World
from paceline.islands import Outer
from paceline.run import Run, RunOptions
from paceline.testing import seeded
from tests.archipelago import run_islands


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("has_moved", [False, True])
def test_an_exchange_on_a_gpu_is_that_on_a_cpu(bits: Any, has_moved: bool) -> None:
    found = []
    for device in ("cpu", "cuda"):
        draw = torch.Generator().manual_seed(0)
        tensors = [torch.randn(size, generator=draw).to(device) for size in (1, 1500, 2_100_001)]
        outer = Outer(tensors, [], Islands(every=4, bits=bits))
        for step in (4, 8):
            sent = []
            for _ in range(2):
                for tensor in tensors:
                    tensor += torch.randn(len(tensor), generator=draw).to(device)
                sent.append(outer.begin(step, (0,)))
            host = [each.cpu() for each in sent]
            for tensor in tensors if has_moved else ():
                tensor += 1.0
            outer.finish((0,), [[2.0], [1.0]], [host[0], sent[1]], 1, has_moved=has_moved)
        found.append([tensor.cpu() for tensor in tensors])
    for one, other in zip(*found, strict=True):
        # A value between two steps of eight bits may be rounded to either.
        torch.testing.assert_close(one, other, rtol=0, atol=0.1 if bits == 8 else 1e-5)


@pytest.mark.parametrize("options", [{}, {"bits": 16, "delay": 2}, {"bits": 8, "fragments": 2}])
def test_islands_that_share_a_gpu_end_with_the_same_bits(options: dict[str, Any]) -> None:
    def island(world: World, at: str) -> list[Tensor]:
        net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))
        seeded(net).cuda()
        run = Run(
            net,
            torch.optim.AdamW(net.parameters(), lr=0.05),
            Rows(48),
            global_batch=8,
            epochs=2,
            world=world,
            options=RunOptions(
                islands=Islands(every=4, at=at, **options), progress="quiet", handle_signals=False
            ),
        )
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(cross_entropy(run.model(x.cuda()), y.cuda()))
        return [each.detach().cpu() for each in net.state_dict().values()]

    [first], [second] = run_islands(2, 1, island)
    assert all(map(torch.equal, first, second))
