"""What happens around the module, kept out of graphs that `torch.compile` captures.

Imported only while a graph is being captured: importing the compiler takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._dynamo


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call outside the graph."""
    return function(*args)
