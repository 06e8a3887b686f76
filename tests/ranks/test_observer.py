"""The engine observed: phases, blame and recordings of real models on real ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from updates import update

from paceline import DistributedDataParallel, SyncBatchNorm, env
from paceline.group.membership import Membership
from paceline.group.world import World
from paceline.telemetry import stopwatch
from paceline.telemetry.phases import MEASURED, Phase
from paceline.telemetry.stopwatch import Observer, Stopwatch
from paceline.telemetry.stragglers import Blame, StragglerDetector, print_blame
from paceline.testing import run_ranks, seeded
from paceline.testing.ranks import gloo_group

STEPS = 20
DELAY_NS = 30_000_000


class HandClock:
    """Shows what it was set to; every look takes a microsecond."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1000
        return self.ns


class Slow(nn.Module):
    """A layer whose forward and backward pass call a function with their names."""

    def __init__(self, pass_: Callable[[str], object]) -> None:
        super().__init__()
        self.pass_ = pass_

    def forward(self, x: Tensor) -> Tensor:
        self.pass_("forward")
        x = x.clone()
        if x.requires_grad:
            x.register_hook(lambda _: self.pass_("backward"))
        return x


def train(world: World, phase: str, slow_rank: int) -> Any:
    clock = HandClock()

    def go_through(place: str) -> None:
        clock.ns += DELAY_NS * (place == phase and world.rank == slow_rank)

    net = nn.Sequential(nn.Linear(8, 8), Slow(go_through), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = DistributedDataParallel(seeded(net), process_group=world.group)
    told = []
    observer = model.reducer.observer
    assert observer is not None
    assert observer.watch.detector is not None
    set_clock(observer.watch, clock)
    observer.watch.detector.on_blame = lambda step, blame: told.append((step, blame))
    for _ in range(STEPS):
        go_through("data")
        model.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        go_through("other")
        update(model)
    return told


def set_clock(watch: Stopwatch, clock: Callable[[], int]) -> None:
    watch.clock = watch.waits.clock = clock
    watch._accounted_ns = clock()


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "other"])
def test_a_delay_is_blamed_on_its_rank_and_phase_within_twenty_steps(phase: str) -> None:
    told, *others = run_ranks(3, train, phase, 1)
    assert [(blame.rank, blame.phase) for _, blame in told] == [(1, phase)]
    assert others == [[], []]


def find_stopwatch(world: World) -> Stopwatch:
    watch = stopwatch.find_stopwatch(world.group)
    assert watch is not None
    return watch


def watched(world: World) -> tuple[dict[str, float], tuple[float, float], int]:
    """Seconds by phase, the least and the most they can add up to, and the steps counted."""
    model = DistributedDataParallel(seeded(nn.Linear(4, 2)), process_group=world.group)
    watch = find_stopwatch(world)
    earliest = time.monotonic()
    watch.enter(Phase.OTHER)
    latest = time.monotonic()
    before = watch.totals()
    for step in range(6):
        with model.no_sync(enabled=step % 2 == 0):
            model(torch.ones(3, 4)).sum().backward()
        update(model)
    with torch.no_grad():
        model(torch.ones(3, 4))
    least = time.monotonic() - latest
    watch.enter(Phase.OTHER)
    most = time.monotonic() - earliest
    totals = {phase: seconds - before[phase] for phase, seconds in watch.totals().items()}
    return totals, (least, most), watch.step


def test_phases_add_up_to_the_time_and_only_synchronised_backwards_are_steps() -> None:
    for totals, (least, most), steps in run_ranks(2, watched):
        assert set(totals) == set(MEASURED)
        assert all(seconds > 0 for seconds in totals.values())
        assert least <= sum(totals.values()) <= most
        assert steps == 3


def test_a_world_of_one_is_not_observed() -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(nn.Linear(4, 2), process_group=world.group)
        assert model.reducer.observer is None
        assert stopwatch.find_stopwatch(world.group) is None

    run_ranks(1, body)


def test_what_a_layer_waits_for_is_not_its_own_work() -> None:
    """One clock for both ranks, which moves while the first one waits for the second."""
    clock, watches = HandClock(), dict[int, Stopwatch]()

    def body(world: World) -> Stopwatch:
        net = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4, process_group=world.group))
        model = DistributedDataParallel(seeded(net), process_group=world.group)
        watch = watches[world.rank] = find_stopwatch(world)
        set_clock(watch, clock)
        world.barrier()
        for _ in range(3):
            if world.rank == 1:
                while watches[0].phase is not Phase.WAIT:
                    time.sleep(0.001)
                clock.ns += DELAY_NS
            model(torch.randn(8, 4)).sum().backward()
            world.barrier()
        return watch

    totals = run_ranks(2, body)[0].totals()
    assert totals[Phase.FORWARD] < DELAY_NS / 1e9 < 3 * DELAY_NS / 1e9 <= totals[Phase.WAIT]


CPU = torch.device("cpu")
STEP_MS = {Phase.DATA: 2, Phase.FORWARD: 5, Phase.OTHER: 1, Phase.BACKWARD: 10, Phase.WAIT: 1}


class Trainer:
    """Steps as a rank lives them, on a clock turned by hand, with a delay on one rank."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.clock = HandClock()
        self.watch = Stopwatch(self.clock)
        self.detector = self.watch.detector = StragglerDetector(self.watch, membership)
        self.observer = Observer(membership, CPU, env.read_observation())
        self.observer.watch = self.watch
        self.told: list[tuple[int, Blame]] = []
        self.detector.on_blame = self.tell

    def tell(self, step: int, blame: Blame) -> None:
        self.told.append((step, blame))
        print_blame(step, blame)

    def train(self, steps: int, slow: int, phase: Phase, ms: float, first: int = 0) -> None:
        for self.watch.step in range(first, first + steps):
            for name, usual_ms in STEP_MS.items():
                self.watch.enter(name)
                late = ms if name == phase and self.membership.rank == slow else 0
                self.clock.ns += int((usual_ms + late) * 1e6)
            self.watch.end_step()
            self.observer.step_ends()


def compare(world: World, phase: Phase, ms: float) -> tuple[Blame | None, list[tuple[int, Blame]]]:
    trainer = Trainer(Membership(world.group))
    trainer.train(4, 1, phase, ms, first=900)
    trainer.detector.cadence.on_generation()  # another run begins
    trainer.train(16, 1, phase, ms)
    return trainer.detector.blame, trainer.told


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.BACKWARD])
def test_all_ranks_know_who_is_slow_and_rank_0_says_so_within_twenty_steps(
    phase: Phase, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_ranks(3, compare, phase, 200)
    assert [blame and blame.culprit for blame, _ in results] == [(1, phase)] * 3
    ((step, blame),) = results[0][1]
    assert step <= 20
    assert blame.slower_by_s == pytest.approx(0.2)
    assert results[1][1] == results[2][1] == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline: step {step}: Worker 1 is slow: its {phase} takes")


def test_ranks_of_one_pace_hear_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(3, compare, Phase.DATA, 0) == [(None, [])] * 3
    assert capsys.readouterr().err == ""


def test_another_group_of_fewer_ranks_compares_anew() -> None:
    def body(world: World) -> tuple[int, Phase] | None:
        membership = Membership(world.group)
        trainer = Trainer(membership)
        trainer.train(20, 2, Phase.DATA, 200)
        assert trainer.detector.blame is not None
        if world.rank == 2:
            return None
        membership.move_on(smaller_group(world, 2))
        trainer.train(1, 1, Phase.FORWARD, 200)
        assert trainer.detector.blame is None  # the rank that was slow is not there any more
        trainer.train(19, 1, Phase.FORWARD, 200)
        blame: Blame | None = trainer.detector.blame
        return blame and blame.culprit

    assert run_ranks(3, body) == [(1, Phase.FORWARD)] * 2 + [None]


def smaller_group(world: World, size: int) -> Any:
    """A group of the first `size` ranks, made as a launcher would: over a store of its own."""
    store = PrefixStore("smaller", world.group.get_group_store())
    return gloo_group(store, world.rank, size, 30.0)
