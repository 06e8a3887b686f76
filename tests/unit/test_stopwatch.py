"""The stopwatch: phases that add up, and spans from them."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.group import follow_waits, waiting
from paceline.group.membership import Membership, NoGroup
from paceline.telemetry import spans, stopwatch
from paceline.telemetry.phases import MEASURED, OWN, Phase
from paceline.telemetry.stopwatch import StepTimes, Stopwatch


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.ns = 1000

    def __call__(self) -> int:
        return self.ns


class Group(NoGroup):
    """Stands for a process group, of which only the identity matters here."""


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MEASURED), st.integers(0, 10**9), st.booleans())))
def test_phases_of_all_steps_add_up_to_the_time_between(
    changes: list[tuple[Phase, int, bool]],
) -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    last_end = clock.ns
    for phase, ns, ends_step in changes:
        watch.enter(phase)
        clock.ns += ns
        if ends_step:
            watch.end_step()
            last_end = clock.ns
    assert sum(sum(s.values()) for s in watch.finished) == last_end - 1000
    assert len(watch.finished) == sum(c[2] for c in changes)


def test_a_wait_inside_a_phase_counts_as_waiting_once_and_the_phase_continues() -> None:
    clock, group = Clock(), Group()
    watch = Stopwatch(clock)
    follow_waits(group, watch.waits)
    watch.enter(Phase.FORWARD)
    clock.ns += 10
    for ns in (200, 300):
        with waiting(group), waiting(group):
            clock.ns += ns
        clock.ns += 1
    watch.mark((clock(), Phase.WAIT))
    clock.ns += 4000
    with waiting(group):
        clock.ns += 5000
    watch.end_step()
    with waiting(group):  # between two steps
        clock.ns += 60000
    watch.end_step()
    first, second = watch.finished
    assert (first[Phase.FORWARD], first[Phase.WAIT], first[Phase.OTHER]) == (12, 9500, 0)
    assert (second[Phase.WAIT], second[Phase.OTHER]) == (60000, 0)


def own_ns(times: StepTimes) -> int:
    return sum(times[phase] for phase in OWN)


def test_a_step_knows_its_own_work_from_waiting_and_totals_continue_over_steps() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(2):
        for phase, ns in zip(
            ("data", "forward", "backward", "wait"), (1, 20, 300, 4000), strict=True
        ):
            watch.enter(Phase(phase))
            clock.ns += ns
        watch.end_step()
    assert [(own_ns(times), times[Phase.WAIT]) for times in watch.finished] == [(321, 4000)] * 2
    assert watch.totals()[Phase.FORWARD] == 40e-9


def test_phases_become_spans_while_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    monkeypatch.setattr(spans, "now_ns", lambda: 0)
    spans.start(tmp_path, rank=0)
    for phase, ns in (("forward", 2000), ("other", 1000), ("backward", 5000)):
        watch.enter(Phase(phase))
        clock.ns += ns
    watch.end_step()
    spans.stop()
    trace = json.loads((tmp_path / "rank0.trace.json").read_text())
    found = [(e["name"], int(e["ts"]), int(e["dur"]), e["args"]) for e in trace if e["ph"] == "X"]
    assert found == [
        ("forward", 1, 2, {"step": 0}),
        ("backward", 4, 5, {"step": 0, "last": True}),
    ]


def test_waiting_inside_a_phase_is_not_that_phase() -> None:
    membership = Membership(Group())
    watch = stopwatch.get_stopwatch(membership)
    watch.enter(Phase.FORWARD)
    with waiting(membership.group):
        assert watch.phase == "wait"
        with waiting(membership.group):
            pass
        assert watch.phase == "wait"
    assert watch.phase == "forward"
    with waiting(Group()):  # nobody measures that group
        pass


def test_a_group_has_one_stopwatch_which_follows_its_members_to_another_group() -> None:
    one, other = Membership(Group()), Membership(Group())
    assert stopwatch.find_stopwatch(one.group) is None
    watch = stopwatch.get_stopwatch(one)
    second_model = Membership(one.group)
    assert (
        stopwatch.get_stopwatch(second_model)
        is stopwatch.get_stopwatch(one)
        is stopwatch.find_stopwatch(one.group)
        is watch
    )
    assert stopwatch.get_stopwatch(other) is not watch
    moved = Group()
    one.move_on(moved)
    second_model.move_on(moved)
    assert stopwatch.find_stopwatch(one.group) is watch
    del one, second_model, watch  # the models go, the group stays: its steps are counted on
    assert stopwatch.find_stopwatch(moved) is not None


def test_any_optimizer_is_noticed_while_somebody_watches() -> None:
    gc.collect()
    before = dict(stopwatch._followers)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    membership = Membership(Group())
    watch = stopwatch.get_stopwatch(membership)
    seen: list[str] = []
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(watch.phase))
    optimizer.step()
    assert (seen, watch.phase) == (["optimizer"], "data")
    del membership
    gc.collect()
    assert stopwatch._followers == before


def test_who_follows_optimizers_can_stop_in_the_middle_of_a_step() -> None:
    """torch's own list of hooks must not change while it, or another thread, goes through it."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer, seen = torch.optim.SGD([parameter], lr=0.1), list[Any]()

    def hear(stepped: Any) -> None:
        stop()
        seen.append(stepped)

    stop = stopwatch.follow_optimizers(hear)
    stop_after = stopwatch.follow_optimizers(lambda _: seen.append("after"), after=True)
    optimizer.step()
    optimizer.step()
    stop_after()
    optimizer.step()
    assert seen == [optimizer, "after", "after"]


def test_who_waits_for_somebody_outside_of_the_group_is_not_taken_for_one_that_waits_for_it() -> (
    None
):
    """Such as an island for the others: that ends by itself, and no worker here is at fault."""

    class Group:
        pass

    group = Group()
    stopwatch._watches[group] = watch = Stopwatch()
    follow_waits(group, watch.waits)
    with waiting(group):
        found = stopwatch.last_change()
        assert found is not None
        assert found[1]
    with waiting(group, elsewhere=True):
        assert stopwatch.last_change() is None
    assert stopwatch.last_change() is not None
