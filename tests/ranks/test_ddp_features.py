"""What a torch user expects to work under the wrapper, besides averaging."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from paceline import DistributedDataParallel, World
from paceline.errors import UsageError
from paceline.testing import gradients, run_ranks, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def small() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), 0)


def wrap(world: World, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(small(), process_group=world.group, **options)


def step(model: nn.Module, world: World) -> None:
    model.zero_grad()
    model(X[world.rank :: world.size]).square().mean().backward()


def whole_gradients() -> dict[str, Tensor | None]:
    model = small()
    model(X).square().mean().backward()
    return gradients(model)


def test_gradient_clipping_sees_averaged_gradients() -> None:
    whole = small()
    whole(X).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)

    def body(world: World) -> tuple[Tensor, Any]:
        model = wrap(world)
        step(model, world)
        got = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return got, gradients(model)

    for got, grads in run_ranks(2, body):
        torch.testing.assert_close(got, norm)
        torch.testing.assert_close(grads, gradients(whole))


def test_autocast_and_a_grad_scaler_train_alike_on_all_ranks() -> None:
    def body(world: World) -> list[Tensor]:
        model = wrap(world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for number in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = model(X[world.rank :: world.size]).square().mean()
            if number == 1 and world.rank == 1:
                value = value * float("inf")  # one rank overflows, so all must skip
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]

    first, second = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[-1].item() == 128.0
    assert all(torch.isfinite(t).all() for t in first)


def test_a_hook_sees_torchs_bucket_interface() -> None:
    def body(world: World) -> list[tuple[int, bool, int, int]]:
        model = wrap(world, bucket_cap_mb=1e-4)
        seen: list[tuple[int, bool, int, int]] = []

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            grads, params = bucket.gradients(), bucket.parameters()
            assert [g.shape for g in grads] == [p.shape for p in params]
            flat = torch.cat([g.reshape(-1) for g in grads])
            assert torch.equal(flat, bucket.buffer())
            seen.append((bucket.index(), bucket.is_last(), len(grads), bucket.buffer().numel()))
            world.group.allreduce([bucket.buffer()]).wait()
            bucket.set_buffer(bucket.buffer() / world.size)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, hook)
        step(model, world)
        assert torch.allclose(gradients(model)["0.weight"], whole_gradients()["0.weight"])
        return seen

    for seen in run_ranks(2, body):
        assert [index for index, *_ in seen] == list(range(len(seen)))
        assert [is_last for _, is_last, *_ in seen] == [False] * (len(seen) - 1) + [True]
        assert sum(numel for *_, numel in seen) == sum(p.numel() for p in small().parameters())


def test_gradients_kept_from_an_earlier_step_do_not_change() -> None:
    def body(world: World) -> bool:
        model = wrap(world)
        step(model, world)
        kept = [p.grad for p in model.parameters()]
        flat = [p.grad.view(-1) for p in model.parameters()]
        copies = [g.clone() for g in kept if g is not None]
        model.zero_grad()
        del kept[1]
        (model(X[world.rank :: world.size] * 3).square().mean()).backward()
        step(model, world)
        same_flat = all(torch.equal(f, c.view(-1)) for f, c in zip(flat, copies, strict=True))
        return same_flat and torch.equal(kept[0], copies[0])

    assert run_ranks(2, body) == [True, True]


def test_memory_is_reused_when_nobody_holds_it() -> None:
    def body(world: World) -> list[int]:
        model = wrap(world)
        pointers = []
        for _ in range(5):
            step(model, world)
            grad = next(model.parameters()).grad
            assert grad is not None
            pointers.append(grad.data_ptr())
            del grad
        return pointers

    for pointers in run_ranks(2, body):
        assert len(set(pointers[1:])) == 1


def test_gradients_in_memory_of_the_caller_are_averaged_there() -> None:
    def body(world: World) -> tuple[Tensor, Tensor]:
        model = wrap(world)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        start = 0
        for param in model.parameters():
            param.grad = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
        for _ in range(2):
            flat.zero_()
            model(X[world.rank :: world.size]).square().mean().backward()
        expected = torch.cat([g.view(-1) for g in whole_gradients().values() if g is not None])
        return flat, expected

    for flat, expected in run_ranks(2, body):
        torch.testing.assert_close(flat, expected)


def test_optimizers_without_set_to_none_accumulate_in_place() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(X[world.rank :: world.size]).square().mean().backward()
        return gradients(model)

    for got in run_ranks(3, body):
        torch.testing.assert_close(got, whole_gradients())


def test_a_deepcopy_synchronises_on_its_own() -> None:
    def body(world: World) -> tuple[Any, Any]:
        model = wrap(world)
        step(model, world)
        clone = copy.deepcopy(model)
        assert clone.module is not model.module
        model.zero_grad()
        step(clone, world)
        return gradients(model), gradients(clone)

    for original, cloned in run_ranks(2, body):
        assert all(g is None for g in original.values())
        torch.testing.assert_close(cloned, whole_gradients())


def test_a_copy_of_the_bare_module_is_a_plain_module() -> None:
    def body(world: World) -> None:
        model = wrap(world)
        step(model, world)
        plain = copy.deepcopy(model.module)
        if world.rank == 0:  # on one rank only: would hang if it synchronised
            plain(X).square().mean().backward()
            saved = io.BytesIO()
            torch.save(model.module, saved)
            assert b"paceline" not in saved.getvalue()
            saved.seek(0)
            torch.load(saved, weights_only=False)(X).sum().backward()

    run_ranks(2, body)


def test_pickling_needs_a_default_group_to_come_back() -> None:
    data = run_ranks(1, lambda world: pickle.dumps(wrap(world)))[0]
    with pytest.raises(RuntimeError, match="process group"):
        pickle.loads(data)


def test_a_compiled_module_is_synchronised() -> None:
    def body(world: World) -> tuple[Any, list[str]]:
        compiled = torch.compile(small(), backend="aot_eager")
        model = DistributedDataParallel(compiled, process_group=world.group)
        for _ in range(2):
            step(model, world)
        return gradients(model), list(model.state_dict())

    # One rank at a time may compile: threads share the compiler.
    for got, names in run_ranks(1, body):
        torch.testing.assert_close(got, whole_gradients())
        assert names == list(small().state_dict())


def test_checks_for_forgotten_models_leave_nothing_behind() -> None:
    references: list[weakref.ref[Any]] = []

    def body(world: World) -> None:
        model = wrap(world)
        step(model, world)
        references.extend(
            [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.reducer)]
        )

    run_ranks(2, body)
    gc.collect()
    assert [ref() for ref in references] == [None] * 6


def test_autograd_grad_stays_local_and_leaves_the_model_usable() -> None:
    def body(world: World) -> Any:
        model = wrap(world)
        value = model(X[world.rank :: world.size]).square().mean()
        torch.autograd.grad(value, list(model.parameters()))
        step(model, world)
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, whole_gradients())


def test_a_gradient_penalty_with_double_backward_is_averaged() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum(dim=1).mean()

    whole = small()
    penalty(whole, X).backward()

    def body(world: World) -> Any:
        model = wrap(world)
        for _ in range(2):
            model.zero_grad()
            penalty(model, X[world.rank :: world.size]).backward()
        return gradients(model)

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, gradients(whole))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("keeps", [False, True], ids=["added", "zeroed between"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_penalty_on_averaged_gradients_has_the_gradient_of_one_process(
    size: int, keeps: bool
) -> None:
    def train(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward(create_graph=True)
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            if keeps:
                model.zero_grad()
            (sum(grad.square().sum() for grad in grads) + model(x).mean()).backward()
        found = {
            name: None if g is None else g.detach().clone() for name, g in gradients(model).items()
        }
        model.zero_grad()  # a graph and its parameter keep each other alive
        return found

    def body(world: World) -> Any:
        model = wrap(world, bucket_cap_mb=1e-4, gradient_as_bucket_view=keeps)
        return train(model, X[world.rank :: world.size])

    expected = train(small(), X)
    for got in run_ranks(size, body):
        torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("weighted", [False, True])
def test_graphs_of_averages_that_nothing_can_differentiate_are_refused(weighted: bool) -> None:
    def body(world: World) -> None:
        model = wrap(world)
        try:
            with model.weighted(3) if weighted else model.no_sync(enabled=False):
                model(X).square().sum().backward(create_graph=True)
            penalty = [
                param.grad.square().sum() for param in model.parameters() if param.grad is not None
            ]
            torch.stack(penalty).sum().backward(create_graph=True)
        finally:
            model.zero_grad()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert "create_graph" in str(error)


@pytest.mark.parametrize("size", [1, 2])
def test_mixed_precision_computes_low_and_averages_high(size: int) -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

    def body(world: World) -> Any:
        model = wrap(world, mixed_precision=config)
        output = model(X[world.rank :: world.size])
        assert output.dtype is torch.bfloat16
        output.float().square().mean().backward()
        return gradients(model)

    for got in run_ranks(size, body):
        assert got["0.weight"].dtype is torch.float32
        torch.testing.assert_close(got, whole_gradients(), rtol=0.05, atol=0.01)
