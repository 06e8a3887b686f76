"""Weights from any file into any model: `paceline.load_weights`.

Names are matched as a plan before anything is copied: the model has the new weights as a whole, or
keeps its own and an error says in words what does not fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.checkpoint.foreign import Weights, find_weights, read_state
from paceline.checkpoint.names import (
    bare_name,
    closest,
    describe_renames,
    foreign_prefix,
    match_names,
)
from paceline.ddp.wrapper import Wrapper
from paceline.errors import UsageError, WeightsError

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What `load_weights` did."""

    path: Path
    where: str
    """The keys in the file under which the weights were found; empty where they are all of it."""
    loaded: list[str]
    """Names in the model that have new values."""
    renamed: dict[str, str]
    """The model's name by the file's, where they differ."""
    missing: list[str]
    """Names in the model that the file lacks; they keep their values."""
    unexpected: list[str]
    """Names in the file that the model lacks."""
    tied: list[str] = field(default_factory=list)
    """Names the file lacks, but whose memory is another's that was loaded."""
    cast: dict[str, str] = field(default_factory=dict)
    """Tensors that have another type in the model: `float16 -> float32`, by the model's name."""

    def __str__(self) -> str:
        lines = [f"{len(self.loaded):,} tensors loaded from {self.path}{self.where}"]
        lines += describe_renames(self.renamed)
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                lines.append(f"{title}: {_some(names)}")
        if self.cast:
            name, change = next(iter(self.cast.items()))
            lines.append(f"{len(self.cast):,} converted, such as {name}: {change}")
        return "\n".join(lines)


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True
) -> WeightsReport:
    """Load the weights in `path` into `model`, whatever either was wrapped in.

    `path` is a checkpoint or folder of checkpoints of ours, a safetensors file, or what torch.save
    wrote: a state dict, or a dictionary with one inside. With `strict=False` missing and
    unexpected names are reported instead of refused; another shape always is refused. In a world
    of several workers every one of them calls this.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"load_weights needs a module, not a {type(model).__name__}.")
    path = Path(path)
    own = model.state_dict()
    weights = find_weights(read_state(path), path, own.keys())
    plan = _plan(own, weights)
    is_fit = not plan.shapes and (not strict or not (plan.missing or plan.unexpected))
    has_own_ways = _has_own_ways(model)
    if not is_fit and not has_own_ways:
        raise _explain(model, own, path, weights, plan)
    state = _renamed_state(own, weights, plan, plan.unexpected if has_own_ways else [])
    # A module's own hooks may rename what we think is missing, and may fail half way.
    backup = None if is_fit and not _has_foreign_ways(model) else _copy_of(own)
    try:
        result = model.load_state_dict(state, strict=False)
    except Exception as error:
        _put_back(own, backup)
        if is_fit:
            raise WeightsError(f"{path} cannot be loaded: {error}.") from error
        raise _explain(model, own, path, weights, plan) from error
    still_missing = [name for name in result.missing_keys if name not in plan.tied]
    still_unexpected = list(result.unexpected_keys) if has_own_ways else plan.unexpected
    if strict and (still_missing or still_unexpected):
        _put_back(own, backup)
        raise _explain(model, own, path, weights, plan)
    return WeightsReport(
        path=path,
        where=weights.where,
        loaded=list(plan.names.values()),
        renamed={old: new for old, new in plan.names.items() if old != new},
        missing=still_missing,
        unexpected=still_unexpected,
        tied=plan.tied,
        cast=plan.casts,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the names of a file become those of a model, and what does not fit."""

    names: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    tied: list[str]
    shapes: dict[str, str]
    casts: dict[str, str]


def _plan(own: Mapping[str, Any], weights: Weights) -> _Plan:
    given = weights.tensors
    names = match_names(given.keys(), own.keys())
    taken = set(names.values())
    memory = {_memory(own[name]) for name in taken} - {None}
    lacking = [name for name in own if name not in taken]
    tied = [name for name in lacking if _memory(own[name]) in memory]
    shapes, casts = {}, {}
    for old, new in names.items():
        theirs, ours = given[old], own[new]
        if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
            continue
        if is_lazy(ours):
            continue
        if theirs.shape != ours.shape:
            shapes[new] = f"{tuple(theirs.shape)} in the file, {tuple(ours.shape)} in the model"
        elif theirs.is_complex() and not ours.is_complex():
            shapes[new] = "complex in the file, real in the model"
        elif theirs.dtype != ours.dtype:
            words = [str(each.dtype).removeprefix("torch.") for each in (theirs, ours)]
            casts[new] = " -> ".join(words)
    return _Plan(
        names=names,
        missing=[name for name in lacking if name not in tied],
        unexpected=[name for name in given if name not in names],
        tied=tied,
        shapes=shapes,
        casts=casts,
    )


def _memory(value: Any) -> tuple[Any, ...] | None:
    """What is equal for two names of one tensor; None for what has no memory to share."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return None
    if value.is_meta or value.layout != torch.strided or value.numel() == 0:
        return None
    return value.data_ptr(), value.device, value.dtype, value.shape, value.stride()


def _renamed_state(
    own: Any, weights: Weights, plan: _Plan, unknown: Sequence[str]
) -> dict[str, Any]:
    """The file's tensors under the model's names, with the versions of modules that came along."""
    given: Any = weights.tensors
    state: Any = type(own)((new, given[old]) for old, new in plan.names.items())
    state.update((name, given[name]) for name in unknown)
    versions, targets = getattr(given, "_metadata", None), getattr(own, "_metadata", None)
    if isinstance(versions, Mapping) and targets is not None:
        version_by_bare_name = {bare_name(name): each for name, each in versions.items()}
        state._metadata = type(targets)(
            (name, version_by_bare_name.get(bare_name(name), {})) for name in targets
        )
    return state  # type: ignore[no-any-return]


def _has_own_ways(model: nn.Module) -> bool:
    """Whether some module changes names or values while it loads."""
    return any(
        not isinstance(module, Wrapper)
        and (
            type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
            or module._load_state_dict_pre_hooks
            or module._load_state_dict_post_hooks
        )
        for module in model.modules()
    )


def _has_foreign_ways(model: nn.Module) -> bool:
    """Whether code from outside torch takes part in loading, and may fail in the middle."""
    return any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or (
            not isinstance(module, Wrapper)
            and not type(module).__module__.startswith("torch.")
            and (
                type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
                or type(module).set_extra_state is not nn.Module.set_extra_state
            )
        )
        for module in model.modules()
    )


def _copy_of(own: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: value.detach().clone()
        for name, value in own.items()
        if isinstance(value, Tensor) and not is_lazy(value)
    }


def _put_back(own: Mapping[str, Any], backup: Mapping[str, Tensor] | None) -> None:
    """Restore the model's tensors, which the state dict shares memory with."""
    with torch.no_grad():
        for name, value in (backup or {}).items():
            own[name].copy_(value)


def _meant(own: Mapping[str, Any], weights: Weights, plan: _Plan) -> Iterator[str]:
    """Guesses at misspelt names, among those with the same shape."""
    for name in plan.unexpected:
        shape = getattr(weights.tensors[name], "shape", None)
        same = [each for each in plan.missing if getattr(own[each], "shape", None) == shape]
        meant = closest(bare_name(name), same)
        if meant:
            yield f"Did you mean {meant!r} by {name!r}?"


def _explain(
    model: nn.Module, own: Mapping[str, Any], path: Path, weights: Weights, plan: _Plan
) -> WeightsError:
    counts = {
        "missing": len(plan.missing),
        "unexpected": len(plan.unexpected),
        "of another shape": len(plan.shapes),
    }
    said = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    parts = []
    if plan.missing:
        parts.append(f"Missing in the file: {_some(plan.missing)}.")
    if plan.unexpected:
        parts.append(f"Not in the model: {_some(plan.unexpected)}.")
    if plan.shapes:
        name, words = next(iter(plan.shapes.items()))
        parts.append(f"{name!r} is {words}.")
    given = [bare_name(name) for name in weights.tensors]
    expected = [bare_name(name) for name in own]
    hints = [*foreign_prefix(given, expected), *_meant(own, weights, plan)]
    advice = "Build the model as it was when the file was written"
    advice += "." if plan.shapes else ", or pass strict=False to leave out what does not fit."
    parts += hints[:1]
    kind = type(model.module if isinstance(model, Wrapper) else model).__name__
    return WeightsError(
        f"{path}{weights.where} does not fit {kind}: {said}; nothing was loaded.",
        " ".join(parts),
        advice,
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"
