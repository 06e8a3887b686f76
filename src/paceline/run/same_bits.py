"""`RunOptions(same_bits=True)`: what it switches on, what it refuses, and hashes to compare.

The bits of a shard's gradient depend on the parameters, the samples and the seed, and on how it is
computed: the processor, the version of torch, the threads. So a run computes with one thread per
worker and by deterministic algorithms, and writes down where.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from paceline import env
from paceline.data import Files
from paceline.errors import DesyncError, UsageError
from paceline.files import as_plain, memory_of
from paceline.group import runs_ahead
from paceline.update import is_known

EVERY = 100
"""Hashes are written after every so many steps, and at the end."""
THREADS = 1
_PRODUCTS = ("amx", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "fma")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def check_same_bits(config: Any) -> None:
    """Refuse what would make bits depend on the number of workers."""
    options, dataset = config.options, config.dataset
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if options.audit and (is_stream or isinstance(dataset, Files)):
        raise UsageError(
            f"audit was asked for together with a dataset of the type {type(dataset).__name__}, "
            "whose samples cannot be read by number, so that no second worker can read a shard.",
            advice="Leave audit out, or use a dataset with __len__ and __getitem__.",
        )
    if options.audit and options.noise_every:
        raise UsageError(
            "audit was asked for together with noise_every, which would count the shards twice "
            "that are computed twice.",
            advice="Leave one of them out: audit or noise_every.",
        )
    compression = getattr(config.ddp, "compression", None)
    causes = {
        "merge_shards": (options.merge_shards, "which cuts the batch by the workers"),
        "loader": (config.loader is not None, "whose batches are cut by the workers"),
        "engine": (config.engine is not None, "which adds gradients in an order of its own"),
        "compression": (compression is not None, "which rounds what workers have added"),
        "update": (not isinstance(options.update, str), "of which no bit is known"),
    }
    for name, (is_set, why) in causes.items():
        if is_set:
            raise UsageError(
                f"same_bits was asked for together with {name}, {why}.",
                advice=f"Leave one of them out: same_bits or {name}.",
            )
    if options.update == "sharded" and not is_known(config.optimizer):
        raise UsageError(
            'same_bits was asked for together with update="sharded", and whether '
            f"{type(config.optimizer).__name__} gives a part of a tensor the bits that it gives "
            "the whole is not known.",
            advice='Use update="whole", or an optimizer of torch.optim.',
        )
    if config.has_sync_norm:
        raise UsageError(
            "same_bits was asked for, and the model has a SyncBatchNorm, whose statistics are "
            "added up between workers.",
            advice="Use BatchNorm: its statistics are those of a shard, at any number of workers.",
        )


@contextmanager
def fixed_arithmetic() -> Iterator[None]:
    """Inside, this process computes the same at any number of workers; afterwards as before."""
    with _lock:
        _inside.append(_inside[0] if _inside else _read_settings())
        # On a GPU products are refused without it.
        workspace = _inside[0][0] or (":4096:8" if torch.cuda.is_available() else None)
        _apply_settings((workspace, THREADS, False, False, True, False))
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside and not sys.is_finalizing():
                _apply_settings(before)


_lock = threading.Lock()
_inside: list[tuple[Any, ...]] = []
"""The settings before the first run of this process that fixes them, once for each."""


def _read_settings() -> tuple[Any, ...]:
    return (
        env.read(_WORKSPACE) or None,
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _apply_settings(settings: tuple[Any, ...]) -> None:
    workspace, threads, benchmark, fills, is_deterministic, only_warns = settings
    env.put(_WORKSPACE, workspace)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)


def refuse_other_threads(step: int) -> None:
    """Raise where the script has changed how many threads compute, inside of its loop."""
    if (threads := torch.get_num_threads()) != THREADS:
        raise UsageError(
            f"Step {step}: torch computes with {threads} threads, and with same_bits it is to "
            f"compute with {THREADS}.",
            advice="Leave torch.set_num_threads() out of the loop.",
        )


def describe_arithmetic(device: torch.device) -> dict[str, str]:
    """Where bits are computed: the same on all workers of a run, and when it continues."""
    kind = " ".join([torch.backends.cpu.get_cpu_capability(), *_features()])
    if runs_ahead(device):
        kind = torch.get_device_module(device).get_device_name(device)
    return {"processor": kind, "torch": str(torch.__version__), "threads": str(THREADS)}


@cache
def _features() -> list[str]:
    """What libraries under torch choose their kernels by: the maker, and instructions for
    products that not every processor of one capability has. Empty where it is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return []
    pairs = [line.partition(":") for line in text.splitlines()]
    facts = {key.strip(): value.split() for key, _, value in pairs}
    special = [flag for flag in facts.get("flags", ()) if flag.startswith(_PRODUCTS)]
    return [*facts.get("vendor_id", ()), *sorted(special)]


def refuse_other_arithmetic(
    one: Mapping[str, str], other: Mapping[str, str] | None, where: str, elsewhere: str
) -> None:
    """Raise if two workers would not compute the same bits."""
    for key, value in one.items():
        if other and other[key] != value:
            raise DesyncError(
                "Workers would compute different bits, and same_bits was asked for.",
                f"First difference: {key} is {value} {where}, {other[key]} {elsewhere}.",
                "Use machines of one kind, with the same version of torch.",
            )


def hash_state(state: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of every value of a state, by its path, and of all of them as "all"."""
    found, together = dict[str, str](), hashlib.sha256()
    for path, data in _values(state, ""):
        found[path] = hashlib.sha256(data).hexdigest()
        together.update(f"{path}={found[path]}\n".encode())
    return found | {"all": together.hexdigest()}


def _values(value: Any, path: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, Tensor):
        plain = as_plain(value)
        yield path, f"{value.dtype} {tuple(value.shape)} ".encode() + bytes(memory_of(plain))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):  # in one order, whichever worker has gathered it
            yield from _values(value[key], f"{path}/{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _values(each, f"{path}/{number}")
    else:
        yield path, repr(value).encode()
