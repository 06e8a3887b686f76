"""The examples with several models, or a loss over the whole batch, through deaths and resizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import TrainingFaults, assert_survived, run_training, train_alone

EXAMPLES = ["gan", "distillation", "simclr", "clip", "actor_critic"]
SCRIPT = """
import runpy, sys
import torch, paceline
from tests.faults import wait_for_replacements

example, folder, last = sys.argv[1:]

class Run(paceline.Run):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, folder=folder)

    def __iter__(self):
        for step in super().__iter__():
            yield step
            if step.number == int(last):
                self.save()
                return
            wait_for_replacements(self)

paceline.Run = Run
torch.set_num_threads(1)
runpy.run_path(example, run_name="__main__")
"""


@pytest.mark.parametrize("name", EXAMPLES)
def test_deaths_and_a_resume_at_another_size_leave_no_trace_in_an_example(
    name: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    example = Path(__file__).parents[2] / "examples" / f"{name}.py"
    reference = train_alone(script, example, tmp_path / "alone", 0)
    three = (
        TrainingFaults()
        .kill(rank=1, step=2, where="before the sum")
        .kill(rank=0, step=5, where="in the commit")
    )
    first = run_training(script, example, tmp_path / "run", 9, workers=3, faults=three)
    assert first.exit_code == 0, first.output
    two = (
        TrainingFaults()
        .kill(rank=0, step=11, where="after the last bucket")
        .kill(rank=1, step=15, where="between steps")
    )
    second = run_training(script, example, tmp_path / "run", 0, workers=2, faults=two)
    # Where there are turns, each of them is counted, as 100 times its step and its number.
    last = 9 if reference.steps[-1].number < 100 else 999
    rest = [step for step in reference.steps if step.number > last]
    assert_survived(second, replace(reference, steps=rest), rtol=1e-10, atol=1e-12)
