"""Islands on two hosts with a network of their own: cut off and back, and on a slow link."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


SLOW_SCRIPT = """
import json, os, sys, time
import torch, paceline
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
steps, has_islands = int(sys.argv[1]), sys.argv[2] == "islands"
net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
x = torch.randn(16 * steps, 256)
islands = paceline.Islands(every=30, bits=16) if has_islands else None
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.01), TensorDataset(x), epochs=1,
                   global_batch=16, options=paceline.RunOptions(islands=islands, progress="quiet"))
times = []
for step in run:
    with step:
        for (a,) in step.batches():
            step.backward((run.model(a) - a).square().mean())
    times.append(time.monotonic())
if run.membership.leads:
    # Of islands whole rounds; otherwise all steps but the first ones, which lay out buckets.
    first = 30 if has_islands else 3
    per_s = 16 * (len(times) - first) / (times[-1] - times[first - 1])
    with open(f"{sys.argv[2]}.{os.environ.get('PACELINE_ISLAND', '0')[0]}", "w") as file:
        json.dump(per_s, file)
"""


@pytest.mark.skipif(shutil.which("tc") is None, reason="there is no tc here")
def test_on_a_link_of_20_mbit_islands_train_five_times_as_many_samples(tmp_path: Path) -> None:
    """2 MB of gradients take about 0.8 s on it, so a busy machine hardly matters."""
    script = tmp_path / "train.py"
    script.write_text(SLOW_SCRIPT)
    samples_per_s = {}
    for kind, steps, flags in (("plain", 8, []), ("islands", 90, ["--island", "host"])):
        with two_hosts(tmp_path) as hosts:
            for host in hosts:
                host.do("tc qdisc add dev cable root tbf rate 20mbit burst 64kb latency 200ms")
                host.run(script, 1, steps, kind, flags=flags)
            assert [host.finish(300.0) for host in hosts] == [0, 0], hosts[0].output
        samples_per_s[kind] = json.loads((tmp_path / f"{kind}.0").read_text())
    assert samples_per_s["islands"] >= 5 * samples_per_s["plain"], samples_per_s
