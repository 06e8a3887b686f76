"""Optimizers: their step without what is around it."""

from __future__ import annotations

from torch.optim import Optimizer


def step_without_hooks(optimizer: Optimizer) -> None:
    """Step as `optimizer.step()` does, without hooks, counters of schedulers and profiling."""
    step = type(optimizer).step
    is_wrapped: bool = getattr(step, "hooked", False)
    (step.__wrapped__ if is_wrapped else step)(optimizer)  # type: ignore[attr-defined]
