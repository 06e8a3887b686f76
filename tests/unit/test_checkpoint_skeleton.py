"""A state comes back as it was, or is refused with the path of what cannot be saved."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint.skeleton import put_together, take_apart
from paceline.errors import CheckpointError, UsageError

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(max_size=20),
    st.just(torch.float8_e5m2),
    st.just(torch.device("cuda", 3)),
    st.just(torch.Size([2, 0, 5])),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.integers(-9, 9).map(torch.tensor),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
states = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


def round_trip(state: Any) -> Any:
    tensors, skeleton = take_apart(state)
    return put_together(skeleton, {name: each.clone() for name, each in tensors.items()}, "a file")


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    match first:
        case torch.Tensor():
            assert torch.equal(first.nan_to_num(nan=7.5), second.nan_to_num(nan=7.5))
        case dict():
            assert [*map(repr, first)] == [*map(repr, second)]
            for mine, theirs in zip(first.values(), second.values(), strict=True):
                assert_same(mine, theirs)
        case list() | tuple():
            assert len(first) == len(second)
            for mine, theirs in zip(first, second, strict=True):
                assert_same(mine, theirs)
        case _:
            assert repr(first) == repr(second)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_any_nested_state_comes_back_as_it_was(state: Any) -> None:
    assert_same(round_trip(state), state)


def test_numbers_and_strings_of_other_libraries_come_back_as_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    found = round_trip({"lr": numpy.float64(0.5), "name": numpy.str_("x")})
    assert_same(found, {"lr": 0.5, "name": "x"})


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.manual_seed(0)
    model(torch.randn(5, 3)).square().mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.LBFGS(p, max_iter=2),
        lambda p: torch.optim.AdamW(
            [{"params": [each], "lr": 0.1 * i} for i, each in enumerate(p)]
        ),
    ],
    ids=["AdamW", "tensor lr", "SGD", "plain SGD", "Adafactor", "Rprop", "LBFGS", "groups"],
)
def test_an_optimizer_goes_on_from_its_saved_state_as_if_never_stopped(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    torch.manual_seed(1)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, another = make(model.parameters()), make(other.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):
        torch.manual_seed(0)
        x = torch.randn(5, 3)

        def closure_of(net: nn.Module, opt: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
            def closure() -> torch.Tensor:
                opt.zero_grad()
                loss: torch.Tensor = net(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            return closure

        def advance(net: nn.Module, opt: torch.optim.Optimizer) -> None:
            opt.step(closure_of(net, opt))  # type: ignore[arg-type]
    else:
        advance = step
    advance(model, optimizer)

    saved = round_trip({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert_same(saved["optimizer"], optimizer.state_dict())
    other.load_state_dict(saved["model"])
    another.load_state_dict(saved["optimizer"])
    for net, opt in ((model, optimizer), (other, another)):
        advance(net, opt)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            ],
            [2],
        ),
    ],
    ids=["MultiStep", "OneCycle", "Cyclic", "Plateau", "WarmRestarts", "Lambda", "Sequential"],
)
def test_a_scheduler_goes_on_from_its_saved_state(make: Callable[[Any], Any]) -> None:
    def build() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def advance(optimizer: Any, scheduler: Any) -> None:
        optimizer.step()
        is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if is_plateau else []))

    optimizer, scheduler = build()
    advance(optimizer, scheduler)
    saved = round_trip([optimizer.state_dict(), scheduler.state_dict()])
    assert_same(saved[1], scheduler.state_dict())
    another, other = build()
    another.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for _ in range(3):
        advance(optimizer, scheduler)
        advance(another, other)
        assert optimizer.param_groups[0]["lr"] == another.param_groups[0]["lr"]


def test_a_modules_versions_travel_with_its_state_dict() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    saved = round_trip(model.state_dict())
    assert saved._metadata == model.state_dict()._metadata


def test_a_tied_tensor_is_stored_once_and_comes_back_as_one() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    tensors, skeleton = take_apart({"model": model.state_dict(), "again": model["head"].weight})
    assert len(tensors) == 1
    found = put_together(skeleton, tensors, "a file")
    assert found["model"]["embed.weight"] is found["model"]["head.weight"] is found["again"]


def test_views_that_differ_and_empty_tensors_are_stored_apart() -> None:
    whole = torch.arange(6.0)
    state = [whole[:3], whole[3:], whole[::2], whole.view(2, 3), torch.empty(0), torch.empty(0)]
    assert len(take_apart(state)[0]) == 6
    assert_same(round_trip(state), state)


def test_names_of_tensors_can_be_read_and_never_collide() -> None:
    state = {
        "a": {"b": torch.zeros(1)},
        "a/b": torch.ones(1),
        "__metadata__": torch.ones(2),
        "\ud800": torch.ones(3),
        "x" * 500: torch.ones(4),
        "x" * 501: torch.ones(5),
        1: torch.ones(6),
        "1": torch.ones(7),
    }
    tensors, _ = take_apart(state)
    assert {"a/b", "a/b#2", "1", "1#2"} <= tensors.keys()
    assert len(tensors) == 8
    assert all(not name.startswith("__") and len(name) < 250 for name in tensors)
    assert_same(round_trip(state), state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [1, {2: object()}]}, r"state\['a'\]\[1\]\[2\] is a builtins\.object"),
        ({"a": {1, 2}}, r"state\['a'\] is a builtins\.set"),
        ({"model": nn.Linear(1, 1)}, "Linear, which a checkpoint cannot hold"),
        ([torch.ones(2).to_sparse()], r"state\[0\] is a torch\.sparse_coo tensor"),
        ([torch.ones(2, device="meta")], r"on meta"),
        ({"f": math.sin}, r"state\['f'\]"),
        ({b"k": 1}, "has the key b'k' of type bytes"),
        ({"n": 10**5000}, "number that cannot be written"),
        ({"s": "x" * 70_000_000}, "more than the 67,108,864 allowed"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_named_with_its_path(state: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        take_apart(state)


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="holds itself"):
        take_apart(loop)


@pytest.mark.parametrize(
    "skeleton",
    [
        b"",
        b"{}",
        b"[]",
        b"NaN",
        b'["tensor","nothing"]',
        b'["bytes","nothing"]',
        b'["dict",["a"]]',
        b'["dict",[["list"],1]]',
        b'["dict",["a",1],["a",2]]',
        b'["float","1"]',
        b'["complex","a","b"]',
        b'["size","a"]',
        b'["dtype","load"]',
        b'["dtype","os"]',
        b'["device","no such"]',
        b'["device","nonsense:3"]',
        b'["object","os.system"]',
        b"[" * 100_000,
        b'["list",' * 80 + b"0" + b"]" * 80,
        b"0",
    ],
    ids=lambda text: text.decode()[:30],
)
def test_a_skeleton_we_did_not_write_is_a_typed_error(skeleton: bytes) -> None:
    with pytest.raises(CheckpointError):
        put_together(skeleton, {"x": torch.zeros(2)}, Path("a file"))


def test_a_counter_stays_a_counter() -> None:
    assert_same(round_trip(Counter([1, 1, 2])), Counter([1, 1, 2]))
