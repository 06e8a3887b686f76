"""Mistakes get an answer that says what, where and what to do, and the next call works."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.dp import DataParallel
from paceline.errors import DeviceError, UsageError

TWO = ["cpu:0", "cpu:1"]


class Picky(nn.Module):
    """Fails on negative rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        if (x < 0).any():
            self.complain()
        return self.linear(x)

    def complain(self) -> None:
        raise ArithmeticError("negative rows")


@pytest.mark.parametrize(
    ("device_ids", "message"),
    [
        (["cuda:0", "cuda:1"], "has no cuda device"),
        ([0, 1], "has no accelerator"),
        (["cpu:0", "gpu"], r"device_ids\[1\] is 'gpu', which is not a device"),
        (["cpu:0", "meta"], "has no meta device"),
        ([], "device_ids is empty"),
        ("cpu:0", "not a list"),
        ([None], "not a device"),
    ],
)
def test_devices_that_do_not_exist_are_refused(device_ids: Any, message: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has accelerators")
    with pytest.raises(DeviceError, match=message) as caught:
        DataParallel(nn.Linear(1, 1), device_ids=device_ids)
    assert caught.value.advice


def test_an_output_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeviceError, match="output_device is 'nowhere'"):
        DataParallel(nn.Linear(1, 1), device_ids=TWO, output_device="nowhere")


@pytest.mark.parametrize("split", [[1], [1, 2, 3], [0, 0], [-1, 2], [float("nan"), 1]])
def test_a_split_that_makes_no_sense_is_refused(split: list[float]) -> None:
    with pytest.raises(UsageError, match="split"):
        DataParallel(nn.Linear(1, 1), device_ids=TWO, split=split)


def test_parameters_that_are_elsewhere_are_named() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))
    model = DataParallel(module, device_ids=TWO)
    with pytest.raises(DeviceError, match=r"'1.weight' is on meta, but .* on cpu:0") as caught:
        model(torch.zeros(4, 3))
    assert "(2, 3)" in str(caught.value)
    module[1] = nn.Linear(3, 2)
    assert model(torch.zeros(4, 3)).shape == (4, 2)


def test_buffers_that_are_elsewhere_are_named() -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("mask", torch.zeros(3, device="meta"))
    with pytest.raises(DeviceError, match="'mask' is on meta"):
        DataParallel(module, device_ids=TWO)(torch.zeros(4, 3))


@pytest.mark.parametrize("call", ["forward", "loss"])
def test_an_error_in_a_replica_keeps_its_type_and_traceback_and_names_the_device(call: str) -> None:
    model = DataParallel(Picky(), device_ids=TWO)
    rows = torch.ones(4, 3)
    rows[3] = -1
    calls = {"forward": lambda: model(rows), "loss": lambda: model.backward(Tensor.mean, rows)}
    with pytest.raises(ArithmeticError, match="negative rows") as caught:
        calls[call]()
    (note,) = caught.value.__notes__
    assert "Replica 1 of 2 on cpu:1" in note
    assert "(2, 3)" in note
    assert "complain" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert model(torch.ones(4, 3)).shape == (4, 2)


def test_when_several_replicas_fail_the_first_speaks() -> None:
    model = DataParallel(Picky(), device_ids=TWO)
    with pytest.raises(ArithmeticError) as caught:
        model(-torch.ones(4, 3))
    assert "Replica 0 of 2 on cpu:0" in caught.value.__notes__[0]


def test_bad_inputs_and_outputs_leave_the_model_usable() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return len(x)

    model = DataParallel(Odd(), device_ids=TWO)
    with pytest.raises(UsageError, match="nothing to split"):
        model("text")
    with pytest.raises(UsageError, match="output differs between replicas"):
        model(torch.zeros(3))
    assert model(torch.zeros(4)) == 2


def test_a_script_is_refused_with_advice() -> None:
    class Linear(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model = DataParallel(torch.jit.script(Linear()), device_ids=TWO)
    with pytest.raises(UsageError, match="compiled script"):
        model(torch.zeros(4))


def test_a_replica_may_exit_the_program() -> None:
    class Exits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        DataParallel(Exits(), device_ids=TWO)(torch.zeros(4))
