"""Whether an exception has left a loop, or a `break`: asked where the generator is closed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from paceline.run.stop import UNKNOWN, find_thrown

found: list[BaseException | None] = []


def steps() -> Iterator[int]:
    try:
        yield from range(9)
    except GeneratorExit:
        found.append(find_thrown(sys._getframe(1)))
        raise


def bar(steps: Iterator[int]) -> Iterator[int]:
    try:
        for step in steps:
            yield step + 1
    finally:
        found.append(None)


def leave() -> None:
    for _ in steps():
        break


def return_value() -> int:
    for step in steps():
        with nullcontext():
            return step
    return 0


def leave_after_an_error() -> list[Exception]:
    errors: list[Exception] = []
    for step in steps():
        try:
            int("x")
        except ValueError as error:
            errors.append(error)
        if step == 2:
            break
    return errors


def leave_bar() -> None:
    for _ in bar(steps()):
        break


def fail_in_c() -> None:
    for _ in steps():
        int("x")


def fail_in_a_block() -> None:
    for _, _ in enumerate(steps()):
        with nullcontext():
            raise ValueError


def fail_at_last() -> None:
    for _ in steps():
        try:
            int("x")
        finally:
            found.append(None)


def fail_in_bar() -> None:
    for _ in bar(steps()):
        int("x")


@pytest.mark.parametrize("body", [leave, return_value, leave_after_an_error, leave_bar])
def test_a_loop_that_is_left_on_purpose_has_no_exception(body: Callable[[], Any]) -> None:
    found.clear()
    kept = body()
    assert found[0] is None
    del kept


@pytest.mark.parametrize("body", [fail_in_c, fail_in_a_block, fail_at_last, fail_in_bar])
def test_an_exception_that_leaves_a_loop_is_found(body: Callable[[], Any]) -> None:
    found.clear()
    with suppress(ValueError):
        body()
    thrown = next(filter(None, found))
    assert isinstance(thrown, ValueError) or (thrown is UNKNOWN and sys.version_info < (3, 12))
