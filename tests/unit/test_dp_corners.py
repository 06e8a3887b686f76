"""Where data parallelism in one process used to go wrong: calls broken off, buffers that appear
late, inputs and outputs that only look as if they could be cut and joined."""

from __future__ import annotations

import copy
import os
import signal
import threading
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from paceline.ddp import DDPOptions
from paceline.dp import DataParallel, DPOptions
from paceline.errors import UsageError

TWO = ["cpu:0", "cpu:1"]


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
        self.gate.wait(20)
        y: Tensor = self.norm(self.linear(x))
        return y


@pytest.mark.parametrize("batch_norm", ["first", "whole"])
def test_a_call_that_ctrl_c_broke_off_leaves_nothing_in_the_next_ones_gradients(
    batch_norm: Any,
) -> None:
    module = Gated()
    model = DataParallel(module, TWO, options=DPOptions(batch_norm=batch_norm))
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
        module.arrived.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        gradient()
    # The replicas of that call go on while the next one has already begun.
    opener = threading.Timer(0.1, module.gate.set)
    opener.start()
    torch.testing.assert_close(gradient(), expected)
    opener.join()


def test_buffers_registered_in_forward_are_the_first_replicas() -> None:
    together = threading.Barrier(2, timeout=20)

    class Caches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "seen"):
                together.wait()  # both have looked before either registers
                self.register_buffer("seen", x[:1].clone())
            return x - self.seen

    module = Caches()
    x = torch.arange(4.0).reshape(4, 1)
    output = DataParallel(module, TWO)(x)
    assert output.flatten().tolist() == [0, 1, 0, 1]
    assert torch.equal(module.seen, x[:1])


def test_buffers_registered_after_the_first_call_are_written_to_once() -> None:
    def count(module: Any, x: Tensor) -> Tensor:
        if hasattr(module, "calls"):
            module.calls += 1
        return x

    model = parallel(count)
    model(torch.rand(4, 3))
    model.module.register_buffer("calls", torch.zeros(()))
    model(torch.rand(4, 3))
    assert model.module.calls == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("convert", [Tensor.to_sparse_coo, Tensor.to_sparse_csr])
@pytest.mark.parametrize("training", [True, False])
def test_sparse_buffers_are_copied(convert: Any, training: bool) -> None:
    model = parallel(lambda module, x: (module.graph @ (x * module.weight).T).T)
    model.module.register_buffer("graph", convert(torch.eye(3) * 2))
    model.train(training)
    x = torch.rand(4, 3)
    for _ in range(2):
        torch.testing.assert_close(model(x), 2 * x)


def test_a_method_that_replaces_forward_later_runs_on_the_replicas() -> None:
    model = parallel(lambda module, x: x)
    model(torch.rand(4, 3))

    def forward(self: Any, x: Tensor) -> Tensor:
        self.scratch = x
        return self.scratch * 2

    model.module.forward = MethodType(forward, model.module)
    model(torch.rand(4, 3))
    assert not hasattr(model.module, "scratch")


def test_a_model_that_calls_its_own_wrapper_is_refused_instead_of_waiting_forever() -> None:
    def again(_module: Any, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    model = parallel(again)
    with pytest.raises(UsageError, match="from inside one of its replicas"):
        model(torch.rand(4, 3))


def test_a_wrapper_inside_the_module_is_refused() -> None:
    inner = DataParallel(nn.Linear(3, 3), TWO)
    with pytest.raises(UsageError, match=r"'1' is a DataParallel itself"):
        DataParallel(nn.Sequential(nn.ReLU(), inner), TWO)(torch.rand(4, 3))


def test_a_layer_that_is_not_initialised_yet_is_refused_and_works_once_it_is() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model = DataParallel(module, TWO)
    with pytest.raises(UsageError, match=r"'0\.weight' has no shape yet"):
        model(torch.rand(4, 3))
    module(torch.rand(4, 3))
    assert model(torch.rand(4, 3)).shape == (4, 4)


def test_an_input_with_several_rows_for_each_row_of_the_batch_is_split_with_it() -> None:
    model = parallel(lambda _module, a, b: a * b.reshape(len(a), 3).sum(1))
    a, b = torch.rand(4), torch.rand(12)
    torch.testing.assert_close(model(a, b), a * b.reshape(4, 3).sum(1))


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
    with pytest.raises(UsageError, match=r"inputs\[0\] is a packed sequence"):
        model(packed())
    with pytest.raises(UsageError, match="output is a packed sequence"):
        model(torch.rand(4, 3))


def test_sets_are_joined_only_where_they_hold_no_tensor() -> None:
    forwards, backwards = [0, 8, 16], [16, 8, 0]
    x = torch.tensor([[1.0], [2.0]])
    plain = parallel(lambda _module, x: set(forwards if x < 2 else backwards))
    assert plain(x) == {0, 8, 16}
    with pytest.raises(UsageError, match="set of tensors"):
        parallel(lambda _module, x: {x, x + 1})(x)


def test_a_number_that_is_nan_everywhere_agrees() -> None:
    output = parallel(lambda _module, x: (x * torch.nan).sum().item())(torch.rand(4, 3))
    assert output != output


def test_targets_reach_the_loss_of_a_model_without_inputs() -> None:
    model = parallel(lambda module: module.weight)
    target = torch.tensor([1.0, 2.0, 3.0])
    loss = model.backward(nn.functional.mse_loss, (), target)
    torch.testing.assert_close(loss, torch.tensor(5 / 3))


@pytest.mark.parametrize("kwargs", [{"split": "31"}, {"split": 2}, {"split": [None, 1]}])
def test_a_split_that_is_no_list_of_numbers_is_refused(kwargs: Any) -> None:
    with pytest.raises(UsageError, match="split"):
        DataParallel(nn.Linear(3, 3), TWO, **kwargs)


@pytest.mark.parametrize("dim", ["a", 0.0, None])
def test_a_dim_that_is_no_whole_number_is_refused(dim: Any) -> None:
    with pytest.raises(UsageError, match="dim"):
        DataParallel(nn.Linear(3, 3), TWO, dim=dim)


@pytest.mark.parametrize("threads", [0, 1.5, "2", True])
def test_a_number_of_threads_that_is_none_is_refused(threads: Any) -> None:
    with pytest.raises(UsageError, match="cpu_threads"):
        DPOptions(cpu_threads=threads)


@pytest.mark.parametrize("options", [{"check_every": "1"}, {"transport": "shm"}])
def test_options_of_ranks_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        DDPOptions(**options)


def test_a_count_that_is_no_number_is_refused() -> None:
    model = parallel(lambda module, x: x * module.weight)
    x = torch.rand(4, 3)
    with pytest.raises(UsageError, match=r"count returned a tensor of shape \(2,\)"):
        model.backward(lambda output, _: output.sum(), x, x, count=lambda part: part[:, 0])


def test_devices_may_come_from_a_generator() -> None:
    model = DataParallel(nn.Linear(3, 3), (f"cpu:{number}" for number in range(2)))  # type: ignore[arg-type]
    assert len(model.device_ids) == 2


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a module"):
        DataParallel(lambda x: x, TWO)  # type: ignore[arg-type]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_that_do_not_reach_threads_are_refused_instead_of_giving_zeros(
    transform: Any,
) -> None:
    model = parallel(lambda module, x: (x * module.weight).square())
    with pytest.raises(UsageError, match="do not reach the replicas"):
        transform(lambda x: model(x).sum())(torch.rand(4, 3))


def test_tangents_are_refused_too() -> None:
    model = parallel(lambda module, x: x * module.weight)
    with forward_ad.dual_level(), pytest.raises(UsageError, match="do not reach the replicas"):
        model(forward_ad.make_dual(torch.rand(4, 3), torch.ones(4, 3)))
    assert model(torch.rand(4, 3)).shape == (4, 3)


def whole(module: nn.Module, places: list[str]) -> DataParallel:
    return DataParallel(module, places, options=DPOptions(batch_norm="whole"))


def test_whole_uses_the_statistics_of_the_whole_batch_where_none_were_tracked() -> None:
    module = nn.BatchNorm1d(3, track_running_stats=False).eval()
    x = torch.rand(5, 3)
    torch.testing.assert_close(whole(module, TWO)(x), module(x))


def test_whole_takes_an_empty_batch_as_the_bare_module_does() -> None:
    module = nn.BatchNorm2d(3)
    model = whole(module, TWO)
    assert model(torch.rand(0, 3, 2, 2)).shape == (0, 3, 2, 2)
    assert model(torch.rand(4, 3, 2, 2)).shape == (4, 3, 2, 2)


def test_whole_refuses_a_single_row_as_the_bare_module_does() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        whole(nn.BatchNorm1d(3), TWO)(torch.rand(1, 3))


def test_whole_goes_on_where_one_replica_has_no_rows_left_for_a_layer() -> None:
    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x[x[:, 0] > 0])
            return y

    module = Selects().double()
    x = torch.cat([torch.rand(3, 3) + 1, -torch.rand(3, 3), torch.rand(3, 3) + 1]).double()
    alone, together = (copy.deepcopy(module) for _ in range(2))
    expected = alone(x)
    output = whole(together, ["cpu:0", "cpu:1", "cpu:2"])(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(together.norm.running_var, alone.norm.running_var)
    (output.square() * output).sum().backward()
    (expected.square() * expected).sum().backward()
    torch.testing.assert_close(together.norm.weight.grad, alone.norm.weight.grad)


@pytest.mark.parametrize("batch_norm", ["first", "whole"])
def test_statistics_are_kept_where_the_first_device_gets_no_rows(batch_norm: Any) -> None:
    norm = nn.BatchNorm1d(3)
    options = DPOptions(batch_norm=batch_norm)
    model = DataParallel(norm, TWO, split=[1, 9], options=options)
    alone = nn.BatchNorm1d(3)
    few, many = torch.rand(3, 3), torch.rand(30, 3)
    model(few)
    alone(few)
    torch.testing.assert_close(norm.running_mean, alone.running_mean)
    model(many)
    alone(many if batch_norm == "whole" else many[:3])
    torch.testing.assert_close(norm.running_var, alone.running_var)
    model.backward(lambda output: output.sum(), few)
    alone(few)
    torch.testing.assert_close(norm.running_var, alone.running_var)
    assert norm.num_batches_tracked == 3
