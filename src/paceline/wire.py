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
    payload: list[bytes] = []
    tree = _to_json(value, "value", 0, payload)
    try:
        header = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")
    except ValueError as error:  # an integer with more digits than Python converts
        raise WireError(f"A value cannot be written: {error}.") from None
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"The header takes {len(header):,} bytes, more than the {MAX_HEADER_BYTES:,} allowed.",
            advice="Put long lists of numbers into a tensor, and long text into bytes.",
        )
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *payload])


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
        tree = json.loads(header, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise WireError(f"The header is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as error:
        raise WireError(f"The header is not the JSON we write: {error}.") from None
    reader = _Reader(view[_PREFIX_BYTES + length :])
    value = reader.value(tree, "value", 0)
    reader.expect_end()
    return value


def _to_json(value: Any, path: str, depth: int, payload: list[bytes]) -> Any:
    if depth > MAX_DEPTH:
        raise WireError(
            f"{path[:200]} is nested deeper than {MAX_DEPTH} levels.",
            advice="A container that holds itself cannot be written.",
        )
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", str(value)]
    if kind is bytes:
        payload.append(value)
        return ["bytes", len(value)]
    if kind is list or kind is tuple or kind is torch.Size:
        items = [_to_json(v, f"{path}[{i}]", depth + 1, payload) for i, v in enumerate(value)]
        return ["list" if kind is list else "tuple", *items]
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in (str, int):
                raise WireError(
                    f"{path} has the key {key!r} of type {type(key).__name__}.",
                    advice="Keys are str or int.",
                )
        pairs = [
            [key, _to_json(v, f"{path}[{key!r}]", depth + 1, payload)] for key, v in value.items()
        ]
        return ["dict", *pairs]
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        payload.append(_tensor_bytes(value, path))
        return ["tensor", _NAME_BY_DTYPE[value.dtype], list(value.shape)]
    raise WireError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be written.",
        advice="Use None, bool, int, float, str, bytes, list, tuple, dict and dense tensors.",
    )


def _tensor_bytes(tensor: torch.Tensor, path: str) -> bytes:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _NAME_BY_DTYPE:
        raise WireError(
            f"{path} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, "
            "which cannot be written.",
            advice="Use a dense tensor of a plain dtype.",
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not .numpy(): torch alone must be enough, and NumPy knows no bfloat16.
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.itemsize)


class _Reader:
    """Turns the JSON tree into values, taking tensor bytes off the payload in order."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._taken = 0

    def value(self, tree: Any, path: str, depth: int) -> Any:
        if not isinstance(tree, list):
            if isinstance(tree, dict):
                raise WireError(f"{path} is a JSON object, which we never write.")
            return tree
        if depth > MAX_DEPTH:
            raise WireError(f"{path[:200]} is nested deeper than {MAX_DEPTH} levels.")
        match tree:
            case ["list", *items]:
                return self._items(items, path, depth)
            case ["tuple", *items]:
                return tuple(self._items(items, path, depth))
            case ["dict", *pairs]:
                return self._dict(pairs, path, depth)
            case ["float", str(name)] if name in _FLOAT_BY_NAME:
                return _FLOAT_BY_NAME[name]
            case ["bytes", int(length)]:
                return bytes(self._take(length, path))
            case ["tensor", str(dtype), list(shape)] if dtype in _DTYPE_BY_NAME:
                return self._tensor(_DTYPE_BY_NAME[dtype], shape, path)
        raise WireError(f"{path} is of no kind we write: {str(tree)[:80]}.")

    def expect_end(self) -> None:
        left = len(self._payload) - self._taken
        if left:
            raise WireError(f"{left:,} bytes follow the last value.")

    def _items(self, trees: list[Any], path: str, depth: int) -> list[Any]:
        return [self.value(tree, f"{path}[{i}]", depth + 1) for i, tree in enumerate(trees)]

    def _dict(self, pairs: list[Any], path: str, depth: int) -> dict[str | int, Any]:
        result: dict[str | int, Any] = {}
        for pair in pairs:
            match pair:
                case [bool(), _]:
                    pass
                case [str() | int() as key, tree] if key not in result:
                    result[key] = self.value(tree, f"{path}[{key!r}]", depth + 1)
                    continue
            raise WireError(f"{path} has an impossible or repeated entry: {str(pair)[:80]}.")
        return result

    def _tensor(self, dtype: torch.dtype, shape: list[Any], path: str) -> torch.Tensor:
        numel = 1
        for extent in shape:
            if type(extent) is not int or extent < 0:
                raise WireError(f"{path} has the impossible extent {extent!r:.80}.")
            # Saturates, so that a thousand large extents do not build a giant integer.
            numel = min(numel * extent, 2**63)
        raw = self._take(numel * dtype.itemsize, path)
        if not raw:
            return self._empty(dtype, shape, path)
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if dtype is torch.bool and int(flat.max()) > 1:
            raise WireError(f"{path} has a bool that is neither 0 nor 1.")
        return flat.view(dtype).reshape(shape)

    def _empty(self, dtype: torch.dtype, shape: list[int], path: str) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise WireError(f"{path} has the impossible shape {str(shape)[:80]}.") from error

    def _take(self, length: int, path: str) -> memoryview:
        left = len(self._payload) - self._taken
        if not 0 <= length <= left:
            raise WireError(f"{path} claims {length:,} bytes; {left:,} are left.")
        self._taken += length
        return self._payload[self._taken - length : self._taken]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large")
    return number
