"""Death in one place: what is tried again, and how workers compare how far they are."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import PeerError
from paceline.group import Cadence, Membership
from paceline.run.healing import Standing, Verdict, compare
from paceline.run.recovery import AGAIN, Recovery, Survival


class Regrouping(Survival):
    """Survival without anybody else: regrouping is only counted."""

    def __init__(self) -> None:
        self.regrouped = 0

    def regroup(self, *, is_lost: bool = True) -> None:
        self.regrouped += 1


class Task:
    """Loses a worker as often as it is told, then succeeds."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths

    def __call__(self) -> str:
        if self.deaths:
            self.deaths -= 1
            raise PeerError("Rank 1 is gone.")
        return "done"


def test_without_recovery_a_lost_worker_is_an_error() -> None:
    for attempt in (Recovery().attempt, Recovery().holds):
        with pytest.raises(PeerError):
            attempt(Task(1))
    assert Recovery().attempt(Task(0)) == "done"
    assert Recovery().holds(Task(0))
    assert not Recovery().is_on


@pytest.mark.parametrize("deaths", [0, 1, 3])
def test_survivors_regroup_and_try_again_until_it_works(deaths: int) -> None:
    survival = Regrouping()
    assert survival.attempt(Task(deaths)) == "done"
    assert survival.regrouped == deaths


def test_what_cannot_be_had_any_more_is_replaced_after_regrouping_once() -> None:
    survival = Regrouping()
    assert survival.attempt(Task(2), instead="nothing") == "nothing"
    assert survival.regrouped == 1
    assert survival.attempt(Task(0), instead="nothing") == "done"


def test_a_part_of_a_step_is_lost_and_not_tried_again() -> None:
    survival = Regrouping()
    assert not survival.holds(Task(1))
    assert survival.holds(Task(0))
    assert survival.regrouped == 0


def test_another_error_is_nobodys_death() -> None:
    def fail() -> None:
        raise ValueError

    survival = Regrouping()
    for attempt in (survival.attempt, survival.holds):
        with pytest.raises(ValueError, match=r"^$"):
            attempt(fail)
    assert survival.regrouped == 0
    assert AGAIN is not None


def at(step: int, worker: int = 0, **rest: Any) -> Standing:
    return Standing(
        worker=worker,
        step=step,
        **(
            {"results": [], "live": [], "asked": [0, 0], "adopted": [[]], "fit": {"size": None}}
            | rest
        ),
    )


def test_workers_at_one_step_need_nothing_from_each_other() -> None:
    verdict = compare([at(5), at(5, 1)])
    assert (verdict.ahead.step, verdict.behind, verdict.joined) == (5, frozenset(), [])
    assert verdict.is_whole


def test_who_is_behind_or_new_gets_the_state_of_the_first_who_is_furthest() -> None:
    verdict = compare([at(-1, 7), at(4, 1), at(5, 2), at(5, 3)])
    assert (verdict.ahead.step, verdict.leader) == (5, 2)
    assert verdict.behind == {0, 1}
    assert verdict.joined == [7]


def test_a_whole_state_is_preferred_and_without_one_all_go_back() -> None:
    verdict = compare([at(5, is_whole=False), at(5, 1), at(4, 2, is_whole=True)])
    assert (verdict.leader, verdict.is_whole, verdict.behind) == (1, True, frozenset({0, 2}))
    verdict = compare([at(5, is_whole=False), at(5, 1, is_whole=False), at(4, 2, is_whole=True)])
    assert (verdict.leader, verdict.is_whole, verdict.behind) == (0, False, frozenset({2}))


def test_what_the_furthest_were_told_counts_and_every_wish_to_stop() -> None:
    told = [[1, 2], [3, 4]]
    verdict: Verdict = compare(
        [
            at(5, results=told[:1], epochs=2, live=["a"]),
            at(5, 1, results=told, epochs=2, saved=4),
            at(4, 2, results=[*told, [9, 9]], epochs=1, stopping=15, live=["b"], identity=3),
        ]
    )
    assert verdict.ahead.results == told
    assert (verdict.ahead.epochs, verdict.ahead.identity) == (2, 0)
    assert (verdict.ahead.saved, verdict.ahead.stopping) == (4, 15)
    assert verdict.ahead.live == ["a", "b"]


def test_newcomers_alone_know_nothing() -> None:
    with pytest.raises(PeerError):
        compare([at(-1), at(-1, 1)])


class Group:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_a_cadence_is_a_function_of_steps_and_begins_anew_with_every_generation() -> None:
    members = Membership(Group())
    survivor = Cadence(members, first=3)
    due = [step for step in range(10, 20) if survivor.is_due(step)]
    assert due == list(range(13, 20))
    survivor.agree(19, 500)
    assert not survivor.is_due(20)
    members.move_on(Group())
    newcomer = Cadence(members, first=3)
    asked = [(survivor.is_due(step), newcomer.is_due(step)) for step in range(20, 26)]
    assert asked == [(False, False)] * 3 + [(True, True)] * 3


def test_followers_hear_of_a_generation_once() -> None:
    class Follower:
        heard = 0

        def on_generation(self) -> None:
            self.heard += 1

    members, follower = Membership(Group()), Follower()
    members.follow(follower.on_generation)
    members.leave()
    assert (members.size, members.leads, follower.heard) == (1, False, 0)
    members.move_on(Group())
    assert (members.size, members.generation, follower.heard) == (2, 1, 1)
