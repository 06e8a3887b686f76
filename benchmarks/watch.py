"""Cost of the live page for the training: ten open tabs against none, alternating.

    python -m benchmarks watch

A `Run` trains on all cores, and `paceline watch` shows its folder. In some intervals of steps ten
connections read the page's events as fast as they come. The server runs all the time; without a
page it reads nothing. Intervals come in pairs: one with tabs and one without, in alternating order,
and, to show the noise, two without. The result of an interval is its median step, so that a short
disturbance does not count; the result of the pairs is the median ratio, with its 95 % confidence
interval (from order statistics, for any distribution).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.run_overhead import with_run
from benchmarks.spread import slowest
from benchmarks.tables import print_table
from paceline import World
from paceline.testing import run_processes

WARM_UP_STEPS = 10
SETTLING_STEPS = 5
"""Not measured, after tabs were opened or closed."""


class Tabs:
    """Connections opened and closed through a file, because workers are other processes."""

    def __init__(self, folder: Path, count: int) -> None:
        self.wanted, self.are_open = folder / "wanted", folder / "open"
        self.shares: list[float] = []
        """What the server took of one core each time while they were open."""
        self._count, self._is_over = count, False
        self._connections: list[http.client.HTTPConnection] = []
        self._thread: threading.Thread | None = None

    def follow(self, address: str, server: int) -> None:
        """Open and close connections according to the file, in a thread; `server` is a process."""
        host, _, query = address.removeprefix("http://").partition("/?")
        arguments = (host, f"/events?{query}", server)
        self._thread = threading.Thread(target=self._follow, args=arguments)
        self._thread.start()

    def _follow(self, host: str, path: str, server: int) -> None:
        began_s, began_cpu_s = 0.0, 0.0
        while not self._is_over:
            if self.wanted.exists() and not self._connections:
                for _ in range(self._count):
                    connection = http.client.HTTPConnection(host)
                    connection.request("GET", path)
                    self._connections.append(connection)
                    reading = threading.Thread(target=self._read, args=[connection], daemon=True)
                    reading.start()
                self.are_open.touch()
                began_s, began_cpu_s = time.perf_counter(), cpu_s(server)
            elif not self.wanted.exists() and self._connections:
                passed_s = time.perf_counter() - began_s
                self.shares.append((cpu_s(server) - began_cpu_s) / passed_s)
                self._close()
                self.are_open.unlink()
            time.sleep(0.01)
        self._close()

    def _read(self, connection: http.client.HTTPConnection) -> None:
        try:
            response = connection.getresponse()
            while response.read1(2**16):
                pass
        except (OSError, AttributeError, ValueError, http.client.HTTPException):
            pass  # it was closed

    def _close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a reader may have closed it
                if (sock := connection.sock) is not None:
                    sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._connections = []

    def end(self) -> None:
        self._is_over = True
        if self._thread is not None:
            self._thread.join()


def cpu_s(process: int) -> float:
    """The processor seconds that a process has used."""
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def measure(
    world: World, name: str, tabs_open: list[bool], stretch: int, folder: str
) -> list[list[float]]:
    """The seconds of each step of each interval, on this rank."""
    torch.set_num_threads(1)
    tabs = Tabs(Path(folder), 0)
    steps = with_run(world, MODELS[name], f"{folder}/run", 0)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    seconds: list[list[float]] = []
    for is_wanted in tabs_open:
        if world.rank == 0:
            tabs.wanted.touch() if is_wanted else tabs.wanted.unlink(missing_ok=True)
            while tabs.are_open.exists() != is_wanted:
                time.sleep(0.01)
        world.barrier()
        for _ in range(SETTLING_STEPS):
            next(steps)
        begins_s = [time.perf_counter()]
        for _ in range(stretch):
            next(steps)
            begins_s.append(time.perf_counter())
        seconds.append([end_s - begin_s for begin_s, end_s in pairwise(begins_s)])
    steps.close()  # type: ignore[attr-defined]
    return seconds


def plan_stretches(pairs: int) -> list[bool]:
    """Whether tabs are open: pairs with and without, and pairs without, alternating."""
    return [
        is_open
        for number in range(pairs)
        for is_open in ((False, True, False, False) if number % 2 else (True, False, False, False))
    ]


def median_interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, as two of the values."""
    ordered, count = sorted(values), len(values)
    first = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[first], ordered[count - 1 - first]


def row_of(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The summary of the ratios of some pairs."""
    ratios = [first / second for first, second in pairs]
    low, high = median_interval(ratios)
    return {
        "pairs": name,
        "ms per step": " / ".join(
            f"{statistics.median(each) * 1e3:.1f}" for each in zip(*pairs, strict=True)
        ),
        "ratio": round(statistics.median(ratios), 3),
        "95 % of its median": f"{low:.3f} to {high:.3f}",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt-17M", choices=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--tabs", type=int, default=10, help="open pages (default 10)")
    parser.add_argument("--steps", type=int, default=40, help="steps per interval (default 40)")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of intervals (default 60)")
    parser.add_argument("--quick", action="store_true", help="a short test that it runs")


def main(args: argparse.Namespace) -> dict[str, Any]:
    stretch, pairs = (4, 2) if args.quick else (args.steps, args.pairs)
    tabs_open = plan_stretches(pairs)
    folder = Path(tempfile.mkdtemp(prefix="paceline-watch-"))
    (folder / "run").mkdir()
    (folder / "run" / "events").mkdir()
    command = [sys.executable, "-m", "paceline", "watch", str(folder / "run"), "--no-open"]
    tabs = Tabs(folder, args.tabs)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        tabs.follow(server.stdout.readline().split()[-1], server.pid)
        arguments = (args.model, tabs_open, stretch, str(folder))
        ranks = run_processes(args.ranks, measure, *arguments, timeout_s=3600)
    finally:
        tabs.end()
        server.terminate()
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)
    medians = [statistics.median(slowest(stretches)) for stretches in zip(*ranks, strict=True)]
    pairs_found = list(zip(medians[::2], medians[1::2], strict=True))
    with_tabs = [  # every other pair began without
        (second, first) if number % 2 else (first, second)
        for number, (first, second) in enumerate(pairs_found[::2])
    ]
    rows = [
        row_of(f"{args.tabs} tabs / none", with_tabs),
        row_of("none / none", pairs_found[1::2]),
    ]
    share = statistics.median(tabs.shares)
    title = (
        f"{args.model}, {args.ranks} ranks, {pairs} pairs of {stretch} steps; with tabs the server "
        f"takes {share:.1%} of one core; {os.getloadavg()[2]:.0f} processes wanted to run"
    )
    print_table(title, rows)
    return {title: rows}
