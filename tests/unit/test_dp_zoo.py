"""DataParallel on CPU replicas computes what the bare model computes, on the whole zoo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Case

from paceline.dp import DataParallel, DPOptions

each_case = pytest.mark.parametrize("case", CASES, ids=str)

# Three chunks of unequal sizes: 4, 4, 3.
REPLICAS = 3
ROWS = 11


def cpus(count: int) -> list[str]:
    return [f"cpu:{number}" for number in range(count)]


def dense_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.to_dense()
        for name, parameter in module.named_parameters()
    }


def tolerance(case: Case) -> dict[str, float]:
    return {"rtol": 0.05, "atol": 0.05} if "rough" in case.traits else {}


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.body = case, case.build()

    def forward(self, *inputs: Tensor) -> Any:
        return self.case.loss(self.body, inputs)


@pytest.mark.parametrize(
    ("case", "share"),
    [*((case, True) for case in CASES), *((case, False) for case in CASES[::3])],
    ids=str,
)
def test_losses_and_gradients_are_the_bare_models(case: Case, share: bool) -> None:
    bare, wrapped, on_replicas = case.build(), case.build(), WithLoss(case)
    options = DPOptions(share_parameters=share)
    model = DataParallel(wrapped, device_ids=cpus(REPLICAS), options=options)
    losses = DataParallel(on_replicas, device_ids=cpus(REPLICAS), options=options)
    inputs = case.batch(ROWS)
    for _ in range(2):  # the second time with replicas that were used before
        expected, loss = case.loss(bare, inputs), case.loss(model, inputs)
        expected.backward()
        loss.backward()
        total = losses.backward(lambda output: output, inputs)
        grads = dense_gradients(bare)
        torch.testing.assert_close(loss, expected, **tolerance(case))
        torch.testing.assert_close(total, expected.detach(), **tolerance(case))
        torch.testing.assert_close(dense_gradients(wrapped), grads, **tolerance(case))
        torch.testing.assert_close(dense_gradients(on_replicas.body), grads, **tolerance(case))


@each_case
def test_training_ends_with_the_bare_models_weights(case: Case) -> None:
    bare, wrapped = case.build(), case.build()
    model = DataParallel(wrapped, device_ids=cpus(2))
    for module, called in ((bare, bare), (wrapped, model)):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            case.loss(called, case.batch(6 + step)).backward()
            optimizer.step()
    torch.testing.assert_close(wrapped.state_dict(), bare.state_dict(), **tolerance(case))


@each_case
def test_evaluation_without_gradients_gives_the_same_loss(case: Case) -> None:
    if "inner" in case.traits:
        pytest.skip("this loss differentiates")
    bare, model = case.build().eval(), DataParallel(case.build(), device_ids=cpus(2)).eval()
    with torch.inference_mode():
        inputs = case.batch(ROWS)
        torch.testing.assert_close(
            case.loss(model, inputs), case.loss(bare, inputs), **tolerance(case)
        )
