"""What a model and its training loop notice of running in replicas: nothing that is torch's."""

from __future__ import annotations

import contextvars
import copy
import io
import threading
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.dp import DataParallel, DPOptions
from paceline.dp.devices import ReplicaDevice
from paceline.dp.parameters import ParameterSource
from paceline.errors import UsageError
from paceline.testing import seeded

TWO = ["cpu:0", "cpu:1"]
COPIED = DPOptions(share_parameters=False)
each_memory = pytest.mark.parametrize("options", [DPOptions(), COPIED], ids=["shared", "copied"])


def mlp() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))


def rows(count: int = 6) -> Tensor:
    return torch.linspace(-1, 1, count * 4).view(count, 4)


class Probe(nn.Module):
    """Lets a function look at the replica in forward."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.look(self, x)
        return self.linear(x)


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


def test_replicas_run_in_threads_of_their_own_with_their_share_of_the_cores() -> None:
    seen = {}

    def look(module: nn.Module, x: Tensor) -> None:
        seen[threading.current_thread().name] = (len(x), torch.get_num_threads())

    before = torch.get_num_threads()
    DataParallel(Probe(look), device_ids=TWO)(rows(7))
    each = max(1, before // 2)
    assert seen == {"paceline replica cpu:0": (4, each), "paceline replica cpu:1": (3, each)}
    assert torch.get_num_threads() == before


def test_cpu_threads_can_be_chosen() -> None:
    seen = []
    probe = Probe(lambda module, x: seen.append(torch.get_num_threads()))
    DataParallel(probe, device_ids=TWO, options=DPOptions(cpu_threads=3))(rows())
    assert seen == [3, 3]


def test_weights_saved_under_the_wrapper_load_into_the_bare_model() -> None:
    model = DataParallel(mlp(), device_ids=TWO)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    bare = seeded(mlp(), seed=1)
    bare.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(bare(rows()), model(rows()))


def test_weights_loaded_into_the_wrapper_reach_every_replica() -> None:
    for options in (DPOptions(), COPIED):
        model = DataParallel(mlp(), device_ids=TWO, options=options)
        other = seeded(mlp(), seed=1)
        with torch.no_grad():
            model(rows())
            model.load_state_dict({f"module.{k}": v for k, v in other.state_dict().items()})
            torch.testing.assert_close(model(rows()), other(rows()))


def test_attributes_and_methods_of_the_module_can_be_used_directly() -> None:
    model = DataParallel(mlp(), device_ids=TWO)
    model.module.scale = 2
    assert model.scale == 2
    assert model.get_parameter("0.weight") is model.module[0].weight
    assert next(iter(model.named_parameters()))[0] == "0.weight"


@each_memory
def test_parameters_can_be_listed_inside_a_replica(options: DPOptions) -> None:
    seen = []

    def look(module: nn.Module, x: Tensor) -> None:
        first = next(module.parameters())
        seen.append((isinstance(first, nn.Parameter), first.shape, len(module.state_dict())))

    DataParallel(Probe(look), device_ids=TWO, options=options)(rows())
    assert seen == [(True, (3, 4), 2)] * 2


@each_memory
def test_a_write_through_data_is_seen_by_every_replica(options: DPOptions) -> None:
    model, bare = DataParallel(mlp(), device_ids=TWO, options=options), mlp()
    for module in (model, bare):
        module(rows()).sum().backward()
        for param in module.parameters():
            assert param.grad is not None
            param.data -= 0.1 * param.grad  # leaves no trace in the version counter
    torch.testing.assert_close(model(rows()), bare(rows()))


@each_memory
def test_a_replaced_parameter_and_a_replaced_layer_are_seen(options: DPOptions) -> None:
    model = DataParallel(mlp(), device_ids=TWO, options=options)
    model(rows())
    model.module[0].weight = nn.Parameter(torch.ones(8, 4))
    model.module[2] = seeded(nn.Linear(8, 5), seed=3)
    torch.testing.assert_close(model(rows()), model.module(rows()))


def test_modes_and_hooks_changed_later_reach_the_replicas() -> None:
    model = DataParallel(nn.Sequential(nn.Linear(4, 3), nn.Dropout(1.0)), device_ids=TWO)
    assert model(rows()).abs().sum() == 0
    model.eval()
    torch.testing.assert_close(model(rows()), model.module(rows()))
    handle = model.module[0].register_forward_hook(lambda module, inputs, output: output * 0 + 7)
    assert (model(rows()) == 7).all()
    handle.remove()
    torch.testing.assert_close(model(rows()), model.module(rows()))


@each_memory
def test_torch_autograd_grad_and_double_backward_work(options: DPOptions) -> None:
    results = []
    for model in (mlp(), DataParallel(mlp(), device_ids=TWO, options=options)):
        x = rows().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grads = torch.autograd.grad(slope.square().sum(), list(model.parameters()))
        results.append((slope, *grads))
    torch.testing.assert_close(results[1], results[0])


@each_memory
def test_hooks_on_parameters_see_the_sum_over_replicas_once(options: DPOptions) -> None:
    seen: dict[str, list[Tensor]] = {"bare": [], "forward": [], "loss": []}
    models = {name: mlp() for name in seen}
    for name, model in models.items():
        model[0].weight.register_hook(seen[name].append)
        model[2].weight.register_post_accumulate_grad_hook(
            lambda param, name=name: seen[name].append(param.grad.clone())
        )
    models["bare"](rows()).mean().backward()
    two = {name: DataParallel(models[name], device_ids=TWO, options=options) for name in seen}
    two["forward"](rows()).mean().backward()
    two["loss"].backward(lambda output: output.mean(), rows())
    assert [len(grads) for grads in seen.values()] == [2, 2, 2]
    for name in ("forward", "loss"):
        torch.testing.assert_close(
            sorted(seen[name], key=len), sorted(seen["bare"], key=len), msg=name
        )


@each_memory
def test_gradients_accumulate_over_several_batches(options: DPOptions) -> None:
    bare, model = mlp(), DataParallel(mlp(), device_ids=TWO, options=options)
    for count in (5, 6):
        bare(rows(count)).mean().backward()
        model(rows(count)).mean().backward()
        bare(rows(count)).mean().backward()
        model.backward(lambda output: output.mean(), rows(count))
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_mode_of_the_calling_thread_holds_in_replicas(context: Any) -> None:
    seen = []
    probe = Probe(
        lambda module, x: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    )
    model = DataParallel(probe, device_ids=TWO)
    with context():
        expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        output = model(rows())
    assert seen == [expected] * 2
    assert output.requires_grad == expected[0]
    model(rows()).sum().backward()  # and replicas made in inference mode can train afterwards


def test_autocast_holds_in_replicas_and_ends_with_them() -> None:
    seen = []
    model = DataParallel(Probe(lambda m, x: seen.append(m.linear(x).dtype)), device_ids=TWO)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(rows()).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert model(rows()).dtype == torch.float32
    model(rows())
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 4


def test_context_variables_are_visible_in_replicas() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen = []
    model = DataParallel(Probe(lambda m, x: seen.append(variable.get())), device_ids=TWO)
    variable.set(5)
    model(rows())
    assert seen == [5, 5]


def test_buffers_written_in_forward_are_the_first_replicas() -> None:
    class Counter(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x)
            return x + self.seen

    model = DataParallel(Counter(), device_ids=TWO)
    assert model(torch.zeros(5)).tolist() == [3, 3, 3, 2, 2]
    assert model(torch.zeros(5)).tolist() == [6, 6, 6, 5, 5]
    assert model.seen == 6


def test_a_buffer_that_is_assigned_in_forward_is_the_first_replicas() -> None:
    class Last(nn.Module):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.last = x[:1].detach()
            return x

    model = DataParallel(Last(), device_ids=TWO)
    model(torch.arange(4.0))
    assert model.last.tolist() == [0]


def test_a_buffer_that_requires_gradients_gets_them() -> None:
    class Scale(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    for options in (DPOptions(), COPIED):
        model = DataParallel(Scale(), device_ids=TWO, options=options)
        model(torch.ones(4, 3)).sum().backward()
        model.backward(lambda output: output.sum(), torch.ones(4, 3), reduction="sum")
        assert model.scale.grad.tolist() == [8, 8, 8]


def test_methods_kept_as_attributes_work_on_the_replica() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.activation = self.double

        def double(self, x: Tensor) -> Tensor:
            owners.add(id(self))
            return x * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(self.linear(x))

    owners: set[int] = set()
    model = DataParallel(Chosen(), device_ids=TWO)
    model(rows())
    assert len(owners) == 2


def test_attributes_set_in_forward_do_not_pile_up() -> None:
    class Remember(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not hasattr(self, "before")
            self.before = x
            return x

    model = DataParallel(Remember(), device_ids=TWO)
    for _ in range(3):
        model(rows())
    assert not hasattr(model.module, "before")


def test_inputs_that_require_gradients_get_them() -> None:
    bare, model = mlp(), DataParallel(mlp(), device_ids=TWO)
    for called in (bare, model):
        x = rows(5).requires_grad_()
        called(x).sum().backward()
        if called is bare:
            expected = x.grad
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_batches_of_any_size_are_the_bare_models(count: int, replicas: int) -> None:
    model = DataParallel(mlp(), device_ids=[f"cpu:{i}" for i in range(replicas)])
    x = rows(7)[:count]
    torch.testing.assert_close(model(x), model.module(x))


def test_rows_are_shared_out_by_weight() -> None:
    seen = {}
    probe = Probe(lambda m, x: seen.update({threading.current_thread().name[-5:]: len(x)}))
    model = DataParallel(probe, device_ids=TWO, split=[3, 1])
    torch.testing.assert_close(model(rows(8)), model.module.linear(rows(8)))
    assert seen == {"cpu:0": 6, "cpu:1": 2}


def test_another_dimension_can_hold_the_batch() -> None:
    lstm = seeded(nn.LSTM(4, 3))
    model = DataParallel(lstm, device_ids=TWO, dim=1)
    x = torch.linspace(-1, 1, 5 * 7 * 4).view(5, 7, 4)
    torch.testing.assert_close(model(x), lstm(x))


def test_a_model_without_inputs_runs_once() -> None:
    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(2)

    assert DataParallel(Constant(), device_ids=TWO)().tolist() == [1, 1]


def test_without_accelerators_it_says_that_it_runs_alone() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    with pytest.warns(UserWarning, match=r"no accelerator.*alone on.* CPU"):
        model = DataParallel(mlp())
    torch.testing.assert_close(model(rows()), model.module(rows()))
    torch.testing.assert_close(
        model.backward(lambda output: output.mean(), rows()), model(rows()).mean().detach()
    )


def test_a_copy_of_the_wrapper_has_weights_and_threads_of_its_own() -> None:
    model = DataParallel(mlp(), device_ids=TWO)
    model(rows())
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone.module[0].weight.zero_()
    torch.testing.assert_close(clone(rows()), clone.module(rows()))
    torch.testing.assert_close(model(rows()), model.module(rows()))
    assert not torch.equal(model(rows()), clone(rows()))


def test_a_compiled_module_is_compiled_in_every_replica() -> None:
    module = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    model = DataParallel(torch.compile(module, backend="eager"), device_ids=TWO)
    plain = DataParallel(copy.deepcopy(module), device_ids=TWO)
    for called in (model, plain):
        called(rows()).square().mean().backward()
        called.backward(lambda output: output.square().mean(), rows())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_calls_from_several_threads_take_turns() -> None:
    model = DataParallel(mlp(), device_ids=TWO)
    batches = [rows(count) for count in (3, 5, 8, 6)]
    outputs: dict[int, Tensor] = {}
    threads = [
        threading.Thread(target=lambda i=i, x=x: outputs.update({i: model(x)}))
        for i, x in enumerate(batches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(batches):
        torch.testing.assert_close(outputs[number], model.module(batch))


def test_the_same_batch_gives_the_same_bits_every_time() -> None:
    runs = []
    for _ in range(3):
        model = DataParallel(mlp(), device_ids=[f"cpu:{i}" for i in range(5)])
        model.backward(lambda output: output.square().mean(), rows(13))
        output = model(rows(13))
        output.square().mean().backward()
        runs.append([output, *(param.grad for param in model.parameters())])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_buffers_registered_in_forward_are_the_first_replicas() -> None:
    together = threading.Barrier(2, timeout=60)

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


def test_an_input_with_several_rows_for_each_row_of_the_batch_is_split_with_it() -> None:
    model = parallel(lambda _module, a, b: a * b.reshape(len(a), 3).sum(1))
    a, b = torch.rand(4), torch.rand(12)
    torch.testing.assert_close(model(a, b), a * b.reshape(4, 3).sum(1))


def test_sets_are_joined_only_where_they_hold_no_tensor() -> None:
    forwards, backwards = [0, 8, 16], [16, 8, 0]
    x = torch.tensor([[1.0], [2.0]])
    plain = parallel(lambda _module, x: set(forwards if x < 2 else backwards))
    assert plain(x) == {0, 8, 16}
    with pytest.raises(UsageError, match="differs between replicas"):
        parallel(lambda _module, x: {x, x + 1})(x)


def test_a_number_that_is_nan_everywhere_agrees() -> None:
    output = parallel(lambda _module, x: (x * torch.nan).sum().item())(torch.rand(4, 3))
    assert output != output


def test_devices_may_come_from_a_generator() -> None:
    model = DataParallel(nn.Linear(3, 3), (f"cpu:{number}" for number in range(2)))  # type: ignore[arg-type]
    assert len(model.device_ids) == 2


def test_replicas_that_share_a_thread_have_copies_of_their_own_where_sharing_is_off() -> None:
    devices = [ReplicaDevice(name, torch.device("cpu")) for name in TWO]
    param = nn.Parameter(torch.ones(3))
    for share, memories in ((True, 1), (False, 2)):
        source = ParameterSource(devices, groups=[[0, 1]], share=share)
        tables, leaves = source.detach([param], [0, 1])
        assert len({table[id(param)].data_ptr() for table in tables.values()}) == memories
        assert len(leaves) == memories
