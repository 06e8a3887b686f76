"""Mistakes get an answer that says what, where and what to do, and the next call works."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from paceline.dp import DataParallel, DPOptions
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


class Function(nn.Module):
    """A module that does what it is told, with a parameter so that it can learn."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def parallel(function: Any, **kwargs: Any) -> DataParallel:
    return DataParallel(Function(function), TWO, **kwargs)


@pytest.mark.parametrize(
    ("device_ids", "message"),
    [
        (["cuda:0", "cuda:1"], r"device_ids\[0\].* 'cuda:0', but .* no such device"),
        ([0, 1], r"device_ids\[0\].* 0, but .* no such device\.\nIt has no accelerator"),
        ([-1], r"device_ids\[0\].* -1, but .* no such device"),
        (["cpu:0", "gpu"], r"device_ids\[1\].* 'gpu', but .* no such device"),
        (["cpu:0", "meta"], r"device_ids\[1\].* 'meta', but .* no such device"),
        ([], r"device_ids.* \[\], which.* not a list of devices"),
        ("cpu:0", "not a list"),
        ([None], r"device_ids\[0\].* None, but .* no such device"),
    ],
)
def test_devices_that_do_not_exist_are_refused(device_ids: Any, message: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has accelerators")
    with pytest.raises(DeviceError, match=message) as caught:
        DataParallel(nn.Linear(1, 1), device_ids=device_ids)
    assert caught.value.advice


def test_an_output_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"output_device.* 'nowhere'"):
        DataParallel(nn.Linear(1, 1), device_ids=TWO, output_device="nowhere")


@pytest.mark.parametrize(
    "split", [[1], [1, 2, 3], [0, 0], [-1, 2], [float("nan"), 1], "31", 2, [None, 1]]
)
def test_a_split_that_makes_no_sense_is_refused(split: Any) -> None:
    with pytest.raises(UsageError, match="split"):
        DataParallel(nn.Linear(1, 1), device_ids=TWO, split=split)


def test_parameters_that_are_elsewhere_are_named() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))
    model = DataParallel(module, device_ids=TWO)
    with pytest.raises(DeviceError, match=r"'1.weight'.* on meta, but .* on cpu:0") as caught:
        model(torch.zeros(4, 3))
    assert "(2, 3)" in str(caught.value)
    module[1] = nn.Linear(3, 2)
    assert model(torch.zeros(4, 3)).shape == (4, 2)


def test_buffers_that_are_elsewhere_are_named() -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("mask", torch.zeros(3, device="meta"))
    with pytest.raises(DeviceError, match=r"'mask'.* on meta"):
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


def test_a_model_that_calls_its_own_wrapper_is_refused_instead_of_waiting_forever() -> None:
    def again(_module: Any, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    model = parallel(again)
    with pytest.raises(UsageError, match="from inside one of its replicas"):
        model(torch.rand(4, 3))


def test_a_wrapper_inside_the_module_is_refused() -> None:
    inner = DataParallel(nn.Linear(3, 3), TWO)
    with pytest.raises(UsageError, match=r"'1'.* DataParallel itself"):
        DataParallel(nn.Sequential(nn.ReLU(), inner), TWO)(torch.rand(4, 3))


def test_a_layer_that_is_not_initialised_yet_is_refused_and_works_once_it_is() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model = DataParallel(module, TWO)
    with pytest.raises(UsageError, match=r"'0\.weight' has no shape yet"):
        model(torch.rand(4, 3))
    module(torch.rand(4, 3))
    assert model(torch.rand(4, 3)).shape == (4, 4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "make",
    [
        Tensor.to_sparse_coo,
        Tensor.to_sparse_csr,
        lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    ],
    ids=["sparse", "csr", "nested"],
)
def test_inputs_that_cannot_be_cut_are_named(make: Any) -> None:
    model = parallel(lambda _module, x: x)
    with pytest.raises(UsageError, match=r"inputs\[0\]"):
        model(make(torch.rand(4, 3)))
    assert model(torch.rand(4, 3)).shape == (4, 3)


def packed() -> PackedSequence:
    return pack_padded_sequence(torch.rand(4, 5, 3), torch.tensor([5, 4, 3, 2]), batch_first=True)


def test_packed_sequences_are_refused_as_inputs_and_as_outputs() -> None:
    model = parallel(lambda module, x: packed() if x.dim() == 2 else x)
    with pytest.raises(UsageError, match=r"inputs\[0\].* packed sequence"):
        model(packed())
    with pytest.raises(UsageError, match=r"output.* packed sequence"):
        model(torch.rand(4, 3))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DataParallel(lambda x: x, TWO), "module.* <function"),  # type: ignore[arg-type]
        (lambda: DataParallel(nn.Linear, TWO), r"module.* class Linear\.\n.*torch\.nn\.Module"),  # type: ignore[arg-type]
        (lambda: DataParallel(nn.Linear(3, 3), TWO, dim="a"), "dim.* 'a'"),  # type: ignore[arg-type]
        (lambda: DataParallel(nn.Linear(3, 3), TWO, dim=0.0), "dim.* 0.0"),  # type: ignore[arg-type]
        (lambda: DataParallel(nn.Linear(3, 3), TWO, options={}), "options.* {}"),  # type: ignore[arg-type]
        (lambda: DPOptions(cpu_threads=0), "cpu_threads.* 0"),
        (lambda: DPOptions(cpu_threads=1.5), "cpu_threads.* 1.5"),  # type: ignore[arg-type]
        (lambda: DPOptions(cpu_threads=True), "cpu_threads.* True"),
        (lambda: DPOptions(batch_norm="all"), "'first', 'whole'"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_make_no_sense_are_refused(build: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_that_do_not_reach_threads_are_refused_instead_of_giving_zeros(
    transform: Any,
) -> None:
    model = parallel(lambda module, x: (x * module.weight).square())
    with pytest.raises(UsageError, match=r"do not reach.* replicas"):
        transform(lambda x: model(x).sum())(torch.rand(4, 3))


def test_tangents_are_refused_too() -> None:
    model = parallel(lambda module, x: x * module.weight)
    with forward_ad.dual_level(), pytest.raises(UsageError, match=r"do not reach.* replicas"):
        model(forward_ad.make_dual(torch.rand(4, 3), torch.ones(4, 3)))
    assert model(torch.rand(4, 3)).shape == (4, 3)
