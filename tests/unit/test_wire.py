"""What `wire` writes it reads back unchanged, and what it did not write costs only an error."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from collections import OrderedDict, namedtuple
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import codec
from paceline.errors import WireError

DTYPES = sorted(codec._NAME_BY_DTYPE, key=str)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, tensors and NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = (a.contiguous().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def message(tree: Any, payload: bytes = b"") -> bytes:
    header = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return codec.MAGIC + len(header).to_bytes(4, "little") + header + payload


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
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF, exclude_categories=()))
    | st.binary()
    | tensors
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_every_value_comes_back_unchanged(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)
    assert same(codec.decode(codec.encode(tensor)), tensor)


def test_views_that_are_not_contiguous_come_back_as_what_they_show() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    for view in (base.t(), base[::2, 1::3], base.conj(), base.imag, base.conj().imag):
        got = codec.decode(codec.encode(view))
        assert torch.equal(got, view)
        assert not got.is_conj()
        assert not got.is_neg()


def test_a_parameter_comes_back_as_a_plain_tensor_that_can_be_written_to() -> None:
    got = codec.decode(codec.encode(torch.nn.Parameter(torch.ones(3))))
    assert type(got) is torch.Tensor
    assert not got.requires_grad
    assert got.add_(1).tolist() == [2.0, 2.0, 2.0]


def test_a_state_dict_comes_back_as_a_dict_that_loads() -> None:
    source, target = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    source.running_mean.fill_(7.0)
    state = codec.decode(codec.encode(OrderedDict(source.state_dict())))
    target.load_state_dict(state)
    assert target.running_mean.tolist() == [7.0, 7.0, 7.0]


def test_decoding_leaves_the_sent_bytes_alone() -> None:
    data = codec.encode(torch.zeros(4))
    codec.decode(data).fill_(1.0)
    assert torch.equal(codec.decode(data), torch.zeros(4))


class Colour(IntEnum):
    RED = 1


@dataclass
class Point:
    x: int


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        Point(1),
        Colour.RED,
        Pair(1, 2),
        {1, 2},
        object(),
        1j,
        bytearray(b"x"),
        lambda: None,
        torch.float32,
        torch.nn.Linear(1, 1),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.ones([1] * 65),
        {(1, 2): 3},
        {True: 1},
        {None: 1},
        {1.5: 1},
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_and_not_turned_into_something_near_it(value: Any) -> None:
    with pytest.raises(WireError):
        codec.encode(value)


def test_a_refusal_names_the_type_and_the_place() -> None:
    with pytest.raises(WireError, match=r"value\['a'\]\[1\] is a .*Point"):
        codec.encode({"a": [0, Point(1)]})


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(WireError, match="nested deeper than 64"):
        codec.encode(loop)


def test_the_deepest_nesting_that_is_written_is_also_read() -> None:
    value: Any = 0
    for _ in range(codec.MAX_DEPTH):
        value = [value]
    assert codec.decode(codec.encode(value)) == value
    with pytest.raises(WireError):
        codec.encode([value])


def test_a_header_over_the_limit_is_refused_by_the_writer() -> None:
    with pytest.raises(WireError, match="into a tensor"):
        codec.encode("x" * (codec.MAX_HEADER_BYTES + 1))


MALFORMED = {
    "nothing": b"",
    "too short": codec.MAGIC,
    "other magic": b"PK\3\4" + bytes(8),
    "header longer than the message": codec.MAGIC + b"\xff\xff\xff\xff{}",
    "not JSON": message(b"[1,"),
    "not text": message(b"\xff\xfe"),
    "NaN": message(b"NaN"),
    "a float out of range": message(b"1e999"),
    "an endless integer": message(b"9" * 10_000),
    "a JSON object": message({"a": 1}),
    "nested in JSON": message(b"[" * 100_000 + b"]" * 100_000),
    "nested in kinds": message(b'["list",' * 100 + b"1" + b"]" * 100),
    "an empty list": message([]),
    "an unknown kind": message(["set", 1]),
    "a kind that is no string": message([["list"]]),
    "an unknown float": message(["float", "1.5"]),
    "bytes that are not there": message(["bytes", 2**60]),
    "a negative length": message(["bytes", -1], b"x"),
    "a length that is a bool": message(["bytes", True], b""),
    "a length that is a float": message(["bytes", 1.0], b"x"),
    "a tensor that is not there": message(["tensor", "float32", [2**20, 2**20]]),
    "a size that overflows": message(["tensor", "float32", [2**32, 2**32, 2**32]]),
    "an empty shape that overflows": message(["tensor", "float32", [0, 2**62, 2**62]]),
    "an extent beyond 64 bits": message(["tensor", "float32", [0, 2**70]]),
    "a thousand extents": message(["tensor", "float32", [2**62] * 1000]),
    "more dimensions than torch has": message(["tensor", "uint8", [1] * 1000], b"x"),
    "a negative extent": message(["tensor", "uint8", [-1, -4]], bytes(4)),
    "an extent that is a bool": message(["tensor", "uint8", [True]], b"x"),
    "an unknown dtype": message(["tensor", "qint8", [1]], b"x"),
    "a dtype that is another name": message(["tensor", "load", [1]], b"x"),
    "a bool that is 2": message(["tensor", "bool", [1]], b"\2"),
    "bytes left over": message(1, b"x"),
    "a pair that is none": message(["dict", [1]]),
    "a key that is a list": message(["dict", [[1], 2]]),
    "a key that is a bool": message(["dict", [True, 2]]),
    "a key that is null": message(["dict", [None, 2]]),
    "a key twice": message(["dict", ["a", 1], ["a", 2]]),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_are_an_error_at_once_and_with_flat_memory(data: bytes) -> None:
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(WireError) as caught:
            codec.decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 1.0
    assert peak < 20 * len(data) + 2**20
    assert len(str(caught.value)) < 500


def test_a_hostile_key_costs_its_length_once_and_not_once_per_item() -> None:
    data = message(["dict", ["k" * 2**20, ["list", *range(50_000), ["no kind"]]]])
    started = time.monotonic()
    with pytest.raises(WireError, match="no kind") as caught:
        codec.decode(data)
    assert time.monotonic() - started < 2.0
    assert len(str(caught.value)) < 500


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    for candidate in (data, codec.MAGIC + data, message(data)):
        with suppress(WireError):
            codec.decode(candidate)


@given(values, st.data())
@settings(max_examples=200)
def test_a_damaged_message_is_read_or_refused_and_nothing_else(value: Any, data: Any) -> None:
    sound = codec.encode(value)
    cut = data.draw(st.integers(0, len(sound)))
    place = data.draw(st.integers(0, len(sound) - 1))
    flipped = bytearray(sound)
    flipped[place] ^= data.draw(st.integers(1, 255))
    for damaged in (sound[:cut], bytes(flipped), sound + b"x"):
        with suppress(WireError):
            codec.decode(damaged)


json_trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["list", "tuple", "dict", "tensor", "bytes", "float", "float32", "bool"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=10,
)


@given(json_trees, st.binary(max_size=16))
def test_a_crafted_header_is_read_or_refused_and_nothing_else(tree: Any, payload: bytes) -> None:
    with suppress(WireError):
        codec.decode(message(tree, payload))
