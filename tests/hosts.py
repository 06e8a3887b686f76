"""Hosts for tests: network, process ids and names of their own, a cable between them.

Namespaces of the kernel make them, which takes root.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SPACES = ("unshare", "--net", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
SOON_S = 120.0


@functools.cache
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


class Host:
    """One of two hosts: a shell that does what it is told, and the launcher that it starts."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        names, order = folder / f"hosts{number}", folder / "nsswitch.conf"
        # As Debian does: nobody else could reach that address. And no network is asked for names.
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{number}\n")
        order.write_text("hosts: files\npasswd: files\n")
        setup = f"""
            mount --bind {names} /etc/hosts && mount --bind {order} /etc/nsswitch.conf || exit 90
            hostname host{number} && ip link set lo up || exit 91
            echo waiting
            while read -r order; do eval "$order"; done
        """
        self.process = subprocess.Popen(
            [*SPACES, "sh", "-c", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "waiting\n"

    def do(self, order: str) -> None:
        """Let the shell do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def plug_in(self) -> None:
        self.do(f"ip addr add {ADDRESSES[self.number]}/24 dev cable && ip link set cable up")

    def run(
        self, script: Path, workers: int, *arguments: object, flags: Sequence[str] = ()
    ) -> None:
        """Start this host's launcher."""
        launch = [sys.executable, "-m", "paceline", "run", "--no-label", "--nnodes", "2"]
        where = ["--node-rank", str(self.number), "--master-addr", ADDRESSES[0]]
        command = [*launch, *where, *flags, "--workers", str(workers), str(script)]
        text = " ".join([*command, *map(str, arguments)])
        self.do(f"cd {self.folder}; {text} > out{self.number} 2>&1 < /dev/null & launcher=$!")

    def kill_launcher(self) -> None:
        self.do("kill -9 $launcher")

    @property
    def output(self) -> str:
        path = self.folder / f"out{self.number}"
        return path.read_text() if path.exists() else ""

    def finish(self, within_s: float = SOON_S) -> int:
        """Wait for the launcher to end; its exit code."""
        code = self.folder / f"code{self.number}"
        self.do(f"wait $launcher; echo $? > {code}.new; mv {code}.new {code}")
        deadline_s = time.monotonic() + within_s
        while not code.exists():
            assert time.monotonic() < deadline_s, f"host {self.number} still runs:\n{self.output}"
            time.sleep(0.02)
        text = code.read_text()
        code.unlink()
        return int(text)

    def count_processes(self) -> int:
        """How many there are beside the shell."""
        name = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        shell = Path(name).read_text().split()[0]
        return len(Path(f"/proc/{shell}/task/{shell}/children").read_text().split())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Two hosts with a cable between them, which is gone when they are."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        hosts = []
        for number in range(2):
            hosts.append(Host(number, folder))
            stack.callback(hosts[-1].close)
        ends = [str(host.process.pid) for host in hosts]
        link = ["link", "add", "cable", "netns", ends[0]]
        peer = ["peer", "name", "cable", "netns", ends[1]]
        subprocess.run(["ip", *link, "type", "veth", *peer], check=True, timeout=60)
        for host in hosts:
            host.plug_in()
        yield hosts
