"""Watching one forward pass: which Python code it runs, and what passes from tensors to Python.

A recording is right only where a forward pass would do the same again. One pass is watched from
two sides. A profile function sees every Python function and every C function that is called; a
`TorchFunctionMode` sees every use of a tensor, reading a shape included. What is seen is judged at
once, by lists of what is known to be harmless; see Note [What makes a pass repeatable] in `repeat`.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TORCH = os.path.dirname(torch.__file__) + os.sep

_FILES = {
    *("_jit_internal.py", "_tensor.py", "_VF.py", "functional.py", "jit/__init__.py"),
    *("nn/_reduction.py", "nn/functional.py", "nn/parameter.py"),
}
_LAYERS = {
    *("activation", "batchnorm", "channelshuffle", "conv", "distance", "dropout", "flatten"),
    *("fold", "instancenorm", "linear", "loss", "normalization", "padding", "pixelshuffle"),
    *("pooling", "sparse", "upsampling"),
}
"""Files of torch whose functions compute from arguments and attributes alone."""

_SAFE_METHODS = {
    "nn/modules/module.py": {
        *("_wrapped_call_impl", "_call_impl", "__call__", "__getattr__", "children", "modules"),
        *("named_children", "named_modules", "parameters", "named_parameters", "buffers"),
        *("named_buffers", "_named_members"),
    },
    "nn/modules/container.py": {
        *("forward", "__iter__", "__len__", "__getitem__", "__contains__", "keys", "values"),
        *("items", "_get_item_by_idx", "_get_abs_string_index"),
    },
}
_NOT_THESE = ("__init__", "__set", "reset_", "register_", "_load", "add_", "backward")
"""Functions in these files that change something."""

METADATA = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device"),
    *("layout", "stride", "is_cuda", "is_cpu", "is_sparse", "is_floating_point", "is_complex"),
    *("is_contiguous", "requires_grad", "is_quantized", "is_nested", "is_meta", "__len__"),
    *("element_size", "itemsize", "is_signed", "is_same_size", "names", "get_device"),
    *("is_mkldnn", "is_mps", "is_xpu"),
}
"""What a pass may learn of a tensor: it is the same for inputs of the same signature."""

_DENIED = {
    # These show, or change, what a signature does not hold.
    *("data", "grad", "_grad", "_base", "detach_", "requires_grad_", "set_", "resize_"),
    *("resize_as_", "share_memory_", "pin_memory", "retain_grad", "apply_", "map_", "map2_"),
    # These bring numbers from Python to the device, by a copy that a recording would not repeat.
    *("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "new_tensor", "scalar_tensor"),
    # These wait for the device, to know the shape of their result.
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "histc"),
    *("repeat_interleave", "combinations"),
}

_BUILTINS = {
    *("len", "isinstance", "issubclass", "callable", "min", "max", "sum", "abs"),
    *("round", "sorted", "any", "all", "iter", "next", "divmod", "pow"),
}
_MODES = {
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
    *("get_autocast_dtype", "get_default_dtype"),
}
_VALUES = (list, dict, tuple, str, set, frozenset, int, float, bool, range, slice)


_CHANGING = {
    *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update"),
    *("setdefault", "popitem", "add", "discard", "difference_update", "intersection_update"),
    "symmetric_difference_update",
}


class Watch:
    """What was seen of one pass: code to be checked, and the first reason not to repeat it."""

    def __init__(self, device: torch.device, trusted: Sequence[Callable[..., Any]] = ()) -> None:
        self.device = device
        self.refusal: str | None = None
        self.codes: dict[int, CodeType] = {}
        """The code outside torch that ran, by its `id`: equal code may belong to two functions."""
        self.changed: list[Any] = []
        """Lists, dictionaries and sets that code outside torch changed."""
        self.is_random = False
        """Whether random numbers of the device were drawn."""
        own = [function.__code__ for function in trusted if isinstance(function, FunctionType)]
        self._is_trusted = dict.fromkeys(own, True)
        self._muted: FrameType | None = None

    def refuse(self, reason: str) -> None:
        if self.refusal is None:
            self.refusal = reason

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        unwritten: Sequence[Tensor],
    ) -> Any:
        """Call the function and watch it; it must not write to any of the tensors `unwritten`."""
        if sys.getprofile() is not None or sys.gettrace() is not None:
            self.refuse("a profiler or a debugger looks on")
            return function(*args, **kwargs)
        versions = [tensor._version for tensor in unwritten]
        cpu_random, random = torch.get_rng_state(), _random_state(self.device)
        with self._warnings(), _Uses(self), _no_collection():
            sys.setprofile(self._on_event)
            try:
                result = function(*args, **kwargs)
            finally:
                sys.setprofile(None)
        if versions != [tensor._version for tensor in unwritten]:
            self.refuse("it writes to its inputs, parameters or buffers")
        if self.device.type != "cpu" and not torch.equal(cpu_random, torch.get_rng_state()):
            self.refuse("it draws random numbers on the CPU")
        self.is_random |= not torch.equal(random, _random_state(self.device))
        return result

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """A warning is said again afterwards, and a reason: a replay would not say it.

        CUDA warns where the host waits for the device, if told to.
        """
        mode = torch.cuda.get_sync_debug_mode() if self.device.type == "cuda" else 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if self.device.type == "cuda" and mode == 0:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                if self.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode(mode)
        for warning in caught:
            text = str(warning.message)
            if "ynchronization debug mode" in text:  # torch's word on being asked to say so
                continue
            if "called a synchronizing CUDA operation" in text:
                self.refuse("it waits for the device")
                continue
            self.refuse(f"it warns: {text}")
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._muted is not None:
            if event == "return" and frame is self._muted:
                self._muted = None
            return
        if event == "call":
            code = frame.f_code
            if code is Tensor.__hash__.__code__:
                # By address, so the order of a set of tensors differs. torch only asks for members.
                if frame.f_back is None or not self.trusts(frame.f_back.f_code):
                    self.refuse("it hashes a tensor")
                self._muted = frame
            elif _is_ours(code):
                self._muted = frame
            elif not self.trusts(code):
                self.codes[id(code)] = code
        elif event == "c_call" and not self.trusts(frame.f_code):
            if _is_ours(frame.f_code):
                return
            if not _is_harmless(arg):
                self.refuse(f"{frame.f_code.co_qualname} calls {_name_of(arg)}")
            elif isinstance(arg.__self__, (list, dict, set)) and arg.__name__ in _CHANGING:
                self.changed.append(arg.__self__)

    def trusts(self, code: CodeType) -> bool:
        """Whether the code is torch's, and computes from arguments and attributes alone."""
        known = self._is_trusted.get(code)
        if known is None:
            known = self._is_trusted[code] = _is_trusted(code)
        return known


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: whoever is called back then would seem to be a part of the pass."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Uses(TorchFunctionMode):
    """Judges each use of a tensor by what it returns."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        if isinstance(func, FunctionType) and not self._watch.trusts(func.__code__):
            self._watch.refuse(f"it calls {name}, which is not torch's")
        elif name in _DENIED or name == "__set__":
            self._watch.refuse(f"it uses {name} of a tensor")
        elif name not in METADATA:
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if type(part) is not Tensor and not isinstance(part, torch.nn.Parameter):
                    self._watch.refuse(f"{name} gives Python a value")
                elif part.device != self._watch.device:
                    self._watch.refuse(f"{name} computes on {part.device}")
        return result


def _is_ours(code: CodeType) -> bool:
    """Code that runs only because somebody watches."""
    name = code.co_filename
    return name == __file__ or name == _TORCH + "overrides.py"


def _is_trusted(code: CodeType) -> bool:
    if not code.co_filename.startswith(_TORCH):
        return False
    file = code.co_filename.removeprefix(_TORCH).replace(os.sep, "/")
    functions = [part for part in code.co_qualname.split(".") if not part.startswith("<")]
    if file in _SAFE_METHODS:
        return any(name in _SAFE_METHODS[file] for name in functions)
    is_layer = file.startswith("nn/modules/") and file[11:].removesuffix(".py") in _LAYERS
    if file not in _FILES and not is_layer:
        return False
    return not any(name.startswith(_NOT_THESE) for name in functions)


def _is_harmless(function: Any) -> bool:
    """Whether a C function called by the user's code reads and writes nothing but its arguments.

    Those of torch that take or make tensors are judged by `_Uses`.
    """
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, Tensor):
        return True
    if isinstance(owner, ModuleType):
        if owner.__name__ == "builtins":
            return name in _BUILTINS
        if owner is math:
            return True
        return owner.__name__.startswith("torch._C._") or (owner is torch._C and name in _MODES)
    if owner is None or isinstance(owner, type):
        module = getattr(function, "__module__", None)
        return module == "torch" or owner in _VALUES or name in _MODES
    return type(owner) in _VALUES or isinstance(owner, torch.Size) or _is_view(owner)


def _is_view(owner: Any) -> bool:
    return type(owner).__name__ in {"dict_keys", "dict_values", "dict_items"}


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()
