"""Which forward passes may be replayed: what is proven, what is refused, and what a proof guards.

All of it is decided without a GPU. A pass is watched as `DataParallel` watches it.
"""

from __future__ import annotations

import gc
import math
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.dp.repeat import MOST_SNAPSHOTS, Proof, Snapshots, prove
from paceline.dp.watch import Watch

CPU = torch.device("cpu")
WIDTH = 4
SCALE = 2.0
COUNTS = {"calls": 0}
DIMS = [0, 1]
criterion = nn.CrossEntropyLoss()


def pass_of(module: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Proof | str:
    """Watch one pass over a small batch and judge it."""
    x, y = torch.randn(3, WIDTH), torch.arange(3)
    kept = (nn.BatchNorm1d,)
    tensors = [t for m in module.modules() if type(m) not in kept for t in m._buffers.values()]
    written = [x, *module.parameters(), *(t for t in tensors if t is not None)]
    watch = Watch(CPU)
    output = watch.run(module, [x], {}, written)
    if loss_fn is not None:
        watch.run(loss_fn, [output, y], {}, [output])
    return prove(watch, list(module.modules()), [] if loss_fn is None else [loss_fn])


class Deep(nn.Module):
    """The loop that most people would write."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm, self.scale = nn.LayerNorm(WIDTH), 0.5

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + torch.relu(layer(x)) * self.scale if index % 2 else F.gelu(layer(x))
        return self.norm(x) * SCALE / math.sqrt(x.shape[-1])


class Of(nn.Module):
    """A module whose forward pass is a function of itself, a layer and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.seen, self.dims = 0, [], [1, 2]
        self.act, self.config = F.relu, object()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def shift_by(amount: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + amount


shift_by_one = shift_by(1.0)


def in_training_only(self: Any, x: Tensor) -> Tensor:
    if self.training and x.shape[0] > 1:
        x = x * 2
    return self.layer(x)


def with_parts(self: Any, x: Tensor) -> Tensor:
    batch, width = x.shape
    first, second = x.view(batch, 2, width // 2).unbind(1)
    parts = [part.tanh() for part in (first, second)]
    parts.append(first)
    if len(parts) != 3:
        raise ValueError(f"{len(parts)} parts")
    return torch.cat(parts, dim=-1)


GOOD: dict[str, Callable[[Any, Tensor], Any]] = {
    "layer": lambda self, x: self.layer(x),
    "method of a tensor": lambda self, x: x.relu().flatten(1)[:, :2],
    "another function": lambda self, x: helper(self.layer(x)),
    "a function with a closure": lambda self, x: shift_by_one(x),
    "a function as an attribute": lambda self, x: self.act(x),
    "a list of constants": lambda self, x: x.sum(self.dims[0]),
    "mode and shape": in_training_only,
    "unpacking and lists": with_parts,
    "a parameter": lambda self, x: x @ self.layer.weight,
    "the long way to torch": lambda self, x: torch.nn.functional.torch.relu(x),
    "new tensors": lambda self, x: x + torch.arange(WIDTH, device=x.device, dtype=x.dtype),
    "random numbers of the device": lambda self, x: F.dropout(x) + torch.rand_like(x),
    "the first parameter": lambda self, x: x.to(next(self.parameters()).dtype),
}


@pytest.mark.parametrize("function", GOOD.values(), ids=GOOD)
def test_a_pass_that_only_computes_is_proven(function: Callable[[Any, Tensor], Any]) -> None:
    proof = pass_of(Of(function))
    assert isinstance(proof, Proof), proof
    assert proof.holds()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "loop": Deep,
    "inherited": lambda: type("Child", (Deep,), {})(),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)),
    "nested": lambda: nn.Sequential(*(nn.Sequential(Deep(2), nn.SiLU()) for _ in range(2))),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.ReLU()),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, 3, padding=1), nn.MaxPool1d(2), nn.Flatten()
    ),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_models_of_torchs_layers_and_loops_over_them_are_proven(
    build: Callable[[], nn.Module],
) -> None:
    proof = pass_of(build())
    assert isinstance(proof, Proof), proof
    assert proof.holds()


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.calls


def counts_in_a_dictionary(self: Any, x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return x


def counts_in_a_global(self: Any, x: Tensor) -> Tensor:
    global SCALE
    SCALE = SCALE * 1.0
    return x


def make_counter() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def count(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return count


def adds_to_a_list(self: Any, x: Tensor) -> Tensor:
    seen = self.seen
    seen += [1]
    return x * len(seen)


def catches(self: Any, x: Tensor) -> Tensor:
    try:
        return x.view(-1, 5)
    except RuntimeError:
        return x


def warns(self: Any, x: Tensor) -> Tensor:
    warnings.warn("careful", stacklevel=2)
    return x


def says(self: Any, x: Tensor) -> Tensor:
    print("here")
    return x


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def writes_an_item(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return x


def changes_modes(self: Any, x: Tensor) -> Tensor:
    self.layer.train(not self.layer.training)
    return self.layer(x)


def function_with_attributes(self: Any, x: Tensor) -> Tensor:
    return x * function_with_attributes.factor


function_with_attributes.factor = 2  # type: ignore[attr-defined]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


learned = nn.Parameter(torch.ones(()))

BAD: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "counts": (counts, "STORE_ATTR"),
    "counts in a dictionary": (counts_in_a_dictionary, "STORE_SUBSCR"),
    "counts in a global": (counts_in_a_global, "STORE_GLOBAL"),
    "counts in a closure": (make_counter(), "STORE_DEREF"),
    "keeps a list": (lambda self, x: self.seen.append(1) or x, "seen of Of is changed"),
    "adds to a list": (adds_to_a_list, "in place"),
    "keeps a buffer": (lambda self, x: x + self.count.add_(1), "writes"),
    "writes to its input": (lambda self, x: x.mul_(2), "writes"),
    "writes an item": (writes_an_item, "STORE_SUBSCR|Python a value"),
    "branches on a value": (lambda self, x: x if x.sum() > 0 else -x, "Python a value"),
    "takes a value": (lambda self, x: x * x.sum().item(), "Python a value"),
    "indexes with a value": (lambda self, x: x[: int(x.argmax())], "Python a value"),
    "shows a value": (lambda self, x: (f"{x.sum()}", x)[1], "Python a value"),
    "takes an address": (lambda self, x: x * (x.data_ptr() % 2), "Python a value"),
    "hashes a tensor": (lambda self, x: next(iter({x, x * 2})), "hashes"),
    "looks behind autograd": (lambda self, x: x * self.layer.weight.data.sum(), "data"),
    "shape of the data": (lambda self, x: x[x > 0].sum() + x.nonzero().sum(), "nonzero"),
    "numbers from Python": (lambda self, x: x + torch.tensor([1.0]), "uses tensor"),
    "random": (lambda self, x: x * random.random(), "random"),
    "the clock": (lambda self, x: x * time.time(), "time"),
    "an object": (lambda self, x: (self.config, x)[1], "config .* is a object"),
    "torch by another way": (lambda self, x, t=torch: t.relu(x), "is a module"),
    "an import": (lambda self, x: __import__("math").pi * x, "__import__"),
    "any attribute": (lambda self, x: getattr(self, "lay" + "er")(x), "getattr"),
    "the inside of modules": (lambda self, x: self._modules["layer"](x), "_modules"),
    "the inside of objects": (lambda self, x: self.__dict__["calls"] * x, "__dict__"),
    "catches": (catches, "more than compute"),
    "warns": (warns, "calls warn"),
    "prints": (says, "print"),
    "gradients off": (without_gradients, "calls object.__new__|more than compute"),
    "changes modes": (changes_modes, "unknown|more than compute"),
    "own autograd": (lambda self, x: Double.apply(x), "apply|Double"),
    "learns outside": (lambda self, x: x * learned, "learns outside"),
    "attributes of functions": (function_with_attributes, "attributes"),
    "a new layer": (lambda self, x: nn.Linear(WIDTH, 2)(x), "unknown|calls"),
    "another device": (lambda self, x: (torch.ones(1, device="meta"), x)[1], "on meta"),
}


@pytest.mark.parametrize(("function", "reason"), BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore:careful")
def test_a_pass_that_could_differ_is_refused(
    function: Callable[[Any, Tensor], Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = pass_of(Of(function))
    assert isinstance(refusal, str)
    assert re.search(reason, refusal), refusal


LOSSES: dict[str, Callable[..., Any]] = {
    "a function of torch": F.cross_entropy,
    "a layer": nn.CrossEntropyLoss(label_smoothing=0.1),
    "a lambda": lambda output, target: F.cross_entropy(output, target, label_smoothing=0.1),
    "around a global layer": lambda output, target: criterion(output, target) * SCALE,
    "two terms": lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().mean(),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_loss_functions_are_proven_with_the_model(loss_fn: Callable[..., Any]) -> None:
    proof = pass_of(Deep(), loss_fn)
    assert isinstance(proof, Proof), proof
    assert proof.holds()


def test_a_loss_that_learns_or_keeps_statistics_is_refused() -> None:
    with_weights, with_buffers = nn.Linear(WIDTH, 1), nn.BatchNorm1d(WIDTH)
    for layer in (with_weights, with_buffers):
        refusal = pass_of(Deep(), lambda output, target, layer=layer: layer(output).sum())
        assert isinstance(refusal, str)


def test_a_garbage_collection_in_the_middle_is_no_part_of_the_pass() -> None:
    calls: list[float] = []

    def on_collection(_phase: str, _facts: dict[str, int]) -> None:
        calls.append(time.perf_counter())  # as Hypothesis and many monitors do

    thresholds = gc.get_threshold()
    gc.callbacks.append(on_collection)
    gc.set_threshold(1, 1, 1)
    try:
        proof = pass_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20))))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(on_collection)
    assert calls
    assert gc.isenabled()
    assert isinstance(proof, Proof), proof


def test_a_profiler_that_looks_on_is_left_alone() -> None:
    def profile(*_: Any) -> None: ...

    sys.setprofile(profile)
    try:
        assert isinstance(pass_of(Deep()), str)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_an_error_in_a_watched_pass_is_the_callers() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pass_of(Broken())
    assert sys.getprofile() is None


def test_equal_functions_with_different_closures_are_both_looked_at() -> None:
    class Two(nn.Module):
        def __init__(self, second: Any) -> None:
            super().__init__()
            self.first, self.second = shift_by(1.0), shift_by(second)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert isinstance(pass_of(Two(2.0)), Proof)
    assert isinstance(pass_of(Two(nn.Parameter(torch.ones(())))), str)


def proven(module: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Proof:
    proof = pass_of(module, loss_fn)
    assert isinstance(proof, Proof), proof
    assert proof.holds()
    return proof


def test_a_changed_global_ends_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proven(Deep())
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert not proof.holds()


def test_a_changed_function_of_torch_ends_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proven(Deep())
    monkeypatch.setattr(F, "gelu", F.relu)
    assert not proof.holds()


def test_a_name_that_hides_a_builtin_ends_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proven(Deep())
    monkeypatch.setitem(globals(), "enumerate", zip)
    assert not proof.holds()


@pytest.mark.parametrize("kind", [nn.Linear, nn.Module, Deep])
def test_a_changed_class_ends_a_proof(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = proven(Deep())
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    assert not proof.holds()


def test_a_changed_closure_ends_a_proof() -> None:
    factor = 1.0

    def forward(self: Any, x: Tensor) -> Tensor:
        return x * factor

    proof = proven(Of(forward))
    factor = 2.0
    assert not proof.holds()


def test_changed_defaults_end_a_proof() -> None:
    def forward(self: Any, x: Tensor, factor: float = 1.0) -> Tensor:
        return x * factor

    proof = proven(Of(forward))
    forward.__defaults__ = (2.0,)
    assert not proof.holds()


def test_a_list_with_other_constants_ends_a_proof() -> None:
    module = Of(lambda self, x: x.sum(self.dims[0]))
    proof = proven(module)
    module.dims[0] = 0
    assert not proof.holds()


def test_a_changed_criterion_ends_a_proof() -> None:
    layer = nn.CrossEntropyLoss()
    proof = proven(Deep(), layer)
    layer.label_smoothing = 0.5
    assert not proof.holds()


def test_a_moved_tensor_ends_a_proof() -> None:
    mask = torch.ones(WIDTH)
    proof = proven(Of(lambda self, x: x * mask))
    mask.set_(torch.zeros(WIDTH).untyped_storage())
    assert not proof.holds()


def test_every_attribute_of_every_module_counts() -> None:
    module = nn.Sequential(Deep(), nn.Dropout(0.1))
    snapshots = Snapshots(list(module.modules()))
    assert snapshots.number() == 0
    module.eval()
    assert snapshots.number() == 1
    module.train()
    assert snapshots.number() == 0
    module[1].p = 0.3
    assert snapshots.number() == 2
    module[0].layers[1].extra = None
    assert snapshots.number() == 3


def test_weights_that_change_places_count() -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    module[1].weight = module[0].weight
    snapshots = Snapshots(list(module.modules()))
    assert snapshots.number() == 0
    module[1].weight = module[2].weight
    assert snapshots.number() == 1


def test_what_is_put_on_classes_of_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: dict[str, Callable[[Any, Tensor], Any]] = {
        "of a layer": lambda self, x: x * self.layer.odd["n"],
        "of a tensor": lambda self, x: x * x.odd["n"],
    }
    monkeypatch.setattr(nn.Linear, "odd", {"n": 1}, raising=False)
    monkeypatch.setattr(torch.Tensor, "odd", {"n": 1}, raising=False)
    for function in reads.values():
        proof = proven(Of(function))
        nn.Linear.odd["n"] = torch.Tensor.odd["n"] = 2  # type: ignore[attr-defined]
        assert not proof.holds()
        nn.Linear.odd["n"] = torch.Tensor.odd["n"] = 1  # type: ignore[attr-defined]


def test_a_number_of_another_type_is_another_number() -> None:
    module = Of(lambda self, x: x * self.calls)
    snapshots = Snapshots([module])
    assert snapshots.number() == 0
    module.calls = False
    assert snapshots.number() == 1


def test_attributes_that_change_forever_are_given_up() -> None:
    module = nn.Dropout(0.0)
    snapshots = Snapshots([module])
    seen = []
    for step in range(MOST_SNAPSHOTS + 2):
        module.p = step / 100
        seen.append(snapshots.number())
    assert seen == [*range(MOST_SNAPSHOTS), None, None]


def test_hooks_are_noticed_and_so_is_that_they_are_gone() -> None:
    module = Deep()
    snapshots = Snapshots(list(module.modules()))
    assert snapshots.number() == 0
    for register in (
        module.layers[0].register_forward_hook,
        module.layers[0].register_forward_pre_hook,
        module.layers[0].register_full_backward_pre_hook,
        nn.modules.module.register_module_forward_hook,
    ):
        handle = register(lambda *_: None)
        assert snapshots.number() is None
        handle.remove()
        assert snapshots.number() == 0
