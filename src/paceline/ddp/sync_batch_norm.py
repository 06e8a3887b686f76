"""Batch normalisation over the batch of all ranks, on any device.

Plain `BatchNorm` sees only its own rank's shard, so N workers compute something else than one.
Here the statistics are those of the whole batch: one all-reduce of sums in forward, one in
backward. Everything else is the arithmetic of plain batch normalisation, by the same kernels.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.errors import UsageError
from paceline.group import Group, Membership, all_reduce
from paceline.torch_private import BatchNorm, outside_graphs

_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
# The layouts the kernels know, by number of dimensions.
_LAYOUTS = defaultdict(
    lambda: [torch.contiguous_format],
    {
        4: [torch.contiguous_format, torch.channels_last],
        5: [torch.contiguous_format, torch.channels_last_3d],
    },
)


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
            plain: Tensor = BatchNorm.forward(self, input)
            return plain
        return self._normalize(input, group)

    @outside_graphs  # the collective is Python's to call
    def _normalize(self, input: Tensor, group: Group) -> Tensor:
        what = f"The batch statistics of {self._name!r}" if self._name else "The batch statistics"
        normalized: tuple[Tensor, Tensor, Tensor, Tensor] = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group, what
        )
        output, mean, variance, count = normalized
        if self.track_running_stats:
            self._track(mean, variance, count, has_rows=input.numel() > 0)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor, has_rows: bool) -> None:
        """Move the running statistics towards those of this batch."""
        if (
            self.num_batches_tracked is None
            or self.running_mean is None
            or self.running_var is None
        ):
            return
        self.num_batches_tracked.add_(1)
        weight: Tensor | float
        if self.momentum is None:
            weight = self.num_batches_tracked.double().reciprocal()
        else:
            weight = self.momentum
        if not has_rows:  # perhaps no rank has any: then the batch says nothing
            weight = count.clamp(max=1) * weight
        # Plain batch normalisation keeps the unbiased variance: count / (count - 1) times as much.
        unbiased = torch.addcdiv(variance, variance, (count - 1).clamp_(min=1).to(variance.dtype))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            share = weight.to(running.dtype) if isinstance(weight, Tensor) else weight
            running.lerp_(new.to(running.dtype), share)

    def _group(self) -> Group | None:
        if isinstance(self.process_group, Membership):
            return self.process_group.group
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
        cls, module: nn.Module, process_group: Group | None = None
    ) -> nn.Module:
        """Replace every BatchNorm in `module` by one of these, sharing its parameters and buffers.

        Returns the module, or the replacement where it is a BatchNorm itself. Optimizers made
        before stay valid. A layer that is used in several places stays one layer.
        """
        return cls._convert(module, process_group, "", {})

    @classmethod
    def _convert(
        cls, module: nn.Module, group: Group | None, name: str, done: dict[int, nn.Module]
    ) -> nn.Module:
        if id(module) in done:
            return done[id(module)]
        converted = cls._like(module, group, name) if isinstance(module, BatchNorm) else module
        done[id(module)] = converted
        for child_name, child in list(module._modules.items()):
            if child is not None:
                path = f"{name}.{child_name}" if name else child_name
                converted.add_module(child_name, cls._convert(child, group, path, done))
        return converted

    @classmethod
    def _like(cls, module: BatchNorm, group: Group | None, name: str) -> SyncBatchNorm:
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
        for kept in (*_TENSORS, "training", "qconfig"):
            if hasattr(module, kept):
                setattr(sync, kept, getattr(module, kept))
        sync._name = name
        return sync


def has_sync_batch_norm(model: nn.Module) -> bool:
    """Whether layers need every rank in every pass."""
    return any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())


class _Normalize(torch.autograd.Function):
    """The normalised rows of this rank, and the mean, variance and row count of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group,
        what: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        if not any(input.is_contiguous(memory_format=layout) for layout in _LAYOUTS[input.dim()]):
            input = input.contiguous()
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
        inverse = (variance + ctx.eps).rsqrt()
        grad_output = _laid_out_like(input, grad_output)
        sum_dy, sum_dy_xmu, sum_dy_xhat = _sum_gradients(
            grad_output, input, mean, variance, inverse, ctx.eps
        )
        grad_input = None
        if needs_input:
            sums = torch.stack([sum_dy, sum_dy_xmu])
            all_reduce(ctx.group, sums, f"{ctx.what}, in backward,")
            wide_weight = _to(weight, mean.dtype)
            grad_input = _input_gradient(
                grad_output, input, wide_weight, mean, inverse, sums, count
            )
        grad_weight = sum_dy_xhat.to(weight.dtype) if needs_weight else None
        grad_bias = sum_dy.to(ctx.bias_dtype) if needs_bias else None
        return grad_input, grad_weight, grad_bias, None, None, None


def _reduce_moments(
    input: Tensor, wide: torch.dtype, group: Group, what: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel, and the number of rows, over all ranks.

    Sums and sums of squares lose digits where the mean is large, so they travel in float64: a few
    numbers per channel, and one message of a size that does not depend on the number of ranks.
    """
    channels = input.size(1)
    rows = input.numel() // channels
    message = input.new_full((2 * channels + 1,), rows, dtype=torch.float64)
    if rows > 0:
        mean, variance = _local_moments(input, wide)
        mean = mean.double()
        message[:channels].mul_(mean)
        message[channels:-1].mul_(variance.double().addcmul_(mean, mean))
    all_reduce(group, message, what)
    count = message[-1]
    moments = (message[:-1] / (count if rows > 0 else count.clamp(min=1))).view(2, channels)
    # A difference of large numbers, which rounding may leave below zero.
    moments[1].addcmul_(moments[0], moments[0], value=-1).clamp_(min=0)
    mean, variance = moments.to(wide)
    return mean, variance, count


def _local_moments(input: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of this rank's rows."""
    if input.is_cuda:
        return torch.batch_norm_update_stats(input, None, None, 0.0)
    # The CPU's kernel answers in the dtype of the running statistics it is given.
    running = input.new_zeros(2, input.size(1), dtype=wide)
    return torch.batch_norm_update_stats(input, running[0], running[1], 0.0)


def _sum_gradients(
    grad_output: Tensor, input: Tensor, mean: Tensor, variance: Tensor, inverse: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per channel, over this rank's rows: the sums of dy, of dy * (x - mean), of dy * xhat."""
    if input.numel() == 0:  # the kernels divide by the number of rows
        return torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
    if input.is_cuda:
        # The second mean stands for the weight, of which the kernel needs the dtype only.
        sum_dy, sum_dy_xmu, sum_dy_xhat, _ = torch.batch_norm_backward_reduce(
            grad_output, input, mean, inverse, mean, True, True, False
        )
        return sum_dy, sum_dy_xmu, sum_dy_xhat
    ones, only_sums = torch.ones_like(mean), [False, True, True]
    _, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
        grad_output, input, ones, mean, variance, mean, inverse, False, eps, only_sums
    )
    return sum_dy, sum_dy_xhat / inverse, sum_dy_xhat


def _input_gradient(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    """weight * inverse * (dy - mean(dy) - (x - mean) * inverse^2 * mean(dy * (x - mean)))."""
    if input.numel() == 0:
        return torch.empty_like(input)
    if input.is_cuda:
        # The kernel takes the counts of all ranks, and adds them up: here this is done.
        return torch.batch_norm_backward_elemt(
            grad_output, input, mean, inverse, weight, sums[0], sums[1], count.int().view(1)
        )
    # The same, as dy * scale + x * slope + constant: one pass over the rows less.
    mean_dy, mean_dy_xmu = sums / count.to(sums.dtype)
    scale = inverse if weight is None else inverse * weight
    slope = -scale * inverse.square() * mean_dy_xmu
    constant = -scale * mean_dy - slope * mean
    scale, slope, constant = (
        each.view([1, -1] + [1] * (input.dim() - 2)) for each in (scale, slope, constant)
    )
    grad = torch.addcmul(torch.addcmul(constant, grad_output, scale), input, slope)
    return grad.to(input.dtype)


def _laid_out_like(input: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient with the strides of the input, which the kernels take for granted."""
    if grad_output.stride() == input.stride():
        return grad_output
    return torch.empty_like(input).copy_(grad_output)


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
