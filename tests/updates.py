"""An optimizer's step without torch's optimizers, whose first one imports the compiler: seconds."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Descend, between the hooks that torch calls around any optimizer's step."""
    for hook in _global_optimizer_pre_hooks.values():
        hook(None, (), {})  # type: ignore[arg-type]
    for param in model.parameters():
        if param.grad is not None:
            param -= 0.01 * param.grad
    for hook in _global_optimizer_post_hooks.values():
        hook(None, (), {})  # type: ignore[arg-type]
