"""Scripts that start a world of their own: what the launcher arranged follows into their children.

Many public scripts call `torch.multiprocessing.spawn` and choose their own MASTER_PORT. Then the
launcher's store is not the one they mean, and `--as-torch` should hold in the processes that
really train. Both are arranged in the worker and in every Python process it spawns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from paceline.launcher.worker import when_imported

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def follow(store_port: int, as_torch: bool) -> None:
    """Arrange things in a process that a worker has spawned."""
    watch_for_spawning(store_port, as_torch)
    when_imported("torch", lambda: on_torch_imported(store_port, as_torch))


def on_torch_imported(store_port: int, as_torch: bool) -> None:
    import torch.distributed

    if torch.distributed.is_available():
        # An import statement would find the function of the same name.
        serve_other_stores(import_module("torch.distributed.rendezvous"), store_port)
    if as_torch:
        from paceline.launcher.as_torch import swap_classes

        swap_classes()


def serve_other_stores(rendezvous: ModuleType, store_port: int) -> None:
    """Let rank 0 serve a store of the script's own: the launcher serves only its own."""
    original: Callable[..., Any] | None = getattr(rendezvous, "_create_c10d_store", None)
    if original is None:
        return

    def create_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if port == store_port or _AGENT_STORE not in os.environ:
            return original(hostname, port, *args, **kwargs)
        before = os.environ.pop(_AGENT_STORE)
        try:
            return original(hostname, port, *args, **kwargs)
        finally:
            os.environ[_AGENT_STORE] = before

    vars(rendezvous)["_create_c10d_store"] = create_store


def watch_for_spawning(store_port: int, as_torch: bool) -> None:
    """Make every process that multiprocessing spawns call `follow` before anything else."""

    def change_command() -> None:
        from multiprocessing import spawn

        original = spawn.get_command_line
        prefix = f"from {__name__} import follow; follow({store_port}, {as_torch}); "

        def get_command_line(**kwargs: Any) -> list[str]:
            command = original(**kwargs)
            if "-c" in command[:-1]:
                at = command.index("-c") + 1
                command[at] = prefix + command[at]
            return command

        spawn.get_command_line = get_command_line

    when_imported("multiprocessing.spawn", change_command)
