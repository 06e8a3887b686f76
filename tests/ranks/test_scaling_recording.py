"""What real engines record for `paceline scale`: steps, samples and buckets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from updates import update

from paceline import DistributedDataParallel
from paceline.group.world import World
from paceline.telemetry import spans
from paceline.telemetry.phases import MEASURED, Phase
from paceline.telemetry.timeline import RankRecording, read_events, survey
from paceline.testing import run_ranks, seeded


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Path]:
    """Ranks are threads here and share a file, so only one world of one, or rank 0, records."""
    path = tmp_path / "rank0.trace.json"
    spans.start(path, 0)
    yield path
    spans.stop()


def read(path: Path) -> RankRecording:
    spans.stop()
    return survey(path)


def test_one_worker_that_accumulates_makes_one_step_of_several_passes(recording: Path) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(seeded(nn.Linear(8, 2)), process_group=world.group)
        for _ in range(4):
            with model.no_sync():
                model(torch.ones(3, 8)).sum().backward()
            model(torch.ones(5, 8)).sum().backward()
            update(model)

    run_ranks(1, body)
    found = read(recording)

    assert list(found.steps) == [1, 2, 3]  # the first has no begin
    assert [step.samples for step in found.steps.values()] == [8, 8, 8]
    assert found.facts["size"] == 1
    assert found.facts["device"] == "cpu"
    for step in found.steps.values():
        assert set(step.us_by_phase) == set(MEASURED)
        assert step.us_by_phase[Phase.FORWARD] > 0
        assert step.us_by_phase[Phase.BACKWARD] > 0


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_are_recorded_with_their_bytes(recording: Path, size: int) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(
            seeded(nn.Linear(8, 2)), process_group=world.group, bucket_cap_mb=1
        )
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            update(model)

    run_ranks(size, body)
    spans.stop()
    ready = [event for event in read_events(recording) if event["name"] == "ready"]

    assert len(ready) == 3 * size
    # 18 numbers of 4 bytes, and the trailer behind them.
    assert all(event["args"]["bytes"] > 72 for event in ready)


def test_a_batch_without_rows_is_not_counted(recording: Path) -> None:
    class Sum(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    def body(world: World) -> None:
        model = DistributedDataParallel(seeded(Sum(8, 2)), process_group=world.group)
        for _ in range(3):
            model(torch.ones(4, 8)).backward()

    run_ranks(1, body)
    assert [step.samples for step in read(recording).steps.values()] == [0, 0]
