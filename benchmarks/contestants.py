"""The contestants: no communication at all, Paceline, torch's class, and libraries built on it.

Each contestant wraps a bare module for training as its own documentation says. Only names are sent
to the worker processes, so that every process builds the same.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DDPOptions, DistributedDataParallel, World, env
from paceline.transport.select import keep_freed_memory

FLOOR = "no communication"
KEPT_FLOOR = "no communication, freed memory kept"
"""The bare model in a process that treats freed memory as Paceline does: the stricter floor."""
FLOORS = [FLOOR, KEPT_FLOOR]
LEARNING_RATE = 1e-3


@dataclass(slots=True)
class Trainer:
    """A wrapped module, and what it needs for training."""

    module: nn.Module
    optimizer: Any
    backward: Callable[[Tensor], Any] = Tensor.backward

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        self.optimizer.zero_grad()
        self.backward(loss(self.module))
        self.optimizer.step()


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def _plain(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        wrapped = wrap(module)
        return Trainer(wrapped, _sgd(wrapped))

    return build


def _bare_and_kept(module: nn.Module) -> nn.Module:
    keep_freed_memory()
    return module


def _over_c10d(module: nn.Module) -> nn.Module:
    options: Any = {"transport": "c10d"} if has_transports() else {}
    return DistributedDataParallel(module, options=DDPOptions(**options))


def has_transports() -> bool:
    """Whether this version of Paceline can choose the transport of gradients."""
    return "transport" in {field.name for field in dataclasses.fields(DDPOptions)}


def tuned_options() -> dict[str, dict[str, Any]]:
    """torch's class with the options that make it faster, as far as this release has them."""
    known = inspect.signature(TorchDDP).parameters
    kinds: dict[str, dict[str, Any]] = {
        "batched": {"batched_grad_copy": True},
        "static": {"static_graph": True},
        "static, batched": {"static_graph": True, "batched_grad_copy": True},
    }
    return {
        f"torch tuned: {kind}, {cap} MB": {
            "bucket_cap_mb": cap,
            "gradient_as_bucket_view": True,
            **options,
        }
        for kind, options in kinds.items()
        if set(options) <= set(known)
        for cap in (1, 5, 25, 100)
    }


def _accelerate(module: nn.Module) -> Trainer:
    accelerate: Any = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(module, _sgd(module))
    return Trainer(wrapped, optimizer, accelerator.backward)


def _fabric(module: nn.Module) -> Trainer:
    lightning: Any = importlib.import_module("lightning_fabric")
    ranks = int(os.environ["WORLD_SIZE"])
    fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=ranks)
    fabric.launch()
    wrapped, optimizer = fabric.setup(module, _sgd(module))
    return Trainer(wrapped, optimizer, fabric.backward)


BUILD: dict[str, Callable[[nn.Module], Trainer]] = {
    FLOOR: _plain(lambda module: module),
    KEPT_FLOOR: _plain(_bare_and_kept),
    "paceline": _plain(DistributedDataParallel),
    "paceline over c10d": _plain(_over_c10d),
    "torch default": _plain(TorchDDP),
    **{
        name: _plain(lambda module, options=options: TorchDDP(module, **options))  # type: ignore[misc]
        for name, options in tuned_options().items()
    },
    "Accelerate": _accelerate,
    "Lightning Fabric": _fabric,
}

_MODULE_BY_NAME = {"Accelerate": "accelerate", "Lightning Fabric": "lightning_fabric"}


def why_absent(name: str) -> str:
    """Why a contestant cannot run here, or an empty string."""
    module = _MODULE_BY_NAME.get(name)
    if module is not None and importlib.util.find_spec(module) is None:
        return f"{name}: left out, not installed (pip install 'paceline[bench]')"
    if name == KEPT_FLOOR and (platform.libc_ver()[0] != "glibc" or env.has_malloc_settings()):
        return f"{name}: left out, as malloc is not glibc's or the environment has settings for it"
    if name == "paceline over c10d" and not has_transports():
        return f"{name}: left out, as this version has no other way"
    return ""


def present(floors: Collection[str] = (FLOOR,)) -> tuple[list[str], list[str]]:
    """Those besides the tuned ones that can take part, and a line for each that cannot.

    The second floor is meaningful only if every contestant has separate processes.
    """
    others = set(FLOORS) - set(floors)
    names = [name for name in BUILD if name not in others | tuned_options().keys()]
    return [n for n in names if not why_absent(n)], [w for w in map(why_absent, names) if w]


def choose_tuned(seconds: dict[str, float], how_many: int) -> list[str]:
    """The fastest of the screened ones, fastest first."""
    return sorted(seconds, key=lambda name: seconds[name])[:how_many]


def load(name: str) -> None:
    """Import what a contestant and a first optimizer need, so that neither is measured."""
    if name in _MODULE_BY_NAME:
        importlib.import_module(_MODULE_BY_NAME[name])
    _plain(lambda module: module)(nn.Linear(1, 1)).step(lambda module: module(torch.ones(1)).sum())


def enter(world: World, port: int = 1) -> None:
    """Tell libraries that read the environment which rank this is; one thread for each rank."""
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.rank),
        "LOCAL_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)


def build(name: str, make_module: Callable[[], nn.Module]) -> Trainer:
    """The contestant, starting from the same parameters as all others."""
    torch.manual_seed(0)
    return wrap(name, make_module())


def wrap(name: str, module: nn.Module) -> Trainer:
    trainer = BUILD[name](module)
    if torch.get_num_threads() != 1:
        raise RuntimeError(f"{name} has changed the number of threads, which must be 1 for all")
    return trainer
