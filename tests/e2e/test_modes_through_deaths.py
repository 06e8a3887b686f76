"""What a script sets once during a training, and a newcomer has not lived through."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.testing import assert_replicas_equal
from tests.faults import TrainingFaults, assert_survived, run_training, train_alone

SCRIPT = """
import sys, torch, paceline
from torch import nn
from torch.nn.functional import mse_loss
from paceline.testing import assert_replicas_equal
from tests.faults import wait_for_replacements

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 3)).double()
net[3].requires_grad_(False)
x = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
stops = int(sys.argv[3])
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02),
                   torch.utils.data.TensorDataset(x), global_batch=6, epochs=4, shards=3,
                   folder=sys.argv[2] if stops else None,
                   options=paceline.RunOptions(progress="plain", update=sys.argv[1]))
for step in run:
    with step:
        for (rows,) in step.batches():
            step.backward(mse_loss(run.model(rows), rows[:, :3]))
    if step.number == 4:
        net[3].requires_grad_(True)
        net[1].eval()
        net[2].bias.requires_grad_(False)
    if step.number == stops:
        run.stop()
    wait_for_replacements(run)
print(run.step, [p.requires_grad for p in net.parameters()], net[1].training, flush=True)
"""


@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_a_newcomer_has_the_layers_frozen_that_the_others_have(update: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    reference = train_alone(tmp_path / "script.py", update, "", 0)
    faults = (
        TrainingFaults()
        .kill(rank=0, step=7, where="before the sum")
        .kill(rank=1, step=12, where="in the commit")
        .kill(rank=2, step=16, where="between steps")
    )
    done = run_training(tmp_path / "script.py", update, "", 0, workers=3, faults=faults)
    assert_survived(done, reference)
    assert done.output.count("32 [True, True, True, False, True, True] False") == 3


def test_a_run_that_continues_has_the_layers_frozen_that_it_had(tmp_path: Path) -> None:
    # Layers keep their mode, which a save in the middle of an evaluation would see.
    (tmp_path / "script.py").write_text(SCRIPT.replace("        net[1].eval()\n", ""))
    reference = train_alone(tmp_path / "script.py", "whole", "", 0)
    folder = tmp_path / "run"
    train_alone(tmp_path / "script.py", "whole", folder, 10)
    done = train_alone(tmp_path / "script.py", "whole", folder, 10)
    assert "32 [True, True, True, False, True, True] True" in done.output
    (ours,), (theirs,) = done.states.values(), reference.states.values()
    assert_replicas_equal([ours["model"], theirs["model"]])
