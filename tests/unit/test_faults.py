"""A plan of faults is plain data: it can be read, repeated and checked."""

from __future__ import annotations

import signal
import time

import pytest

from paceline.errors import UsageError
from tests.faults.planned import Fault, Faults, PlannedFault


def test_nothing_happens_unless_planned() -> None:
    plan = Faults().fail(rank=1, step=2, where="backward")
    plan.strike(rank=1, step=2)
    plan.strike(rank=1, step=3, where="backward")
    plan.strike(rank=0, step=2, where="backward")
    with pytest.raises(PlannedFault):
        plan.strike(rank=1, step=2, where="backward")


def test_a_plan_grows_into_a_new_plan_and_stays_as_it_is() -> None:
    empty = Faults()
    first = empty.kill(rank=1, step=3)
    second = first.stop(rank=0, step=2)
    assert (len(empty.planned), len(first.planned), len(second.planned)) == (0, 1, 2)
    assert [fault.signal for fault in second.planned] == [signal.SIGKILL, signal.SIGSTOP]


def test_a_planned_failure_says_where_it_was_planned() -> None:
    with pytest.raises(PlannedFault, match="rank 2, step 5"):
        Faults().fail(rank=2, step=5).strike(2, 5)


def test_a_planned_failure_can_be_any_built_in_exception_or_a_message_alone() -> None:
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        Faults().fail(rank=0, step=0, error=ZeroDivisionError("by nothing")).strike(0, 0)
    with pytest.raises(PlannedFault, match="out of luck"):
        Faults().fail(rank=0, step=0, error="out of luck").strike(0, 0)


def test_a_planned_exit_ends_the_rank_with_its_code() -> None:
    with pytest.raises(SystemExit) as caught:
        Faults().exit(rank=0, step=4, code=3).strike(0, 4)
    assert caught.value.code == 3


def test_a_planned_delay_takes_its_time_and_the_next_fault_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    plan = Faults().delay(rank=0, step=1, seconds=0.02).fail(rank=0, step=1)
    with pytest.raises(PlannedFault):
        plan.strike(0, 1)
    assert slept == [0.02]


def test_random_plans_repeat_with_their_seed_and_differ_without() -> None:
    plan = Faults.random(7, ranks=3, steps=50, count=20)
    assert plan == Faults.random(7, ranks=3, steps=50, count=20)
    assert plan != Faults.random(8, ranks=3, steps=50, count=20)


def test_random_plans_stay_inside_what_was_given_and_strike_no_place_twice() -> None:
    plan = Faults.random(0, ranks=[1, 2], steps=range(10, 15), count=20, wheres=("a", "b"))
    places = {(fault.rank, fault.step, fault.where) for fault in plan.planned}
    assert places == {(r, s, w) for r in (1, 2) for s in range(10, 15) for w in "ab"}
    assert [fault.step for fault in plan.planned] == sorted(fault.step for fault in plan.planned)


def test_more_random_faults_than_places_are_refused() -> None:
    with pytest.raises(UsageError, match=r"count.* 7, but 6 places"):
        Faults.random(0, ranks=2, steps=3, count=7)


class OwnError(Exception):
    pass


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: Faults().kill(rank=-1, step=0), "rank=-1"),
        (lambda: Faults().kill(rank=0, step=-3), "step=-3"),
        (lambda: Faults().kill(rank=True, step=0), "rank=True"),
        (lambda: Faults().kill(rank=0, step=1.5), "step=1.5"),
        (lambda: Faults().kill(rank=0, step=0, where=3), "where=3"),
        (lambda: Faults().kill(rank=0, step=0, signal=999), "signal=999"),
        (lambda: Faults().delay(rank=0, step=0, seconds=-1), "seconds=-1"),
        (lambda: Faults().delay(rank=0, step=0, seconds=float("nan")), "seconds=nan"),
        (lambda: Faults().delay(rank=0, step=0, seconds=float("inf")), "seconds=inf"),
        (lambda: Faults().exit(rank=0, step=0, code=256), "code=256"),
        (lambda: Faults().fail(rank=0, step=0, error=OwnError()), "OwnError"),
        (lambda: Fault(action="explode", rank=0, step=0), "explode"),
        (lambda: Fault(action="fail", rank=0, step=0, error="KeyboardInterrupt"), "Keyboard"),
        (lambda: Fault(action="fail", rank=0, step=0, error="open"), "open"),
    ],
)
def test_an_impossible_fault_is_refused_when_it_is_planned(build: object, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        build()
