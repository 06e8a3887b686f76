"""Steps of both engines, recorded for real, in the report."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from paceline import DataParallel, DistributedDataParallel
from paceline.comm.world import World
from paceline.explain import report
from paceline.record import record_step
from paceline.testing import run_ranks, seeded

DATA = torch.linspace(-1, 1, 10_000).view(1000, 10)
TIMES = "\N{MULTIPLICATION SIGN}"


def words_of(path: Path) -> str:
    inside = path.read_text().partition('id="pipeline"')[2].partition("</section>")[0]
    without_data = re.sub(r"<script.*?</script>", " ", inside)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without_data))


def test_a_batch_of_data_parallel_is_split_computed_in_parallel_and_gathered(
    tmp_path: Path,
) -> None:
    model = DataParallel(seeded(nn.Linear(10, 1)), device_ids=["cpu:0", "cpu:1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"dataset": DATA, "sample": 3, "weight": "weight[0, 3]", "values": True}
    with record_step(model, optimizer, folder=tmp_path, **options) as recording:
        loss = model(DATA[:100]).square().mean()
        recording.note_loss(loss)
        loss.backward()
        optimizer.step()
    words = words_of(report.write(tmp_path))
    order = [f"1,000 {TIMES} 10", f"100 {TIMES} 10", f"50 {TIMES} 10", f"50 {TIMES} 1 "]
    places = [words.index(shape) for shape in [*order, f"100 {TIMES} 1 "]]
    assert places == sorted(places)
    assert "Same as one process on the whole batch" in words
    assert "on 2 replicas, with DataParallel" in words


def test_workers_average_their_gradients_and_make_the_same_update(tmp_path: Path) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(seeded(nn.Linear(10, 1)), process_group=world.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = DATA[world.rank :: world.size][:50]
        with record_step(model, optimizer, folder=tmp_path, values=True) as recording:
            loss = model(rows).square().mean()
            recording.note_loss(loss)
            loss.backward()
            optimizer.step()

    run_ranks(2, body)
    words = words_of(report.write(tmp_path))
    assert "Same as one process on the whole batch" in words
    assert "all workers ended with the same bits" in words
    for title in ("Forward", "Loss", "Backward", "Buckets", "All-reduce", "Update"):
        assert title in words
