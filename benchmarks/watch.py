"""What a live page costs the training: ten tabs open against none, taking turns.

    python -m benchmarks watch

A `Run` trains on all cores, and `paceline watch` shows its folder. In every other stretch of steps
ten connections take the page's events as fast as they come. The server runs all the time; without
a page it reads nothing. A third kind, again without tabs, shows what chance makes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.run_overhead import with_run
from benchmarks.spread import ratio, rotated, slowest
from benchmarks.tables import print_table
from paceline import World
from paceline.testing import run_processes

NOBODY, STILL_NOBODY = "no tab", "still no tab"
WARM_UP_STEPS = 10


class Tabs:
    """Connections that a file opens and closes: those who train are in other processes."""

    def __init__(self, folder: Path, count: int) -> None:
        self.wanted, self.are_open = folder / "wanted", folder / "open"
        self.received = 0
        self._count, self._is_over = count, False
        self._connections: list[http.client.HTTPConnection] = []
        self._thread: threading.Thread | None = None

    def follow(self, address: str) -> None:
        """Open and close connections as the file says, in a thread."""
        host, _, query = address.removeprefix("http://").partition("/?")
        self._thread = threading.Thread(target=self._follow, args=(host, f"/events?{query}"))
        self._thread.start()

    def _follow(self, host: str, path: str) -> None:
        while not self._is_over:
            if self.wanted.exists() and not self._connections:
                for _ in range(self._count):
                    connection = http.client.HTTPConnection(host)
                    connection.request("GET", path)
                    self._connections.append(connection)
                    reading = threading.Thread(target=self._read, args=[connection], daemon=True)
                    reading.start()
                self.are_open.touch()
            elif not self.wanted.exists() and self._connections:
                self._close()
                self.are_open.unlink()
            time.sleep(0.01)
        self._close()

    def _read(self, connection: http.client.HTTPConnection) -> None:
        try:
            response = connection.getresponse()
            while piece := response.read1(2**16):
                self.received += len(piece)
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


def measure(
    world: World, name: str, kinds: list[str], stretch: int, rounds: int, folder: str
) -> dict[str, list[float]]:
    """The seconds of each stretch, by kind, on this rank."""
    torch.set_num_threads(1)
    tabs = Tabs(Path(folder), 0)
    steps = with_run(world, MODELS[name], f"{folder}/run", 0)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in rotated(kinds, number):
            is_wanted = kind not in (NOBODY, STILL_NOBODY)
            if world.rank == 0:
                tabs.wanted.touch() if is_wanted else tabs.wanted.unlink(missing_ok=True)
                while tabs.are_open.exists() != is_wanted:
                    time.sleep(0.01)
            world.barrier()
            begin_s = time.perf_counter()
            for _ in range(stretch):
                next(steps)
            seconds[kind].append(time.perf_counter() - begin_s)
    steps.close()  # type: ignore[attr-defined]
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt-17M", choices=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--tabs", type=int, default=10, help="open pages (default 10)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a stretch (default 30)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="see that it runs")


def main(args: argparse.Namespace) -> dict[str, Any]:
    stretch, rounds = (4, 2) if args.quick else (args.steps, args.rounds)
    kinds = [NOBODY, STILL_NOBODY, f"{args.tabs} tabs"]
    folder = Path(tempfile.mkdtemp(prefix="paceline-watch-"))
    (folder / "run").mkdir()
    (folder / "run" / "events").mkdir()
    command = [sys.executable, "-m", "paceline", "watch", str(folder / "run"), "--no-open"]
    tabs = Tabs(folder, args.tabs)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        tabs.follow(server.stdout.readline().split()[-1])
        arguments = (args.model, kinds, stretch, rounds, str(folder))
        ranks = run_processes(args.ranks, measure, *arguments, timeout_s=3600)
    finally:
        tabs.end()
        server.terminate()
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)
    seconds = {kind: slowest([rank[kind] for rank in ranks]) for kind in kinds}
    rows = []
    for kind, times in seconds.items():
        against = ratio(times, seconds[NOBODY])
        rows.append(
            {
                "open": kind,
                "ms per step": round(statistics.median(times) / stretch * 1e3, 2),
                f"/ {NOBODY}": round(against.median, 3),
                "quartiles": f"{against.low:.3f} to {against.high:.3f}",
            }
        )
    title = f"{args.model}, {args.ranks} ranks, stretches of {stretch} steps"
    print_table(f"{title}; {tabs.received / 1e6:.1f} MB of events were taken", rows)
    return {title: rows}
