"""Recordings of real training: what the ranks did, on one clock."""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import chrome_trace
import pytest
import torch
from torch import nn
from updates import update

from paceline import DDPOptions, DistributedDataParallel
from paceline.group.world import World
from paceline.telemetry import spans, timeline
from paceline.telemetry.timeline import RankRecording
from paceline.testing import run_processes, seeded

SIZE, STEPS = 3, 6
TRANSPORTS = ("shared_memory", "c10d")

Event = dict[str, Any]


def train(world: World, folder: str) -> None:
    """A recording for each transport, one after the other."""
    for transport in TRANSPORTS:
        os.environ["PACELINE_TIMELINE"] = os.path.join(folder, transport)
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
        model = DistributedDataParallel(
            seeded(net),
            process_group=world.group,
            bucket_cap_mb=0.0004,
            options=DDPOptions(transport=transport),  # type: ignore[arg-type]
        )
        for _ in range(STEPS):
            with spans.span("whole step", rows=4):  # ends inside the next phase, "data"
                model.zero_grad()
                with spans.span("forward", rows=4):  # a name that the engine uses too
                    out = model(torch.ones(4, 64)).sum()
                out.backward()
                update(model)
        spans.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    run_processes(SIZE, train, str(folder))
    return folder


def survey(folder: Path) -> list[RankRecording]:
    return [timeline.survey(path) for path in timeline.find_recordings(folder)]


def by_step(events: list[Event], rank: int) -> list[list[Event]]:
    """The events of a rank, step by step."""
    mine = [event for event in events if event["ph"] != "M" and event["pid"] == rank]
    steps = sorted({event["args"]["step"] for event in mine if "step" in event["args"]})
    return [[e for e in mine if e["args"].get("step") == step] for step in steps]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_phase_of_every_rank_is_there_in_its_order(folder: Path, transport: str) -> None:
    events = list(timeline.merge(survey(folder / transport)))
    for rank in range(SIZE):
        found = by_step(events, rank)[STEPS - 1]
        begins = {event["name"]: event["ts"] for event in found if event["tid"] == 1}
        order = ["optimizer", "data", "forward", "backward"]
        assert [begins[name] for name in order] == sorted(begins[name] for name in order)
        assert {"wait", "transfer"} & set(begins)
        ready = [event["args"]["bucket"] for event in found if event["name"] == "ready"]
        moved = [
            event["args"]["bucket"]
            for event in found
            if (event["name"], event["tid"]) == ("transfer", 2)
        ]
        assert ready == moved == list(range(len(ready)))
        assert len(ready) > 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_of_a_recording_is_what_perfetto_takes(folder: Path, transport: str) -> None:
    whole = folder / f"{transport}.json"
    timeline.main(argparse.Namespace(run=folder / transport, output=whole, steps=":"))
    some = folder / f"{transport}-some.json"
    first = TRANSPORTS.index(transport) * STEPS + 2  # one group counts on
    steps = f"{first}:{first + 2}"
    timeline.main(argparse.Namespace(run=folder / transport, output=some, steps=steps))
    for path in (whole, some, *timeline.find_recordings(folder / transport)):
        events = chrome_trace.load(path)
        assert chrome_trace.violations(events) == []
        assert {"forward", "backward"} <= {e["name"] for e in events if e["ph"] == "X"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_callers_own_spans_have_a_lane_of_their_own(folder: Path, transport: str) -> None:
    events = list(timeline.merge(survey(folder / transport)))
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    own = [e for e in events if lanes.get((e["pid"], e["tid"])) == "own spans"]
    assert {event["name"] for event in own} == {"thread_name", "whole step", "forward"}
    assert len([event for event in own if event["ph"] == "X"]) == 2 * STEPS * SIZE


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_spans_of_one_lane_never_overlap(folder: Path, transport: str) -> None:
    events = list(timeline.merge(survey(folder / transport)))
    for rank in range(SIZE):
        for lane in (1, 2):
            ends = sorted(
                (event["ts"], event["ts"] + event["dur"])
                for event in events
                if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, lane)
            )
            assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(ends))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_on_one_clock_nobody_goes_on_before_all_are_ready(folder: Path, transport: str) -> None:
    events = list(timeline.merge(survey(folder / transport)))
    for steps in zip(*(by_step(events, rank)[:STEPS] for rank in range(SIZE)), strict=True):
        last_ready = max(e["ts"] for step in steps for e in step if e["name"] == "ready")
        ends = [max(e["ts"] + e["dur"] for e in step if e["name"] == "transfer") for step in steps]
        assert min(ends) >= last_ready


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_table_of_a_recording_adds_up(folder: Path, transport: str) -> None:
    recordings = survey(folder / transport)
    averages = timeline.average_steps(recordings)
    assert len(averages) == SIZE
    for recording, average in zip(recordings, averages.values(), strict=True):
        assert len(recording.steps) == STEPS - 1
        steps = timeline.after_warm_up(recording.steps)
        whole_us = sum(sum(recording.steps[step].us_by_phase.values()) for step in steps)
        assert sum(average.values()) == pytest.approx(whole_us / len(steps) / 1000)
        assert min(average.values()) >= 0


def test_a_world_of_one_is_recorded_too(tmp_path: Path) -> None:
    run_processes(1, train, str(tmp_path))
    events = list(timeline.merge(survey(tmp_path / TRANSPORTS[0])))
    names = {event["name"] for event in by_step(events, 0)[3]}
    assert {"data", "forward", "backward", "optimizer"} <= names


def train_unevenly(world: World) -> Any:
    model = DistributedDataParallel(seeded(nn.Linear(4, 2)), process_group=world.group)
    with model.join():
        for _ in range(12 if world.rank else 30):
            model(torch.ones(3, 4)).sum().backward()
    observer = model.reducer.observer
    assert observer is not None
    assert observer.watch.detector is not None
    return [
        observer.watch.step,
        len(observer.watch.finished),
        observer.watch.detector.blame is None,
    ]


def test_a_rank_without_inputs_compares_but_is_not_compared_with() -> None:
    longer, shorter, _ = run_processes(3, train_unevenly)
    assert longer == [30, 30, True]
    assert shorter == [30, 12, True]
