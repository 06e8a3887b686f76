"""Values as JSON and tensors, and back: for checkpoints, pipes and stores. Nothing is pickled.

A value without its tensors is its skeleton. In it scalars and strings represent themselves;
everything else is a list that begins with its kind, such as `["tensor", "model/head.weight"]` or
`["dict", [0, ...], ["lr", 0.1]]`. A value without a kind is refused with its path. A tensor that
occurs twice is written once and read as one tensor.

A message is a safetensors file in memory, with the skeleton as one more tensor. torch is imported
for the first tensor.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, WireError
from paceline.files.documents import FLOAT_BY_NAME, JsonLimits, count_values, parse_json
from paceline.files.safetensors import as_plain, is_storable, memory_of, plan_file, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

MAX_SKELETON_BYTES = 64 * 2**20
MAX_DEPTH = 64
_SKELETON = "__skeleton__"
_MAX_NAME_LENGTH = 200
_SKELETON_LIMITS = JsonLimits(
    values=2**23, depth=3 * MAX_DEPTH, text=MAX_SKELETON_BYTES, digits=4300, surrogates=True
)
_DICT_BY_KIND: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
}
_KIND_BY_DICT = {dict: "dict", defaultdict: "dict", OrderedDict: "ordered", Counter: "counter"}


def encode(value: Any) -> bytes:
    """Encode a value of plain Python data and dense tensors as one message."""
    tensors, skeleton = separate_tensors(value)
    plan = plan_file({**tensors, _SKELETON: _flat(skeleton)})
    plain = [as_plain(tensor) for tensor in plan.tensors]
    return b"".join([plan.prefix, *map(memory_of, plain)])


def decode(data: bytes) -> Any:
    """Decode what `encode` wrote; malformed bytes raise WireError before memory is allocated."""
    tensors = read_tensors(io.BytesIO(data), len(data), "The message")
    try:
        skeleton = revive("bytes", [tensors.pop(_SKELETON, None)])
    except ValueError:
        raise WireError("The message has no skeleton.") from None
    return restore_tensors(skeleton, tensors, "The message")


def separate_tensors(
    value: Any, root: str = "value", error: type[PacelineError] = WireError
) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a value by name, sharing their memory, and its skeleton as JSON.

    `root` is the value's name in messages, and `error` the class that is raised.
    """
    encoder = _Encoder(root, error)
    tree = encoder.tree(value)
    try:
        text = json.dumps(tree, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except ValueError as problem:  # an integer with more digits than Python converts
        raise error(f"A number in the {root} cannot be written: {problem}.") from None
    # Not escaped as ASCII: JSON would join two lone surrogates of a string into one character.
    skeleton = text.encode("utf-8", "surrogatepass")
    values = count_values(skeleton)
    if len(skeleton) > MAX_SKELETON_BYTES or values > _SKELETON_LIMITS.values:
        raise error(
            f"Without its tensors the {root} takes {len(skeleton):,} bytes in {values:,} values, "
            f"more than the {MAX_SKELETON_BYTES:,} in {_SKELETON_LIMITS.values:,} allowed.",
            advice="Put long lists of numbers into a tensor, and long text into bytes.",
        )
    return encoder.tensors, skeleton


def revive(kind: str, parts: list[Any]) -> Any:
    """Rebuild a value that is neither a container nor JSON; ValueError if it is malformed."""
    import torch

    match kind, parts:
        case "bytes", [torch.Tensor(dtype=torch.uint8) as flat] if flat.dim() == 1:
            return bytes(memory_of(flat))
        case "complex", [float(real), float(imaginary)]:
            return complex(real, imaginary)
        case "size", _ if all(type(extent) is int for extent in parts):
            return torch.Size(parts)
        case "dtype", [str(name)] if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case "device", [str(name)] if re.fullmatch(r"[a-z]{2,20}(:\d{1,4})?", name):
            try:
                return torch.device(name)
            except RuntimeError:
                pass
    raise ValueError(kind)


def restore_tensors(
    skeleton: bytes,
    tensors: Mapping[str, Any],
    origin: object,
    error: type[PacelineError] = WireError,
    revive: Callable[[str, list[Any]], Any] = revive,
) -> Any:
    """Rebuild the value that was taken apart; a malformed skeleton raises `error` about `origin`.

    `tensors` may have other objects in place of tensors. With another `revive` this needs no torch.
    """
    used: set[str] = set()

    def take(name: str) -> Any:
        used.add(name)
        return tensors[name]

    def build(tree: Any, depth: int) -> Any:
        if not isinstance(tree, list | dict):
            return tree
        if depth > MAX_DEPTH:
            raise error(f"{origin} is nested deeper than {MAX_DEPTH} levels.")
        match tree:
            case ["tensor", str(name)] if name in tensors:
                return take(name)
            case ["list", *items]:
                return [build(item, depth + 1) for item in items]
            case ["tuple", *items]:
                return tuple(build(item, depth + 1) for item in items)
            case [("dict" | "ordered" | "counter") as kind, *pairs]:
                return _DICT_BY_KIND[kind](build_pairs(pairs, depth + 1))
            case ["module", metadata, *pairs]:
                state: Any = OrderedDict(build_pairs(pairs, depth + 1))
                state._metadata = build(metadata, depth + 1)
                return state
            case ["float", str(name)] if name in FLOAT_BY_NAME:
                return FLOAT_BY_NAME[name]
            case ["bytes", str(name)] if name in tensors:
                parts = [take(name)]
            case ["complex" | "size" | "dtype" | "device", *trees]:
                parts = [build(each, depth + 1) for each in trees]
            case _:
                raise unknown(tree)
        try:
            return revive(tree[0], parts)
        except ValueError:
            raise unknown(tree) from None

    def build_pairs(pairs: list[Any], depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            match pair:
                case [key, tree]:
                    value = build(tree, depth)
                    try:
                        found[build(key, depth)] = value
                    except TypeError:  # a key that is a list
                        raise unknown(pair) from None
                case _:
                    raise unknown(pair)
        if len(found) != len(pairs):
            raise error(f"{origin} has a key twice.")
        return found

    def unknown(tree: Any) -> PacelineError:
        return error(f"{origin} has a part of an unknown kind: {str(tree)[:80]}.")

    value = build(parse_json(skeleton, origin, error, _SKELETON_LIMITS), 0)
    if unused := tensors.keys() - used:
        raise error(f"{origin} does not refer to the tensor {min(unused)!r:.100}.")
    return value


def _flat(data: bytes) -> Tensor:
    """A copy of bytes as a tensor."""
    import torch

    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _Encoder:
    """Traverses a value, gives every tensor a name, and builds the tree of the rest."""

    def __init__(self, root: str, error: type[PacelineError]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name_by_memory: dict[tuple[Any, ...], str] = {}
        self._last_number: dict[str, int] = {}
        self._keys: list[Any] = []
        self._root, self._error = root, error

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else ["float", str(value)]
        if kind in _KIND_BY_DICT:
            return self._dict(value)
        if kind is list or kind is tuple:
            return [kind.__name__, *self._items(enumerate(value))]
        if kind is bytes:
            return ["bytes", self._add(_flat(value))]
        return self._other(value)

    def _other(self, value: Any) -> Any:
        import torch

        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return ["tensor", self._tensor(value)]
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
        raise self._error(
            f"{self._path()} is a {kind.__module__}.{kind.__qualname__}, which cannot be written.",
            advice="Use None, bool, int, float, str, bytes, list, tuple, dict and dense tensors; "
            "of an object, its state_dict().",
        )

    def _dict(self, value: dict[Any, Any]) -> Any:
        items = self._items(value.items())
        pairs = [[self._key(key), item] for key, item in zip(value, items, strict=True)]
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:  # a module's state_dict(): the versions of its parts
            return ["module", self.tree(metadata), *pairs]
        return [_KIND_BY_DICT[type(value)], *pairs]

    def _key(self, key: Any) -> Any:
        if type(key) is tuple:
            return ["tuple", *map(self._key, key)]
        if key is None or isinstance(key, str | int | float):
            return self.tree(key)
        raise self._error(
            f"{self._path()} has the key {key!r:.80} of type {type(key).__name__}.",
            advice="Keys are str, numbers, None, or tuples of these.",
        )

    def _items(self, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        if len(self._keys) >= MAX_DEPTH:
            raise self._error(
                f"{self._path()} is nested deeper than {MAX_DEPTH} levels.",
                advice="A container that contains itself cannot be written.",
            )
        trees = []
        for key, value in items:
            self._keys.append(key)
            trees.append(self.tree(value))
            self._keys.pop()
        return trees

    def _tensor(self, tensor: Tensor) -> str:
        if not is_storable(tensor):
            raise self._error(
                f"{self._path()} is a {tensor.dim()}-dimensional {tensor.layout} tensor of "
                f"{tensor.dtype} on {tensor.device}, which cannot be written.",
                advice="Use a dense tensor with memory.",
            )
        memory = (
            *(tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()),
            *(tensor.is_conj(), tensor.is_neg()),
        )
        # Tied tensors are written once. Empty ones have no memory: their address identifies
        # nothing.
        if not tensor.numel() or memory not in self._name_by_memory:
            self._name_by_memory[memory] = self._add(tensor)
        return self._name_by_memory[memory]

    def _add(self, tensor: Tensor) -> str:
        """Register a tensor under its path with slashes, as valid UTF-8 and unique."""
        text = "/".join(map(str, self._keys)) or "state"
        text = text.encode("utf-8", "replace").decode()[:_MAX_NAME_LENGTH]
        name, count = text, self._last_number.get(text, 1)
        while name in self.tensors or name.startswith("__"):
            count += 1
            name = f"{text.lstrip('_')}#{count}"
        self._last_number[text] = count
        self.tensors[name] = tensor
        return name

    def _path(self) -> str:
        text = "".join(f"[{key!r:.60}]" for key in self._keys)
        return f"{self._root}{text if len(text) < 300 else f'{text[:200]}…{text[-80:]}'}"
