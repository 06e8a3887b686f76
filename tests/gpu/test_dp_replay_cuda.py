"""Replays that nobody asked for: they happen where they pay, and nobody can tell but by the clock.

Every test compares a model that replays by itself with one that may not.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CASES, Case

from paceline.comm import tree
from paceline.dp import DataParallel, DPOptions
from paceline.dp import pace as pace_of_calls

PLAIN = DPOptions(cuda_graphs=False)
WIDTH = 16
STEPS = 8
SCALE = 2.0


@pytest.fixture(autouse=True)
def _every_gpu_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small models do keep a GPU waiting, but a busy host may measure otherwise now and then."""
    monkeypatch.setattr(pace_of_calls, "WAITS_BELOW", float("inf"))
    yield
    gc.collect()


class Loop(nn.Module):
    def __init__(self, depth: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.dropout, self.factor = nn.Dropout(dropout), 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x))) * self.factor
        return x * SCALE


def sequence() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers).cuda()


def batches(count: int = STEPS, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, WIDTH, generator=generator).cuda(),
            torch.randint(WIDTH, (rows,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def recordings(model: DataParallel) -> int:
    """How many recordings the model has; the only look inside."""
    assert model._engine is not None
    replayer = model._engine._replayer
    entries = [] if replayer is None else replayer._recorder._entries.values()
    return sum(entry.recording is not None for entry in entries)


def refusal(model: DataParallel) -> str | None:
    assert model._engine is not None
    assert model._engine._replayer is not None
    return model._engine._replayer._recorder.refusal


def train(
    model: DataParallel,
    on_replicas: bool = False,
    between: Callable[[int, nn.Module], Any] = lambda step, module: None,
) -> list[Tensor]:
    """Losses of a few steps, then parameters and buffers."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(batches()):
        between(step, model.module)
        if step % 3:  # gradients are added up now and then
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if on_replicas:
            losses.append(model.backward(F.cross_entropy, x, y))
        else:
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
        optimizer.step()
    return [*(loss.detach() for loss in losses), *model.state_dict().values()]


def both(build: Callable[[], nn.Module], replicas: int = 2) -> tuple[DataParallel, DataParallel]:
    """A model that replays by itself, and one that does not."""
    module = build().cuda()
    plain = DataParallel(copy.deepcopy(module), [0] * replicas, options=PLAIN)
    return DataParallel(module, [0] * replicas), plain


each_way = pytest.mark.parametrize("on_replicas", [False, True], ids=["forward", "loss"])
each_model = pytest.mark.parametrize(
    "build",
    [Loop, sequence, lambda: Loop(dropout=0.3)],
    ids=["loop", "sequence", "dropout"],
)


@each_way
@pytest.mark.parametrize("replicas", [2, 3, 4])
@each_model
def test_training_gives_the_same_bits_as_without_replays(
    build: Callable[[], nn.Module], replicas: int, on_replicas: bool
) -> None:
    ours, plain = both(build, replicas)
    got, expected = train(ours, on_replicas), train(plain, on_replicas)
    assert recordings(ours) > 0, refusal(ours)
    assert recordings(plain) == 0
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@each_way
def test_batch_norm_keeps_the_same_statistics(on_replicas: bool) -> None:
    ours, plain = both(lambda: nn.Sequential(Loop(), nn.BatchNorm1d(WIDTH), Loop()))
    got, expected = train(ours, on_replicas), train(plain, on_replicas)
    assert recordings(ours) > 0, refusal(ours)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@each_way
@pytest.mark.parametrize("keeps_casts", [True, False])
def test_autocast_is_replayed_where_it_keeps_no_casts(on_replicas: bool, keeps_casts: bool) -> None:
    """Casts that are kept for as long as autocast is on do not see new weights."""
    ours, plain = both(Loop)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=keeps_casts):
        got, expected = train(ours, on_replicas), train(plain, on_replicas)
    assert (recordings(ours) == 0) == keeps_casts
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = Loop(), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return self.layer(x) * len(self.seen)


class Waits(Loop):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class Masks(Loop):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[x > 0].sum()


class DrawsOnTheCpu(Loop):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(1).to(x.device)


@each_way
@pytest.mark.parametrize("build", [Counts, Waits, Masks, DrawsOnTheCpu])
def test_what_could_differ_runs_as_usual(build: Callable[[], nn.Module], on_replicas: bool) -> None:
    ours, plain = both(build)
    got, expected = train(ours, on_replicas), train(plain, on_replicas)
    assert recordings(ours) == 0
    assert refusal(ours)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def change_a_factor(step: int, module: nn.Module) -> None:
    module.factor = 0.5 if step >= 6 else 1.0


def change_a_rate(step: int, module: nn.Module) -> None:
    module.dropout.p = 0.4 if step >= 6 else 0.0


def change_the_mode(step: int, module: nn.Module) -> None:
    module.train(step % 2 == 0)


def replace_a_weight(step: int, module: nn.Module) -> None:
    if step == 6:
        module.layers[0].weight.data = torch.ones(WIDTH, WIDTH, device="cuda") / WIDTH


def turn_a_weight(step: int, module: nn.Module) -> None:
    if step == 6:
        module.layers[0].weight.data = module.layers[0].weight.data.t()


def tie_other_weights(step: int, module: nn.Module) -> None:
    layers = module.layers
    layers[1].weight = layers[2 if step >= 6 else 0].weight


def freeze_a_weight(step: int, module: nn.Module) -> None:
    module.layers[0].weight.requires_grad_(step < 6)


def replace_a_layer(step: int, module: nn.Module) -> None:
    if step == 6:
        module.layers[1] = copy.deepcopy(module.layers[2])


def change_a_global(step: int, module: nn.Module) -> None:
    globals()["SCALE"] = 3.0 if step >= 6 else 2.0


def add_a_hook(step: int, module: nn.Module) -> None:
    if step == 6:
        module.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)


def hook_a_parameter(step: int, module: nn.Module) -> None:
    if step == 6:
        module.layers[0].weight.register_hook(lambda grad: grad * 2)


def write_a_weight(step: int, module: nn.Module) -> None:
    with torch.no_grad():
        module.layers[0].weight.mul_(0.9)


@each_way
@pytest.mark.parametrize(
    "change",
    [
        change_a_factor,
        change_a_rate,
        change_the_mode,
        replace_a_weight,
        turn_a_weight,
        tie_other_weights,
        freeze_a_weight,
        replace_a_layer,
        change_a_global,
        add_a_hook,
        hook_a_parameter,
        write_a_weight,
    ],
)
def test_changes_after_a_recording_count_at_once(
    change: Callable[[int, nn.Module], None], on_replicas: bool
) -> None:
    ours, plain = both(Loop)
    got, expected = train(ours, on_replicas, change), train(plain, on_replicas, change)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@each_way
def test_tf32_switched_on_after_a_recording_counts(on_replicas: bool) -> None:
    def switch(step: int, module: nn.Module) -> None:
        torch.backends.cuda.matmul.allow_tf32 = step >= 6

    try:
        ours, plain = both(Loop)
        got, expected = train(ours, on_replicas, switch), train(plain, on_replicas, switch)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def warmed(build: Callable[[], nn.Module] = Loop, replicas: int = 2) -> Any:
    """Two models that have seen the same, of which one replays from now on."""
    ours, plain = both(build, replicas)
    for model in (ours, plain):
        for x, _ in batches(5):
            model(x).square().mean().backward()
        model.zero_grad()
    assert recordings(ours) > 0, refusal(ours)
    return ours, plain


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_gradients_work_after_a_recording(dropout: float) -> None:
    results = []
    for model in both(lambda: Loop(dropout=dropout).double()):
        torch.manual_seed(3)
        x = batches(1)[0][0].double().requires_grad_()
        for _ in range(6):
            model(x).square().mean().backward()
        model.zero_grad()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        after = torch.rand(3, device="cuda")
        grads = [param.grad for param in model.parameters()]
        results.append([slope.detach(), *grads, model(x).detach(), after])
        assert recordings(model) == (0 if len(results) == 2 else 1)
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


def test_a_kept_graph_can_be_used_again_while_others_run() -> None:
    results = []
    for model in warmed():
        (x, _), (other, _) = batches(2)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        model(other).square().mean().backward()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        results.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_a_kept_graph_with_dropout_keeps_its_masks() -> None:
    results = []
    for model in warmed(lambda: Loop(dropout=0.3)):
        torch.manual_seed(3)
        loss = model(batches(1)[0][0]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        after = torch.rand(3, device="cuda")
        results.append([after, *(param.grad for param in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_two_passes_may_wait_for_their_backward_passes() -> None:
    results = []
    for model in warmed():
        (x, _), (other, _) = batches(2)
        first, second = model(x), model(other)
        (first * second).mean().backward()
        results.append([first.detach(), second.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_outputs_and_gradients_that_are_kept_stay_as_they_are() -> None:
    for rows in (1, 12):
        results = []
        for model in both(Loop):
            kept: list[Tensor] = []
            for x, _ in batches(STEPS, rows):
                output = model(x)
                output.square().mean().backward()
                kept += [output.detach(), *(p.grad for p in model.parameters())]
                model.zero_grad()
            results.append(kept)
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_weight_written_between_forward_and_backward_is_an_error() -> None:
    for model in warmed():
        loss = model(batches(1)[0][0]).square().mean()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_bias_written_between_forward_and_backward_is_none() -> None:
    results = []
    for model in warmed():
        loss = model(batches(1)[0][0]).square().mean()
        with torch.no_grad():
            for layer in model.module.layers:
                layer.bias.mul_(2)
        loss.backward()
        results.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_an_input_written_between_forward_and_backward_is_used_as_it_was() -> None:
    results = []
    for model in warmed(lambda: nn.Sequential(nn.Tanh(), Loop())):
        x = batches(1)[0][0].requires_grad_()
        for step in range(6):
            hidden = x * 1.0
            loss = model(hidden).square().mean()
            if step == 5:
                hidden += 1  # what tanh saved is its output
            loss.backward(retain_graph=step == 5)
        loss.backward()
        results.append([x.grad, *(param.grad for param in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_another_stream_has_a_recording_of_its_own() -> None:
    results = []
    for model in warmed():
        stream = torch.cuda.Stream()
        outputs = []
        for x, _ in batches(12):
            for context in (nullcontext(), torch.cuda.stream(stream)):
                with context:
                    outputs.append(model(x).detach().clone())
        torch.cuda.synchronize()
        results.append(outputs)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_modes_that_look_on_see_everything() -> None:
    from torch.overrides import TorchFunctionMode

    class Look(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            Look.count += func is torch.tanh
            return func(*args, **(kwargs or {}))

    ours, _ = warmed()
    with Look():
        ours(batches(1)[0][0])
    assert Look.count == 2 * 6


def test_gradients_off_is_replayed_and_inference_mode_runs_as_usual() -> None:
    ours, plain = both(Loop)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for x, _ in batches():
                torch.testing.assert_close(ours(x), plain(x), rtol=0, atol=0)
    assert recordings(ours) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
@each_way
def test_no_model_of_the_zoo_can_tell(case: Case, on_replicas: bool) -> None:
    rough = {"rtol": 0.05, "atol": 0.05} if "rough" in case.traits else {"rtol": 1e-4, "atol": 1e-5}
    results = []
    for options in (DPOptions(), PLAIN):
        module = case.build().cuda()
        if on_replicas:
            module = _WithLoss(case, module)
        model = DataParallel(module, [0, 0], options=options)
        learning = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=1e-4)
        torch.manual_seed(0)
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            parts = case.batch(11)
            inputs = tree.map_tensors(lambda t, step=step: t.roll(step, 0).cuda(), parts)
            if on_replicas:
                losses.append(model.backward(lambda output: output, inputs))
            else:
                losses.append(case.loss(model, inputs))
                losses[-1].backward()
            optimizer.step()
        results.append([*(loss.detach() for loss in losses), *model.state_dict().values()])
    torch.testing.assert_close(results[0], results[1], **rough)


class _WithLoss(nn.Module):
    def __init__(self, case: Case, body: nn.Module) -> None:
        super().__init__()
        self.case, self.body = case, body

    def forward(self, *inputs: Tensor) -> Any:
        return self.case.loss(self.body, inputs)


@each_way
def test_a_thousand_replays_leak_nothing(on_replicas: bool) -> None:
    model = DataParallel(Loop().cuda(), [0, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batches(1)[0]

    def step() -> None:
        optimizer.zero_grad()
        if on_replicas:
            model.backward(F.cross_entropy, x, y)
        else:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def look() -> tuple[int, int, int]:
        gc.collect()
        torch.cuda.synchronize()
        tensors = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), tensors

    for _ in range(20):
        step()
    before = look()
    assert recordings(model) > 0, refusal(model)
    for _ in range(1000):
        step()
    assert look() == before


def test_a_dropped_model_is_freed_at_once_with_its_recordings() -> None:
    model = DataParallel(Loop().cuda(), [0, 0])
    train(model)
    train(model, on_replicas=True)
    assert recordings(model) > 0
    weight = weakref.ref(model.module.layers[0].weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_ever_new_shapes_do_not_fill_the_memory() -> None:
    model = DataParallel(Loop().cuda(), [0, 0])
    for rows in range(2, 60):
        for x, _ in batches(5, rows):
            model(x).sum().backward()
    assert recordings(model) <= 16


def test_a_large_model_is_never_recorded() -> None:
    model = DataParallel(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))).cuda(), [0, 0])
    for _ in range(6):
        model(torch.ones(4, 2048, device="cuda")).sum().backward()
    assert model._engine is not None
    assert model._engine._replayer is None


def test_watching_leaves_no_profiler_behind() -> None:
    model = DataParallel(Loop().cuda(), [0, 0])
    train(model)
    assert sys.getprofile() is None
    assert torch.cuda.get_sync_debug_mode() == 0
