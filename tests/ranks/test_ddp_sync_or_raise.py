"""No path ends with replicas silently different: it synchronises, or an error says why not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn
from torch.func import functional_call
from zoo import Breaks

from paceline import DistributedDataParallel, World
from paceline.ddp import DDPOptions
from paceline.errors import (
    DesyncError,
    DeviceError,
    HookError,
    NotInitializedError,
    PacelineError,
    PeerError,
    ReplicaError,
    UsageError,
)
from paceline.testing import gradients, run_ranks, seeded

BATCH = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def small(seed: int = 0) -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), seed)


def wrap(module: nn.Module, world: World, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=world.group, **options)


def mine(world: World) -> Tensor:
    return BATCH[world.rank :: world.size]


def whole_batch_gradients() -> dict[str, Tensor | None]:
    model = small()
    model(BATCH).square().mean().backward()
    return gradients(model)


def test_a_dropped_wrapper_still_synchronises() -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        model = small()
        wrap(model, world)
        gc.collect()
        model(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_batch_gradients())


def test_a_forward_that_bypasses_the_wrapper_synchronises() -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        model = wrap(small(), world)
        model.module(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(3, body):
        torch.testing.assert_close(got, whole_batch_gradients())


def test_wrapping_twice_averages_once() -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        model = small()
        first = wrap(model, world)
        second = wrap(model, world)
        second(mine(world)).square().mean().backward()
        assert first.module is second.module
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_batch_gradients())


def test_backward_on_one_rank_only_raises_and_names_the_other() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        if world.rank == 0:
            model(mine(world)).square().mean().backward()

    got = run_ranks(2, body, return_exceptions=True)
    assert isinstance(got[0], PeerError)
    assert "rank 1" in str(got[0]).lower()
    assert "Step 0" in str(got[0])
    assert got[1] is None


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_rank_that_skips_a_backward_raises_in_its_next_forward(skipped: int) -> None:
    def body(world: World) -> None:
        model = wrap(nn.Sequential(small(), nn.BatchNorm1d(3)), world)
        for step in range(4):
            loss = model(mine(world)).square().mean()
            if world.rank == 1 and step == skipped:
                continue
            loss.backward()

    got = run_ranks(2, body, return_exceptions=True)
    assert isinstance(got[1], DesyncError)
    assert says(str(got[1]), "rank 1", "rank 0", "backward")
    assert isinstance(got[0], PeerError)


def test_a_rank_that_raises_in_the_middle_is_named_on_the_others() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        for step in range(3):
            if world.rank == 1 and step == 2:
                raise ArithmeticError("bad luck")
            model(mine(world)).square().mean().backward()

    got = run_ranks(3, body, return_exceptions=True)
    assert isinstance(got[1], ArithmeticError)
    for rank in (0, 2):
        assert isinstance(got[rank], PeerError)
    assert any("bad luck" in str(got[rank]) for rank in (0, 2))


def test_a_rank_that_finishes_early_is_named_on_the_others() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        for _ in range(3 if world.rank else 2):
            model(mine(world)).square().mean().backward()

    got = run_ranks(2, body, return_exceptions=True)
    assert got[0] is None
    assert isinstance(got[1], PeerError)
    assert "Rank 0" in str(got[1])


def test_a_backward_that_broke_off_on_one_rank_stops_all_ranks_and_the_next_works() -> None:
    def body(world: World) -> tuple[list[str], dict[str, Tensor | None]]:
        model = wrap(small(), world, bucket_cap_mb=1e-5)
        heard = []

        def step(explodes: bool) -> None:
            model.zero_grad()
            hidden = model.module[0](mine(world))
            hidden = Breaks.apply(hidden, explodes)
            model.module[2](model.module[1](hidden)).square().mean().backward()

        tries = completed = 0
        while completed < 4:
            try:
                step(explodes=tries == 2 and world.rank == 1)
                completed += 1
            except MemoryError:
                heard.append("memory")
            except DesyncError as error:
                heard.append("desync" if "Step 2" in str(error) else str(error))
            tries += 1
        return heard, gradients(model)

    (heard_by_0, first), (heard_by_1, second) = run_ranks(2, body)
    assert heard_by_0 == ["desync"]
    assert heard_by_1 == ["memory", "desync"]
    torch.testing.assert_close(first, whole_batch_gradients())
    torch.testing.assert_close(second, whole_batch_gradients())


def test_models_that_differ_between_ranks_name_the_first_difference() -> None:
    def body(world: World) -> None:
        width = 5 if world.rank != 2 else 4
        model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, width))
        wrap(model, world)

    for error in run_ranks(3, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert says(str(error), "'1.weight'", "(5, 7) float32 on rank 0")
        assert "(4, 7) float32 on rank 2" in str(error)


def test_models_with_another_parameter_order_are_refused() -> None:
    class Two(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            for name in ("b", "a") if flip else ("a", "b"):
                self.register_parameter(name, nn.Parameter(torch.zeros(3)))

    def body(world: World) -> None:
        wrap(Two(flip=world.rank == 1), world)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "'a'" in str(error)
        assert "'b'" in str(error)


def test_a_model_with_more_parameters_on_one_rank_is_refused() -> None:
    def body(world: World) -> None:
        layers = [nn.Linear(3, 3) for _ in range(1 + world.rank)]
        wrap(nn.Sequential(*layers), world)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "only rank 1 has '1.weight'" in str(error)


def test_a_problem_of_one_rank_is_raised_on_all() -> None:
    def body(world: World) -> None:
        model = small()
        if world.rank == 1:
            model.requires_grad_(False)
        wrap(model, world)

    got = run_ranks(2, body, return_exceptions=True)
    assert all(isinstance(error, PacelineError) for error in got)
    assert "Rank 1" in str(got[0])
    assert isinstance(got[1], UsageError)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    def body(world: World) -> None:
        wrap(small().requires_grad_(False), world)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert says(str(error), "None of", "model's 4 parameters")


def test_parameters_on_several_devices_are_refused() -> None:
    model = small()
    model[2] = nn.Linear(5, 3, device="meta")

    def body(world: World) -> None:
        wrap(model, world)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DeviceError)
        assert "2 devices" in str(error)


@pytest.mark.parametrize(
    "options", [{"device_ids": [0]}, {"output_device": 0}, {"device_ids": [0, 1]}]
)
def test_device_arguments_for_a_cpu_model_are_refused(options: dict[str, Any]) -> None:
    def body(world: World) -> None:
        wrap(small(), world, **options)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DeviceError)


@pytest.mark.parametrize("megabytes", [0, -1])
def test_a_bucket_of_no_size_is_refused(megabytes: float) -> None:
    def body(world: World) -> None:
        wrap(small(), world, bucket_cap_mb=megabytes)

    with pytest.raises(UsageError, match="positive"):
        run_ranks(1, body)


def test_a_missing_process_group_is_said() -> None:
    with pytest.raises(NotInitializedError, match="init_process_group"):
        DistributedDataParallel(small())


def test_a_layer_unfrozen_later_is_averaged_from_its_first_gradient_on() -> None:
    def body(world: World) -> list[dict[str, Tensor | None]]:
        net = small()
        net[0].requires_grad_(False)
        model = wrap(net, world)
        seen = []
        for step in range(4):
            if step == 2:
                net[0].requires_grad_(True)
            model.zero_grad()
            model(mine(world)).square().mean().backward()
            seen.append({k: None if g is None else g.clone() for k, g in gradients(model).items()})
        return seen

    for seen in run_ranks(3, body):
        assert seen[0]["0.weight"] is None
        assert seen[1]["0.weight"] is None
        torch.testing.assert_close(seen[2], whole_batch_gradients())
        torch.testing.assert_close(seen[3], whole_batch_gradients())


class Adversaries(nn.Module):
    """Two parts that are trained in turns, each while the other is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = seeded(nn.Linear(6, 6), 0), seeded(nn.Linear(6, 1), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.generator(x)).square().mean()

    def judgement(self, x: Tensor) -> Tensor:
        return self.judge(self.generator(x).detach()).mean() + self.judge(x).square().mean()


@pytest.mark.parametrize("frozen", ["generator", "judge"])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_trained_in_turns_are_averaged_though_one_was_frozen_when_wrapped(
    size: int, frozen: str
) -> None:
    def train(model: nn.Module, net: Adversaries, x: Tensor) -> list[Tensor]:
        optimizers = {
            part: torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.generator, net.judge)
        }
        for _ in range(3):
            for trained, other in ((net.generator, net.judge), (net.judge, net.generator)):
                trained.requires_grad_(True)
                other.requires_grad_(False)
                loss: Callable[[Tensor], Tensor] = model
                if trained is net.judge:
                    loss = model.judgement  # type: ignore[assignment]
                optimizers[trained].zero_grad()
                loss(x).backward()
                optimizers[trained].step()
        return [param.detach().clone() for param in net.parameters()]

    def body(world: World) -> list[Tensor]:
        net = Adversaries()
        getattr(net, frozen).requires_grad_(False)
        return train(wrap(net, world), net, mine(world))

    whole = Adversaries()
    expected = train(whole, whole, BATCH)
    for got in run_ranks(size, body):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_a_layer_with_sparse_gradients_unfrozen_later_is_averaged(size: int) -> None:
    rows = torch.randint(7, (12, 3), generator=torch.Generator().manual_seed(0))

    def train(model: nn.Module, net: nn.Sequential, x: Tensor) -> list[dict[str, Tensor | None]]:
        seen = []
        for step in range(4):
            net[0].requires_grad_(step > 1)
            model.zero_grad()
            model(x).square().mean().backward()
            found = gradients(model).items()
            seen.append({name: None if g is None else g.to_dense().clone() for name, g in found})
        return seen

    def net() -> nn.Sequential:
        made = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
        return seeded(made).requires_grad_(True)

    def body(world: World) -> list[dict[str, Tensor | None]]:
        mine = net()
        mine[0].requires_grad_(False)
        return train(wrap(mine, world), mine, rows[world.rank :: world.size])

    whole = net()
    expected = train(whole, whole, rows)
    for got in run_ranks(size, body):
        torch.testing.assert_close(got, expected)


def test_a_layer_unfrozen_on_one_rank_only_raises_on_all() -> None:
    def body(world: World) -> None:
        net = small()
        net[0].requires_grad_(False)
        model = wrap(net, world)
        net[0].requires_grad_(world.rank == 1)
        model(mine(world)).square().mean().backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "'0.bias' requires grad on rank 1 but not on rank 0" in str(error)


def test_a_layer_frozen_later_keeps_no_gradient_and_the_rest_goes_on() -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        model = wrap(small(), world)
        model(mine(world)).square().mean().backward()
        model.zero_grad()
        model.module[0].requires_grad_(False)
        model(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(2, body):
        assert got["0.weight"] is None
        torch.testing.assert_close(got["2.weight"], whole_batch_gradients()["2.weight"])


def test_a_parameter_added_after_wrapping_is_refused() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        model.module[2] = nn.Linear(5, 3)
        model(mine(world)).square().mean().backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "'2.weight' was added or replaced" in str(error)


class Scaled(nn.Module):
    """A parameter of its own, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(6)), seeded(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


def test_functional_calls_with_tensors_computed_from_parameters_are_averaged() -> None:
    def train(model: nn.Module, prefix: str, x: Tensor) -> dict[str, Tensor | None]:
        for _ in range(2):
            model.zero_grad()
            twice = {prefix + name: param * 2 for name, param in model.named_parameters()}
            first = functional_call(model, twice, (x,)).square().mean()
            (first + functional_call(model, twice, (x,)).mean()).backward()
        return gradients(model)

    def body(world: World) -> dict[str, Tensor | None]:
        return train(wrap(Scaled(), world), "module.", mine(world))

    expected = train(Scaled(), "", BATCH)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("leaves", [False, True], ids=["by bare names", "copies"])
def test_functional_calls_that_would_not_be_averaged_are_refused_by_name(leaves: bool) -> None:
    def body(world: World) -> None:
        model = wrap(Scaled(), world)
        for _ in range(2):
            copies = {"scale": model.module.scale * 2}
            if leaves:
                copies = {"scale": nn.Parameter(model.module.scale.detach().clone())}
                copies["layer.weight"] = nn.Parameter(model.module.layer.weight.detach().clone())
                copies["layer.bias"] = nn.Parameter(model.module.layer.bias.detach().clone())
            functional_call(model, copies, (mine(world),)).square().mean().backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError if leaves else TypeError)
        assert "'scale'" in str(error)


def test_loading_with_assign_keeps_the_new_parameters_synchronised() -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        model = wrap(small(seed=3), world)
        model.load_state_dict(small().state_dict(), assign=True)
        model(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_batch_gradients())


def test_the_replica_check_names_parameter_and_rank() -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        model.check_in_sync()
        if world.rank == 2:
            with torch.no_grad():
                model.module[2].weight[0, 0] += 0.5
        model.check_in_sync()

    for error in run_ranks(3, body, return_exceptions=True):
        assert isinstance(error, ReplicaError)
        assert "'2.weight' on rank 2" in str(error)
        assert says(str(error), "element 0")


def test_the_replica_check_runs_every_n_steps_by_option() -> None:
    def body(world: World) -> int:
        model = wrap(small(), world, options=DDPOptions(check_every=2))
        for step in range(4):
            model.zero_grad()
            if step == 2 and world.rank == 0:
                with torch.no_grad():
                    model.module[0].bias += 1e-6
            try:
                model(mine(world)).square().mean().backward()
            except ReplicaError:
                return step
        return -1

    assert run_ranks(2, body) == [3, 3]


def test_an_impossible_check_period_is_refused() -> None:
    with pytest.raises(UsageError, match=r"check_every.* -1"):
        DDPOptions(check_every=-1)


def test_a_wrong_hook_result_is_refused_and_the_model_stays_usable() -> None:
    def body(world: World) -> dict[str, Tensor | None]:
        model = wrap(small(), world)
        broken = True

        def hook(_state: object, bucket: Any) -> Any:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            if broken:
                future.set_result(torch.zeros(3))
                return future
            buffer = bucket.buffer()
            world.group.allreduce([buffer]).wait()
            future.set_result(buffer / world.size)
            return future

        model.register_comm_hook(None, hook)
        with pytest.raises(HookError, match="3 elements"):
            model(mine(world)).square().mean().backward()
        broken = False
        model.zero_grad()
        model(mine(world)).square().mean().backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_batch_gradients())


@pytest.mark.parametrize("value", [None, 3, "future", torch.zeros(1)])
def test_a_hook_must_return_a_future(value: object) -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        model.register_comm_hook(None, lambda _state, _bucket: value)
        model(mine(world)).square().mean().backward()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, HookError)
        assert "not a future" in str(error)


def test_a_hook_with_wrong_annotations_is_refused() -> None:
    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[Tensor]:
        raise NotImplementedError

    def wrong_result(state: object, bucket: Any) -> int:
        raise NotImplementedError

    def body(world: World) -> None:
        model = wrap(small(), world)
        for hook in (wrong_bucket, wrong_result, "no function"):
            with pytest.raises(HookError):
                model.register_comm_hook(None, hook)  # type: ignore[arg-type]

    run_ranks(1, body)


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
def test_an_impossible_weight_is_refused(count: float) -> None:
    def body(world: World) -> None:
        model = wrap(small(), world)
        with pytest.raises(UsageError, match="weighted"), model.weighted(count):
            pass

    run_ranks(1, body)


@pytest.mark.parametrize("size", [2, 3])
def test_other_bucket_sizes_on_one_rank_are_refused_on_all(size: int) -> None:
    def body(world: World) -> None:
        cap = 3.0 if world.rank == 1 else None
        DistributedDataParallel(small(), process_group=world.group, bucket_cap_mb=cap)

    for got in run_ranks(size, body, return_exceptions=True):
        assert isinstance(got, DesyncError)
        assert "on rank 1 than on rank 0" in str(got)
