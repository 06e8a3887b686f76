"""In which precision a run computes: torch's autocast and its `GradScaler`, set up for a device.

Parameters, gradients and the optimizer stay in float32. Under `bf16` and `fp16` forward passes and
losses run under autocast, which has matrix products and convolutions compute in 16 bits, and
backward passes outside of it, as torch wants it. Only float16 needs its losses scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Parameter

from paceline.errors import UsageError

DTYPE_BY_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class Precision:
    """What a run does around forward and backward passes; `fp32` leaves both to the script."""

    def __init__(self, name: str, device: torch.device, params: Sequence[Parameter]) -> None:
        self.name, self._dtype = name, DTYPE_BY_PRECISION[name]
        self.forward: AbstractContextManager[Any] = nullcontext()
        """Around a shard's forward pass and its loss; entered many times, never within itself."""
        self.backward: AbstractContextManager[Any] = nullcontext()
        """Around its backward pass, inside of `forward`."""
        self._device = device
        self.is_short = self._dtype is not None
        """Whether gradients are computed in 16 bits."""
        if self._dtype is not None:
            self._refuse_missing(self._dtype, params)
            self.forward = torch.autocast(device.type, self._dtype)
            self.backward = torch.autocast(device.type, enabled=False)

    def find_scaler(self, scaler: Any) -> Any:
        """What scales losses: the one that was passed, one of torch's where fp16 needs it."""
        if scaler is None and self.name == "fp16":
            return torch.amp.GradScaler(self._device.type)
        if scaler is not None and self.name == "bf16":
            raise UsageError(
                'A scaler was passed along with precision="bf16", whose range is that of float32: '
                "there is nothing to scale.",
                advice='Leave scaler= out, or use precision="fp16".',
            )
        return scaler

    def explain(self, error: BaseException | None) -> UsageError | None:
        """What an error means that says that an operation does not exist in this precision."""
        text = str(error)
        is_missing = "not implemented for" in text or "Low precision dtypes not supported" in text
        names = ("'Half'", "Got Half") if self.name == "fp16" else ("'BFloat16'", "Got BFloat16")
        if self._dtype is None or not is_missing or not any(name in text for name in names):
            return None
        other = 'precision="bf16" or ' * (self.name == "fp16")
        return UsageError(
            f'The model needs an operation that torch does not have for precision="{self.name}" on '
            f"{self._device.type}: {text.splitlines()[0]}.",
            advice=f'Use {other}precision="fp32", or compute that part under '
            f'torch.autocast("{self._device.type}", enabled=False) from inputs in float32.',
        )

    def _refuse_missing(self, dtype: torch.dtype, params: Sequence[Parameter]) -> None:
        kind, advice, problem = self._device.type, 'Use precision="fp32".', ""
        if not torch.amp.is_autocast_available(kind):
            problem = f"torch has no autocast for {kind}"
        elif self.name == "bf16" and kind == "cuda" and not _has_bf16():
            problem = f"{torch.cuda.get_device_name(self._device)} does not compute in bfloat16"
            advice = 'Use precision="fp16", which it does.'
        elif self.name == "fp16" and any(p.requires_grad and p.dtype == dtype for p in params):
            problem = "the model's parameters are float16, and small updates to them would be lost"
            advice = "Leave the model in float32: autocast casts where that is safe."
        if problem:
            raise UsageError(f'precision="{self.name}" on {kind}: {problem}.', advice=advice)


def _has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
