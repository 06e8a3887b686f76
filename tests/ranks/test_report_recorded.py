"""Steps of both engines, recorded for real, in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import DataParallel, DistributedDataParallel
from paceline.group.world import World
from paceline.record import record_step
from paceline.show import report
from paceline.testing import run_ranks, seeded

DATA = torch.linspace(-1, 1, 10_000).view(1000, 10)


def step_in(page: Path) -> dict[str, Any]:
    """The recorded step as the page has it."""
    data = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    (step,) = json.loads(data)["pipeline"]
    found: dict[str, Any] = step
    return found


def take_step(model: Any, rows: torch.Tensor, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_step(model, optimizer, values=True, **options) as recording:
        loss = model(rows).square().mean()
        recording.note_loss(loss)
        loss.backward()
        optimizer.step()


def test_a_batch_of_data_parallel_is_split_computed_in_parallel_and_gathered(
    tmp_path: Path,
) -> None:
    model = DataParallel(seeded(nn.Linear(10, 1)), device_ids=["cpu:0", "cpu:1"])
    take_step(model, DATA[:100], folder=tmp_path, dataset=DATA, sample=3, weight="weight[0, 3]")
    step = step_in(report.write(tmp_path))
    shapes = {
        stage["name"]: [part["tensors"][0]["shape"] for part in stage["parts"] if part["tensors"]]
        for stage in step["stages"]
    }
    assert list(shapes)[:4] == ["data", "batch", "split", "copy"]
    assert [shapes["data"], shapes["batch"]] == [[[1_000, 10]], [[100, 10]]]
    assert [shapes["split"], shapes["gather"]] == [[[50, 10]] * 2, [[100, 1]]]
    assert step["check"]["text"].startswith("same as one process on the whole batch")
    assert (step["engine"], step["workers"]) == ("DataParallel", 2)


def test_workers_average_their_gradients_and_make_the_same_update(tmp_path: Path) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(seeded(nn.Linear(10, 1)), process_group=world.group)
        take_step(model, DATA[world.rank :: world.size][:50], folder=tmp_path)

    run_ranks(2, body)
    step = step_in(report.write(tmp_path))
    assert step["check"]["text"].startswith("same as one process on the whole batch")
    assert step["check"]["is_equal_on_all"]
    names = [stage["name"] for stage in step["stages"]]
    assert names == ["batch", "forward", "loss", "backward", "buckets", "all-reduce", "update"]
