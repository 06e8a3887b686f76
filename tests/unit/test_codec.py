"""What the codec writes it reads back unchanged; what it did not write costs only an error."""

from __future__ import annotations

import functools
import json
import math
import struct
import tracemalloc
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from counting import lines_executed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.errors import WireError
from paceline.files import codec
from paceline.files.safetensors import _NAME_BY_DTYPE

DTYPES = [getattr(torch, name) for name in (*_NAME_BY_DTYPE, "complex32", "complex128")]


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, tensors and NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        has_same_keys = [*map(repr, a)] == [*map(repr, b)]
        return has_same_keys and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    return repr(a) == repr(b)


def message(tree: Any, payload: bytes = b"", places: Any = None) -> bytes:
    """A message with this skeleton, and raw bytes behind it that `places` describes."""
    skeleton = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    size = len(skeleton)
    header = {"__skeleton__": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    for name, (dtype, shape, begin, end) in (places or {}).items():
        offsets = [size + begin, size + end]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + skeleton + payload


def one_tensor(dtype: str, shape: list[Any], payload: bytes = b"") -> bytes:
    return message(["tensor", "x"], payload, {"x": (dtype, shape, 0, len(payload))})


def round_trip(value: Any) -> Any:
    return codec.decode(codec.encode(value))


tensors = st.builds(
    lambda shape, dtype, seed: (
        torch.randint(
            0,
            2 if dtype is torch.bool else 256,
            (math.prod(shape) * dtype.itemsize,),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        .view(dtype)
        .reshape(shape)
    ),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF, exclude_categories=()))
    | st.binary()
    | st.sampled_from([torch.float8_e5m2, torch.device("cuda", 3), torch.Size([2, 0, 5])])
    | tensors
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_every_value_comes_back_unchanged(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)
    assert same(round_trip(tensor), tensor)


def test_views_that_are_not_contiguous_come_back_as_what_they_show() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    for view in (base.t(), base[::2, 1::3], base.conj(), base.imag, base.conj().imag):
        got = round_trip(view)
        assert torch.equal(got, view)
        assert not got.is_conj()
        assert not got.is_neg()


def test_a_parameter_comes_back_as_a_plain_tensor_that_can_be_written_to() -> None:
    got = round_trip(nn.Parameter(torch.ones(3)))
    assert type(got) is torch.Tensor
    assert not got.requires_grad
    assert got.add_(1).tolist() == [2.0, 2.0, 2.0]


def test_decoding_leaves_the_sent_bytes_alone() -> None:
    data = codec.encode(torch.zeros(4))
    codec.decode(data).fill_(1.0)
    assert torch.equal(codec.decode(data), torch.zeros(4))


def test_numbers_and_strings_of_other_libraries_come_back_as_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    found = round_trip({"lr": numpy.float64(0.5), "name": numpy.str_("x")})
    assert same(found, {"lr": 0.5, "name": "x"})


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
    assert same(saved["optimizer"], optimizer.state_dict())
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
    assert same(saved[1], scheduler.state_dict())
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
    tensors, skeleton = codec.separate_tensors(
        {"model": model.state_dict(), "again": model["head"].weight}
    )
    assert len(tensors) == 1
    found = codec.restore_tensors(skeleton, tensors, "a file")
    assert found["model"]["embed.weight"] is found["model"]["head.weight"] is found["again"]


def test_views_that_differ_and_empty_tensors_are_stored_apart() -> None:
    whole = torch.arange(6.0)
    state = [whole[:3], whole[3:], whole[::2], whole.view(2, 3), torch.empty(0), torch.empty(0)]
    assert len(codec.separate_tensors(state)[0]) == 6
    assert same(round_trip(state), state)


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
    tensors, _ = codec.separate_tensors(state)
    assert {"a/b", "a/b#2", "1", "1#2"} <= tensors.keys()
    assert len(tensors) == 8
    assert all(not name.startswith("__") and len(name) < 250 for name in tensors)
    assert same(round_trip(state), state)


def test_a_counter_stays_a_counter() -> None:
    assert same(round_trip(Counter([1, 1, 2])), Counter([1, 1, 2]))


@dataclass
class Point:
    x: int


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        Point(1),
        Pair(1, 2),
        {1, 2},
        object(),
        bytearray(b"x"),
        lambda: None,
        torch.nn.Linear(1, 1),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.ones([1] * 65),
        {b"k": 1},
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_and_not_turned_into_something_near_it(value: Any) -> None:
    with pytest.raises(WireError):
        codec.encode(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {2: Point(1)}]}, r"value\['a'\]\[1\]\[2\].* .*Point, which cannot"),
        ({"a": {1, 2}}, r"value\['a'\].* builtins\.set"),
        ([torch.ones(2).to_sparse()], r"value\[0\].* 1-dimensional torch\.sparse_coo tensor"),
        ([torch.ones(2, device="meta")], r"on meta"),
        ({b"k": 1}, "has.* key b'k' of type bytes"),
        ({"n": 10**5000}, "A number in.* value cannot be written"),
        (
            "x" * (codec.MAX_SKELETON_BYTES + 1),
            "more than.* 67,108,864 in[^$]*into a tensor",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_a_refusal_names_the_type_and_the_place(value: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        codec.encode(value)


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(WireError, match="nested deeper than 64"):
        codec.encode(loop)


def test_the_deepest_nesting_that_is_written_is_also_read() -> None:
    value: Any = 0
    for _ in range(codec.MAX_DEPTH):
        value = [value]
    assert round_trip(value) == value
    with pytest.raises(WireError):
        codec.encode([value])


MALFORMED = {
    "nothing": b"",
    "too short": bytes(4),
    "another file": b"PK\3\4" + bytes(8),
    "no skeleton": one_tensor("U8", [1], b"x").replace(b"__skeleton__", b"__sk3l3ton__"),
    "header longer than the message": b"\xff\xff\xff\xff\0\0\0\0{}",
    "nothing in the header": message(b""),
    "not JSON": message(b"[1,"),
    "not text": message(b"\xff\xfe"),
    "NaN": message(b"NaN"),
    "a float out of range": message(b"1e999"),
    "an endless integer": message(b"9" * 10_000),
    "a JSON object": message({"a": 1}),
    "nested in JSON": message(b"[" * 100_000 + b"]" * 100_000),
    "nested in kinds": message(b'["list",' * 100 + b"1" + b"]" * 100),
    "an empty list": message([]),
    "an unknown kind": message(["object", "os.system"]),
    "a kind that is no string": message([["list"]]),
    "an unknown float": message(["float", "1.5"]),
    "a complex of text": message(["complex", "a", "b"]),
    "a size of text": message(["size", "a"]),
    "a dtype that is a function": message(["dtype", "load"]),
    "a dtype that is a module": message(["dtype", "os"]),
    "a device that is none": message(["device", "no such"]),
    "a device that torch lacks": message(["device", "nonsense:3"]),
    "bytes that are not there": message(["bytes", "x"]),
    "bytes that are floats": message(["bytes", "x"], bytes(4), {"x": ("F32", [1], 0, 4)}),
    "a tensor without a name": message(["tensor", 1]),
    "a tensor that nothing speaks of": message(0, b"x", {"x": ("U8", [1], 0, 1)}),
    "a tensor that is not there": one_tensor("F32", [2**20, 2**20]),
    "a size that overflows": one_tensor("F32", [2**32, 2**32, 2**32]),
    "an empty shape that overflows": one_tensor("F32", [0, 2**62, 2**62]),
    "an extent beyond 64 bits": one_tensor("F32", [0, 2**70]),
    "a thousand extents": one_tensor("F32", [2**62] * 1000),
    "more dimensions than torch has": one_tensor("U8", [1] * 1000, b"x"),
    "a negative extent": one_tensor("U8", [-1, -4], bytes(4)),
    "an extent that is a bool": one_tensor("U8", [True], b"x"),
    "an extent that is a float": one_tensor("U8", [1.0], b"x"),
    "an unknown dtype": one_tensor("qint8", [1], b"x"),
    "a dtype that is another name": one_tensor("load", [1], b"x"),
    "a bool that is 2": one_tensor("BOOL", [1], b"\2"),
    "tensors that overlap": message(["tensor", "x"], b"x", {"x": ("U8", [1], -1, 0)}),
    "bytes left over": message(1, b"x"),
    "a pair that is none": message(["dict", [1]]),
    "a key that is a list": message(["dict", [["list"], 2]]),
    "a key twice": message(["dict", ["a", 1], ["a", 2]]),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_are_an_error_with_flat_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            codec.decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(data) + 2**20
    assert len(str(caught.value)) < 500


def test_a_hostile_key_costs_its_length_once_and_not_once_per_item() -> None:
    # Once per item would be a terabyte to copy, and the test would not end in time.
    data = message(["dict", ["k" * 2**20, ["list", *range(1_000_000), ["no kind"]]]])
    with pytest.raises(WireError, match="no kind") as caught:
        codec.decode(data)
    assert len(str(caught.value)) < 500


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    for candidate in (data, len(data).to_bytes(8, "little") + data, message(data)):
        with suppress(WireError):
            codec.decode(candidate)


@given(values, st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_damaged_message_is_read_or_refused_and_nothing_else(value: Any, data: Any) -> None:
    sound = codec.encode(value)
    cut = data.draw(st.integers(0, len(sound)))
    place = data.draw(st.integers(0, len(sound) - 1))
    flipped = bytearray(sound)
    flipped[place] ^= data.draw(st.integers(1, 255))
    for damaged in (sound[:cut], bytes(flipped), sound + b"x"):
        with suppress(WireError):
            codec.decode(damaged)


KINDS = ["list", "tuple", "dict", "module", "tensor", "bytes", "float", "complex", "size", "dtype"]
json_trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([*KINDS, "x", "float32", "bool"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=10,
)


@given(json_trees, json_trees, st.binary(max_size=16))
def test_a_crafted_header_is_read_or_refused_and_nothing_else(
    tree: Any, shape: Any, payload: bytes
) -> None:
    for extents in (shape, [len(payload)]):
        with suppress(WireError):
            codec.decode(message(tree, payload, {"x": ("U8", extents, 0, len(payload))}))


def test_a_look_needs_no_tensors_and_no_torch() -> None:
    value = {"a": [torch.zeros(2), b"x"], "d": torch.float32, "n": math.inf}
    tensors, skeleton = codec.separate_tensors(value)
    stand_ins = dict.fromkeys(tensors, "here")
    seen = codec.restore_tensors(skeleton, stand_ins, "a file", revive=lambda kind, _: kind)
    assert seen == {"a": ["here", "bytes"], "d": "dtype", "n": math.inf}


def test_names_that_are_cut_to_one_take_work_in_proportion_to_their_number() -> None:
    lines = []
    for count in (1_000, 4_000):
        state = {f"{'x' * 300}{i}": torch.zeros(0) for i in range(count)}
        lines.append(lines_executed(functools.partial(codec.separate_tensors, state)))
        assert len(codec.separate_tensors(state)[0]) == count
    assert lines[1] < 4.5 * lines[0]


def test_more_values_than_are_read_again_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_SKELETON_LIMITS", replace(codec._SKELETON_LIMITS, values=2**10))
    most = 2**10 - 10
    assert codec.decode(codec.encode([0] * most)) == [0] * most
    with pytest.raises(WireError, match="into a tensor"):
        codec.encode([0] * 2**10)
