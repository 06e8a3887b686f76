"""Do all ranks hold the same model? What belongs to it, and comparing, copying and checking it.

Compared are descriptions (names, shapes, dtypes) when a model is wrapped, and bits when replicas
are checked. A disagreement is found by all ranks together, so all of them raise.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.ddp.wrapper import named_parameters
from paceline.errors import (
    DesyncError,
    DeviceError,
    PacelineError,
    ReplicaError,
    UsageError,
    name_ranks,
)
from paceline.group import Group, all_gather, broadcast, exchange

# Chunks are joined in a buffer, which should be small beside the model.
BROADCAST_CHUNK_BYTES = 64 * 2**20

Named = Sequence[tuple[str, Tensor]]


def describe(named_params: Sequence[tuple[str, nn.Parameter]], buffers: Named) -> list[list[Any]]:
    """What must be the same on every rank for gradients to be summed and buffers to be copied."""
    entries: list[list[Any]] = []
    for kind, named in (("parameter", named_params), ("buffer", buffers)):
        for name, tensor in named:
            state = "frozen" if kind == "parameter" and not tensor.requires_grad else ""
            if not tensor.is_contiguous():  # gradients have their parameter's strides
                state += f" with strides {tensor.stride()}"
            entries.append([kind, name, list(tensor.shape), str(tensor.dtype), state.strip()])
    return entries


def verify_same_model(
    group: Group,
    description: list[list[Any]],
    device: torch.device,
    problem: PacelineError | None,
    engine: list[Any],
) -> int:
    """Raise on every rank if any rank has a problem of its own, or another model than rank 0.

    `engine` is what else must be equal: how gradients are packed and sent. Returns a number for
    this model that is the same on every rank.
    """
    mine = {
        "model": hashlib.sha256(json.dumps(description).encode()).hexdigest(),
        "number": next(_numbers),
        "engine": engine,
    }
    everyone = exchange(group, problem or mine, device, "Comparing the models")
    if any(theirs["model"] != everyone[0]["model"] for theirs in everyone):
        models = exchange(group, description, device, "Comparing the models")
        odd = next(rank for rank, model in enumerate(models) if model != models[0])
        raise _difference(models[0], models[odd], odd)
    for rank, theirs in enumerate(everyone):
        if theirs["engine"] != everyone[0]["engine"]:
            raise DesyncError(
                f"The model has another device, bucket sizes or options on rank {rank} than on "
                f"rank 0: {theirs['engine']} and {everyone[0]['engine']}.",
                advice="Use one kind of device, and pass the same arguments, on every rank.",
            )
    number: int = everyone[0]["number"]
    return number


_numbers = count(1)


def _difference(first: list[list[Any]], other: list[list[Any]], rank: int) -> DesyncError:
    for one, two in zip(first, other, strict=False):
        if one != two:
            where = f"First difference: {_name(one)} on rank 0, {_name(two)} on rank {rank}."
            break
    else:
        longer, who = (first, 0) if len(first) > len(other) else (other, rank)
        extra = longer[min(len(first), len(other))]
        where = f"First difference: only rank {who} has {_name(extra)}."
    return DesyncError(
        f"The model has {len(first)} parameters and buffers on rank 0 and {len(other)} on rank "
        f"{rank}, and they are not the same.",
        where,
        "Build the model from the same configuration, in the same order, on every rank.",
    )


def _name(entry: list[Any]) -> str:
    kind, name, shape, dtype, state = entry
    remarks = "".join(f", {word}" for word in (kind if kind == "buffer" else "", state) if word)
    return f"{name!r} is {tuple(shape)} {dtype.removeprefix('torch.')}{remarks}"


@torch.no_grad()
def broadcast_tensors(
    copy: Callable[[Tensor, int, str], None],
    tensors: Sequence[Tensor],
    root: int,
    what: str,
    *,
    is_root: bool,
    device: torch.device | None = None,
) -> None:
    """Overwrite the tensors with the root's, in as few messages as sensible.

    `copy` is that of a transport, and gets bytes on `device`, whatever devices the tensors of a
    rank are on; None: on the tensors' own, which are then alike everywhere.
    """
    by_device = device is None
    for chunk in _chunks(tensors, BROADCAST_CHUNK_BYTES, by_device=by_device):
        runs = groupby(chunk, lambda tensor: tensor.device)
        parts = [torch.cat([_as_bytes(t) for t in run]).to(device=device) for _, run in runs]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        copy(flat, root, what)
        if is_root:
            continue
        start = 0
        for tensor in chunk:
            stop = start + tensor.numel() * tensor.element_size()
            piece = flat[start:stop].clone()  # a fresh start is aligned for any dtype
            tensor.copy_(_from_bytes(piece, tensor))
            start = stop


def _chunks(
    tensors: Sequence[Tensor], limit_bytes: int, *, by_device: bool
) -> Iterator[list[Tensor]]:
    """Runs of tensors, each of at most `limit_bytes` unless one alone is larger.

    `by_device`: and of one device each.
    """
    chunk: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        is_elsewhere = by_device and bool(chunk) and tensor.device != chunk[0].device
        if chunk and (filled + nbytes > limit_bytes or is_elsewhere):
            yield chunk
            chunk, filled = [], 0
        chunk.append(tensor)
        filled += nbytes
    if chunk:
        yield chunk


def _as_bytes(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().contiguous().view(-1).view(torch.uint8)


def _from_bytes(flat: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        real = flat.view(like.real.dtype).view(*like.shape, 2)
        return torch.view_as_complex(real)
    return flat.view(like.dtype).view(like.shape)


@torch.no_grad()
def check_in_sync(group: Group, named: Named, device: torch.device, step: int) -> None:
    """Raise on every rank if any tensor differs in any bit between ranks."""
    if group.size() == 1 or not named:
        return
    mine = torch.stack([checksum(tensor).to(device) for _, tensor in named])
    sums = torch.stack(all_gather(group, mine, "Checking that all ranks are in sync"))
    differs = (sums != sums[0]).any(dim=2)
    if not differs.any():
        return
    index = int(differs.any(dim=0).nonzero()[0])
    odd = _minority([tuple(row) for row in sums[:, index].tolist()])
    name, tensor = named[index]
    reference = next(rank for rank in range(group.size()) if rank not in odd)
    flat, what = _as_bytes(tensor).clone(), "Comparing a tensor that differs"
    broadcast(group, flat, reference, what)
    seen = exchange(group, _first_difference(tensor, flat), device, what)[odd[0]]
    total = int(differs.any(dim=0).sum())
    raise ReplicaError(
        f"Step {step}: {total} of {len(named)} tensors differ between ranks.",
        f"First difference: {name!r} on {name_ranks(odd)} is not what it is on rank {reference}: "
        f"element {seen[0]} is {seen[1]} on rank {odd[0]} and {seen[2]} on rank {reference}.",
        "Look for updates, random numbers or loading that only some ranks do.",
    )


def check_modes(group: Group, is_training: bool, device: torch.device, step: int) -> None:
    """Raise on every rank if the model is in training mode on some of them only."""
    modes = exchange(group, is_training, device, "Comparing the modes of the model")
    if len(set(modes)) > 1:
        ranks = [rank for rank, each in enumerate(modes) if not each]
        raise DesyncError(
            f"Step {step}: the model is in evaluation mode on {name_ranks(ranks)}, and not on the "
            "others.",
            advice="Call model.train() after an evaluation on every rank that called model.eval().",
        )


def _first_difference(tensor: Tensor, theirs: Tensor) -> list[Any]:
    """The first element whose bytes differ: its place, the value here, and theirs."""
    differs = (_as_bytes(tensor) != theirs).nonzero()
    place = int(differs[0]) // tensor.element_size() if len(differs) else 0
    values = (tensor.detach(), _from_bytes(theirs, tensor))
    return [place, *(str(each.reshape(-1)[place].item()) for each in values)]


def checksum(tensor: Tensor) -> Tensor:
    """Two numbers that differ when the bits differ: a sum, and a sum weighted by position."""
    data = _as_bytes(tensor)
    tail = data.numel() % 8
    # Copied, because a view of 8 bytes each must begin at a multiple of 8.
    words = data[: data.numel() - tail].clone().view(torch.int64)
    rest = data[data.numel() - tail :].to(torch.int64)
    words = torch.cat([words, rest]) if tail else words
    place = torch.arange(1, words.numel() + 1, device=words.device)
    return torch.stack([words.sum(), (words * place).sum()])


def _minority(values: Sequence[tuple[int, ...]]) -> list[int]:
    """The ranks that do not hold the most common value; a tie is decided for rank 0's."""
    counts = Counter(values)
    most = max(counts.values())
    common = values[0] if counts[values[0]] == most else counts.most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != common]


class _Registrations:
    """How many parameters and modules this process has put into modules since it counts."""

    def __init__(self) -> None:
        self.total = 0
        register_module_parameter_registration_hook(self._count)
        register_module_module_registration_hook(self._count)

    def _count(self, *_: object) -> None:
        self.total += 1


_count_registrations = cache(_Registrations)


class ModelCheck:
    """Raises if a model has got parameters, since it was wrapped, that no engine averages."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.registrations = _count_registrations()
        """Parameters that were put into any module of this process; another total is news."""
        self.seen = 0

    def is_training(self) -> bool:
        module = self._module()
        return module is None or module.training

    def __call__(self, known: Iterable[nn.Parameter]) -> None:
        self.seen = self.registrations.total
        if (module := self._module()) is not None:
            check_parameters_are_known(module, known)


def check_parameters_are_known(module: nn.Module, known: Iterable[nn.Parameter]) -> None:
    """Raise if the module has got parameters that no engine averages.

    A tensor computed from others, which `torch.func.functional_call` puts in their place, is none.
    """
    ids = set(map(id, known))
    own = (param for each in modules(module) for param in each._parameters.values())
    if ids.issuperset(id(param) for param in own if param is not None):
        return  # the usual case, in a fraction of the time that names take
    for name, param in named_parameters(module):
        if id(param) not in ids and param.is_leaf:
            raise DesyncError(
                f"Parameter {name!r} was added or replaced after the model was wrapped, "
                "so nobody averages its gradient or keeps it equal.",
                advice="Change the model first, then wrap it.",
            )


def modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all inside it; `module.modules()` takes several times as long."""
    seen, stack = {id(module)}, [module]
    while stack:
        each = stack.pop()
        yield each
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def find_problem(
    named: Sequence[tuple[str, nn.Parameter]],
    buffers: Named,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> PacelineError | None:
    """What is wrong with this rank's arguments, if anything; all ranks hear of it."""
    for name, tensor in (*named, *buffers):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            return UsageError(
                f"Modules with uninitialized parameters cannot be averaged: {name!r} has no shape.",
                advice="Run one batch through the bare model first, then wrap it.",
            )
    for name, param in named:
        if hasattr(param, "placements"):  # without importing DTensor, which takes a second
            return UsageError(
                f"Parameter {name!r} is a DTensor, of which every rank has a part, as "
                "fully_shard() makes it: Paceline keeps the whole model on every rank.",
                advice="Pass the model without fully_shard(), and share the optimizer's state out: "
                'RunOptions(update="sharded"), or shard_update(). Keep FSDP2, in a loop of your '
                "own, for a model that does not fit on one device.",
            )
        if getattr(param, "_in_backward_optimizers", None):
            return UsageError(
                f"Parameter {name!r} is updated inside backward, before gradients are averaged.",
                advice="Call the optimizer's step() after backward instead.",
            )
    if not any(param.requires_grad for _, param in named):
        return UsageError(
            f"None of the model's {len(named)} parameters requires a gradient.",
            advice="Such a model needs no wrapper: use it as it is.",
        )
    devices = {param.device: name for name, param in reversed(named)}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        return DeviceError(
            f"The model's parameters lie on {len(devices)} devices: {where}.",
            advice="Move the whole model to one device before wrapping it.",
        )
    device = next(iter(devices))
    if device.type == "meta":
        return DeviceError(
            "The model's parameters lie on the meta device, which holds no values.",
            advice="Give the model memory with to_empty() and fill it before wrapping it.",
        )
    return _find_device_problem(device, list(device_ids or []), output_device)


def _find_device_problem(
    device: torch.device,
    device_ids: list[int | torch.device],
    output_device: int | torch.device | None,
) -> PacelineError | None:
    if len(device_ids) > 1:
        return DeviceError(
            f"device_ids has {len(device_ids)} entries.",
            advice="One process drives one device: pass its own only, or use DataParallel.",
        )
    if device.type == "cpu" and (device_ids or output_device is not None):
        return DeviceError(
            f"device_ids={device_ids or None} was passed for a model on the CPU.",
            advice="Leave device_ids and output_device out, or move the model to its GPU first.",
        )
    for chosen in [*device_ids, *([] if output_device is None else [output_device])]:
        wanted = torch.device(device.type, chosen) if isinstance(chosen, int) else chosen
        if torch.device(wanted) != device:
            return DeviceError(
                f"device_ids or output_device says {wanted}, but the model is on {device}.",
                advice=f"Move the model there, or pass {device.index}.",
            )
    return None
