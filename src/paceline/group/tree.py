"""Nested containers of tensors: finding the tensors in them, and rebuilding them changed.

Lists, tuples, named tuples, dictionaries, sets and dataclasses are containers; everything else
is a leaf. Models take and return such trees, and torch's own flattening does not know dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def find_tensors(value: Any, _inside: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Every tensor in the tree, in the order of its containers; a loop is followed once."""
    if isinstance(value, Tensor):
        yield value
    elif is_container(value) and id(value) not in _inside:
        for _, item in children_of(value):
            yield from find_tensors(item, (*_inside, id(value)))


def named_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in the tree with the expression that finds it, such as `batch['x'][0]`."""
    if isinstance(value, Tensor):
        yield path, value
    for key, item in children_of(value):
        yield from named_tensors(item, path + key)


def named_leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """Everything in the tree that holds nothing else, likewise; a set counts as one leaf, because
    what is in it has no order, and so does a packed sequence."""
    if isinstance(value, (set, frozenset, PackedSequence)) or not is_container(value):
        return [(path, value)]
    found = children_of(value)
    return [leaf for key, item in list(found) for leaf in named_leaves(item, path + key)]


def children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with what follows the container's name to get there."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield f"[{name!r}]", item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value, strict=True):
            yield f".{name}", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield f".{field.name}", getattr(value, field.name)


def with_children(value: Any, items: Sequence[Any]) -> Any:
    """The container rebuilt around other items, in the order of `children_of`."""
    if isinstance(value, Mapping):
        return _same_mapping(value, dict(zip(value, items, strict=True)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(items)
    clone = copy.copy(value)
    fields = (f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
    for name, item in zip(fields, items, strict=True):
        object.__setattr__(clone, name, item)  # frozen dataclasses too
    return clone


def is_container(value: Any) -> bool:
    """Whether the value is something that holds other values, rather than a leaf."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same tree with `function` applied to every tensor."""
    if isinstance(value, PackedSequence):
        # Its sizes stay where they are: torch wants them on the CPU, whatever happens to the data.
        data, sizes, *order = value
        return PackedSequence(function(data), sizes, *(map_tensors(function, o) for o in order))
    if isinstance(value, Tensor):
        return function(value)
    if is_container(value):
        return with_children(value, [map_tensors(function, item) for _, item in children_of(value)])
    return value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of dictionaries in dictionaries, by their names with dots between."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _same_mapping(original: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of the original's type: default dictionaries keep their factory."""
    if type(original) is dict:
        return changed
    clone = copy.copy(original)
    try:
        for key, item in changed.items():
            clone[key] = item  # type: ignore[index]
    except TypeError:
        return type(original)(changed)  # type: ignore[call-arg]
    return clone
