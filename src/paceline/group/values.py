"""Values that all workers tell each other in a loop of one's own: `World.gather` and its siblings.

A value is a tensor, a number or text, or nested containers of them. What every worker has is
compared before anything is put together, by all of them on the same data: so a mistake of one
worker is an error on each, and none is left waiting.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DesyncError, PacelineError, UsageError
from paceline.files import decode, encode
from paceline.group.collectives import (
    Group,
    all_reduce,
    broadcast,
    exchange,
    gather_bytes,
    word_device,
)
from paceline.group.tree import children_of, is_container, named_leaves, with_children

Ranks = Mapping[int, int]
"""The ranks of a group, by what their workers are called, in the order of these names."""
_ADVICE = "Pass the same containers on every worker, of dense tensors, numbers and text."


def gather_value(
    group: Group, ranks: Ranks, device: torch.device, value: Any, *, has_grad: bool
) -> Any:
    """The value with the rows of all workers in every tensor, in the order of `ranks`."""
    leaves, problem = _read_leaves(value)
    everyone = [leaves]
    if group.size() > 1:
        try:
            data = encode([problem, leaves])
        except PacelineError as error:  # of this rank alone: the others wait for it
            data = encode([error.what.rstrip("."), {}])
        sent = gather_bytes(group, data, word_device(group, device), "Gathering")
        found = [decode(sent[rank]) for rank in ranks.values()]
        _refuse_problems(ranks, [each[0] for each in found])
        everyone = [each[1] for each in found]
    else:
        _refuse_problems(ranks, [problem])
    described = [{path: _describe(leaf)[1:] for path, leaf in e.items()} for e in everyone]
    _compare(ranks, described)
    before = list(ranks.values()).index(group.rank())
    whole: list[Any] = []
    for path, leaf in named_leaves(value, "value"):
        if not isinstance(leaves[path], Tensor):
            whole.append(leaf)
            continue
        parts = [each[path] if each[path].dim() else each[path].reshape(1) for each in everyone]
        together = torch.cat(parts)
        if isinstance(leaf, Tensor):
            together = together.to(leaf.device)
            if has_grad and leaf.requires_grad:
                first = sum(map(len, parts[:before]))
                together = _Gathered.apply(leaf, together, group, device, first)  # type: ignore
        whole.append(together)
    return _rebuild(value, iter(whole))


def reduce_value(group: Group, ranks: Ranks, device: torch.device, value: Any, op: str) -> Any:
    """The value with the sum or the mean over all workers for every tensor and number."""
    leaves, problem = _read_leaves(value)
    described = {path: _describe(leaf) for path, leaf in leaves.items()}
    what = "Comparing what is reduced"
    told = exchange(group, [problem, described], word_device(group, device), what)
    said = [told[rank] for rank in ranks.values()]
    _refuse_problems(ranks, [each[0] for each in said])
    _compare(ranks, [each[1] for each in said])
    found: list[Any] = []
    for path, leaf in named_leaves(value, "value"):
        if isinstance(leaves[path], Tensor):
            tensor = leaf.detach() if isinstance(leaf, Tensor) else leaves[path]
            tensor = tensor.long() if tensor.dtype is torch.bool else tensor
            total = _sum(group, device, tensor, f"Reducing {path}")
            total = total / group.size() if op == "mean" else total
            found.append(total if isinstance(leaf, Tensor) else total.item())
        else:
            found.append(leaf)
    return _rebuild(value, iter(found))


def broadcast_value(group: Group, ranks: Ranks, device: torch.device, value: Any, root: int) -> Any:
    """The value of rank `root`, on every worker, its tensors on this worker's device."""
    if root not in ranks:
        there = ", ".join(map(str, ranks))
        raise UsageError(
            f"Rank {root}, whose value is to be broadcast, is not there; there are: {there}.",
            advice="A worker that replaces another is alone until its loop begins, and the others "
            "are without it until then: read the value on every worker.",
        )
    if group.size() == 1:
        return value
    place = ranks[root]
    is_root, where = group.rank() == place, word_device(group, device)
    data, problem = b"", ""
    if is_root:
        try:
            data = encode(value)
        except PacelineError as error:
            problem = f"rank {root} cannot broadcast its value: {error.what}"
    length, problem = exchange(group, [len(data), problem], where, "Broadcasting")[place]
    _refuse_problems({root: place}, [problem])
    # A bytearray, because torch warns of memory that cannot be written to.
    flat = torch.frombuffer(bytearray(data or bytes(length)), dtype=torch.uint8).to(where)
    broadcast(group, flat, place, "Broadcasting")
    here = flat.cpu()
    return value if is_root else decode(ctypes.string_at(here.data_ptr(), length))


class _Gathered(torch.autograd.Function):
    """A worker's rows among those of all: their gradient is the sum of what all workers compute."""

    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, together: Tensor, group: Group, device: torch.device, first: int
    ) -> Tensor:
        ctx.place = group, device, first, mine.shape
        return together

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, device, first, shape = ctx.place
        total = _sum(group, device, grad, "Adding up the gradient of what was gathered")
        rows = shape[0] if shape else 1
        return total[first : first + rows].reshape(shape), None, None, None, None


def _sum(group: Group, device: torch.device, tensor: Tensor, what: str) -> Tensor:
    home = tensor.device
    total = tensor.to(word_device(group, device)) if tensor.is_cpu else tensor
    # Sums are in place, and this may be the caller's tensor.
    total = total.clone(memory_format=torch.contiguous_format)
    all_reduce(group, total, what)
    return total.to(home)


def _rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    if is_container(value):
        return with_children(value, [_rebuild(item, leaves) for _, item in children_of(value)])
    return next(leaves)


def _read_leaves(value: Any) -> tuple[dict[str, Any], str]:
    """The leaves by name, numbers as tensors, all on the host; and what cannot be sent of them."""
    found: dict[str, Any] = {}
    for path, leaf in named_leaves(value, "value"):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found[path] = leaf.detach().cpu()
        elif leaf is None or isinstance(leaf, str | bool):
            found[path] = leaf
        elif isinstance(leaf, float) or (isinstance(leaf, int) and -(2**63) <= leaf < 2**63):
            dtype = torch.float64 if isinstance(leaf, float) else torch.int64
            found[path] = torch.tensor(leaf, dtype=dtype)
        else:
            return {}, f"{path} is a {type(leaf).__name__}"
    return found, ""


def _describe(leaf: Any) -> list[Any]:
    """The first dimension, and what has to be alike where that one may differ."""
    if isinstance(leaf, Tensor):
        return [list(leaf.shape[:1]), str(leaf.dtype), leaf.dim() > 0, list(leaf.shape[1:])]
    return ["", repr(leaf)]


def _refuse_problems(ranks: Ranks, problems: Sequence[str]) -> None:
    for rank, problem in zip(ranks, problems, strict=True):
        if problem:
            where = f" on rank {rank}" if len(problems) > 1 else ""
            raise UsageError(f"What is told to all workers: {problem}{where}.", advice=_ADVICE)


def _compare(ranks: Ranks, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise where a worker has something else than the first."""
    first, lowest = everyone[0], next(iter(ranks))
    for rank, theirs in zip(ranks, everyone, strict=True):
        for path in [*first, *theirs]:
            if first.get(path) != theirs.get(path):
                one, other = (_words(each.get(path)) for each in (first, theirs))
                raise DesyncError(
                    "The workers tell each other values that do not fit together.",
                    f"First difference: {path} is {one} on rank {lowest}, {other} on rank {rank}.",
                    _ADVICE,
                )


def _words(described: list[Any] | None) -> str:
    match described:
        case None:
            return "missing"
        case [*first, str(dtype), bool(), list(others)]:
            sizes = [*(first[0] if first else ["…"]), *others]
            return f"{dtype} of shape ({', '.join(map(str, sizes))})"
    return str(described[-1])
