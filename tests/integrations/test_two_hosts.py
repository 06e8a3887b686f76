"""Two hosts for real share memory inside each, and send what must be sent.

Where namespaces are not to be had, the same is tested with a pretended host identity, in
tests/processes/test_transport_processes.py.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hosts import two_hosts

STEPS = 8
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import paceline

def sent_bytes():
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "cable:")

torch.set_num_threads(1)
torch.manual_seed(0)
world = paceline.init_process_group()
net = nn.Sequential(nn.Linear(200, 500), nn.Tanh(), nn.Linear(500, 10))
model = paceline.DistributedDataParallel(net, bucket_cap_mb=0.1)
rows = torch.randn(24, 200, generator=torch.Generator().manual_seed(5))
before = 0
for step in range(int(sys.argv[1]) + 2):
    if step == 2:  # the layout of buckets is agreed on by then
        before = sent_bytes()
    model.zero_grad()
    mine = rows[world.rank :: world.size]
    with model.weighted(len(mine)):
        model(mine).square().mean(dim=1).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.05)
gradients = sum(param.numel() for param in model.parameters()) * 4
share = (sent_bytes() - before) / int(sys.argv[1]) / gradients
print(json.dumps([model.transport, share, net[2].bias.tolist()]), flush=True)
"""


def train_alone() -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 500), nn.Tanh(), nn.Linear(500, 10))
    rows = torch.randn(24, 200, generator=torch.Generator().manual_seed(5))
    for _ in range(STEPS + 2):
        net.zero_grad()
        net(rows).square().mean().backward()
        with torch.no_grad():
            for param in net.parameters():
                param.sub_(param.grad, alpha=0.05)
    values: list[float] = net[2].bias.tolist()
    return values


def test_two_hosts_share_memory_inside_and_send_each_gradient_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    printed: list[Any] = []
    with two_hosts(tmp_path) as hosts:
        for host, workers in zip(hosts, (2, 1), strict=True):
            host.run(script, workers, STEPS)
        for host in hosts:
            assert host.finish() == 0, host.output
            printed += [json.loads(x) for x in host.output.splitlines() if x.startswith("[")]
    assert len(printed) == 3
    for transport, share, values in printed:
        assert transport == "shared memory on each of 2 hosts, c10d between their leaders"
        # A sum over two leaders takes every byte across once; the rest is what TCP adds.
        assert 0.9 < share < 1.3
        assert values == printed[0][2]
        assert values == pytest.approx(train_alone(), rel=1e-4, abs=1e-6)
