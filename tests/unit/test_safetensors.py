"""Our safetensors files hold every type of torch, are the safetensors package's files, and are
believed only where the bytes bear it out."""

from __future__ import annotations

import io
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.formats import read_tensors, write_tensors
from paceline.errors import CheckpointError, UsageError, WireError
from paceline.files.safetensors import MAX_HEADER_BYTES, Header, plan_file, read_header

NATIVE = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
VIEWED = [torch.complex32, torch.complex128, torch.float8_e8m0fnu]


def example(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    count = torch.empty(shape, dtype=dtype).nbytes
    high = 2 if dtype is torch.bool else 100
    raw = torch.randint(high, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


def assert_same(first: Tensor, second: Tensor) -> None:
    assert (first.dtype, first.shape) == (second.dtype, second.shape)
    assert bits(first) == bits(second)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [*NATIVE, *VIEWED], ids=str)
def test_every_type_comes_back_bit_by_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = example(dtype, shape)
    write_tensors(tmp_path / "a.safetensors", {"x": tensor, "y": torch.zeros(3)})
    found = read_tensors(tmp_path / "a.safetensors")
    assert_same(found["x"], tensor)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch lacks the type")
def test_packed_four_bit_numbers_come_back_bit_by_bit(tmp_path: Path) -> None:
    raw = torch.arange(6, dtype=torch.uint8)
    write_tensors(tmp_path / "a.safetensors", {"x": raw.view(torch.float4_e2m1fn_x2)})
    found = read_tensors(tmp_path / "a.safetensors")["x"]
    assert found.dtype == torch.float4_e2m1fn_x2
    assert found.view(torch.uint8).tolist() == raw.tolist()


def test_strided_expanded_conjugate_and_negated_tensors_are_stored_as_their_values(
    tmp_path: Path,
) -> None:
    whole = torch.randn(4, 6, dtype=torch.complex64)
    given = {
        "strided": whole[::2, 1::2],
        "transposed": whole.t(),
        "expanded": torch.arange(3).expand(5, 3),
        "conjugate": whole.conj(),
        "negated": whole.conj().imag,
        "wide conjugate": whole.to(torch.complex128).conj(),
        "needs a gradient": torch.ones(2, requires_grad=True),
    }
    write_tensors(tmp_path / "a.safetensors", given)
    for name, tensor in read_tensors(tmp_path / "a.safetensors").items():
        assert torch.equal(tensor, given[name].detach().resolve_conj().resolve_neg()), name
        assert tensor.is_contiguous()


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    tensors = {f"layer.{i}.{dtype}": example(dtype, (i, 3)) for i, dtype in enumerate(NATIVE)}
    tensors["naïve ⚡ name"] = torch.tensor(1.5)

    write_tensors(tmp_path / "ours.safetensors", tensors)
    package.save_file(tensors, str(tmp_path / "theirs.safetensors"), {"format": "pt"})
    theirs = package.load_file(str(tmp_path / "ours.safetensors"))
    ours = read_tensors(tmp_path / "theirs.safetensors")

    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(theirs[name], tensor)
        assert_same(ours[name], tensor)


def test_tensors_have_memory_of_their_own(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(3), "y": torch.zeros(3)})
    found = read_tensors(tmp_path / "a.safetensors")
    assert found["x"].untyped_storage().nbytes() == 12
    found["x"].add_(1)
    assert found["y"].tolist() == [0, 0, 0]


def test_a_file_is_private_and_takes_the_place_of_the_old_one_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": torch.ones(3)})
    with pytest.raises(UsageError, match=r"'bad'.* torch\.sparse_coo tensor"):
        write_tensors(path, {"x": torch.zeros(3), "bad": torch.ones(2).to_sparse()})
    assert read_tensors(path)["x"].tolist() == [1, 1, 1]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["a.safetensors"]


def damaged(data: bytes, kind: str) -> bytes:
    match kind:
        case "truncated":
            return data[:-1]
        case "longer":
            return data + b"x"
        case "bool":
            return data[:-1] + b"\x02"
        case "views":
            return data.replace(b"complex128", b"complex999")
        case "views of nothing":
            return data.replace(b'"shape":[1,2]', b'"shape":[2,1]')
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["truncated", "longer", "bool", "views", "views of nothing"])
def test_a_damaged_file_is_a_typed_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors: Any = {"c": torch.ones(1, dtype=torch.complex128), "z": torch.tensor([True])}
    write_tensors(path, tensors)
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(CheckpointError):
        read_tensors(path)


def test_a_pipe_and_a_folder_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"not a plain file|cannot be read"):
            read_tensors(path)


def read(data: bytes, size: int | None = None) -> Header:
    """The header of a file that begins with these bytes and is `size` long."""
    return read_header(io.BytesIO(data), len(data) if size is None else size, "a file")[0]


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def read_entries(entries: Any, data_bytes: int = 8) -> Header:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return read(len(text).to_bytes(8, "little") + text, 8 + len(text) + data_bytes)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(NATIVE), st.lists(st.integers(0, 5), max_size=4)),
        max_size=8,
    )
)
def test_what_is_planned_and_written_is_what_is_read(facts: dict[str, Any]) -> None:
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in facts.items()}
    plan = plan_file(tensors, {"a": "b"})
    assert read(plan.prefix, plan.total_bytes) == plan.header
    assert plan.header.metadata == {"a": "b"}
    assert len(plan.prefix) % 8 == 0
    for name, place in plan.header.places.items():
        assert place.begin % tensors[name].itemsize == 0


@pytest.mark.parametrize(
    "entries",
    [
        b"null",
        b"[1, 2]",
        b"{,",
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
    with pytest.raises(WireError, match="invalid header"):
        read_entries(entries)


def test_bytes_behind_the_last_tensor_are_refused() -> None:
    assert list(read_entries({"a": F32}).places) == ["a"]
    with pytest.raises(WireError, match="take 8 bytes, and 9 are there"):
        read_entries({"a": F32}, data_bytes=9)


@pytest.mark.parametrize("length", [0, 1, 100, MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_a_header_longer_than_its_file_or_the_limit_is_refused_unread(length: int) -> None:
    with pytest.raises(WireError, match="claims a header of"):
        read(length.to_bytes(8, "little"), 50 if length < 200 else 2**42)


@pytest.mark.parametrize("start", [b"", b"1234567"])
def test_a_file_without_a_header_length_is_refused(start: bytes) -> None:
    with pytest.raises(WireError, match="not a safetensors file"):
        read(start)


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
def test_a_bomb_of_a_header_costs_little_memory(bomb: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WireError) as caught:
        read_entries(bomb)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 12 * MAX_HEADER_BYTES / 2**20
    assert len(str(caught.value)) < 500
