"""Two hosts for real: network, process ids and names of their own, a cable between them.

Namespaces of the kernel make them, which takes root. Without it the same is tested with a pretended
host identity, in tests/processes/test_transport_processes.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SPACES = ("unshare", "--net", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
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


def why_not() -> str:
    """What is missing for hosts of our own."""
    tools = [tool for tool in ("unshare", "ip", "mount") if shutil.which(tool) is None]
    if tools:
        return f"there is no {tools[0]} here"
    if os.geteuid() != 0:
        return "network namespaces take root"
    steps = [
        "mount --bind /etc/hosts /etc/hosts",
        "mount --bind /etc/nsswitch.conf /etc/nsswitch.conf",
        "hostname probe",
        "ip link set lo up",
        "ip link add cable type veth peer name other",
    ]
    probe = [*SPACES, "sh", "-c", " && ".join(steps)]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    return "" if tried.returncode == 0 else f"namespaces are refused here: {tried.stderr.strip()}"


@pytest.fixture(scope="module")
def _namespaces() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


class Host:
    """One host, which waits until its cable is plugged in and then runs the script."""

    def __init__(self, number: int, folder: Path, workers: int) -> None:
        names = folder / f"hosts{number}"
        order = folder / "nsswitch.conf"  # a host that asks no network for names
        setup = f"""
            mount --bind {names} /etc/hosts && mount --bind {order} /etc/nsswitch.conf || exit 90
            hostname host{number} && ip link set lo up || exit 91
            echo waiting
            read plugged_in
            ip addr add {ADDRESSES[number]}/24 dev cable && ip link set cable up || exit 92
            exec "$@" 2>&1
        """
        run = [sys.executable, "-m", "paceline", "run", "--no-label", "--nnodes", "2"]
        where = ["--node-rank", str(number), "--master-addr", ADDRESSES[0]]
        command = [*run, *where, "--workers", str(workers), str(folder / "train.py"), str(STEPS)]
        self.process = subprocess.Popen(
            [*SPACES, "sh", "-c", setup, "setup", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "waiting\n"


def connect(one: Host, other: Host) -> None:
    """Plug a cable in; it is gone when the hosts are."""
    ends = [str(host.process.pid) for host in (one, other)]
    link = ["link", "add", "cable", "netns", ends[0]]
    peer = ["peer", "name", "cable", "netns", ends[1]]
    subprocess.run(["ip", *link, "type", "veth", *peer], check=True, timeout=60)


@pytest.fixture
def hosts(_namespaces: None, tmp_path: Path) -> Iterator[list[Host]]:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    for number in range(len(ADDRESSES)):  # as Debian does: nobody else could reach that address
        (tmp_path / f"hosts{number}").write_text(f"127.0.0.1 localhost\n127.0.1.1 host{number}\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files\npasswd: files\n")
    started: list[Host] = []
    try:
        for number, workers in enumerate((2, 1)):
            started.append(Host(number, tmp_path, workers))
        connect(*started)
        yield started
    finally:
        for host in started:
            host.process.kill()
            host.process.communicate()


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


def test_two_hosts_share_memory_inside_and_send_each_gradient_once(hosts: list[Host]) -> None:
    printed: list[Any] = []
    for host in hosts:
        assert host.process.stdin is not None
        host.process.stdin.write("yes\n")
        host.process.stdin.flush()
    deadline_s = time.monotonic() + 90
    for host in hosts:
        output, _ = host.process.communicate(timeout=max(1, deadline_s - time.monotonic()))
        assert host.process.returncode == 0, output
        printed += [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert len(printed) == 3
    for transport, share, values in printed:
        assert transport == "shared memory on each of 2 hosts, c10d between their leaders"
        # A sum over two leaders takes every byte across once; the rest is what TCP adds.
        assert 0.9 < share < 1.3
        assert values == printed[0][2]
        assert values == pytest.approx(train_alone(), rel=1e-4, abs=1e-6)
