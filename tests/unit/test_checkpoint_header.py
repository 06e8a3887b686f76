"""The header of a safetensors file is believed only where the bytes bear it out."""

from __future__ import annotations

import json
import resource
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint.header import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    header_bytes,
    plan_places,
    read_header,
    write_header,
)
from paceline.errors import CheckpointError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def read(entries: Any, data_bytes: int = 8) -> Any:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return read_header(text, 8 + len(text) + data_bytes, "a file")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4)),
        max_size=8,
    )
)
def test_what_is_planned_and_written_is_what_is_read(tensors: dict[str, Any]) -> None:
    places = plan_places((name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items())
    written = write_header(places, {"a": "b"})
    total = len(written) + max((place.end for place in places.values()), default=0)
    header = read_header(written[8:], total, "a file")
    assert header.places == places
    assert header.metadata == {"a": "b"}
    assert header.data_begin == len(written)
    assert len(written) % 8 == 0
    assert all(place.begin % ITEM_BYTES[place.dtype] == 0 for place in places.values())


@pytest.mark.parametrize(
    "entries",
    [
        b"",
        b"null",
        b"[1, 2]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b"\xff\xfe{}",
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        {"a": {**F32, "dtype": "F99"}},
        {"a": {**F32, "dtype": "os.system"}},
        {"a": {**F32, "shape": [2**62, 2**62]}},
        {"a": {**F32, "shape": [2**63]}},
        {"a": {**F32, "shape": [-2]}},
        {"a": {**F32, "shape": [2.0]}},
        {"a": {**F32, "shape": [True, 2]}},
        {"a": {**F32, "shape": [1] * 65}},
        {"a": {**F32, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
        {"a": {**F32, "data_offsets": [8, 0]}},
        {"a": {**F32, "data_offsets": [0, 2**70]}},
        {"a": {**F32, "data_offsets": [8, 16]}},
        {"a": {**F32, "data_offsets": [0, 4]}},
        {"a": F32, "b": F32},
        {"a": F32, "b": {**F32, "data_offsets": [4, 12]}},
        {"a": F32, "b": {**F32, "data_offsets": [16, 24]}},
        {"__metadata__": {"a": 1}, "a": F32},
        {"__metadata__": [], "a": F32},
        {},
    ],
    ids=lambda entries: str(entries)[:50],
)
def test_an_impossible_header_is_a_typed_error(entries: Any) -> None:
    with pytest.raises(CheckpointError, match="impossible header"):
        read(entries)


def test_bytes_behind_the_last_tensor_are_refused() -> None:
    assert list(read({"a": F32}).places) == ["a"]
    with pytest.raises(CheckpointError, match="take 8 bytes, and 9 are there"):
        read({"a": F32}, data_bytes=9)


@pytest.mark.parametrize("length", [0, 1, 100, MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_a_header_longer_than_its_file_or_the_limit_is_refused_unread(length: int) -> None:
    with pytest.raises(CheckpointError, match="claims a header of"):
        header_bytes(length.to_bytes(8, "little"), 50 if length < 200 else 2**50, "a file")


@pytest.mark.parametrize("start", [b"", b"1234567"])
def test_a_file_without_a_header_length_is_refused(start: bytes) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file"):
        header_bytes(start, len(start), "a file")


@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * MAX_HEADER_BYTES,
        b"[" + b"[]," * (MAX_HEADER_BYTES // 3 - 1) + b"0]",
        b'{"a":{"shape":[' + b"1," * (MAX_HEADER_BYTES // 2 - 20) + b'1],"dtype":"F32"}}',
        b'{"' + b"a" * (MAX_HEADER_BYTES - 10) + b'":1}',
    ],
    ids=["deep", "wide", "long shape", "long name"],
)
def test_a_bomb_of_a_header_costs_little_memory_and_time(bomb: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read(bomb)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 12 * MAX_HEADER_BYTES / 2**20
    assert time.process_time() - begin < 10
    assert len(str(caught.value)) < 500
