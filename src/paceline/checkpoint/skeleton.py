"""A state as tensors and a skeleton: what is left when the tensors are taken out is JSON.

Scalars and strings stand for themselves; everything else is a list that begins with its kind, such
as `["tensor", "model/head.weight"]` or `["dict", [0, ...], ["lr", 0.1]]`. Nothing is pickled: what
has no kind is refused with its path. A tensor that occurs twice is stored once and comes back as
one tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import MAX_DEPTH, MAX_SKELETON_BYTES
from paceline.checkpoint.tensors import is_storable, memory_of
from paceline.errors import CheckpointError, UsageError

_MAX_NAME_LENGTH = 200
_FLOAT_BY_NAME = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DICT_BY_KIND: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
}
_KIND_BY_DICT = {dict: "dict", defaultdict: "dict", OrderedDict: "ordered", Counter: "counter"}


def take_apart(state: Any) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a state by name, and its skeleton as JSON."""
    taker = _Taker()
    tree = taker.tree(state)
    try:
        text = json.dumps(tree, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except ValueError as error:  # an integer with more digits than Python converts
        raise UsageError(f"The state holds a number that cannot be written: {error}.") from None
    # Not escaped as ASCII: JSON would join two lone surrogates of a string into one character.
    skeleton = text.encode("utf-8", "surrogatepass")
    if len(skeleton) > MAX_SKELETON_BYTES:
        raise UsageError(
            f"Without its tensors the state takes {len(skeleton):,} bytes, more than the "
            f"{MAX_SKELETON_BYTES:,} allowed.",
            advice="Put long lists of numbers into a tensor, and long text into bytes.",
        )
    return taker.tensors, skeleton


def put_together(skeleton: bytes, tensors: Mapping[str, Tensor], path: object) -> Any:
    """The state that was taken apart; whatever we do not write is a CheckpointError."""
    try:
        tree = json.loads(skeleton.decode("utf-8", "surrogatepass"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not the JSON we write: {str(error)[:100]}.") from None
    putter = _Putter(tensors, path)
    state = putter.value(tree, 0)
    unused = tensors.keys() - putter.used
    if unused:
        raise CheckpointError(f"{path} has no place for the tensor {min(unused)!r:.100}.")
    return state


class _Taker:
    """Walks a state, gives every tensor a name, and builds the tree of the rest."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name_by_memory: dict[tuple[Any, ...], str] = {}
        self._keys: list[Any] = []

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else ["float", str(value)]
        if kind is Tensor or kind is torch.nn.Parameter:
            return ["tensor", self._tensor(value)]
        if kind in _KIND_BY_DICT:
            return self._dict(value)
        if kind is list:
            return ["list", *self._items(enumerate(value))]
        if kind is tuple:
            return ["tuple", *self._items(enumerate(value))]
        if kind is bytes:
            return ["bytes", self._bytes(value)]
        return self._rare(value)

    def _rare(self, value: Any) -> Any:
        match value:
            case torch.Size():
                return ["size", *value]
            case torch.dtype():
                return ["dtype", str(value).removeprefix("torch.")]
            case torch.device():
                return ["device", str(value)]
            case complex():
                return ["complex", self.tree(value.real), self.tree(value.imag)]
            # Numbers and strings of other libraries, such as NumPy's float64.
            case float():
                return self.tree(float(value))
            case int():
                return int(value)
            case str():
                return str.__str__(value)
        kind = type(value)
        raise UsageError(
            f"{self._path()} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
            "hold.",
            advice="Use tensors, None, bool, int, float, str, bytes, list, tuple and dict; of an "
            "object, save its state_dict().",
        )

    def _dict(self, value: dict[Any, Any]) -> Any:
        pairs = [
            [self._key(key), item]
            for key, item in zip(value, self._items(value.items()), strict=True)
        ]
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:  # a module's state_dict(): the versions of its parts
            return ["module", self.tree(metadata), *pairs]
        return [_KIND_BY_DICT[type(value)], *pairs]

    def _key(self, key: Any) -> Any:
        if isinstance(key, tuple) and type(key) is tuple:
            return ["tuple", *map(self._key, key)]
        if key is None or isinstance(key, str | int | float):
            return self.tree(key)
        raise UsageError(
            f"{self._path()} has the key {key!r:.80} of type {type(key).__name__}.",
            advice="Keys are str, numbers, None, or tuples of these.",
        )

    def _items(self, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        trees = []
        if len(self._keys) >= MAX_DEPTH:
            raise UsageError(
                f"{self._path()} is nested deeper than {MAX_DEPTH} levels.",
                advice="A container that holds itself cannot be saved.",
            )
        for key, value in items:
            self._keys.append(key)
            trees.append(self.tree(value))
            self._keys.pop()
        return trees

    def _tensor(self, tensor: Tensor) -> str:
        if not is_storable(tensor):
            raise UsageError(
                f"{self._path()} is a {tensor.layout} tensor of {tensor.dtype} on "
                f"{tensor.device}, which a checkpoint cannot hold.",
                advice="Use a dense tensor with memory.",
            )
        memory = (
            *(tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()),
            *(tensor.is_conj(), tensor.is_neg()),
        )
        if tensor.numel() and memory in self._name_by_memory:
            return self._name_by_memory[memory]
        name = self._new_name()
        self.tensors[name] = tensor
        self._name_by_memory[memory] = name
        return name

    def _bytes(self, value: bytes) -> str:
        name = self._new_name()
        self.tensors[name] = (
            torch.frombuffer(bytearray(value), dtype=torch.uint8)
            if value
            else torch.empty(0, dtype=torch.uint8)
        )
        return name

    def _new_name(self) -> str:
        """The path with slashes, as UTF-8 that other readers accept, and unique."""
        text = "/".join(map(str, self._keys)) or "state"
        text = text.encode("utf-8", "replace").decode()[:_MAX_NAME_LENGTH]
        name, count = text, 1
        while name in self.tensors or name.startswith("__"):
            count += 1
            name = f"{text.lstrip('_')}#{count}"
        return name

    def _path(self) -> str:
        text = "".join(f"[{key!r:.60}]" for key in self._keys)
        return f"state{text}" if len(text) < 300 else f"state{text[:200]}…{text[-80:]}"


class _Putter:
    """Builds the state from its tree, taking nothing for granted."""

    def __init__(self, tensors: Mapping[str, Tensor], path: object) -> None:
        self.used: set[str] = set()
        self._tensors = tensors
        self._path = path

    def value(self, tree: Any, depth: int) -> Any:
        if not isinstance(tree, list | dict):
            return tree
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self._path} is nested deeper than {MAX_DEPTH} levels.")
        deeper = depth + 1
        match tree:
            case ["tensor", str(name)] if name in self._tensors:
                self.used.add(name)
                return self._tensors[name]
            case ["list", *items]:
                return [self.value(item, deeper) for item in items]
            case ["tuple", *items]:
                return tuple(self.value(item, deeper) for item in items)
            case [("dict" | "ordered" | "counter") as kind, *pairs]:
                return _DICT_BY_KIND[kind](self._pairs(pairs, deeper))
            case ["module", metadata, *pairs]:
                state: Any = OrderedDict(self._pairs(pairs, deeper))
                state._metadata = self.value(metadata, deeper)
                return state
            case ["float", str(name)] if name in _FLOAT_BY_NAME:
                return _FLOAT_BY_NAME[name]
            case ["bytes", str(name)] if name in self._tensors:
                self.used.add(name)
                return self._bytes(self._tensors[name])
            case ["complex", real, imaginary]:
                return self._complex(self.value(real, deeper), self.value(imaginary, deeper))
            case ["size", *extents] if all(type(extent) is int for extent in extents):
                return torch.Size(extents)
            case ["dtype", str(name)] if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            case ["device", str(name)] if re.fullmatch(r"[a-z]{2,20}(:\d{1,4})?", name):
                return self._device(name)
        raise self._unknown(tree)

    def _pairs(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            match pair:
                case [key, tree]:
                    value = self.value(tree, depth)
                    try:
                        found[self.value(key, depth)] = value
                    except TypeError:  # a key that is a list
                        raise self._unknown(pair) from None
                case _:
                    raise self._unknown(pair)
        if len(found) != len(pairs):
            raise CheckpointError(f"{self._path} has a key twice.")
        return found

    def _bytes(self, tensor: Tensor) -> bytes:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise self._unknown(["bytes"])
        return bytes(memory_of(tensor))

    def _complex(self, real: Any, imaginary: Any) -> complex:
        if not isinstance(real, float) or not isinstance(imaginary, float):
            raise self._unknown(["complex"])
        return complex(real, imaginary)

    def _device(self, name: str) -> torch.device:
        try:
            return torch.device(name)
        except RuntimeError:
            raise self._unknown(["device", name]) from None

    def _unknown(self, tree: Any) -> CheckpointError:
        return CheckpointError(f"{self._path} has a part of no kind we write: {str(tree)[:80]}.")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
