"""DataParallel on one GPU: against the bare model and against torch's class, without waiting."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CASES, Case

from paceline.dp import DataParallel, DPOptions
from paceline.errors import DeviceError
from paceline.group import tree

each_case = pytest.mark.parametrize("case", CASES, ids=str)
ROWS = 11


@pytest.fixture(scope="module", autouse=True)
def _torchs_sockets() -> None:
    """torch's class sets up NCCL, whose sockets stay open for good."""
    model = nn.DataParallel(nn.Linear(2, 2).cuda(), [0, 0])
    model(torch.ones(4, 2, device="cuda")).sum().backward()


@pytest.fixture(autouse=True)
def _exact_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def on_gpu(value: Any) -> Any:
    return tree.map_tensors(lambda tensor: tensor.cuda(), value)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.to_dense() for n, p in module.named_parameters()}


def close(case: Case) -> dict[str, float]:
    is_rough = "rough" in case.traits
    return {"rtol": 0.05, "atol": 0.05} if is_rough else {"rtol": 1e-4, "atol": 1e-5}


class WithLoss(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.body = case, case.build()

    def forward(self, *inputs: Tensor) -> Any:
        return self.case.loss(self.body, inputs)


@each_case
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "copied"])
def test_losses_gradients_and_buffers_are_the_bare_models(
    case: Case, replicas: int, share: bool
) -> None:
    bare, wrapped, on_replicas = case.build().cuda(), case.build().cuda(), WithLoss(case).cuda()
    inputs = on_gpu(case.batch(ROWS))
    options = DPOptions(share_parameters=share)
    model = DataParallel(wrapped, [0] * replicas, options=options)
    losses = DataParallel(on_replicas, [0] * replicas, options=options)
    for _ in range(2):
        expected, loss = case.loss(bare, inputs), case.loss(model, inputs)
        expected.backward()
        loss.backward()
        total = losses.backward(lambda output: output, inputs)
        torch.testing.assert_close(loss, expected, **close(case))
        torch.testing.assert_close(total, expected.detach(), **close(case))
        torch.testing.assert_close(gradients(wrapped), gradients(bare), **close(case))
        torch.testing.assert_close(gradients(on_replicas.body), gradients(bare), **close(case))
    torch.testing.assert_close(wrapped.state_dict(), bare.state_dict())


# What torch's replicas cannot do: hold complex or empty parameters, or let them be listed.
@each_case
@pytest.mark.parametrize("replicas", [2, 4])
def test_losses_and_gradients_are_those_of_torchs_class(case: Case, replicas: int) -> None:
    theirs, ours = case.build().cuda(), case.build().cuda()
    inputs = on_gpu(case.batch(ROWS))
    try:
        expected = case.loss(nn.DataParallel(theirs, [0] * replicas), inputs)
        expected.backward()
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        pytest.skip(f"torch's class cannot: {str(error).splitlines()[-1][:80]}")
    loss = case.loss(DataParallel(ours, [0] * replicas), inputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, **close(case))
    torch.testing.assert_close(_zeros_for_none(ours), _zeros_for_none(theirs), **close(case))


def _zeros_for_none(module: nn.Module) -> dict[str, Tensor]:
    """torch's class gives unused parameters a gradient of zeros."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Flatten(), nn.Linear(8 * 16, 4),
    ).cuda()  # fmt: skip


def images(rows: int = 9) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("replicas", [2, 4])
def test_batch_norm_buffers_are_those_of_torchs_class(replicas: int) -> None:
    module = network()
    theirs = nn.DataParallel(copy.deepcopy(module), [0] * replicas)
    ours = DataParallel(module, [0] * replicas)
    for _ in range(3):
        torch.testing.assert_close(ours(images()), theirs(images()))
    torch.testing.assert_close(ours.state_dict(), theirs.module.state_dict())


def test_batch_norm_of_the_whole_batch_is_the_bare_models() -> None:
    bare, module = network(), network()
    model = DataParallel(module, [0, 0], options=DPOptions(batch_norm="whole"))
    for _ in range(2):
        bare(images()).square().mean().backward()
        model(images()).square().mean().backward()
        bare(images()).square().mean().backward()
        model.backward(lambda output: output.square().mean(), images())
    torch.testing.assert_close(module.state_dict(), bare.state_dict(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(module), gradients(bare), rtol=1e-3, atol=1e-4)


def test_a_step_never_waits_for_the_device() -> None:
    module = network()
    module[4].momentum = 0.1  # a cumulative average makes torch's own layer wait
    model = DataParallel(module, [0, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = images(), torch.arange(9, device="cuda") % 4

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.backward(F.cross_entropy, x, y, count=lambda target: (target >= 0).sum())
        optimizer.step()

    for _ in range(8):
        step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_gpu_and_the_cpu_can_share_a_batch() -> None:
    bare, module = network().eval(), network().eval()
    model = DataParallel(module, ["cuda:0", "cpu:0", "cuda:0"], split=[3, 1, 1])
    for _ in range(2):
        expected, output = bare(images(10)), model(images(10))
        assert output.is_cuda
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        expected.square().mean().backward()
        output.square().mean().backward()
        bare(images(7)).square().mean().backward()
        model.backward(lambda output: output.square().mean(), images(7))
        with torch.no_grad():
            for each in (bare, module):
                for param in each.parameters():
                    param.sub_(0.01)
    torch.testing.assert_close(gradients(module), gradients(bare), rtol=1e-3, atol=1e-4)


def test_gradients_of_gradients_cross_devices() -> None:
    results = []
    for model in (network().eval(), DataParallel(network().eval(), ["cuda:0", "cpu:0"])):
        x = images(6).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), list(model.parameters())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


def test_inputs_on_the_cpu_are_brought_to_the_replicas() -> None:
    model = DataParallel(network(), [0, 0]).eval()
    batch = images(8)
    torch.testing.assert_close(model(batch.cpu().pin_memory()), model(batch))


def test_the_callers_stream_is_the_replicas_stream() -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.cuda.current_stream())
            return x * 2

    stream = torch.cuda.Stream()
    for devices in ([0, 0], ["cuda:0", "cpu:0"]):
        with torch.cuda.stream(stream):
            DataParallel(Look(), devices)(torch.ones(4, device="cuda"))
    stream.synchronize()
    assert [each == stream for each in seen[:3]] == [True, True, True]


def test_autocast_holds_on_the_gpu() -> None:
    model = DataParallel(nn.Linear(4, 4).cuda(), [0, 0])
    with torch.autocast("cuda", torch.bfloat16):
        assert model(torch.ones(4, 4, device="cuda")).dtype == torch.bfloat16


def test_recurrent_layers_that_flatten_their_weights_work() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            self.lstm.flatten_parameters()
            out: Tensor = self.lstm(x)[0]
            return out

    torch.manual_seed(0)
    bare = Recurrent().cuda()
    for share in (True, False):
        module = copy.deepcopy(bare)
        model = DataParallel(module, [0, 0, 0], options=DPOptions(share_parameters=share))
        x = torch.randn(7, 5, 4, device="cuda")
        bare.zero_grad()
        bare(x).square().mean().backward()
        model(x).square().mean().backward()
        torch.testing.assert_close(gradients(module), gradients(bare), rtol=1e-3, atol=1e-5)
        model.zero_grad()
        model.backward(lambda output: output.square().mean(), x)
        torch.testing.assert_close(gradients(module), gradients(bare), rtol=1e-3, atol=1e-5)


def test_the_same_batch_gives_the_same_bits_every_time() -> None:
    runs = []
    for _ in range(2):
        model = DataParallel(network(), [0, 0, 0, 0])
        model(images(11)).square().mean().backward()
        model.backward(lambda output: output.square().mean(), images(11))
        runs.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_memory_is_not_above_that_of_torchs_class_and_does_not_grow() -> None:
    def peak(wrap: Any, on_replicas: bool = False) -> int:
        gc.collect()
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda())
        x = torch.randn(64, 1024, device="cuda")
        after = []
        for _ in range(8):
            torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            if on_replicas:
                model.backward(lambda output: output.square().mean(), x)
            else:
                model(x).square().mean().backward()
            after.append(torch.cuda.memory_allocated())
        assert after[-1] == after[-3]
        return torch.cuda.max_memory_allocated()

    theirs = peak(lambda module: nn.DataParallel(module, [0, 0]))
    assert peak(lambda module: DataParallel(module, [0, 0])) <= theirs
    assert peak(lambda module: DataParallel(module, [0, 0]), on_replicas=True) <= theirs


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"device_ids\[1\].* 99, but .* no such device"):
        DataParallel(nn.Linear(1, 1), [0, 99])


def test_parameters_left_on_the_cpu_are_named() -> None:
    model = DataParallel(nn.Linear(3, 2), [0, 0])
    with pytest.raises(DeviceError, match=r"'weight'.* on cpu, but .* on cuda:0"):
        model(torch.zeros(4, 3))
    assert model.cuda()(torch.zeros(4, 3)).shape == (4, 2)


def test_a_single_gpu_takes_the_module_there() -> None:
    model = DataParallel(nn.Linear(3, 2))
    assert model.module.weight.is_cuda
    assert model(torch.zeros(4, 3)).shape == (4, 2)
