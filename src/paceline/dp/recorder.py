"""Which calls are recorded and replayed: by order, or where it is proven to change nothing.

Every signature of inputs and modes has a life of its own. With `cuda_graphs=True` it is short: two
calls as usual, then a recording. By itself, `DataParallel` takes more care:

    first call -> timed --(GPU waits for Python)--> watched --(proven)--> recorded -> replayed ...
                    |                                 |
                    '-> as usual                      '-> as usual, from then on for the whole model
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d

from paceline.comm import tree
from paceline.dp.loss import check_loss, compute_loss
from paceline.dp.pace import Pace
from paceline.dp.repeat import Proof, Snapshots, freeze, place_of, prove
from paceline.dp.scatter import Chunk
from paceline.dp.watch import Watch
from paceline.errors import UsageError

WARM_UP = 2
"""Calls of one signature that run as usual before the next is recorded by order: libraries set up
in them what they may not while recording."""

MOST_TIMED = 4
"""A GPU that did not wait for Python in any of these calls is busy."""

MOST_RECORDINGS = 16
"""Further signatures are not recorded: batches of ever new shapes would fill the memory."""

MOST_BYTES = 128 * 2**20
"""What recordings that nobody asked for may keep in all. A model that needs more is no model that
keeps a GPU waiting; and torch's class takes a workspace of 32 MiB for each of its threads."""

MOST_FAILURES = 3
"""What does not stay as it was that often is not looked at again."""

_KEEPS_STATISTICS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
"""The only layers that may write to buffers: their outputs do not depend on what they write."""

_log = logging.getLogger(__name__)


class Stage(enum.Enum):
    """What is to be done with a call."""

    PLAIN = enum.auto()
    TIMED = enum.auto()
    WATCHED = enum.auto()
    REPLAYED = enum.auto()


@dataclass(slots=True)
class Entry:
    """The life of one signature."""

    calls: int = 0
    recording: Any = None
    pace: Pace | None = None
    proof: Proof | None = None
    needed: list[Tensor] = field(default_factory=list)
    """Parameters and buffers that backward reads."""
    is_random: bool = False
    failures: int = 0
    is_left: bool = False
    """Whether it runs as usual for good."""
    keeps: list[object] = field(default_factory=list)
    """What the signature refers to by its `id`."""


class Recorder:
    """The recordings of one engine, by signature."""

    def __init__(self, source: nn.Module, device: torch.device, *, is_automatic: bool) -> None:
        self._device = device
        self._modules = list(source.modules())
        self._snapshots = Snapshots(self._modules)
        self._entries: dict[Hashable, Entry] = {}
        self._is_automatic = is_automatic
        self._kept_bytes = 0
        self.refusal: str | None = None
        """Why nothing of this model is recorded any more."""

    def state(self, tensors: Sequence[Tensor]) -> Hashable | None:
        """The part of a signature that all inputs have in common; None if all runs as usual."""
        if self._is_automatic and (self.refusal is not None or not _is_ordinary()):
            return None
        snapshot = self._snapshots.number()
        if snapshot is None:
            return None
        places = tuple((id(tensor), *place_of(tensor)) for tensor in tensors)
        if self._is_automatic and any(place[-1] not in (Tensor, nn.Parameter) for place in places):
            return None
        return snapshot, places, _switches(self._device)

    def shape(self, chunks: Sequence[Chunk]) -> Hashable | None:
        """The inputs' part of a signature: everything but the values of tensors.

        None if it does not hold all that a forward pass can see of them.
        """
        look = _strict_shape if self._is_automatic else _shape
        parts = tuple((chunk.replica, look(chunk.contents)) for chunk in chunks)
        return None if any(part is None for _, part in parts) else parts

    def plan(self, key: Hashable, keeps: Sequence[object]) -> tuple[Entry, Stage]:
        """What to do with the next call of a signature."""
        entry = self._entries.get(key)
        if entry is None:
            entry = Entry(keeps=list(keeps))
            if len(self._entries) >= MOST_RECORDINGS:
                return entry, Stage.PLAIN
            self._entries[key] = entry
        entry.calls += 1
        if not self._is_automatic:
            return entry, Stage.REPLAYED if entry.calls > WARM_UP else Stage.PLAIN
        return entry, self._stage(entry)

    def _stage(self, entry: Entry) -> Stage:
        if entry.is_left or self.refusal is not None or entry.calls == 1:
            return Stage.PLAIN
        if entry.proof is not None:
            if entry.proof.holds():
                return Stage.REPLAYED
            self._forget(entry)
            return Stage.PLAIN if entry.is_left else Stage.WATCHED
        if entry.pace is not None and entry.pace.is_waiting_for_python():
            return Stage.WATCHED
        if entry.calls > 1 + MOST_TIMED:
            entry.is_left = True
            return Stage.PLAIN
        entry.pace = Pace(self._device)
        return Stage.TIMED

    def _forget(self, entry: Entry) -> None:
        entry.proof = entry.recording = None
        entry.failures += 1
        entry.is_left = entry.failures >= MOST_FAILURES

    def watch(self) -> Watch:
        """Watches a call, which may consist of several chunks."""
        return Watch(self._device, trusted=(compute_loss, check_loss))

    def conclude(
        self, entry: Entry, watch: Watch, kept_bytes: int, functions: Sequence[Any] = ()
    ) -> None:
        """Decide, after a watched call, whether the next is recorded."""
        if entry.pace is not None:
            kept_bytes += entry.pace.kept_bytes
        if self._kept_bytes + kept_bytes > MOST_BYTES:
            entry.is_left = True
            return
        verdict = prove(watch, self._modules, functions)
        if isinstance(verdict, str):
            self._refuse(verdict)
        else:
            entry.proof, entry.is_random = verdict, watch.is_random
            self._kept_bytes += kept_bytes

    def record(self, entry: Entry, record: Callable[[], Any]) -> Any:
        """The entry's recording, made now if there is none; None if it cannot be made."""
        if entry.recording is None:
            generator = torch.cuda.default_generators[self._device.index]
            random_state = generator.clone_state()
            # Workspaces for usual calls are of no use to recorded ones, which get their own.
            clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
            try:
                # Half-precision copies that autocast keeps would be of memory not recorded.
                torch.clear_autocast_cache()
                entry.recording = record()
            except RuntimeError as error:
                # The generator would wait for the end of the recording for good.
                generator.graphsafe_set_state(random_state)
                self._fail(error)
            finally:
                torch.clear_autocast_cache()
                if clear is not None:  # this recording's must not become another's
                    clear()
        return entry.recording

    def _fail(self, error: RuntimeError) -> None:
        if self._is_automatic:
            self._refuse(str(error).splitlines()[0])
            return
        raise UsageError(
            "This model's work cannot be recorded as a CUDA graph.",
            f"Recording it failed: {str(error).splitlines()[0]}",
            "Leave cuda_graphs off; models that wait for the GPU in forward need that.",
        ) from error

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._entries.clear()
        _log.debug("The model is not replayed as a CUDA graph: %s.", reason)


def unwritten(chunk: Chunk, module: nn.Module) -> list[Tensor]:
    """The tensors that a pass must leave as they are, if it is to be repeated."""
    tensors = [*tree.tensors(chunk.contents), *module.parameters()]
    for each in module.modules():
        if type(each) not in _KEEPS_STATISTICS:
            tensors += [buffer for buffer in each._buffers.values() if buffer is not None]
    return tensors


def identity_of(function: Callable[..., Any]) -> Hashable:
    """Equal for two functions made by the same line around the same objects, as lambdas are."""
    if isinstance(function, MethodType):
        return identity_of(function.__func__), id(function.__self__)
    code = getattr(function, "__code__", None)
    if code is None:
        return id(function)
    cells = getattr(function, "__closure__", None) or ()
    contents = tuple(id(cell.cell_contents) for cell in cells)
    return code, id(function.__globals__), contents, id(function.__defaults__)


def _is_ordinary() -> bool:
    """Whether nobody looks on or changes what torch does; a replay would pass them by."""
    return (
        torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and forward_ad._current_level < 0
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        # Casts that autocast keeps may be older than the weights; a replay makes its own.
        and not (torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled())
        and not torch.cuda.is_current_stream_capturing()
    )


def _switches(device: torch.device) -> Hashable:
    """Whatever decides which kernels torch starts, besides the inputs."""
    c = torch._C
    return (
        torch.cuda.current_stream(device).cuda_stream,
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        *(c._get_deterministic_algorithms(), c._get_float32_matmul_precision()),
        *(c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic()),
        *(c._get_cudnn_allow_tf32(), c._get_cublas_allow_tf32()),
        *(c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled()),
        *(c._get_math_sdp_enabled(), c._get_cudnn_sdp_enabled()),
        str(c._get_cublas_allow_fp16_reduced_precision_reduction()),
        str(c._get_cublas_allow_bf16_reduced_precision_reduction()),
    )


def _shape(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    if tree.is_container(value):
        return (type(value), tuple((key, _shape(item)) for key, item in tree.children(value)))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)


def _strict_shape(value: Any) -> Hashable | None:
    if isinstance(value, Tensor):
        is_plain = (
            type(value) in (Tensor, nn.Parameter)
            and value.layout is torch.strided
            and not value.is_conj()
            and not value.is_neg()
            and not value.__dict__
            and value.numel() > 0
            and (value.is_contiguous() or _is_channels_last(value))
        )
        return _shape(value) if is_plain else None
    if type(value) in (tuple, list, dict):
        if type(value) is dict and not all(type(key) is str for key in value):
            return None
        parts = [(key, _strict_shape(item)) for key, item in tree.children(value)]
        return None if any(part is None for _, part in parts) else (type(value), tuple(parts))
    frozen: Hashable | None = freeze(value)
    return frozen


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
