"""Folders of `torch.distributed.checkpoint` (DCP): read without unpickling, and written.

    .metadata        a pickle: size and type of each tensor, and where its parts lie
    __0_0.distcp     the parts, each as torch.save writes it, one after the other

torch reads `.metadata` by unpickling it, which can run any code. Here its instructions are read as
data: an object is the name of its class and its arguments, and nothing is imported or called. Every
size is compared with the file's bytes before memory is allocated for it.
"""

from __future__ import annotations

import io
import math
import pickletools
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import open_file, size_of
from paceline.checkpoint.formats import MAX_INSTRUCTION_BYTES, read_saved
from paceline.errors import CheckpointError, UsageError
from paceline.files import MAX_DEPTH

METADATA = ".metadata"


@dataclass(eq=False, slots=True)
class _Described:
    """An object as a pickle describes it: `name(*arguments)`, then `state` set on it."""

    name: str
    arguments: Any = ()
    state: Any = None


Part = tuple[str, int, int]
"""The location of one part of a tensor, or of one value: file, first byte, length."""


def read_dcp(folder: Path) -> Any:
    """All contents of a DCP folder, nested as they were saved."""
    path = folder / METADATA
    try:
        with open_file(path) as file:
            described = _describe(io.BytesIO(file.read(MAX_INSTRUCTION_BYTES)))
        entries, parts, keys_by_name = _parse_metadata(described)
        state: dict[Any, Any] = {}
        for name, entry in entries.items():
            keys = keys_by_name.get(name, (name,))
            if not 0 < len(keys) <= MAX_DEPTH:
                raise ValueError(f"{name[:80]!r} is {len(keys)} levels deep")
            inner = state
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = _read_entry(folder, name, entry, parts[name])
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__} {str(error)[:200]}"
        raise CheckpointError(
            f"{path} is damaged, or torch.distributed.checkpoint did not write it: {reason}.",
            advice="Nothing of it was used.",
        ) from error
    return _with_lists(state)


def write_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state into a new folder, for `torch.distributed.checkpoint.load`."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():  # torch warns that there is one process; that is intended
            warnings.simplefilter("ignore")
            save(dict(state), storage_writer=FileSystemWriter(folder), no_dist=True)
    except Exception as error:
        cause = error.__cause__ or error
        raise UsageError(
            f"torch.distributed.checkpoint cannot write this state: {cause}."
        ) from error


def _parse_metadata(
    metadata: Any,
) -> tuple[dict[str, Any], dict[str, dict[tuple[int, ...], Part]], dict[str, Any]]:
    """The entries by name, the location of their parts, and the nested keys of each."""
    facts = _state_of(metadata, "Metadata")
    parts: dict[str, dict[tuple[int, ...], Part]] = defaultdict(dict)
    for index, place in facts["storage_data"].items():
        key, info = _state_of(index, "MetadataIndex"), _state_of(place, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError(f"its files are transformed by {info['transform_descriptors']}")
        offset = key.get("offset")
        part = info["relative_path"], info["offset"], info["length"]
        parts[key["fqn"]][() if offset is None else _size(offset)] = part
    return facts["state_dict_metadata"], parts, facts.get("planner_data") or {}


def _read_entry(folder: Path, name: str, entry: Any, parts: dict[tuple[int, ...], Part]) -> Any:
    """One tensor put together from its parts, or one value."""
    import torch

    if entry.name.endswith(".BytesStorageMetadata"):
        (part,) = parts.values()
        return _read_part(folder, part)
    facts = _state_of(entry, "TensorStorageMetadata")
    size = _size(facts["size"])
    dtype = getattr(torch, facts["properties"].state[0].name.removeprefix("torch."))
    chunks = [_state_of(each, "ChunkStorageMetadata") for each in facts["chunks"]]
    shapes = [(_size(each["offsets"]), _size(each["sizes"])) for each in chunks]
    # A rank whose share is empty writes nothing, or an empty part at the offset of another.
    shape_by_offset = {offset: shape for offset, shape in shapes if math.prod(shape)}
    if sum(map(math.prod, shape_by_offset.values())) != math.prod(size):
        raise ValueError(f"the parts of {name[:80]!r} do not add up to its size")
    tensors = {}
    for offset, shape in shape_by_offset.items():
        tensor = tensors[offset] = _read_part(folder, parts[offset])
        if not torch.is_tensor(tensor) or tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"a part of {name[:80]!r} has another type or shape than stated")
    if list(shape_by_offset.values()) == [size]:
        return tensors.popitem()[1]
    whole, is_filled = torch.empty(size, dtype=dtype), torch.zeros(size, dtype=torch.bool)
    for offset, tensor in tensors.items():
        place = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
        whole[place] = tensor
        is_filled[place] = True
    if not is_filled.all():
        raise ValueError(f"the parts of {name[:80]!r} overlap")
    return whole


def _read_part(folder: Path, part: Part) -> Any:
    name, begin, length = part
    path = folder / name
    if Path(name).name != name:
        raise ValueError(f"{name[:80]!r} is not the name of a file in this folder")
    with open_file(path) as file:
        if begin < 0 or not 0 < length <= size_of(file) - begin:
            raise CheckpointError(
                f"{path} has {size_of(file):,} bytes, fewer than {METADATA} states.",
                advice="It is truncated, or was not copied completely. Nothing of it was used.",
            )
        file.seek(begin)
        return read_saved(file.read(length), path)


def _with_lists(value: Any) -> Any:
    """Turn dictionaries whose keys are positions back into lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(each) for key, each in value.items()}
    # DCP writes the keys of dictionaries as strings, whatever they were: numbers are positions.
    is_list = bool(inner) and all(type(key) is int for key in inner)
    return [inner[key] for key in sorted(inner)] if is_list else inner


def _state_of(value: Any, kind: str) -> dict[str, Any]:
    """The fields of an object of DCP, by name."""
    if not value.name.startswith("torch.distributed.") or not value.name.endswith(f".{kind}"):
        raise ValueError(f"{value.name[:80]!r} is in the place of a {kind}")
    return dict(value.state or {})


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size as a tuple; its extents must be whole numbers."""
    (extents,) = value.arguments
    if value.name != "torch.Size" or any(type(n) is not int or n < 0 for n in extents):
        raise ValueError(f"{str(extents)[:80]} is not a size")
    return tuple(extents)


def _describe(file: io.BytesIO) -> Any:
    """Interpret a pickle as plain data; nothing is imported or called."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    empty = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
    known = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append(empty[opcode.name]())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(known[opcode.name])
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "SETITEM":
                key, value = stack[-2:]
                del stack[-2:]
                stack[-1][key] = value
            case "SETITEMS":
                items = since_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL":
                stack.append(_Described(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, name = stack[-2:]
                stack[-2:] = [_Described(f"{module}.{name}")]
            case "NEWOBJ" | "REDUCE":
                kind, arguments = stack[-2:]
                stack[-2:] = [_Described(kind.name, arguments)]
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case _ if type(argument) in (int, str, float):
                stack.append(argument)
            case other:
                raise ValueError(f"it has the instruction {other}")
    raise ValueError("it does not end")
