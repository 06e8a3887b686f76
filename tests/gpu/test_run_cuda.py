"""`Run` on a GPU: the same training, numbers read late, a NaN found a step later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, QUIET, WIDTH, Rows, assert_same, train
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import NotFiniteError
from paceline.files.run_folder import RunFolder, read_events
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import run_processes, seeded

SHARDS = 4


def on_gpu() -> nn.Module:
    # Without a bias: before a BatchNorm its gradient is rounding alone, which AdamW would enlarge.
    first = nn.Linear(WIDTH, 16, bias=False)
    net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))
    return seeded(net).cuda()


def make(net: nn.Module, dataset: Any, *, is_fused: bool = False, **arguments: Any) -> Run:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=is_fused)
    arguments = {"global_batch": 8, "epochs": 1, "shards": 2, "options": QUIET, **arguments}
    return Run(net, optimizer, dataset, **arguments)


def share_gpu(world: World | None) -> dict[str, Tensor]:
    drop = RunOptions(progress="quiet", drop_last=True)
    trained = train(world, on_gpu, global_batch=16, shards=SHARDS, options=drop)
    return {name: each.cpu() for name, each in trained.parameters.items()}


NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (2, NCCL), (3, NCCL), (4, NCCL)])
def test_workers_that_share_a_gpu_train_as_one_does(size: int, backend: str) -> None:
    expected = share_gpu(None)
    for parameters in run_processes(size, share_gpu, backend=backend):
        assert_same(parameters, expected, rtol=1e-3, atol=1e-5)


def weigh_on_gpu(world: World | None, precision: Any) -> list[Tensor]:
    """Losses over other items than samples, in shards of which the last are short."""
    net = seeded(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    options = RunOptions(progress="quiet", precision=precision)
    how: dict[str, Any] = {"global_batch": 9, "epochs": 2, "shards": 4, "options": options}
    run = Run(net, optimizer, Rows(19), world=world, **how)
    for step in run:
        with step:
            for x, y, _ in step.batches():
                items = 1 + int(y.sum())
                step.backward(F.cross_entropy(run.model(x), y), items=items)
    return [param.detach().cpu() for param in net.parameters()]


@pytest.mark.parametrize("backend", ["gloo", NCCL])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weighted_losses_on_a_gpu_do_not_depend_on_the_workers(
    precision: Any, backend: str
) -> None:
    expected = weigh_on_gpu(None, precision)
    for found in run_processes(2, weigh_on_gpu, precision, backend=backend):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_dropout_on_the_device_follows_the_step_and_the_shard(tmp_path: Path) -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))
        return seeded(net).cuda()

    whole = train(build=build, shards=2)
    torch.randn(100, device="cuda")
    begun = train(build=build, shards=2, folder=tmp_path / "run", stop_after=5)
    torch.randn(100, device="cuda")
    ended = train(build=build, folder=tmp_path / "run", loader_workers=1)
    assert begun.ledger + ended.ledger == whole.ledger
    assert_same(ended.parameters, whole.parameters, rtol=0, atol=0)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_nan_is_found_later_and_spares_the_parameters(is_fused: bool) -> None:
    data = Rows()
    data.x[13] = float("nan")
    net = seeded(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES))).cuda()
    run = make(net, data, is_fused=is_fused)
    bad: list[int] = []

    def go_on() -> None:
        for step in run:
            with step:
                for x, y, indices in step.batches():
                    if 13 in indices.tolist():
                        bad.append(step.number)
                    step.backward(F.cross_entropy(run.model(x), y))

    with pytest.raises(NotFiniteError) as raised:
        go_on()
    assert f"Step {bad[0]}: the loss of shard" in str(raised.value)
    assert run.step <= bad[0] + 1
    assert all(param.isfinite().all() for param in net.parameters())


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    net = seeded(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES))).cuda()
    run = make(net, Rows(64), folder=tmp_path / "run", epochs=3)
    for step in run:
        # Reading a number from the device raises from here on; the end of an epoch may.
        is_strict = step.number > 4 and not step.ends_epoch
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        with step:
            for x, y, _ in step.batches():
                loss = F.cross_entropy(run.model(x), y, reduction="sum")
                step.backward(loss, items=len(y), reduction="sum")
                run.log("rows", y.float().mean(), weight=len(y))
    torch.cuda.set_sync_debug_mode("default")
    steps = [e for e in read_events(RunFolder(tmp_path / "run")) if e["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 25))
    assert all(event["metrics"]["loss"][1] == 8 for event in steps)


def test_half_precision_with_a_scaler_trains(tmp_path: Path) -> None:
    net = on_gpu()
    scaler = torch.amp.GradScaler("cuda")
    run = make(net, Rows(64), scaler=scaler, folder=tmp_path / "run")
    losses = []
    for step in run:
        with step:
            for x, y, _ in step.batches():
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.cross_entropy(run.model(x), y, reduction="sum")
                step.backward(loss, items=len(y), reduction="sum")
                losses.append(loss.item())
    assert run.step == 8
    other = torch.amp.GradScaler("cuda")
    assert make(on_gpu(), Rows(64), scaler=other, folder=tmp_path / "run").step == 8
    assert other.get_scale() == scaler.get_scale()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_is_one_option(precision: Any, tmp_path: Path) -> None:
    net = on_gpu()
    options = RunOptions(progress="quiet", precision=precision)
    run = make(net, Rows(64), options=options, folder=tmp_path / "run")
    dtypes = set()
    for step in run:
        with step:
            for x, y, _ in step.batches():
                out = run.model(x)
                dtypes.add(out.dtype)
                step.backward(F.cross_entropy(out, y))
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in net.parameters())
    assert make(on_gpu(), Rows(64), options=options, folder=tmp_path / "run").step == 8
