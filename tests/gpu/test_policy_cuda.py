"""The noise meter on a GPU: the same numbers, and the host never waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.policy import NoiseEstimate, NoiseMeter

ROWS = [7, 2, 5, 6]
STEPS = 6


def measure(device: str, *, scale: float = 1.0) -> NoiseEstimate | None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
    meter = NoiseMeter(model.parameters(), every=1)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(sum(ROWS), 6, generator=generator).to(device),
            torch.randint(3, (sum(ROWS),), generator=generator).to(device),
        )
        for _ in range(STEPS)
    ]
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for step, (x, y) in enumerate(batches):
            model.zero_grad()
            meter.begin(step)
            for x_part, y_part in zip(x.split(ROWS), y.split(ROWS), strict=True):
                loss = F.cross_entropy(model(x_part), y_part, reduction="sum")
                (loss * scale).backward()
                meter.add(len(y_part))
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= sum(ROWS)
            meter.end(scale=scale)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return meter.read(None)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_gpu_measures_what_a_cpu_measures_without_waiting(scale: float) -> None:
    there, here = measure("cuda", scale=scale), measure("cpu")
    assert there is not None
    assert here is not None
    assert there.noise_scale == pytest.approx(here.noise_scale, rel=1e-3)
    assert there.batch == sum(ROWS)
