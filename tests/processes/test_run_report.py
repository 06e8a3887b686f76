"""A run that was watched in every way, and what its report shows of that.

In processes, because threads share one recording of spans.
"""

from __future__ import annotations

from pathlib import Path

import torch
from runs import Rows, mlp
from torch.nn import functional as F

from paceline.files.run_folder import RunFolder
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.show import report
from paceline.telemetry import spans
from paceline.testing import run_processes


def train(world: World, folder: str) -> bool:
    net = mlp()
    run = Run(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        Rows(),
        global_batch=8,
        epochs=2,
        folder=folder,
        world=world,
        options=RunOptions(progress="quiet", trace_step=3, timeline=True),
    )
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
    return spans.is_on()


def test_the_report_of_a_run_shows_its_recorded_step_and_its_timeline(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    assert run_processes(2, train, str(folder.path)) == [False, False]
    assert folder.pipeline_steps() == [3]
    assert folder.timeline_of(0).exists()
    assert folder.timeline_of(1).exists()
    page = report.write(folder.path).read_text()
    assert "ame as one process on the whole batch" in page
    assert "Global batch 8 on 2 workers, in 2 shards of at most 4 rows." in page
