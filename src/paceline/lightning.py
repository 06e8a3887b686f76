"""Lightning on our engine: `Trainer(strategy="paceline")` and `Fabric(strategy="paceline")`.

Importing this module registers the name with both. Each strategy is Lightning's strategy for
torch's class, with our class in its place. Lightning's changes to the internals of torch's class,
which make it average at the right time, are left out: our class does not need them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from paceline.ddp import DistributedDataParallel
from paceline.errors import MissingLibraryError

try:
    from lightning.fabric import strategies as fabric
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch import strategies as trainer
except ModuleNotFoundError as error:
    raise MissingLibraryError(
        f"paceline.lightning needs Lightning: {error}.",
        advice="Install it: pip install 'paceline[lightning]'",
    ) from error

__all__ = ["PacelineFabricStrategy", "PacelineStrategy"]


class PacelineStrategy(trainer.DDPStrategy):
    """For the Trainer: takes what Lightning's `DDPStrategy` and our engine take.

    `PacelineStrategy(start_method="fork")` is for notebooks, `options=DDPOptions(...)` for what
    torch's class has no argument for.
    """

    model: Any

    def _setup_model(self, model: nn.Module) -> nn.Module:
        device_ids = self.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook, wrap = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, wrap(hook) if wrap else hook)

    def teardown(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()


class PacelineFabricStrategy(fabric.DDPStrategy):
    """For Fabric: takes what Lightning's `DDPStrategy` for Fabric and our engine take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> nn.Module:
        device_ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)


class _NoSync(_BackwardSyncControl):
    """How Fabric leaves a backward pass out of the averaging."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync(enabled=enabled)  # type: ignore[no-any-return]


_DESCRIPTION = "Gradients averaged by Paceline's DistributedDataParallel"
trainer.StrategyRegistry.register("paceline", PacelineStrategy, description=_DESCRIPTION)
fabric.STRATEGY_REGISTRY.register("paceline", PacelineFabricStrategy, description=_DESCRIPTION)
