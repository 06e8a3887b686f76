"""Batch normalisation over the batch of all ranks, on any device.

Plain `BatchNorm` sees only its own rank's shard, so N workers compute something else than one.
Here the statistics are those of the whole batch: one all-reduce of sums in forward, one in
backward. Everything else is the arithmetic of plain batch normalisation, by the same kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from paceline import comm
from paceline.errors import UsageError


class SyncBatchNorm(nn.SyncBatchNorm):
    """Normalises with the mean and variance of all ranks' rows: torch's class, on CPU too.

    Arguments, attributes and checkpoints are torch's. A rank may have more rows than another, or
    none. Gradients of weight and bias are this rank's share, for DistributedDataParallel to
    reduce. In evaluation, and in a world of one, it is plain batch normalisation.
    """

    process_group: Any
    _name = ""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        self._check_channels(input)
        group = self._group() if self.training else None
        if group is None or group.size() == 1:
            plain: Tensor = _BatchNorm.forward(self, input)
            return plain
        normalized: Tensor = self._normalize(input, group)
        return normalized

    # The collective is Python's to call, so a compiler has to step around it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _normalize(self, input: Tensor, group: comm.Group) -> Tensor:
        what = f"The batch statistics of {self._name!r}" if self._name else "The batch statistics"
        normalized: tuple[Tensor, Tensor, Tensor, Tensor] = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group, what
        )
        output, *statistics = normalized
        if self.track_running_stats:
            self._track(*statistics)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        if (
            self.num_batches_tracked is None
            or self.running_mean is None
            or self.running_var is None
        ):
            return
        self.num_batches_tracked.add_(1)
        # A batch without any row on any rank says nothing. Weights are float64 numbers without a
        # dimension: exact, and they leave the dtype of what they multiply as it is.
        has_rows = (count > 0).double()
        if self.momentum is None:
            momentum = has_rows / self.num_batches_tracked
        else:
            momentum = has_rows * self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - momentum) + new * momentum)

    def _group(self) -> comm.Group | None:
        if self.process_group is not None:
            return self.process_group
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def _check_channels(self, input: Tensor) -> None:
        if input.size(1) != self.num_features or self.num_features == 0:
            raise UsageError(
                f"The input has {input.size(1)} channels, but this SyncBatchNorm was made for "
                f"{self.num_features}.",
                f"The input's shape is {tuple(input.shape)}; channels are its second dimension.",
            )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: comm.Group | None = None
    ) -> nn.Module:
        """Replace every BatchNorm in `module` by one of these, sharing its parameters and buffers.

        Returns the module, or the replacement where it is a BatchNorm itself. Optimizers made
        before stay valid. A layer that is used in several places stays one layer.
        """
        return cls._convert(module, process_group, "", {})

    @classmethod
    def _convert(
        cls, module: nn.Module, group: comm.Group | None, name: str, done: dict[int, nn.Module]
    ) -> nn.Module:
        if id(module) in done:
            return done[id(module)]
        converted = cls._like(module, group, name) if isinstance(module, _BatchNorm) else module
        done[id(module)] = converted
        for child_name, child in list(module._modules.items()):
            if child is not None:
                path = f"{name}.{child_name}" if name else child_name
                converted.add_module(child_name, cls._convert(child, group, path, done))
        return converted

    @classmethod
    def _like(cls, module: _BatchNorm, group: comm.Group | None, name: str) -> SyncBatchNorm:
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise UsageError(
                f"{name!r} is a {type(module).__name__} that does not know its channels yet.",
                advice="Run one batch through the model before converting it.",
            )
        sync = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            group,
        )
        sync.weight = module.weight
        sync.bias = module.bias
        sync.running_mean = module.running_mean
        sync.running_var = module.running_var
        sync.num_batches_tracked = module.num_batches_tracked
        sync.training = module.training
        sync._name = name
        if hasattr(module, "qconfig"):
            sync.qconfig = module.qconfig
        return sync


class _Normalize(torch.autograd.Function):
    """The normalised rows of this rank, and the mean, variance and row count of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: comm.Group,
        what: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        mean, variance, count = _reduce_moments(input, wide, group, what)
        output = F.batch_norm(
            input, mean, variance, _to(weight, wide), _to(bias, wide), training=False, eps=eps
        )
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.group, ctx.what = eps, group, what
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance, count = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sum_dy, sum_dy_xhat = _gradient_sums(grad_output, input, mean, variance, ctx.eps)
        grad_weight = sum_dy_xhat.to(weight.dtype) if needs_weight else None
        grad_bias = sum_dy.to(ctx.bias_dtype) if needs_bias else None
        if not needs_input:
            return None, grad_weight, grad_bias, None, None, None
        sums = torch.stack([sum_dy, sum_dy_xhat])
        comm.all_reduce(ctx.group, sums, f"{ctx.what}, in backward,")
        mean_dy, mean_dy_xhat = sums / count.clamp(min=1).to(sums.dtype)
        inverse = (variance + ctx.eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        # d input = scale * (dy - mean(dy) - xhat * mean(dy * xhat)), as dy * scale + x * slope + c
        slope = -scale * inverse * mean_dy_xhat
        constant = -scale * mean_dy - slope * mean
        per_channel = [1, -1] + [1] * (input.dim() - 2)
        grad_input = torch.addcmul(
            torch.addcmul(constant.view(per_channel), grad_output, scale.view(per_channel)),
            input,
            slope.view(per_channel),
        )
        return grad_input.to(input.dtype), grad_weight, grad_bias, None, None, None


def _reduce_moments(
    input: Tensor, wide: torch.dtype, group: comm.Group, what: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of rows per channel, over all ranks.

    Sums and sums of squares lose digits where the mean is large, so they travel in float64: a few
    numbers per channel, and one message of a size that does not depend on the number of ranks.
    """
    channels = input.size(1)
    message = input.new_zeros(2 * channels + 1, dtype=torch.float64)
    if input.numel() > 0:
        scratch = input.new_zeros(channels, dtype=wide)
        mean, variance = torch.batch_norm_update_stats(input, scratch, scratch.clone(), 0.0)
        mean, variance = mean.double(), variance.double()
        count = input.numel() // channels
        torch.cat([mean * count, (variance + mean * mean) * count], out=message[:-1])
        message[-1] = count
    comm.all_reduce(group, message, what)
    count_all = message[-1]
    means = message[:-1] / count_all.clamp(min=1)
    mean, square = means[:channels], means[channels:]
    variance = (square - mean * mean).clamp(min=0)
    return mean.to(wide), variance.to(wide), count_all


def _gradient_sums(
    grad_output: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Per channel, over this rank's rows: the sums of dy and of dy * xhat."""
    if input.numel() == 0:  # the kernel divides by the number of rows
        return torch.zeros_like(mean), torch.zeros_like(mean)
    _, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
        grad_output,
        input,
        torch.ones_like(mean),
        mean,
        variance,
        None,
        None,
        False,
        eps,
        [False, True, True],
    )
    return sum_dy, sum_dy_xhat


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
