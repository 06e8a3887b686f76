"""Corners where a torch user could have told the difference, each found by looking for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.errors import DesyncError, DeviceError, PacelineError, UsageError
from paceline.group import tree
from paceline.testing import gradients, run_ranks, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def small() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), 0)


def wrap(module: nn.Module, world: World, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=world.group, **options)


def mine(world: World) -> Tensor:
    return X[world.rank :: world.size]


def whole_gradients(module: nn.Module | None = None) -> dict[str, Tensor | None]:
    module = module or small()
    module(X).square().mean().backward()
    return gradients(module)


def test_autograd_grad_through_the_model_on_one_rank_disturbs_nobody() -> None:
    def body(world: World) -> Any:
        model = wrap(small(), world)
        for step in range(3):
            if world.rank == 0 and step:
                value = model(mine(world)).square().mean()
                torch.autograd.grad(value, list(model.parameters()))
            model.zero_grad()
            model(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients())


def test_a_backward_to_the_inputs_of_a_frozen_model_stays_local() -> None:
    def body(world: World) -> Tensor | None:
        model = wrap(small(), world)
        model.requires_grad_(False)
        x = mine(world).clone().requires_grad_()
        if world.rank == 0:
            model.module(x).sum().backward()
            model(x).sum().backward()
        return x.grad

    first, second = run_ranks(2, body)
    assert first is not None
    assert second is None


def test_an_unfrozen_layer_that_alone_has_gradients_is_averaged() -> None:
    def body(world: World) -> Any:
        net = small()
        net[0].requires_grad_(False)
        model = wrap(net, world)
        net[2].requires_grad_(False)
        net[0].requires_grad_(True)
        for _ in range(2):
            model.zero_grad()
            model(mine(world)).square().mean().backward()
        return gradients(model)

    expected = whole_gradients()
    for got in run_ranks(2, body):
        torch.testing.assert_close(got["0.weight"], expected["0.weight"])


def test_a_buffer_that_is_assigned_anew_is_still_copied() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)
            self.register_buffer("code", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) + self.code
            self.code = self.code * 0.9 + out.detach().mean(0)
            return out

    def body(world: World) -> Tensor:
        model = wrap(seeded(Codebook(), 0), world)
        for _ in range(3):
            model(mine(world)).sum().backward()
        with torch.no_grad():
            model(mine(world))
            model._syncs_buffers_next = True
            model._copy_buffers(0)
        code: Tensor = model.code
        return code

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_a_replaced_parameter_is_noticed_in_the_step_it_stops_being_averaged() -> None:
    def body(world: World) -> int:
        model = wrap(small(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # keeps the old parameter alive
        for step in range(8):
            if step == 5:
                model.module[2].weight = nn.Parameter(torch.zeros(3, 5))
            optimizer.zero_grad()
            try:
                model(mine(world)).square().mean().backward()
            except DesyncError as error:
                return step if "'2.weight' was added or replaced" in str(error) else -1
        return -2

    assert run_ranks(2, body) == [5, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_buffers_that_differ_between_ranks_are_refused(dtype: torch.dtype) -> None:
    def body(world: World) -> None:
        net = small()
        shape = (2,) if dtype is torch.int32 or world.rank == 0 else (3,)
        kind = dtype if world.rank else torch.float32
        net.register_buffer("extra", torch.zeros(shape, dtype=kind))
        wrap(net, world)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert says(str(error), "'extra'", "(2,) float32, buffer on rank 0")


class Answer:
    """An output that nothing can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.net(x))


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_forward_pass_decides_even_if_its_output_cannot_be_looked_into(is_inside: bool) -> None:
    def body(world: World) -> bool:
        model = wrap(Opaque(), world)
        with model.no_sync(enabled=is_inside):
            value = model(mine(world)).value.square().mean()
        with model.no_sync(enabled=not is_inside):
            value.backward()
        grad = gradients(model)["net.0.weight"]
        assert grad is not None
        shared = grad.clone()
        world.group.allreduce([shared]).wait()
        return torch.allclose(shared / world.size, grad, atol=1e-7)

    assert run_ranks(2, body) == [not is_inside] * 2


class Segments(nn.Module):
    """All that is trained lies inside reentrant checkpoints; one layer is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3).requires_grad_(False)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        x = checkpoint(self.first, x, use_reentrant=True)
        x = checkpoint(self.second, x, use_reentrant=True)
        out: Tensor = self.head(x)
        return out

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def opaque(self, x: Tensor) -> Answer:
        return Answer(self(x))


@pytest.mark.parametrize("way", ["wrapper", "module", "method"])
def test_reentrant_checkpoints_are_averaged_at_the_end_of_the_real_backward(way: str) -> None:
    def body(world: World) -> Any:
        model = wrap(seeded(Segments(), 0), world)
        for _ in range(3):
            model.zero_grad()
            x = mine(world).clone()
            if way == "wrapper":
                model(x).square().mean().backward()
            elif way == "module":
                model.module(x).square().mean().backward()
            else:
                model.loss(x).backward()
        return gradients(model)

    whole = seeded(Segments(), 0)
    whole.loss(X.clone()).backward()
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, gradients(whole))
        assert got["unused.weight"] is None


def test_two_models_in_different_order_on_two_ranks_raise() -> None:
    def body(world: World) -> None:
        models = [wrap(small(), world), wrap(small(), world)]
        for model in models if world.rank == 0 else reversed(models):
            model(mine(world)).square().mean().backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "another model" in str(error)


def test_two_models_that_share_a_part_both_average_their_own() -> None:
    def body(world: World) -> Any:
        encoder = seeded(nn.Linear(6, 4), 0)
        first = wrap(nn.Sequential(encoder, seeded(nn.Linear(4, 3), 1)), world)
        second = wrap(nn.Sequential(encoder, seeded(nn.Linear(4, 2), 2)), world)
        first.module(mine(world)).square().mean().backward()
        second(mine(world)).square().mean().backward()
        return gradients(first)["1.weight"], gradients(first)["0.weight"]

    encoder = seeded(nn.Linear(6, 4), 0)
    one = nn.Sequential(encoder, seeded(nn.Linear(4, 3), 1))
    two = nn.Sequential(encoder, seeded(nn.Linear(4, 2), 2))
    (one(X).square().mean() + two(X).square().mean()).backward()
    for head, shared in run_ranks(2, body):
        torch.testing.assert_close(head, one[1].weight.grad)
        torch.testing.assert_close(shared, encoder.weight.grad)


def test_gradients_can_be_detached_and_zeroed_in_place() -> None:
    def body(world: World) -> Any:
        model = wrap(small(), world)
        for _ in range(3):
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.detach_()
                    param.grad.zero_()
            model(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients())


def test_the_flag_that_accumulating_loops_set_works() -> None:
    def body(world: World) -> tuple[int, bool]:
        model = wrap(small(), world)
        for step in range(4):
            model.require_backward_grad_sync = step == 3
            model(mine(world)).square().mean().backward()
        return model.reducer.steps, model.require_backward_grad_sync

    assert run_ranks(2, body) == [(1, True), (1, True)]


def test_scripted_modules_can_be_wrapped() -> None:
    traced = [torch.jit.trace(small(), X) for _ in range(2)]  # tracing is not for threads

    def body(world: World) -> Any:
        model = wrap(traced[world.rank], world)
        model(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients())


def test_packed_sequences_keep_their_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = tree.map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_an_output_that_contains_itself_is_no_problem() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def forward(self, x: Tensor) -> dict[str, Any]:
            out: dict[str, Any] = {"y": self.net(x)}
            out["self"] = out
            return out

    def body(world: World) -> None:
        wrap(Loop(), world)(mine(world))["y"].sum().backward()

    run_ranks(2, body)


def test_functional_calls_do_not_look_like_replaced_parameters() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model.module, params, (mine(world),)).sum().backward()
        model(mine(world)).sum().backward()

    run_ranks(2, body)


def test_a_comm_hook_survives_loading_with_assign() -> None:
    def body(world: World) -> int:
        model = wrap(small(), world)
        calls = []

        def hook(_state: object, bucket: Any) -> Any:
            calls.append(bucket.index())
            world.group.allreduce([bucket.buffer()]).wait()
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() / world.size)
            return future

        model.register_comm_hook(None, hook)
        model(mine(world)).sum().backward()
        model.load_state_dict(small().state_dict(), assign=True)
        model(mine(world)).sum().backward()
        return len(calls)

    assert run_ranks(2, body) == [2, 2]


def test_a_model_converted_after_wrapping_is_refused_by_name() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        model.double()
        model(mine(world).double()).square().mean().backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DeviceError)
        assert says(str(error), "torch.float64")


def test_a_process_outside_the_group_is_told_so() -> None:
    with pytest.raises(UsageError, match="not a member"):
        DistributedDataParallel(small(), process_group=-100)


def test_options_and_groups_of_the_wrong_kind_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"process_group.* 'world'"):
        DistributedDataParallel(small(), process_group="world")
    with pytest.raises(UsageError, match=r"options.* \{\}"):
        DistributedDataParallel(small(), options={})  # type: ignore[arg-type]


def test_one_of_two_arguments_that_belong_together_is_refused() -> None:
    def body(world: World) -> None:
        wrap(small(), world, delay_all_reduce_named_params=[])

    with pytest.raises(UsageError, match="belong together"):
        run_ranks(1, body)


def test_an_update_inside_backward_is_refused() -> None:
    def body(world: World) -> None:
        net = small()
        net[0].weight._in_backward_optimizers = [object()]
        wrap(net, world)

    with pytest.raises(PacelineError, match="updated inside backward"):
        run_ranks(1, body)


def test_names_that_libraries_touch_are_there() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        model._set_static_graph()
        assert model._get_ddp_logging_data() == {}
        assert model.will_sync_module_buffers() is False
        model.require_forward_param_sync = False
        assert model.logger is None
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model.module, ["0.bias"]
        )
        model.reducer.prepare_for_backward([])
        assert not model.should_finalize_after_backward
        model.require_manual_backward_finalization = True
        assert model.should_finalize_after_backward
        model.finalize_backward()

    run_ranks(1, body)


def test_keys_that_a_hook_of_the_module_renames_lose_their_prefix_too() -> None:
    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
            if f"{prefix}old_weight" in state:
                state[f"{prefix}weight"] = state.pop(f"{prefix}old_weight")
            super()._load_from_state_dict(state, prefix, *args)

    def body(world: World) -> float:
        model = wrap(Renamed(2, 2), world)
        saved = {"module.old_weight": torch.full((2, 2), 7.0), "module.bias": torch.zeros(2)}
        model.load_state_dict(saved)
        return model.weight[0, 0].item()

    assert run_ranks(1, body) == [7.0]


def test_wrapping_does_not_import_the_compiler() -> None:
    before = "torch._dynamo" in sys.modules

    def body(world: World) -> None:
        wrap(small(), world)(mine(world)).sum().backward()

    run_ranks(2, body)
    assert ("torch._dynamo" in sys.modules) == before


@dataclass
class Output:
    logits: Tensor
    note: str


def test_dataclass_outputs_carry_the_wish_of_their_forward() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def forward(self, x: Tensor) -> Output:
            return Output(self.net(x), "fine")

    def body(world: World) -> int:
        model = wrap(Typed(), world)
        with model.no_sync():
            output = model(mine(world))
        output.logits.sum().backward()
        return model.reducer.steps

    assert run_ranks(2, body) == [0, 0]


def test_rank_local_buffers_may_differ_where_nobody_copies_them() -> None:
    def body(world: World) -> int:
        net = small()
        net.register_buffer("mine", torch.zeros(1 + world.rank))
        model = wrap(net, world, broadcast_buffers=False)
        model(mine(world)).sum().backward()
        return model.mine.numel()

    assert run_ranks(2, body) == [1, 2]


@pytest.mark.parametrize("thing", [None, 3, "model", nn.Linear])
def test_something_that_is_no_module_is_refused(thing: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module"):
        DistributedDataParallel(thing)


@pytest.mark.parametrize("options", [{"check_every": "1"}, {"transport": "shm"}])
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        DDPOptions(**options)


def test_a_group_beside_a_mesh_and_a_mesh_of_two_dimensions_are_refused_in_torchs_words() -> None:
    mesh: Any = SimpleNamespace(ndim=2)
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arg"):
        DistributedDataParallel(nn.Linear(1, 1), process_group=object(), device_mesh=mesh)
    with pytest.raises(RuntimeError, match=r"Only 1D device mesh.* supported, .* 2 dimensions"):
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
