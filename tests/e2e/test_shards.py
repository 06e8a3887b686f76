"""`python steps.py`, then more workers: they get shards of their own, through deaths and growth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import TrainingFaults, assert_survived, run_training, train_alone
from tests.sentences import says

SCRIPT = """
import os, signal, sys, time
import torch, paceline
from torch import nn
from torch.nn.functional import cross_entropy
from tests.faults import wait_for_replacements

folder, last, growths, *dropout = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(48, 6, dtype=torch.float64)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
if dropout:
    net.append(nn.Dropout(0.2))
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02),
                   torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()),
                   global_batch=12, epochs=30, folder=folder,
                   options=paceline.RunOptions(progress="plain"))
for step in run:
    with step:
        for x, y in step.batches():
            step.backward(cross_entropy(run.model(x), y))
    if step.number == int(last):
        run.save()
        break
    if step.number == 3 and growths == "1" and os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGUSR1)
    if step.number >= 3 and growths == "1" and run.membership.size == 2:
        time.sleep(0.02)  # a vote, ten times a second, lets the new one in
    wait_for_replacements(run)
print(f"rank {run.world.rank} ends with {run.shards} shards")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "steps.py"
    path.write_text(SCRIPT)
    return path


def test_a_run_of_one_process_continues_on_two_and_three_that_die_and_ends_the_same(
    script: Path, tmp_path: Path
) -> None:
    reference = train_alone(script, tmp_path / "whole", 0, 0)
    train_alone(script, tmp_path / "run", 4, 0)
    faults = TrainingFaults().kill(rank=1, step=5, where="forward")  # in the new cut
    two = run_training(script, tmp_path / "run", 8, 0, workers=2, faults=faults)
    assert two.exit_code == 0, two.output
    assert two.output.count("ends with 2 shards") == 2, two.output
    faults = (
        TrainingFaults()
        .kill(rank=0, step=9, where="before the sum")  # in the old one
        .kill(rank=2, step=12, where="in the commit")
        .kill(rank=1, step=15, where="after the last bucket")
    )
    three = run_training(script, tmp_path / "run", 0, 0, workers=3, faults=faults)
    assert three.output.count("ends with 3 shards") == 3, three.output
    expected = replace(reference, steps=reference.steps[8:])
    assert_survived(three, expected, rtol=1e-10, atol=1e-12)


def test_a_worker_that_is_added_gets_a_shard(script: Path, tmp_path: Path) -> None:
    reference = train_alone(script, tmp_path / "whole", 0, 0)
    grown = run_training(script, tmp_path / "run", 0, 1, workers=2)
    assert grown.output.count("ends with 3 shards") == 3, grown.output
    assert_survived(grown, reference, rtol=1e-10, atol=1e-12)


def test_with_dropout_a_worker_that_is_added_is_told_why_it_has_nothing_to_do(
    script: Path, tmp_path: Path
) -> None:
    reference = run_training(script, tmp_path / "two", 0, 0, "dropout", workers=2)
    grown = run_training(script, tmp_path / "run", 0, 1, "dropout", workers=2)
    assert grown.output.count("ends with 2 shards") == 3, grown.output
    assert says(grown.output, 3, 2, "shards", 1, "random numbers", "shards="), grown.output
    assert_survived(grown, reference, rtol=1e-10, atol=1e-12)
