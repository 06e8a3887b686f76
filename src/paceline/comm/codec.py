"""Values as bytes and back, for pipes, stores and files: JSON plus raw tensor bytes, no pickle.

    magic (4) | header length (4) | header, JSON | raw bytes of every tensor and `bytes`, in order

Scalars and strings stand for themselves in the header; everything else is a list that begins with
its kind, such as `["tensor", "float32", [2, 3]]`. A reader checks every size against the bytes that
are really there before it allocates, so bad input costs an error and not the memory it claims.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import WireError

MAGIC = b"PLW1"
MAX_HEADER_BYTES = 16 * 2**20
MAX_DEPTH = 64
_PREFIX_BYTES = len(MAGIC) + 4

_DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.complex32, torch.complex64, torch.complex128),
]
_NAME_BY_DTYPE = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
_DTYPE_BY_NAME = {name: dtype for dtype, name in _NAME_BY_DTYPE.items()}
_FLOAT_BY_NAME = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any) -> bytes:
    """The bytes of a value made of plain Python data and dense tensors.

    Tensors lose `requires_grad` and their device; any other type is refused by name and place.
    """
    writer = _Writer()
    tree = writer.tree(value)
    try:
        text = json.dumps(tree, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except ValueError as error:  # an integer with more digits than Python converts
        raise WireError(f"A value cannot be written: {error}.") from None
    # Not escaped as ASCII: JSON would join two lone surrogates of a string into one character.
    header = text.encode("utf-8", "surrogatepass")
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"The header takes {len(header):,} bytes, more than the {MAX_HEADER_BYTES:,} allowed.",
            advice="Put long lists of numbers into a tensor, and long text into bytes.",
        )
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *writer.payload])


def decode(data: bytes) -> Any:
    """The value that `encode` wrote; anything malformed is a WireError before it costs memory."""
    view = memoryview(data)
    if len(view) < _PREFIX_BYTES or view[: len(MAGIC)] != MAGIC:
        raise WireError(f"{len(view):,} bytes do not begin like a message of ours.")
    length = int.from_bytes(view[len(MAGIC) : _PREFIX_BYTES], "little")
    present = len(view) - _PREFIX_BYTES
    if length > min(present, MAX_HEADER_BYTES):
        raise WireError(
            f"The header claims {length:,} bytes; {present:,} are there and at most "
            f"{MAX_HEADER_BYTES:,} are allowed."
        )
    header = bytes(view[_PREFIX_BYTES : _PREFIX_BYTES + length])
    try:
        text = header.decode("utf-8", "surrogatepass")
        tree = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise WireError(f"The header is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as error:
        raise WireError(f"The header is not the JSON we write: {error}.") from None
    reader = _Reader(view[_PREFIX_BYTES + length :])
    value = reader.value(tree)
    reader.expect_end()
    return value


class _Place:
    """Where in the nested value we are. Only an error spells it out: a path per item would cost
    a hostile header's longest key times its number of items."""

    def __init__(self) -> None:
        self._keys: list[str | int] = []

    def __str__(self) -> str:
        text = "".join(f"[{key!r:.40}]" for key in self._keys)
        return f"value{text}" if len(text) < 200 else f"value{text[:100]}…{text[-60:]}"

    @contextmanager
    def at(self, key: str | int) -> Iterator[None]:
        self._keys.append(key)
        if len(self._keys) > MAX_DEPTH:
            raise WireError(
                f"{self} is nested deeper than {MAX_DEPTH} levels.",
                advice="A container that holds itself cannot be written.",
            )
        yield
        self._keys.pop()


class _Writer:
    """Turns a value into the JSON tree, and puts its raw bytes aside in order."""

    def __init__(self) -> None:
        self.payload: list[bytes] = []
        self._place = _Place()

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else ["float", str(value)]
        if kind is bytes:
            self.payload.append(value)
            return ["bytes", len(value)]
        if kind is list:
            return ["list", *self._items(enumerate(value))]
        if kind is tuple or kind is torch.Size:
            return ["tuple", *self._items(enumerate(value))]
        if kind is dict or kind is OrderedDict:
            self._check_keys(value)
            return ["dict", *map(list, zip(value, self._items(value.items()), strict=True))]
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self.payload.append(self._tensor_bytes(value))
            return ["tensor", _NAME_BY_DTYPE[value.dtype], list(value.shape)]
        raise WireError(
            f"{self._place} is a {kind.__module__}.{kind.__qualname__}, which cannot be written.",
            advice="Use None, bool, int, float, str, bytes, list, tuple, dict and dense tensors.",
        )

    def _items(self, items: Iterable[tuple[str | int, Any]]) -> list[Any]:
        trees = []
        for key, value in items:
            with self._place.at(key):
                trees.append(self.tree(value))
        return trees

    def _check_keys(self, value: dict[Any, Any]) -> None:
        for key in value:
            if type(key) not in (str, int):
                raise WireError(
                    f"{self._place} has the key {key!r:.80} of type {type(key).__name__}.",
                    advice="Keys are str or int.",
                )

    def _tensor_bytes(self, tensor: torch.Tensor) -> bytes:
        is_dense = tensor.layout == torch.strided and not tensor.is_meta
        if not is_dense or tensor.dtype not in _NAME_BY_DTYPE or tensor.dim() > MAX_DEPTH:
            raise WireError(
                f"{self._place} is a {tensor.dim()}-dimensional {tensor.layout} tensor of "
                f"{tensor.dtype} on {tensor.device}, which cannot be written.",
                advice="Use a dense tensor of a plain dtype.",
            )
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # Not .numpy(): torch alone must be enough, and NumPy knows no bfloat16.
        return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.itemsize)


class _Reader:
    """Turns the JSON tree into values, taking raw bytes off the payload in order."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._taken = 0
        self._place = _Place()

    def value(self, tree: Any) -> Any:
        if not isinstance(tree, list | dict):
            return tree
        match tree:
            case ["list", *items]:
                return self._items(items)
            case ["tuple", *items]:
                return tuple(self._items(items))
            case ["dict", *pairs]:
                return self._dict(pairs)
            case ["float", str(name)] if name in _FLOAT_BY_NAME:
                return _FLOAT_BY_NAME[name]
            case ["bytes", int(length)] if type(length) is int:
                return bytes(self._take(length))
            case ["tensor", str(dtype), list(shape)] if dtype in _DTYPE_BY_NAME:
                return self._tensor(_DTYPE_BY_NAME[dtype], shape)
        raise WireError(f"{self._place} is of no kind we write: {str(tree)[:80]}.")

    def expect_end(self) -> None:
        left = len(self._payload) - self._taken
        if left:
            raise WireError(f"{left:,} bytes follow the last value.")

    def _items(self, trees: list[Any]) -> list[Any]:
        values = []
        for index, tree in enumerate(trees):
            with self._place.at(index):
                values.append(self.value(tree))
        return values

    def _dict(self, pairs: list[Any]) -> dict[str | int, Any]:
        result: dict[str | int, Any] = {}
        for pair in pairs:
            match pair:
                case [key, tree] if type(key) in (str, int) and key not in result:
                    with self._place.at(key):
                        result[key] = self.value(tree)
                case _:
                    raise WireError(
                        f"{self._place} has an impossible or repeated entry: {str(pair)[:80]}."
                    )
        return result

    def _tensor(self, dtype: torch.dtype, shape: list[Any]) -> torch.Tensor:
        stride = 1
        for extent in shape:
            if type(extent) is not int or extent < 0:
                raise WireError(f"{self._place} has the impossible extent {extent!r:.80}.")
            # Saturates, so that a thousand large extents do not build a giant integer.
            stride = min(stride * max(1, extent), 2**63)
        if stride == 2**63 or len(shape) > MAX_DEPTH:
            raise WireError(f"{self._place} has the impossible shape {str(shape)[:80]}.")
        raw = self._take(0 if 0 in shape else stride * dtype.itemsize)
        if raw:
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        else:
            flat = torch.empty(0, dtype=torch.uint8)
        if dtype is torch.bool and flat.gt(1).any():
            raise WireError(f"{self._place} has a bool that is neither 0 nor 1.")
        return flat.view(dtype).reshape(shape)

    def _take(self, length: int) -> memoryview:
        left = len(self._payload) - self._taken
        if not 0 <= length <= left:
            raise WireError(f"{self._place} claims {length:,} bytes; {left:,} are left.")
        self._taken += length
        return self._payload[self._taken - length : self._taken]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large")
    return number
