"""`precision=` is the autocast loop that one would write by hand, at any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, QUIET, WIDTH, Rows, Told, assert_same, mlp, train
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.plan import Plan
from paceline.errors import UsageError
from paceline.run import Run, RunOptions
from paceline.run.updates import Precision
from paceline.testing import run_ranks, seeded

SHARDS = 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def by_hand(precision: str) -> tuple[dict[str, Tensor], float]:
    """What `train` does, as a loop for torch with autocast and a scaler; the scale at its end."""
    net, data = mlp(), Rows()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    plan = Plan(samples=len(data), global_batch=8, shards=SHARDS, epochs=2)
    for portion in plan.portions(0, 0, 1):
        optimizer.zero_grad()
        for shard in portion.shards:
            with torch.autocast("cpu", DTYPES[precision]):
                loss = F.cross_entropy(net(data.x[shard.indices]), data.y[shard.indices])
            part = loss * (len(shard.indices) / portion.samples)
            scaler.scale(part).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    return {name: each.clone() for name, each in net.state_dict().items()}, scaler.get_scale()


def options(precision: Any) -> RunOptions:
    return RunOptions(progress="quiet", precision=precision)


def make(net: nn.Module, precision: Any = "bf16", **arguments: Any) -> Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given: Any = {"global_batch": 8, "epochs": 1, "options": options(precision), **arguments}
    return Run(net, optimizer, Rows(16), **given)


@pytest.mark.parametrize("precision", DTYPES)
def test_a_run_is_the_loop_written_by_hand_at_any_number_of_workers(precision: str) -> None:
    expected, _ = by_hand(precision)
    how: Any = {"shards": SHARDS, "reduction": "mean", "options": options(precision)}
    assert_same(train(**how, weigh=False).parameters, expected, rtol=0, atol=0)
    for size in (2, 3, SHARDS + 1):  # the last has a worker without a shard
        for each in run_ranks(size, lambda world: train(world, **how, weigh=False).parameters):
            assert_same(each, expected, rtol=0, atol=1e-6)
    full = train(shards=SHARDS).parameters
    assert max(float((full[name] - expected[name]).abs().max()) for name in full) > 1e-4


def test_a_run_in_half_precision_continues_with_its_scale(tmp_path: Path) -> None:
    expected, scale = by_hand("fp16")
    how: Any = {"shards": SHARDS, "reduction": "mean", "weigh": False, "folder": tmp_path / "run"}
    train(**how, stop_after=5, options=options("fp16"))
    with pytest.raises(UsageError, match=r"precision.* 'fp16' there, 'bf16' here"):
        train(**how, options=options("bf16"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)  # what was saved counts
    got = train(**how, options=options("fp16"), scaler=scaler)
    assert_same(got.parameters, expected, rtol=0, atol=0)
    assert scaler.get_scale() == scale


class Asking(nn.Module):
    """Notes whether its forward and its backward pass ran under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.forward_in: set[torch.dtype] = set()
        self.backward_is_plain = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.forward_in.add(out.dtype)
        if out.requires_grad:
            out.register_hook(self.ask)  # type: ignore[no-untyped-call]
        return out

    def ask(self, _grad: Tensor) -> None:
        self.backward_is_plain &= not torch.is_autocast_enabled("cpu")


def test_autocast_holds_from_a_batch_to_its_backward_and_in_evaluations() -> None:
    net = Asking()
    run = make(net, shards=2, options=RunOptions(progress="quiet", precision="bf16"))
    for step in run:
        with step:
            batches = step.batches()  # held beyond the block
            x, y, _ = next(batches)
            with torch.autocast("cpu", torch.bfloat16):
                step.backward(F.cross_entropy(run.model(x), y))
            x, y, _ = next(batches)
            step.backward(F.cross_entropy(run.model(x), y))
        assert not torch.is_autocast_enabled("cpu")
    assert net.forward_in == {torch.bfloat16}
    assert net.backward_is_plain
    assert all(p.dtype == torch.float32 for p in net.parameters())
    net.forward_in.clear()
    run.evaluate(lambda batch: {"mean": run.model(batch[0]).mean()})
    assert net.forward_in == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


def test_numbers_in_16_bits_are_logged_with_all_their_digits() -> None:
    told = Told()
    run = make(mlp(), sinks=[told])
    for step in run:
        with step:
            for x, y, _ in step.batches():
                run.log("one", torch.ones((), dtype=torch.bfloat16), weight=1001)
                step.backward(F.cross_entropy(run.model(x), y))
    assert {report.sums["one"][0] for report in told.of("step")} == {1001.0}


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(x, training=True)


def go_through(run: Run) -> None:
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))


def test_an_operation_that_does_not_exist_in_16_bits_is_one_clear_error() -> None:
    net = seeded(nn.Sequential(nn.Linear(WIDTH, 8), Random(), nn.Linear(8, CLASSES)))
    run = make(net, "fp16")
    with pytest.raises(UsageError, match=r'precision="fp16" on cpu: "rrelu.*"') as raised:
        go_through(run)
    assert 'Use precision="bf16" or precision="fp32"' in raised.value.advice
    assert run.step == 0
    assert not torch.is_autocast_enabled("cpu")


def test_what_a_device_or_a_model_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'bf16', 'fp16'"):
        RunOptions(precision="float16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing to scale"):
        make(mlp(), "bf16", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match="parameters are float16"):
        make(mlp().half(), "fp16")
    with pytest.raises(UsageError, match="no autocast for meta"):
        Precision("bf16", torch.device("meta"), [])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(UsageError, match=r'Tesla T4 does not .*\nUse precision="fp16"'):
        Precision("bf16", torch.device("cuda:0"), [])


def test_a_scaler_of_the_scripts_own_goes_with_fp32_and_fp16() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for name in ("fp32", "fp16"):
        assert Precision(name, torch.device("cpu"), []).find_scaler(scaler) is scaler
    assert QUIET.precision == "fp32"
