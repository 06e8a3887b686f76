"""What callbacks ask for is done by all workers, also where one dies meanwhile."""

from __future__ import annotations

from pathlib import Path

from tests.faults import TrainingFaults, assert_survived, run_training, train_alone

SCRIPT = """
import torch, paceline
from torch import nn
from torch.nn.functional import mse_loss
from tests.faults import wait_for_replacements

class Asking(paceline.Callback):
    def on_step(self, report):
        self.ask_save()
        self.ask_evaluation()

    def evaluate(self):
        self.run.evaluate(lambda batch: {"size": self.run.model(batch[0]).abs().mean()})

    def on_death(self, worker, how, step):
        self.run.message(f"heard of worker {worker} in step {step}")

torch.manual_seed(0)
net = nn.Linear(6, 3).double()
x = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02),
                   torch.utils.data.TensorDataset(x), global_batch=6, epochs=4, shards=3,
                   folder="run", sinks=[Asking()], options=paceline.RunOptions(progress="plain"))
for step in run:
    with step:
        for (x,) in step.batches():
            step.backward(mse_loss(run.model(x), x[:, :3]))
    wait_for_replacements(run)
"""


def test_deaths_while_all_do_what_a_callback_asks_for_leave_no_trace(tmp_path: Path) -> None:
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(SCRIPT.replace('"run"', f'"{tmp_path}/{name}"'))
    reference = train_alone(tmp_path / "alone" / "script.py")
    faults = (
        TrainingFaults()
        .kill(rank=1, step=3, where="while evaluating")
        .kill(rank=0, step=6, where="while saving")
        .kill(rank=2, step=9, where="between steps")
        .kill(rank=0, step=12, where="while evaluating")
        .kill(rank=1, step=15, where="in the commit")
    )
    done = run_training(tmp_path / "together" / "script.py", workers=3, faults=faults)
    assert_survived(done, reference)
    assert "heard of worker 1 in step" in done.output
