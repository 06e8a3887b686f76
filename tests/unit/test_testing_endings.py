"""An error that has let go still says what and where, and keeps nothing alive."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from typing import Any

import pytest
import torch

from paceline.testing.ranks import drop_unfinished_backward, strip_references


class Group:
    """Stands for a process group: something that must go."""


def raise_plainly(group: Group) -> None:
    local = group
    raise ValueError(f"with a {type(local).__name__}")


def raise_in_closure(group: Group) -> None:
    def closure() -> None:
        raise ValueError(f"with a {type(group).__name__}")

    closure()


def raise_in_chain(group: Group) -> None:
    try:
        raise_in_closure(group)
    except ValueError as error:
        raise RuntimeError("later") from error


def raise_in_context(group: Group) -> None:
    try:
        raise_in_closure(group)
    finally:
        raise_plainly(group)


def raise_in_group(group: Group) -> None:
    try:
        raise_in_closure(group)
    except ValueError as error:
        raise ExceptionGroup("several", [error]) from None


def raise_for_missing_attribute(group: Any) -> None:
    _ = group.no_such_attribute


def raise_in_generator(group: Group) -> None:
    def numbers() -> Any:
        yield 1
        raise ValueError(f"with a {type(group).__name__}")

    sum(numbers())


def raise_in_hook(group: Group) -> None:
    def on_grad_ready(parameter: torch.Tensor) -> None:
        raise ValueError(f"with a {type(group).__name__}")

    parameters = [torch.ones(2, requires_grad=True) for _ in range(3)]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(on_grad_ready)
    torch.stack(parameters).sum().backward()


WAYS = [
    raise_plainly,
    raise_in_closure,
    raise_in_chain,
    raise_in_context,
    raise_in_group,
    raise_for_missing_attribute,
    raise_in_generator,
    raise_in_hook,
]


def caught_from(way: Any) -> tuple[Exception, str, weakref.ref[Group]]:
    group = Group()
    try:
        way(group)
    except Exception as error:
        before = "".join(traceback.format_exception(error))
        strip_references(error)
        drop_unfinished_backward()
        return error, before, weakref.ref(group)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("way", WAYS)
def test_an_error_that_has_let_go_keeps_nothing_alive(way: Any) -> None:
    error, _, group = caught_from(way)
    gc.collect()
    assert group() is None
    assert str(error)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_that_has_let_go_prints_the_same_lines(way: Any) -> None:
    error, before, _ = caught_from(way)
    after = "".join(traceback.format_exception(error))
    # All but the markers under each line, which need the original code. From Python 3.13 on, so do
    # the further lines of an expression that is longer than one.
    kept = [line for line in before.splitlines() if line.strip(" |^~")]
    shown = [line for line in after.splitlines() if line.strip(" |^~")]
    assert shown == [line for line in kept if sys.version_info < (3, 13) or line in shown]
