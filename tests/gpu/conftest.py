"""Wakes the GPU before the first test: what the driver then opens stays open for good."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _awake_gpu() -> None:
    if torch.cuda.is_available():
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()
