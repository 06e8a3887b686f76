"""What `nn.Module` keeps about loading, and kinds of layers that torch has no public name for."""

from __future__ import annotations

from torch import nn

from paceline.torch_private.lookup import find, named_if_missing

with named_if_missing():
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

BatchNorm = _BatchNorm
"""Batch norms of any dimension."""
NormBase = _NormBase
"""Layers with running statistics: batch and instance norms."""
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_load = find("torch.nn.Module._load_from_state_dict")


def has_loading_hooks(module: nn.Module) -> bool:
    """Whether hooks take part when a state dict is loaded."""
    return any(getattr(module, name) for name in _HOOKS)


def has_loading_code(kind: type[nn.Module]) -> bool:
    """Whether a class loads its own tensors in another way than torch's."""
    return (
        kind._load_from_state_dict is not _load
        or kind.set_extra_state is not nn.Module.set_extra_state
    )
