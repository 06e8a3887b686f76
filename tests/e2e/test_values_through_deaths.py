"""What a script tells all workers with its `World`, while some of them die."""

from __future__ import annotations

from pathlib import Path

from tests.faults import TrainingFaults, assert_survived, run_training, train_alone

SCRIPT = """
import torch, paceline
from torch import nn
from torch.nn.functional import mse_loss
from tests.faults import wait_for_replacements

torch.set_num_threads(1)
torch.manual_seed(0)
world = paceline.init_process_group()
net = nn.Linear(6, 3).double()
x = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02),
                   torch.utils.data.TensorDataset(x), global_batch=6, epochs=4, shards=3,
                   options=paceline.RunOptions(progress="plain"))
for step in run:
    with step:
        ranks = world.gather(world.rank).tolist()
        assert ranks == sorted(run.membership.numbers), (ranks, run.membership.numbers)
        assert world.broadcast({"rank": world.rank}, root=ranks[-1]) == {"rank": ranks[-1]}
        assert world.reduce(1) == len(ranks)
        for (rows,) in step.batches():
            step.backward(mse_loss(run.model(rows), rows[:, :3]))
    wait_for_replacements(run)
print("generation", run._parts.recovery.member.number if world.size > 1 else 0, flush=True)
"""


def test_a_world_tells_values_in_the_order_of_ranks_through_deaths(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    reference = train_alone(tmp_path / "script.py")
    faults = (
        TrainingFaults()
        .kill(rank=0, step=3, where="before the sum")
        .kill(rank=1, step=8, where="in the commit")
        .kill(rank=0, step=12, where="between steps")
    )
    done = run_training(tmp_path / "script.py", workers=3, faults=faults)
    assert_survived(done, reference)
    assert done.output.count("generation 6") == 3, done.output  # a death, and one who joins, each


def test_a_step_begins_again_on_all_where_one_has_not_heard_what_the_others_have(
    tmp_path: Path,
) -> None:
    """The others wait for its gradients then, and it for what they have told it."""
    lost = """
        if step.number == 5 and world.rank == 1 and not lost:
            lost.append(step.number)
            raise paceline.errors.PeerError("as where a worker dies in the line above")
"""
    line = "        assert world.reduce(1) == len(ranks)\n"
    script = SCRIPT.replace(line, line + lost).replace(
        "for step in run", "lost = []\nfor step in run"
    )
    (tmp_path / "script.py").write_text(script)
    reference = train_alone(tmp_path / "script.py")
    done = run_training(tmp_path / "script.py", workers=3)
    assert_survived(done, reference)
    assert done.output.count("generation 1") == 3, done.output
