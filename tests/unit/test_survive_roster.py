"""Who trains in which generation, whatever dies when: played without any process."""

from __future__ import annotations

import random
import signal

import pytest

from paceline.launcher.deaths import WorkerExit
from paceline.launcher.roster import (
    Announce,
    Dismiss,
    GiveUp,
    Order,
    RestartAll,
    Roster,
    Start,
    Stop,
)

NOW_S = 100.0


def formed(size: int = 3, **options: int) -> Roster:
    roster = Roster(size=size, **options)
    for worker in range(size):
        assert roster.on_joined(worker, 0) == []
    return roster


def die(roster: Roster, worker: int, step: int = 5, *, is_kill: bool = True) -> list[Order]:
    code = -signal.SIGKILL if is_kill else -signal.SIGSEGV
    return roster.on_died(WorkerExit(rank=worker, exit_code=code, step=step), NOW_S)


def test_survivors_form_the_next_generation_at_once_and_the_seat_is_filled() -> None:
    roster = formed()
    assert die(roster, 1) == [Announce(1, (0, 2), is_urgent=True), Start(1, NOW_S)]


def test_a_replacement_comes_last_so_that_duties_stay_where_they_are() -> None:
    roster = formed()
    die(roster, 0)
    assert roster.on_ready(0) == []  # the survivors are still on their way
    roster.on_joined(1, 1)
    assert roster.on_joined(2, 1) == [Announce(2, (1, 2, 0), is_urgent=False)]


def test_a_death_while_a_generation_forms_makes_the_next_one() -> None:
    roster = formed()
    die(roster, 1)
    assert die(roster, 0) == [Announce(2, (2,), is_urgent=True), Start(0, NOW_S)]


def test_a_newcomer_that_dies_while_joining_does_not_break_the_others() -> None:
    roster = formed()
    die(roster, 1)
    roster.on_joined(0, 1)
    roster.on_joined(2, 1)
    assert roster.on_ready(1) == [Announce(2, (0, 2, 1), is_urgent=False)]
    assert die(roster, 1) == [Announce(3, (0, 2), is_urgent=True), Start(1, NOW_S)]


def test_a_newcomer_is_let_in_between_two_steps_and_never_in_haste() -> None:
    roster = formed()
    die(roster, 1)
    roster.on_joined(0, 1)
    roster.on_joined(2, 1)
    roster.on_ready(1)
    assert die(roster, 2)[0] == Announce(3, (0,), is_urgent=True)
    assert roster.on_joined(1, 2) == []  # too late: the others have moved on
    assert roster.is_new(1)
    assert roster.on_joined(0, 3) == [Announce(4, (0, 1), is_urgent=False)]
    roster.on_joined(1, 4)
    assert not roster.is_new(1)


def test_who_has_not_joined_cannot_carry_on_alone() -> None:
    roster = formed(2)
    die(roster, 0)
    roster.on_joined(1, 1)
    assert roster.on_ready(0) == [Announce(2, (1, 0), is_urgent=False)]
    assert isinstance(die(roster, 1)[0], RestartAll)


def test_without_survivors_everybody_begins_with_the_checkpoint() -> None:
    roster = formed(2)
    die(roster, 0)
    assert isinstance(die(roster, 1)[0], RestartAll)


def test_a_death_before_training_began_starts_everybody_again() -> None:
    roster = Roster(size=2)
    roster.on_joined(0, 0)
    assert isinstance(die(roster, 1)[0], RestartAll)


@pytest.mark.parametrize("is_kill", [True, False])
def test_the_third_death_of_a_worker_at_one_step_is_a_bug(is_kill: bool) -> None:
    roster = formed()
    for _ in range(2):
        assert isinstance(die(roster, 1, is_kill=is_kill)[0], Announce)
        roster.on_joined(0, roster.generation)
        roster.on_joined(2, roster.generation)
        roster.on_ready(1)
        for worker in range(3):
            roster.on_joined(worker, roster.generation)
    [order] = die(roster, 1, is_kill=is_kill)
    assert isinstance(order, Stop)
    assert "step 5" in order.reason


def test_a_crash_that_follows_its_sample_is_a_bug_too_but_kills_of_different_workers_are_not() -> (
    None
):
    for is_kill in (True, False):
        roster = formed(4)
        orders = [die(roster, worker, is_kill=is_kill)[0] for worker in (1, 2, 3)]
        assert isinstance(orders[2], Announce if is_kill else Stop)


def test_all_but_one_at_once_leave_one_that_continues() -> None:
    roster = formed(4)
    for worker in (0, 1, 3):
        die(roster, worker, is_kill=True)
    assert roster.members == (2,)


def test_with_too_few_workers_the_rest_waits_for_replacements() -> None:
    roster = formed(3, min_workers=2)
    die(roster, 0)
    assert die(roster, 1) == [Start(1, NOW_S)]
    assert roster.is_held
    assert roster.on_ready(1) == [Announce(2, (2,), is_urgent=True)]
    assert roster.on_joined(2, 2) == [Announce(3, (2, 1), is_urgent=False)]


def test_who_waits_for_replacements_stops_without_them() -> None:
    roster = formed(4, min_workers=3)
    die(roster, 0)
    die(roster, 1)
    assert roster.is_held
    assert roster.on_stop() == [Announce(2, (2, 3), is_urgent=True), Dismiss(0), Dismiss(1)]


def test_a_death_while_all_stop_brings_nobody_new() -> None:
    roster = formed(4, min_workers=3)
    die(roster, 0)
    roster.on_ready(0)
    assert roster.on_stop() == [Dismiss(0)]
    assert die(roster, 1) == [Announce(2, (2, 3), is_urgent=True)]
    assert die(roster, 3) == [Announce(3, (2,), is_urgent=True)]
    roster.on_joined(2, 3)
    assert roster.members == (2,)


def test_where_no_replacement_will_come_the_rest_does_not_wait() -> None:
    roster = formed(2, min_workers=2, max_replacements=1)
    assert die(roster, 0) == [Start(0, NOW_S)]
    _, order = die(roster, 0)
    assert order == Stop("fewer than 2 workers are left")


def test_replicas_that_differ_are_not_healed_with_whichever_is_left() -> None:
    roster = formed()
    die(roster, 2)
    facts = {"exit_code": 1, "step": 5, "summary": "ReplicaError: x", "ends_run": True}
    [order] = roster.on_died(WorkerExit(rank=0, **facts), NOW_S)  # type: ignore[arg-type]
    assert order == Stop("worker 0 failed in step 5: ReplicaError: x")
    roster.on_ready(2)
    orders = roster.on_died(WorkerExit(rank=2, **facts), NOW_S)  # type: ignore[arg-type]
    assert not any(isinstance(each, Stop) for each in orders)


def test_a_group_that_broke_without_a_death_is_formed_anew_after_a_moment() -> None:
    roster = formed(2)
    roster.on_lost(0, 0, NOW_S)
    assert roster.on_time(NOW_S) == []
    assert roster.due_s is not None
    assert roster.on_time(roster.due_s) == [Announce(1, (0, 1), is_urgent=True)]
    assert roster.due_s is None


def test_a_group_that_broke_is_left_by_all_although_a_newcomer_waits_to_be_let_in() -> None:
    for is_lost_first in (True, False):
        roster = formed(3)
        die(roster, 2)
        for worker in (0, 1):
            roster.on_joined(worker, 1)
        if is_lost_first:
            roster.on_lost(0, 1, NOW_S)
            assert roster.on_ready(2) == []  # not now
            number = 2
        else:
            assert roster.on_ready(2) == [Announce(2, (0, 1, 2), is_urgent=False)]
            roster.on_lost(0, 1, NOW_S)  # 1 may wait for it in the middle of a step
            number = 3
        assert roster.due_s is not None
        assert roster.on_time(roster.due_s) == [Announce(number, (0, 1), is_urgent=True)]
        roster.on_lost(1, number - 2, NOW_S)  # as everybody knows
        assert roster.due_s is None
        roster.on_joined(0, number)
        assert roster.on_joined(1, number) == [Announce(number + 1, (0, 1, 2), is_urgent=False)]


def test_members_that_cannot_form_a_group_for_long_stop_with_what_they_said() -> None:
    roster, now_s = formed(2, patience_s=30), NOW_S
    roster.on_lost(0, 0, now_s)
    for number in range(1, 1000):
        assert roster.due_s is not None
        now_s = roster.due_s
        orders = roster.on_time(now_s)
        if number == 200:  # one that is formed begins the count anew, and so does a death
            assert [roster.on_joined(worker, number) for worker in (0, 1)] == [[], []]
        if not isinstance(orders[0], Announce):
            break
        roster.on_lost(1, number, now_s + 0.1, "OSError: Too many open files")
    [order] = orders
    assert isinstance(order, Stop)
    assert order.reason.endswith("worker 1: OSError: Too many open files")
    assert roster.due_s is None, "it is said once, also where a signal has asked all to stop"
    assert number > 380
    assert now_s - NOW_S > 59


def test_news_of_a_death_overtakes_a_broken_group() -> None:
    roster = formed(3)
    roster.on_lost(0, 0, NOW_S)
    die(roster, 2)
    roster.on_lost(1, 0, NOW_S)  # of the generation that is over
    assert roster.due_s is None


def test_nothing_is_due_while_too_few_are_left() -> None:
    roster = formed(2, min_workers=2)
    assert die(roster, 1) == [Start(1, NOW_S)]
    roster.on_lost(0, 0, NOW_S)
    assert roster.due_s is None  # a time in the past would keep the launcher busy until then
    assert roster.on_ready(1) == [Announce(1, (0,), is_urgent=True)]


def test_a_replacement_that_cannot_start_is_tried_again_later_and_then_given_up() -> None:
    roster = formed()
    die(roster, 1)
    delays = []
    while isinstance(order := die(roster, 1)[-1], Start):
        delays.append(order.at_s - NOW_S)
    assert delays == [1.0, 2.0, 4.0, 8.0]
    assert isinstance(order, GiveUp)
    assert roster.members == (0, 2)


def test_replacements_can_be_bounded() -> None:
    roster = formed(3, max_replacements=1)
    assert die(roster, 1)[-1] == Start(1, NOW_S)
    assert isinstance(die(roster, 2, step=6)[-1], GiveUp)


def test_who_is_asked_to_leave_goes_between_two_steps_and_is_not_replaced() -> None:
    roster = formed()
    assert roster.on_leaving(1, NOW_S) == [Announce(1, (0, 1, 2), is_urgent=False, leaving=(1,))]
    assert roster.on_left(1) == [Announce(2, (0, 2), is_urgent=True)]
    assert die(roster, 1) == []
    assert roster.size == 2


def test_who_dies_before_it_has_left_is_not_replaced_either() -> None:
    roster = formed()
    roster.on_leaving(1, NOW_S)
    assert die(roster, 1) == [Announce(2, (0, 2), is_urgent=True)]


def test_a_death_before_somebody_has_left_lets_it_go_a_generation_later() -> None:
    roster = formed()
    roster.on_leaving(1, NOW_S)
    assert die(roster, 0)[0] == Announce(2, (1, 2), is_urgent=True)
    roster.on_joined(1, 2)
    assert roster.on_joined(2, 2) == [Announce(3, (1, 2), is_urgent=False, leaving=(1,))]


def test_where_too_few_would_be_left_another_one_comes_first() -> None:
    roster = formed(2, min_workers=2)
    assert roster.on_leaving(1, NOW_S) == [Start(2, NOW_S)]
    assert roster.on_ready(2) == [Announce(1, (0, 1, 2), is_urgent=False, leaving=(1,))]


def test_nobody_leaves_whose_state_only_newcomers_would_inherit() -> None:
    roster = formed(2)
    assert roster.on_leaving(0, NOW_S) == [Announce(1, (0, 1), is_urgent=False, leaving=(0,))]
    assert die(roster, 1) == [Announce(2, (0,), is_urgent=True), Start(1, NOW_S)]
    roster.on_joined(0, 2)
    assert roster.on_ready(1) == [Announce(3, (0, 1), is_urgent=False)]
    roster.on_joined(0, 3)
    assert roster.on_joined(1, 3) == [Announce(4, (0, 1), is_urgent=False, leaving=(0,))]


def test_that_all_are_asked_to_leave_is_for_the_run_and_nobody_comes_instead() -> None:
    roster = formed(3)
    roster.on_leaving(0, NOW_S)
    roster.on_left(0)
    assert roster.on_leaving(1, NOW_S) == []
    assert not roster.is_left
    assert roster.on_leaving(2, NOW_S) == []
    assert roster.is_left


def test_too_few_workers_that_nobody_can_join_stop_the_run() -> None:
    roster = formed(2, min_workers=2, max_replacements=0)
    assert isinstance(die(roster, 1)[-1], Stop)


def test_who_has_finished_takes_part_in_nothing_any_more() -> None:
    roster = formed()
    roster.on_finished(0)
    assert die(roster, 1)[0] == Announce(1, (2,), is_urgent=True)
    assert die(roster, 0) == []


def test_who_lost_its_group_when_others_finished_gets_one_without_them() -> None:
    roster = formed()
    roster.on_lost(1, 0, NOW_S)
    roster.on_finished(0, now_s=NOW_S)
    assert roster.on_time(NOW_S + 1) == [Announce(1, (1, 2), is_urgent=True)]
    roster.on_finished(2, now_s=NOW_S)
    assert roster.on_time(NOW_S + 1) == [Announce(2, (1,), is_urgent=True)]
    roster.on_joined(1, 2)
    roster.on_finished(1, now_s=NOW_S)
    assert roster.due_s is None


def test_replacements_that_come_after_the_end_are_dismissed_wherever_they_are() -> None:
    roster = formed(4)
    die(roster, 0)
    die(roster, 1)
    for worker in (2, 3):
        roster.on_joined(worker, 2)
    assert roster.on_ready(1) == [Announce(3, (2, 3, 1), is_urgent=False)]
    assert roster.on_finished(2) == [Dismiss(0), Dismiss(1)]
    assert roster.on_finished(3) == []
    assert roster.on_ready(0) == []
    assert die(roster, 1) == []


def test_a_worker_of_the_beginning_is_not_dismissed_where_others_finish_before_it_is_heard_of() -> (
    None
):
    roster = Roster(size=2)  # a training that was complete already, say
    roster.on_joined(0, 0)
    assert roster.on_finished(0) == []
    assert roster.members == (1,)
    assert roster.on_joined(1, 0) == []
    assert roster.on_finished(1) == []


def test_a_newcomer_does_not_wait_for_those_who_have_left_their_loops() -> None:
    roster = formed()
    die(roster, 2)
    for worker in (0, 1):
        roster.on_joined(worker, 1)
    assert roster.on_ready(2) == [Announce(2, (0, 1, 2), is_urgent=False)]
    assert roster.on_finished(0, is_left=True, now_s=NOW_S) == []
    assert roster.on_finished(1, is_left=True, now_s=NOW_S) == [Dismiss(2)]
    assert roster.due_s is None


def test_a_run_can_grow_and_shrink_and_fills_free_seats_first() -> None:
    roster = formed(2)
    assert roster.grow(NOW_S) == [Start(2, NOW_S)]
    assert roster.on_ready(2) == [Announce(1, (0, 1, 2), is_urgent=False)]
    for worker in range(3):
        roster.on_joined(worker, 1)
    assert roster.shrink(NOW_S) == [Announce(2, (0, 1, 2), is_urgent=False, leaving=(2,))]
    roster.on_left(2)
    roster.on_joined(0, 3)
    roster.on_joined(1, 3)
    assert roster.grow(NOW_S) == [Start(3, NOW_S)], "the process of worker 2 has not ended yet"
    assert die(roster, 2) == []
    assert roster.grow(NOW_S) == [Start(2, NOW_S)]
    assert roster.size == 4


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_members_are_alive_and_generations_grow(seed: int) -> None:
    rng = random.Random(seed)
    roster = formed(4)
    alive, starting, generation = {0, 1, 2, 3}, set[int](), 0
    for moment in range(300):
        choice = rng.random()
        if choice < 0.2 and len(alive) > 1:
            worker = rng.choice(sorted(alive | starting))
            alive.discard(worker)
            starting.discard(worker)
            orders = die(roster, worker, step=moment)
        elif choice < 0.5 and starting:
            worker = rng.choice(sorted(starting))
            starting.remove(worker)
            alive.add(worker)
            orders = roster.on_ready(worker)
        else:
            orders = []
            for worker in roster.members:
                orders += roster.on_joined(worker, roster.generation)
        for order in orders:
            assert not isinstance(order, Stop)
            if isinstance(order, Start):
                starting.add(order.worker)
            if isinstance(order, Announce):
                assert order.generation == generation + 1
                generation = order.generation
                assert set(order.members) <= alive
        if not (set(roster.members) & alive):
            return


def on_machines(*sizes: int, **options: int) -> Roster:
    """A roster in the launcher of machine 0."""
    machine_by_worker = dict(enumerate(m for m, size in enumerate(sizes) for _ in range(size)))
    roster = Roster(size=sum(sizes), machine_by_worker=machine_by_worker, **options)
    for worker in range(sum(sizes)):
        roster.on_joined(worker, 0)
    return roster


def test_a_machine_takes_all_its_workers_along_at_once_and_none_is_replaced() -> None:
    roster = on_machines(2, 2, 1)
    assert roster.on_machine_gone(1) == [Announce(1, (0, 1, 4), is_urgent=True)]
    assert die(roster, 2) == []
    assert roster.on_machine_gone(1) == []


def test_a_machine_takes_those_along_that_wait_or_are_on_their_way() -> None:
    roster = on_machines(1, 3)
    for worker in (1, 2):
        die(roster, worker, step=worker)
    roster.on_ready(1)
    roster.on_machine_gone(1)
    assert roster.on_joined(0, roster.generation) == []
    assert roster.members == (0,)


def test_the_last_machine_with_workers_leaves_the_checkpoint() -> None:
    roster = on_machines(1, 2)
    die(roster, 0)
    [order] = roster.on_machine_gone(1)
    assert isinstance(order, RestartAll)


def test_a_machine_lost_before_training_began_starts_everybody_again() -> None:
    roster = Roster(size=2, machine_by_worker={1: 1})
    assert isinstance(roster.on_machine_gone(1)[0], RestartAll)


def test_rank_0s_duties_stay_on_the_rosters_machine_while_somebody_is_there() -> None:
    roster = on_machines(2, 2)
    die(roster, 0)
    assert roster.members == (1, 2, 3)
    for worker in (1, 2, 3):
        roster.on_joined(worker, 1)
    roster.on_ready(0)
    assert roster.members == (1, 2, 3, 0)
    for worker in roster.members:
        roster.on_joined(worker, 2)
    die(roster, 1)
    assert roster.members == (0, 2, 3)


def test_rank_0s_duties_do_not_come_back_before_their_holder_is_gone() -> None:
    roster = on_machines(1, 2)
    die(roster, 0)
    for worker in (1, 2):
        roster.on_joined(worker, 1)
    roster.on_ready(0)
    assert roster.members == (1, 2, 0)
    for worker in roster.members:
        roster.on_joined(worker, 2)
    die(roster, 2)
    assert roster.members == (1, 0)


def test_too_few_workers_do_not_wait_for_a_machine_that_will_not_come_back() -> None:
    roster = on_machines(2, 2, min_workers=3)
    [order] = roster.on_machine_gone(1)
    assert isinstance(order, Stop)
    assert "fewer than 3 workers" in order.reason


def test_too_few_workers_do_not_wait_for_replacements_that_are_used_up() -> None:
    roster = formed(2, min_workers=2, max_replacements=0)
    assert [type(order) for order in die(roster, 1)] == [GiveUp, Stop]
