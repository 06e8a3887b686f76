"""Keeping functions out of the graphs of `torch.compile`, without loading the compiler.

`torch.compiler.disable` does the same and takes seconds, because it imports the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline.torch_private.lookup import find

F = TypeVar("F", bound=Callable[..., Any])

_eval_frame: Any = find("torch._C._dynamo.eval_frame")
_skip: Any = find("torch._C._dynamo.eval_frame._FrameAction").SKIP
_strategy: Any = find("torch._C._dynamo.eval_frame._FrameExecStrategy")(_skip, _skip)
find("torch._C._dynamo.eval_frame.set_code_exec_strategy")


def keep_out_of_graphs(function: Callable[..., Any]) -> None:
    """Have the compiler run this function, and all that it calls, as they are.

    Inside a compiled function autograd calls hooks where the compiler takes every call for a part
    of the program.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _strategy)


def never_compiled(function: F) -> F:
    """A method that a graph breaks at; the compiler asks for the mark when it meets the call."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: F) -> F:
    """As `torch.compiler.disable`: a graph breaks at the call, and nothing inside is compiled."""
    keep_out_of_graphs(function)
    return never_compiled(function)
