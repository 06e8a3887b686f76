"""Whether an exception has left a loop, or a `break`: asked where the generator is closed."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
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


def fail_with_the_name_of_an_exit() -> None:
    for _ in steps():
        int("exit")


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


def fail_at_first() -> None:
    def raise_again() -> None:
        raise

    for _ in steps():
        raise_again()


def exit_with_a_constant() -> None:
    for _ in steps():
        sys.exit(5)


def exit_in_warm_code() -> None:
    def give_up(is_time: bool) -> None:
        if is_time:
            sys.exit(5)

    for step in steps():
        for _ in range(99):
            give_up(False)
        give_up(step == 8)


def exit_in_another_function() -> None:
    def give_up(code: int) -> None:
        with nullcontext():
            pass
        raise SystemExit(code)

    for _ in bar(steps()):
        give_up(5)


def exit_as_a_parser_does() -> None:
    for _ in steps():
        ArgumentParser().exit(5)


def exit_with_something_computed() -> None:
    for step in steps():
        sys.exit(max(step, 5))


def exit_without_a_code() -> None:
    for _ in steps():
        raise SystemExit


@pytest.mark.parametrize("body", [leave, return_value, leave_after_an_error, leave_bar])
def test_a_loop_that_is_left_on_purpose_has_no_exception(body: Callable[[], Any]) -> None:
    found.clear()
    kept = body()
    assert found[0] is None
    del kept


@pytest.mark.parametrize(
    "body",
    [
        *(fail_in_c, fail_with_the_name_of_an_exit, fail_in_a_block, fail_at_first, fail_at_last),
        fail_in_bar,
    ],
)
def test_an_exception_that_leaves_a_loop_is_found(body: Callable[[], Any]) -> None:
    found.clear()
    with suppress(ValueError, RuntimeError):
        body()
    thrown = next(filter(None, found))
    assert isinstance(thrown, ValueError | RuntimeError) or (
        thrown is UNKNOWN and sys.version_info < (3, 12)
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (exit_with_a_constant, 5),
        (exit_in_warm_code, 5),
        (exit_in_another_function, 5),
        (exit_as_a_parser_does, 5),
        (exit_without_a_code, None),
        (exit_with_something_computed, 5),
    ],
)
def test_an_exit_that_leaves_a_loop_is_found_with_its_code(
    body: Callable[[], Any], code: int | None
) -> None:
    found.clear()
    with suppress(SystemExit):
        body()
    thrown = next(filter(None, found))
    if body is exit_with_something_computed and sys.version_info < (3, 12):
        assert thrown is UNKNOWN
    else:
        assert isinstance(thrown, SystemExit)
        assert thrown.code == code


def test_a_process_whose_last_save_failed_does_not_end_with_0_without_a_launcher() -> None:
    program = "from paceline.run import stop; import atexit; atexit.register(print, 'last')"
    for words, code in (("'why'", 120), ("'why'); stop.note_unsaved(''", 0)):
        ended = subprocess.run(
            [sys.executable, "-c", f"{program}; stop.note_unsaved({words}); print('done')"],
            check=False,
            capture_output=True,
        )
        assert (ended.returncode, ended.stdout) == (code, b"done\nlast\n")
