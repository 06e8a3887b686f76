"""The engine observed on a GPU: phases in the device's time, without waiting for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel, World, env, init_process_group
from paceline.group.membership import Membership
from paceline.telemetry import spans, timeline
from paceline.telemetry.phases import Phase
from paceline.telemetry.stopwatch import DeviceStopwatch, Observer
from paceline.telemetry.stragglers import StragglerDetector
from paceline.testing import run_processes, seeded
from tests.faults.planned import Faults

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 100_000_000
"""Some 50 ms on current devices."""
STEPS = 20


def test_phases_take_the_devices_time_and_the_host_does_not_wait() -> None:
    device = torch.device("cuda", 0)
    watch = DeviceStopwatch(device)
    watch.enter(Phase.DATA)
    watch.enter(Phase.FORWARD)
    torch.cuda._sleep(SLEEP_CYCLES)
    watch.enter(Phase.BACKWARD)
    watch.end_step()
    is_busy = not torch.cuda.current_stream(device).query()
    assert is_busy  # all of the above came back while the device still sleeps
    assert not watch.finished
    torch.cuda.synchronize()
    watch.end_step()  # the next one finds that the device has passed
    times = watch.finished[0]
    assert times[Phase.FORWARD] > 10 * max(times[Phase.BACKWARD], times[Phase.DATA], 10**5)


def test_events_that_nobody_reads_do_not_pile_up() -> None:
    watch = DeviceStopwatch(torch.device("cuda", 0))
    for _ in range(1000):
        watch.enter(Phase.OTHER)
        torch.cuda.synchronize()
    assert len(watch._pending) <= 64


class Slow(nn.Module):
    def __init__(self, faults: Faults, rank: int) -> None:
        super().__init__()
        self.faults, self.rank, self.step = faults, rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.faults.strike(self.rank, self.step, "forward")
        x = x.clone()
        x.register_hook(lambda _: self.faults.strike(self.rank, self.step, "backward"))
        return x


def train(world: World, phase: str, folder: str) -> list[list[object]]:
    faults = Faults()
    for step in range(STEPS):
        faults = faults.delay(rank=1, step=step, where=phase, seconds=0.05)
    slow = Slow(faults, world.rank)
    net = nn.Sequential(nn.Linear(64, 64), slow, nn.Linear(64, 2))
    model = DistributedDataParallel(seeded(net).cuda(), process_group=world.group)
    if folder:
        spans.start(folder, world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told: list[list[object]] = []
    observer = model.reducer.observer
    assert observer is not None
    assert isinstance(observer.watch, DeviceStopwatch)
    assert observer.watch.detector is not None
    observer.watch.detector.on_blame = lambda step, blame: told.append([blame.rank, blame.phase])
    x = torch.ones(8, 64, device="cuda")
    for step in range(STEPS):
        slow.step = step
        faults.strike(world.rank, step, "data")
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    spans.stop()
    return told


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_delay_is_blamed_on_its_rank_and_phase(phase: str, tmp_path: Path) -> None:
    told, *_ = run_processes(3, train, phase, str(tmp_path))
    assert told == [[1, phase]]
    recordings = [timeline.survey(path) for path in timeline.find_recordings(tmp_path)]
    average = timeline.average_steps(recordings)
    assert average[1][Phase(phase)] > 40
    assert average[0][Phase.WAIT] + average[0][Phase.TRANSFER] > 40


def compare_alone(world: World) -> list[float]:
    """NCCL, whose tensors lie on the device: results are read in the next exchange."""
    device = torch.device("cuda", 0)
    membership = Membership(world.group)
    observer = Observer(membership, device, env.read_observation())
    watch = observer.watch
    detector = watch.detector = StragglerDetector(watch, membership)
    for _ in range(30):
        watch.enter(Phase.FORWARD)
        torch.ones(1, device=device)
        watch.end_step()
        torch.cuda.synchronize()
        observer.step_ends()
    return [window[0].seconds for window in detector.windows]


def nccl(world: World) -> list[float]:
    torch.distributed.destroy_process_group()
    alone = init_process_group(backend="nccl")
    return compare_alone(alone)


def test_numbers_on_the_device_are_read_late() -> None:
    (owns,) = run_processes(1, nccl)
    assert owns
    assert all(own > 0 for own in owns)
