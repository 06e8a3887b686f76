"""torchrun on two hosts, each in a network namespace of its own, starts workers of Paceline."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import torch
from torch import nn

from tests.hosts import ADDRESSES, two_hosts

STEPS = 4
SCRIPT = f"""
import json, torch, paceline
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
world = paceline.init_process_group()
model = paceline.DistributedDataParallel(nn.Linear(20, 3))
rows = torch.randn(24, 20, generator=torch.Generator().manual_seed(5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range({STEPS}):
    optimizer.zero_grad()
    model(rows[world.rank :: world.size]).square().mean().backward()
    optimizer.step()
place = [world.rank, world.size, world.local_rank, world.node]
# In one piece: two workers write to one file.
print("ended " + json.dumps([place, model.bias.tolist()]) + "\\n", end="", flush=True)
"""


def train_alone() -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(20, 3)
    rows = torch.randn(24, 20, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()
    return net.bias.tolist()


def test_workers_of_two_hosts_train_what_one_process_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with two_hosts(tmp_path) as hosts:
        for host in hosts:
            place = f"--nnodes 2 --node-rank {host.number} --master-addr {ADDRESSES[0]}"
            run = f"{sys.executable} -m torch.distributed.run {place} --nproc-per-node 2 {script}"
            host.do(f"cd {tmp_path}; {run} > out{host.number} 2>&1 < /dev/null & launcher=$!")
        codes = [host.finish(250) for host in hosts]
        said = [host.output for host in hosts]
    assert codes == [0, 0], "\n".join(said)
    ended = [
        json.loads(line.partition("ended ")[2])
        for output in said
        for line in output.splitlines()
        if "ended " in line
    ]
    assert sorted(place for place, _ in ended) == [[r, 4, r % 2, r // 2] for r in range(4)]
    for _, bias in ended:
        torch.testing.assert_close(bias, train_alone(), rtol=1e-5, atol=1e-6)
