"""Where torch makes the store that ranks meet at."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from paceline.torch_private.lookup import find

Create = Callable[..., Any]

# An import statement would find the function of the same name.
_module = import_module("torch.distributed.rendezvous")
find("torch.distributed.rendezvous._create_c10d_store")


def wrap_store_creation(wrap: Callable[[Create], Create]) -> None:
    """Exchange the function `create(hostname, port, ...)` that makes torch's stores."""
    vars(_module)["_create_c10d_store"] = wrap(vars(_module)["_create_c10d_store"])
