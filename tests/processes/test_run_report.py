"""A run that was watched in every way, and what its report shows of that.

In processes, because threads share one recording of spans.
"""

from __future__ import annotations

from pathlib import Path

import torch
from runs import Rows, mlp
from torch.nn import functional as F

from paceline.comm.world import World
from paceline.explain import report
from paceline.observe import spans, stragglers
from paceline.observe.phases import Phase
from paceline.observe.run_folder import RunFolder
from paceline.observe.stragglers import Blame
from paceline.run import Run, RunOptions
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
    detector = stragglers.find(world.group)
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            if step.number == 5 and world.rank == 0 and detector is not None:
                blame = Blame(
                    rank=1,
                    phase=Phase.DATA,
                    slower_by_s=0.2,
                    phase_s=0.21,
                    others_phase_s=0.01,
                    steps=8,
                )
                detector.tell(5, blame)
    return spans.is_on()


def test_the_report_of_a_run_shows_its_recorded_step_its_timeline_and_who_was_slow(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    assert run_processes(2, train, str(folder.path)) == [False, False]
    assert folder.pipeline_steps() == [3]
    assert folder.timeline_of(0).exists()
    assert folder.timeline_of(1).exists()
    page = report.write(folder.path).read_text()
    assert "ame as one process on the whole batch" in page
    assert "Worker 1 holds the others up" in page
    assert "Global batch 8 on 2 workers, in 2 shards of at most 4 rows." in page
