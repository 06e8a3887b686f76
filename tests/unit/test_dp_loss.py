"""The loss on the replicas is the loss of the whole batch, however the batch is split."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.dp import DataParallel, DPOptions
from paceline.errors import UsageError
from paceline.testing import gradients, seeded

IGNORED = -100


def classifier() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))).double()


def cpus(count: int) -> list[str]:
    return [f"cpu:{number}" for number in range(count)]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (rows,), generator=generator)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "copied"])
def test_a_mean_over_uneven_chunks_is_the_mean_over_the_batch(
    replicas: int, rows: int, share: bool
) -> None:
    bare = classifier()
    options = DPOptions(share_parameters=share)
    model = DataParallel(classifier(), device_ids=cpus(replicas), options=options)
    x, y = batch(rows)
    expected = F.cross_entropy(bare(x), y)
    expected.backward()
    loss = model.backward(F.cross_entropy, x, y)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(bare))
    assert not loss.requires_grad


def test_a_weighted_split_is_exact_too() -> None:
    bare = classifier()
    model = DataParallel(classifier(), device_ids=cpus(3), split=[5, 1, 2])
    x, y = batch(11)
    F.cross_entropy(bare(x), y).backward()
    model.backward(F.cross_entropy, x, y)
    torch.testing.assert_close(gradients(model), gradients(bare))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tokens_are_counted_where_padding_is_uneven(reduction: str) -> None:
    bare, model = classifier(), DataParallel(classifier(), device_ids=cpus(3))
    x, y = batch(12)
    y[:3] = IGNORED  # the first chunk keeps one token of four
    y[8:] = IGNORED  # the last one none: its mean would be 0 / 0
    expected = F.cross_entropy(bare(x), y)
    expected.backward()
    loss = model.backward(
        lambda output, target: F.cross_entropy(output, target, reduction=reduction),
        x,
        y,
        reduction=reduction,  # type: ignore[arg-type]
        count=lambda target: (target != IGNORED).sum(),
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(bare))


WEIGHT = torch.tensor([1.0, 3.0, 0.5, 2.0, 10.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.cross_entropy,
        partial(F.cross_entropy, weight=WEIGHT),
        partial(F.cross_entropy, ignore_index=2, label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=2),
        partial(nn.NLLLoss(weight=WEIGHT, ignore_index=1)),
    ],
)
def test_torchs_losses_are_means_over_the_targets_that_they_count(loss_fn: Any) -> None:
    bare, model = classifier(), DataParallel(classifier(), device_ids=cpus(3))
    x, y = batch(11)
    if loss_fn is F.cross_entropy:
        y[:3] = IGNORED
    expected = loss_fn(bare(x), y)
    expected.backward()
    loss = model.backward(loss_fn, x, y)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(bare))


def test_probabilities_as_targets_are_a_mean_over_rows() -> None:
    bare, model = classifier(), DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(5)
    likely = F.one_hot(y, 5).double() * 0.8 + 0.04
    F.cross_entropy(bare(x), likely, weight=WEIGHT).backward()
    model.backward(nn.CrossEntropyLoss(weight=WEIGHT), x, likely)
    torch.testing.assert_close(gradients(model), gradients(bare))


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (nn.MSELoss(reduction="sum"), "mean"),
        (nn.CrossEntropyLoss(), "sum"),
        (F.mse_loss, "sum"),
        (partial(F.mse_loss, reduction="sum"), "mean"),
    ],
)
def test_a_loss_that_reduces_otherwise_than_said_is_refused(loss_fn: Any, reduction: Any) -> None:
    model = DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(5)
    with pytest.raises(UsageError, match=f"reduction='{reduction}'"):
        model.backward(loss_fn, x, y, reduction=reduction)


def test_sums_are_added_up() -> None:
    bare, model = classifier(), DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(5)
    expected = F.cross_entropy(bare(x), y, reduction="sum")
    expected.backward()
    loss = model.backward(
        lambda output, target: F.cross_entropy(output, target, reduction="sum"),
        x,
        y,
        reduction="sum",
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(bare))


def test_several_inputs_and_keywords_and_targets_in_containers_are_split() -> None:
    bilinear = seeded(nn.Bilinear(4, 4, 2)).double()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = bilinear

        def forward(self, a: Tensor, *, b: Tensor) -> dict[str, Tensor]:
            return {"out": self.body(a, b)}

    model = DataParallel(Named(), device_ids=cpus(2))
    a, _ = batch(5)
    target = {"y": a[:, :2]}

    def loss_fn(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output["out"], target["y"])

    loss = model.backward(loss_fn, (a,), target, {"b": a.flip(1)})
    torch.testing.assert_close(loss, loss_fn(model.module(a, b=a.flip(1)), target).detach())


def test_an_empty_batch_gives_gradients_of_zero() -> None:
    model = DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(3)
    model.backward(
        lambda output, target: F.cross_entropy(output, target, reduction="sum"), x[:0], y[:0]
    )
    assert all(grad is not None and not grad.any() for grad in gradients(model).values())


def test_unused_parameters_keep_no_gradient() -> None:
    class OnlyA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x)
            return out

    model = DataParallel(OnlyA(), cpus(2))
    model.backward(lambda output: output.mean(), torch.ones(4, 4))
    assert model.module.a.weight.grad is not None
    assert model.module.b.weight.grad is None


def test_autocast_holds_for_the_loss_too() -> None:
    model = DataParallel(classifier().float(), device_ids=cpus(2))
    x, y = batch(4)
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return F.cross_entropy(output.float(), target)

    with torch.autocast("cpu", torch.bfloat16):
        model.backward(loss_fn, x.float(), y)
    assert seen == [torch.bfloat16] * 2


def test_a_failed_replica_leaves_all_gradients_as_they_were() -> None:
    model = DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(4)
    model.backward(F.cross_entropy, x, y)
    before = gradients(model)
    with pytest.raises(IndexError):
        model.backward(F.cross_entropy, x, torch.tensor([0, 1, 2, 50]))
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
    model.backward(F.cross_entropy, x, y)
    doubled = {name: 2 * grad for name, grad in before.items() if grad is not None}
    torch.testing.assert_close(gradients(model), doubled)


def test_a_parameter_may_go_before_a_batch_too_small_for_all_replicas() -> None:
    module = classifier()
    module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    model = DataParallel(module, device_ids=cpus(3))
    x, y = batch(6)
    model.backward(F.cross_entropy, x, y)
    del module.extra
    model.zero_grad()
    model.backward(F.cross_entropy, x[:1], y[:1])
    assert all(grad is not None for grad in gradients(model).values())


def test_a_hook_may_call_the_model() -> None:
    model = DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(4)
    seen = []
    model.module[0].bias.register_hook(lambda grad: seen.append(model(x).shape))
    model.backward(F.cross_entropy, x, y)
    assert seen == [(4, 5)]


def test_targets_of_another_length_are_named() -> None:
    model = DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(4)
    with pytest.raises(UsageError, match=r"inputs\[0\] would .* but targets for 1"):
        model.backward(F.cross_entropy, x, y[:1])


def test_what_is_no_loss_is_refused() -> None:
    model = DataParallel(classifier(), device_ids=cpus(2))
    x, y = batch(4)
    with pytest.raises(UsageError, match=r"shape \(2, 5\), which.* not one number"):
        model.backward(lambda output, target: output, x, y)
    with pytest.raises(UsageError, match=r"returned 3\.0"):
        model.backward(lambda output, target: 3.0, x, y)
    with pytest.raises(UsageError, match="does not depend on any parameter"):
        model.backward(lambda output, target: output.detach().mean(), x, y)
    with pytest.raises(UsageError, match=r"reduction.* 'max'"):
        model.backward(F.cross_entropy, x, y, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"count returned a tensor of shape \(2,\)"):
        model.backward(F.cross_entropy, x, y, count=lambda target: target)
    with torch.no_grad(), pytest.raises(UsageError, match="gradients are switched off"):
        model.backward(F.cross_entropy, x, y)
    model.backward(F.cross_entropy, x, y)


class Gated(nn.Module):
    """Waits at a gate in the middle of its forward pass, while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.gate = threading.Event()
        self.arrived = threading.Event()
        self.gate.set()

    def forward(self, x: Tensor) -> Tensor:
        self.arrived.set()
        self.gate.wait(60)
        y: Tensor = self.norm(self.linear(x))
        return y


@pytest.mark.parametrize("batch_norm", ["first", "whole"])
def test_a_call_that_ctrl_c_interrupted_leaves_nothing_in_the_next_ones_gradients(
    batch_norm: Any,
) -> None:
    module = Gated()
    model = DataParallel(module, cpus(2), options=DPOptions(batch_norm=batch_norm))
    x = torch.rand(6, 3)

    def gradient() -> Tensor:
        module.zero_grad()
        model.backward(lambda output: output[:, 0].square().mean(), x)
        assert module.norm.weight.grad is not None
        return module.norm.weight.grad

    expected = gradient()
    module.gate.clear()
    module.arrived.clear()

    def interrupt() -> None:
        module.arrived.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        gradient()
    # The replicas of that call continue while the next one has already begun.
    opener = threading.Timer(0.1, module.gate.set)
    opener.start()
    torch.testing.assert_close(gradient(), expected)
    opener.join()


def test_targets_reach_the_loss_of_a_model_without_inputs() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    loss = DataParallel(Constant(), cpus(2)).backward(F.mse_loss, (), torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(loss, torch.tensor(5 / 3))
