"""What a script counts in objects in `state=`, and does to the model and its optimizer itself, in,
before and behind the block, through deaths."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import TrainingFaults, assert_survived, run_training, train_alone

SCRIPT = """
import torch, paceline
from torch import nn
from torch.nn.functional import mse_loss
from tests.faults import wait_for_replacements

class Counts:
    def __init__(self):
        self.ahead, self.before, self.inside, self.behind = 0, torch.zeros(2), [], 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)

torch.set_num_threads(1)
torch.manual_seed(0)
world = paceline.init_process_group()
net, counts = nn.Linear(6, 3).double(), Counts()
x = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02),
                   torch.utils.data.TensorDataset(x), global_batch=6, epochs=4, shards=3,
                   state={"counts": counts}, options=paceline.RunOptions(progress="plain"))
lost = []

def lose(step):
    if step.number not in lost and step.number in (5, 20) and world.rank == 1:
        lost.append(step.number)
        raise paceline.errors.PeerError("as in a collective of the script")

for step in run:
    counts.ahead += 1
    with step:
        counts.before += 1  # in place
        if step.number == 20:
            lose(step)
        for (rows,) in step.batches():
            step.backward(mse_loss(run.model(rows), rows[:, :3]))
        counts.inside.append(step.number)
        lose(step)
    counts.behind += 1
    wait_for_replacements(run)
assert counts.before.tolist() == [32.0, 32.0], counts.before
assert counts.inside == list(range(1, 33)), counts.inside
assert counts.ahead == counts.behind == 32
"""


def test_what_a_loop_counts_in_state_counts_once_through_deaths(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    reference = train_alone(tmp_path / "script.py")
    faults = (
        TrainingFaults()
        .kill(rank=0, step=3, where="before the sum")
        .kill(rank=1, step=8, where="after the last bucket")
        .kill(rank=0, step=12, where="in the commit")
        .kill(rank=2, step=16, where="between steps")
    )
    done = run_training(tmp_path / "script.py", workers=3, faults=faults)
    assert_survived(done, reference)


CHANGES = """
net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
net[0].requires_grad_(False)
optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=0.02)
"""


@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_what_a_loop_does_to_the_model_and_its_optimizer_is_done_once(
    update: str, tmp_path: Path
) -> None:
    """Worker 1 loses steps 5 and 20: of the first it gets the result, the other all do again."""
    script = SCRIPT.replace("net, counts = nn.Linear(6, 3).double(), Counts()", "counts = Counts()")
    script = script.replace("x = torch.randn(48", f"{CHANGES}x = torch.randn(48")
    script = script.replace("torch.optim.AdamW(net.parameters(), lr=0.02)", "optimizer")
    script = script.replace("Options(", f"Options(update={update!r}, ema=0.9, ")
    script = script.replace(
        "    counts.ahead += 1\n",
        "    counts.ahead += 1\n    optimizer.param_groups[0]['lr'] *= 0.99\n",
    ).replace(
        "    counts.behind += 1\n",
        "    counts.behind += 1\n"
        "    net[1].weight.data.mul_(0.99)\n"
        "    optimizer.param_groups[-1]['weight_decay'] += 0.01\n"
        "    if step.number in (5, 19):\n"
        "        added = net[0].weight if step.number == 5 else net[0].bias\n"
        "        optimizer.add_param_group({'params': [added.requires_grad_()], 'lr': 0.1})\n",
    )
    (tmp_path / "script.py").write_text(script)
    reference = train_alone(tmp_path / "script.py")
    faults = (
        TrainingFaults()
        .kill(rank=0, step=3, where="before the sum")
        .kill(rank=1, step=8, where="after the last bucket")
        .kill(rank=0, step=12, where="in the commit")
        .kill(rank=2, step=16, where="between steps")
    )
    done = run_training(tmp_path / "script.py", workers=3, faults=faults)
    assert_survived(done, reference)


SETS = """
import sys, torch, paceline
from torch import nn
from torch.nn.functional import mse_loss
from tests.faults import wait_for_replacements

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
if sys.argv[1] == "adds a group":
    net[0].requires_grad_(False)
x = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02)
run = paceline.Run(net, optimizer, torch.utils.data.TensorDataset(x), global_batch=6, epochs=2,
                   shards=3, options=paceline.RunOptions(progress="plain", update="sharded"))
for step in run:
    if step.number == 9 and sys.argv[1] == "lowers the rate":
        optimizer.param_groups[0]["lr"] *= 0.5
    with step:
        for (rows,) in step.batches():
            step.backward(mse_loss(run.model(rows), rows[:, :3]))
    if step.number == 5:
        net[1].eval()
        if sys.argv[1] == "lowers the rate":
            optimizer.param_groups[0]["lr"] *= 0.5
        else:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters()})
    wait_for_replacements(run)
"""


@pytest.mark.parametrize("does", ["lowers the rate", "adds a group"])
def test_what_a_loop_sets_around_a_step_is_set_once_through_deaths(
    does: str, tmp_path: Path
) -> None:
    """In a sharded update a step may be undone at its end, and what is behind it runs twice."""
    (tmp_path / "script.py").write_text(SETS)
    reference = train_alone(tmp_path / "script.py", does)
    faults = (
        TrainingFaults()
        .kill(rank=1, step=5, where="after the last bucket")
        .kill(rank=0, step=9, where="after the last bucket")
    )
    done = run_training(tmp_path / "script.py", does, workers=3, faults=faults)
    assert_survived(done, reference)
