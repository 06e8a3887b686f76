"""Weights from any file into any model: `paceline.load_weights`.

`nn.DataParallel` and torch's DistributedDataParallel put `module.` into names, `torch.compile` puts
`_orig_mod.`: at the front, repeatedly, or in the middle where a part of a model was wrapped. All
names are matched before anything is copied: the model gets all new weights, or keeps its own and an
error says what does not fit.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.checkpoint.folders import read_state
from paceline.checkpoint.formats import is_state_dict
from paceline.ddp import Wrapper, bare_name, find_wrappers, match_names, rename, without_wrappers
from paceline.errors import CheckpointError, UsageError, WeightsError, did_you_mean
from paceline.files import dtype_name
from paceline.telemetry import count_text
from paceline.torch_private import has_loading_code, has_loading_hooks

# Usual keys of the weights in a saved dictionary, the most likely first.
USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "network", "weights")
_DEEPEST_KEY = 3
_SHOWN = 3
_GUESSED = 50


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What `load_weights` did."""

    path: Path
    where: str
    """The keys under which the weights were found; empty where the file has nothing else."""
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
        if self.renamed:
            lines.append(renames_text(self.renamed))
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                lines.append(f"{title}: {_some(names)}")
        if self.cast:
            name, change = next(iter(self.cast.items()))
            lines.append(f"{len(self.cast):,} converted, such as {name}: {change}")
        return "\n".join(lines)


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, part: str | None = None
) -> WeightsReport:
    """Load the weights in `path` into `model`, whatever wrapper either had.

    `path` is a checkpoint or folder of checkpoints of ours, a folder of DCP or of Hugging Face, a
    safetensors file, or what torch.save wrote: a state dict, or a dictionary with one inside. With
    `strict=False` missing and unexpected names are reported instead of refused; a different shape
    is always refused. `part` names the weights to take where there are several, such as "ema". In a
    world of several workers each of them calls this.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"load_weights needs a module, not a {type(model).__name__}.")
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"load_weights needs a path, not a {type(path).__name__}.",
            advice="For a dictionary of tensors, call model.load_state_dict() on the wrapper.",
        )
    path = Path(path)
    own = model.state_dict()
    given, where = find_weights(read_state(path), path, own.keys(), part)
    names = match_names(given.keys(), own.keys())
    shapes, casts = _compare(own, given, names)
    loaded = set(names.values())
    lacking = [name for name in own if name not in loaded]
    # A name that the file lacks is not missing if it shares memory with one that is loaded.
    memory = {_memory_key(own[name]) for name in loaded} - {None}
    tied = [name for name in lacking if _memory_key(own[name]) in memory]
    plan = WeightsReport(
        path=path,
        where=where,
        loaded=list(names.values()),
        renamed={old: new for old, new in names.items() if old != new},
        missing=[name for name in lacking if name not in tied],
        unexpected=[name for name in given if name not in names],
        tied=tied,
        cast=casts,
    )
    is_fit = not shapes and not (strict and (plan.missing or plan.unexpected))
    # A module's own hooks may rename what seems to be missing here, and may fail half way.
    has_custom_loading = any(map(_has_custom_loading, model.modules()))
    if shapes and not has_custom_loading:
        raise _explain(model, own, given, plan, shapes)
    # A copy of the old values costs memory: it is made where loading may still fail half way.
    kept = {} if is_fit and not has_custom_loading else own
    tensors = {name: t for name, t in kept.items() if isinstance(t, Tensor) and not is_lazy(t)}
    backup = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        # Not strict: torch would refuse names that are missing, but tied to one that is there.
        result = model.load_state_dict(rename(own, given, names), strict=False)
    except Exception as error:
        _restore(own, backup)
        if is_fit:
            raise WeightsError(f"{path} cannot be loaded: {error}.") from error
        raise _explain(model, own, given, plan, shapes) from error
    missing = [name for name in result.missing_keys if name not in plan.tied]
    unexpected = list(result.unexpected_keys)
    if strict and (missing or unexpected):
        _restore(own, backup)
        raise _explain(model, own, given, plan, shapes)
    return replace(plan, missing=missing, unexpected=unexpected)


def find_weights(
    state: Any, path: Path, expected: Collection[str] = (), part: str | None = None
) -> tuple[Mapping[str, Any], str]:
    """The state dict inside a saved state, and its keys: of several the one that fits best, or has
    a usual name."""
    candidates = dict(_candidates(state, ()))
    if part is not None:
        parts = [".".join(keys) for keys in candidates]
        candidates = {keys: each for keys, each in candidates.items() if keys[-1:] == (part,)}
        if not candidates:
            raise CheckpointError(
                f"{path} has no weights named {part!r}.",
                advice=f"It has {', '.join(filter(None, parts)) or 'one part, without a name'}.",
            )
    if not candidates:
        raise CheckpointError(
            f"{path} has no weights: no dictionary in it has tensors by name.",
            advice="Save model.state_dict().",
        )

    def likelihood(keys: tuple[str, ...]) -> tuple[int, int, int]:
        names = candidates[keys].keys()
        fitting = len(match_names(names, expected)) if expected else 0
        last = keys[-1] if keys else USUAL_KEYS[0]
        usual = -USUAL_KEYS.index(last) if last in USUAL_KEYS else -len(USUAL_KEYS)
        return fitting, usual, len(names)

    best = max(candidates, key=likelihood)
    return candidates[best], "".join(f"[{key!r}]" for key in best)


def _candidates(
    value: Any, keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if is_state_dict(value):
        yield keys, value
    elif isinstance(value, Mapping) and len(keys) < _DEEPEST_KEY:
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _candidates(inner, (*keys, key))


def _compare(
    own: Mapping[str, Any], given: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Shapes that do not fit, and conversions, in words, by the model's name."""
    shapes, casts = {}, {}
    for old, new in names.items():
        theirs, ours = given[old], own[new]
        if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor) or is_lazy(ours):
            continue
        if theirs.shape != ours.shape:
            shapes[new] = f"{tuple(theirs.shape)} in the file, {tuple(ours.shape)} in the model"
        elif theirs.is_complex() and not ours.is_complex():
            shapes[new] = "complex in the file, real in the model"
        elif theirs.dtype != ours.dtype:
            casts[new] = f"{dtype_name(theirs)} -> {dtype_name(ours)}"
    return shapes, casts


def _memory_key(value: Any) -> tuple[Any, ...] | None:
    """A key that is equal for two names of one tensor; None for a tensor without memory."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return None
    if value.is_meta or value.layout != torch.strided or value.numel() == 0:
        return None
    return value.data_ptr(), value.device, value.dtype, value.shape, value.stride()


def _has_custom_loading(module: nn.Module) -> bool:
    """Whether code from outside torch takes part in loading, which may rename, reshape or fail."""
    kind = type(module)
    has_own_code = not isinstance(module, Wrapper) and not kind.__module__.startswith("torch.")
    return bool(has_loading_hooks(module) or (has_own_code and has_loading_code(kind)))


def _restore(own: Mapping[str, Any], backup: Mapping[str, Tensor]) -> None:
    """Restore the model's tensors, which the state dict shares memory with."""
    with torch.no_grad():
        for name, value in backup.items():
            own[name].copy_(value)


def _explain(
    model: nn.Module,
    own: Mapping[str, Any],
    given: Mapping[str, Any],
    plan: WeightsReport,
    shapes: Mapping[str, str],
) -> WeightsError:
    counts = {
        "missing": len(plan.missing),
        "unexpected": len(plan.unexpected),
        "of another shape": len(shapes),
    }
    summary = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    parts = []
    if plan.missing:
        parts.append(f"Missing in the file: {_some(plan.missing)}.")
    if plan.unexpected:
        parts.append(f"Not in the model: {_some(plan.unexpected)}.")
    parts += [f"{name!r} is {words}." for name, words in list(shapes.items())[:1]]
    parts += islice(_suggest_names(own, given, plan), 1)
    advice = "Build the model as it was when the file was written"
    advice += "." if shapes else ", or pass strict=False to leave out what does not fit."
    kind = type(model.module if isinstance(model, Wrapper) else model).__name__
    return WeightsError(
        f"{plan.path}{plan.where} does not fit {kind}: {summary}; nothing was loaded.",
        " ".join(parts),
        advice,
    )


def _suggest_names(
    own: Mapping[str, Any], given: Mapping[str, Any], plan: WeightsReport
) -> Iterator[str]:
    """Suggestions for misspelt names, among the first ones with the same shape."""
    missing = plan.missing[:_GUESSED]
    for name in plan.unexpected[:_GUESSED]:
        shape = getattr(given[name], "shape", None)
        same = [each for each in missing if getattr(own[each], "shape", None) == shape]
        if meant := did_you_mean(bare_name(name), sorted(same)):
            yield f"The model has no {name!r}.{meant}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"


def clean_names(names: Collection[str], keep: Collection[str] = ()) -> dict[str, str]:
    """The bare name of each name; raises if two would become the same."""
    wrappers = find_wrappers(names, keep)
    cleaned = {name: without_wrappers(name, wrappers) for name in names}
    count = Counter(cleaned.values())
    twice = sorted(name for name, new in cleaned.items() if count[new] > 1)
    if twice:
        raise CheckpointError(
            f"{twice[0]!r} and {twice[1]!r} would both be named {cleaned[twice[0]]!r}.",
            advice="Name the part that belongs to the model with --keep.",
        )
    return cleaned


def renames_text(renamed: Mapping[str, str]) -> str:
    """`148 names changed, such as module.head.bias -> head.bias`."""
    text = f"{count_text(len(renamed), 'name')} changed"
    return text + "".join(f", such as {old} -> {new}" for old, new in [*renamed.items()][:1])
