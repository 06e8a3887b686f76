"""Nested containers of tensors: finding the tensors in them, and rebuilding them changed.

Lists, tuples, named tuples, dictionaries, sets and dataclasses are containers; everything else
is a leaf. Models take and return such trees, and torch's own flattening does not know dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in the tree, in the order of its containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same tree with `function` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        return _same_mapping(value, changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                item = map_tensors(function, getattr(value, field.name))
                object.__setattr__(clone, field.name, item)  # frozen dataclasses too
        return clone
    return value


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
