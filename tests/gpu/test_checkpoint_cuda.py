"""Checkpoints of a model on a GPU: copied out in the step gap, through pinned memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from paceline import load_weights
from paceline.checkpoint import Checkpoints


def test_the_snapshot_holds_what_was_queued_before_it_and_nothing_after(tmp_path: Path) -> None:
    big = torch.zeros(64 * 2**20, device="cuda")
    strided = torch.arange(12.0, device="cuda").view(3, 4).t()
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            for _ in range(20):  # still running when save is called
                big.add_(0.05)
            checkpoints.save(step, {"big": big, "strided": strided, "cpu": torch.ones(3)}, facts={})
            big.fill_(-1)
            big.zero_()
            assert checkpoints._staging._buffer.is_pinned()
            found = checkpoints.load()
            assert found is not None
            torch.testing.assert_close(found.state["big"], torch.full_like(found.state["big"], 1.0))
            assert torch.equal(found.state["strided"], strided.cpu())


def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="cuda")).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    with Checkpoints(tmp_path) as checkpoints:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.save(1, state, facts={})
        found = checkpoints.load()
    assert found is not None
    other, another = build()
    load_weights(other, tmp_path)
    another.load_state_dict(found.state["optimizer"])
    for net, opt in ((model, optimizer), (other, another)):
        step(net, opt)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
