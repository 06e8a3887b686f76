"""Islands on two hosts with a network of their own: one that is cut off comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts import SOON_S, two_hosts

SCRIPT = """
import os, pathlib, time
import torch, paceline
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(64, 6, dtype=torch.float64)
net = torch.nn.Linear(6, 2).double()
island = os.environ["PACELINE_ISLAND"][0]
islands = paceline.Islands(every=4, timeout_s=2)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1),
                   TensorDataset(x, (x.sum(1) > 0).long()), global_batch=8, epochs=500,
                   options=paceline.RunOptions(islands=islands, progress="quiet"))
for step in run:
    with step:
        for a, b in step.batches():
            step.backward(cross_entropy(run.model(a), b))
    if run.membership.leads:
        pathlib.Path(f"at.{island}.new").write_text(str(step.number))
        os.replace(f"at.{island}.new", f"at.{island}")
    if os.path.exists("end"):
        if step.number % 4 == 0:
            break
    else:
        time.sleep(0.02)
"""


def wait_for(is_true: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not is_true():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.02)


def test_an_island_that_was_cut_off_continues_with_the_state_of_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def step_of(island: int) -> int:
        path = tmp_path / f"at.{island}"
        return int(path.read_text()) if path.exists() else 0

    with two_hosts(tmp_path) as hosts:

        def said() -> str:
            return "\n".join(host.output for host in hosts)

        for host in hosts:
            host.run(script, 2, flags=["--island", "host"])
        wait_for(lambda: min(map(step_of, (0, 1))) > 8, said)
        hosts[1].do("ip link set cable down")
        stuck: list[int] = []

        def goes_on_alone() -> bool:
            stuck.append(step_of(1))
            return step_of(0) > step_of(1) + 12

        wait_for(goes_on_alone, said)
        hosts[1].do("ip link set cable up")
        wait_for(lambda: step_of(1) > stuck[-1] + 12, said)
        (tmp_path / "end").touch()
        assert [host.finish() for host in hosts] == [0, 0]
