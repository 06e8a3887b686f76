"""Binding a process to the NUMA node of its GPU."""

from __future__ import annotations

import inspect

from torch.numa.binding import AffinityMode, NumaOptions

from paceline.torch_private.lookup import find

_bind = find("torch.numa.binding._maybe_apply_numa_binding_to_current_process")
# `gpu_index` until torch 2.14, `device_index` from then on.
_INDEX = next(name for name in inspect.signature(_bind).parameters if name.endswith("_index"))


def bind_to_numa_node(mode: str, gpu: int) -> None:
    """Run this process on cores near the GPU, in one of torch's modes."""
    _bind(numa_options=NumaOptions(affinity_mode=AffinityMode(mode)), **{_INDEX: gpu})
