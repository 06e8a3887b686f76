"""The workers' use of this machine, measured by the system and not by the run, at no cost for it.

Linux counts memory and CPU time of a process; rates need two measurements, so the first has none.
`nvidia-smi` measures GPUs, if it is installed.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from paceline import env
from paceline.show.report.run_data import RankTotals

LEAST_BETWEEN_S = 1.0
"""Rates are averaged over at least this time."""
GPU_PERIOD_S, GPU_PATIENCE_S, NETWORK_PERIOD_S = 5.0, 3.0, 2.0
QUERY = "index,utilization.gpu,memory.used"


class Usage(NamedTuple):
    """What one worker uses; None where unknown."""

    memory_bytes: int | None = None
    cores: float | None = None
    """CPU time per elapsed time: 2.0 means two busy cores."""
    gpu_share: float | None = None
    gpu_bytes: int | None = None
    network_bytes_per_s: float | None = None
    """Sent and received over TCP, including to workers of the same machine."""


class Machine:
    """Measures this machine, at limited rates."""

    def __init__(self) -> None:
        self._before: dict[object, tuple[float, float, float | None]] = {}
        """By quantity: the time of the last measurement, its count, and the rate then."""
        self._gpus: dict[int, tuple[float, int]] = {}
        self._gpus_due_s = 0.0
        self._sockets: dict[str, int] = {}
        self._counted: dict[int, float | None] = {}
        """Rates by process, until the sockets are read again."""
        self._sockets_due_s = 0.0
        self._smi = shutil.which("nvidia-smi")

    def measure(self, rank: RankTotals) -> Usage:
        if not rank.is_here:
            return Usage()
        memory = cores = None
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{rank.pid}/statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGE_SIZE")
            cores = self._rate(rank.pid, env.read_process(rank.pid)[1])
        device = re.fullmatch(r"cuda:(\d{1,3})", rank.device)
        share, used = (self._read_gpus().get(int(device[1])) if device else None) or (None, None)
        return Usage(memory, cores, share, used, self._network_bytes_per_s(rank.pid))

    def _network_bytes_per_s(self, pid: int) -> float | None:
        if time.monotonic() >= self._sockets_due_s:
            self._sockets_due_s, self._sockets = time.monotonic() + NETWORK_PERIOD_S, {}
            with contextlib.suppress(OSError, struct.error):
                self._sockets = read_sockets()
            self._counted.clear()
        if pid not in self._counted:
            total = 0
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        name = os.readlink(entry.path)
                        total += self._sockets.get(name, 0) if name.startswith("socket:") else 0
            self._counted[pid] = self._rate(("network", pid), total) if self._sockets else None
        return self._counted[pid]

    def _rate(self, what: object, count: float) -> float | None:
        now_s = time.monotonic()
        then_s, before, growth = self._before.get(what, (-1.0, 0.0, None))
        if then_s >= 0 and now_s - then_s < LEAST_BETWEEN_S:
            return growth
        growth = max(0.0, count - before) / (now_s - then_s) if then_s >= 0 else None
        if len(self._before) > 4096:  # most of them are of processes that have ended
            self._before.clear()
        self._before[what] = now_s, count, growth
        return growth

    def _read_gpus(self) -> dict[int, tuple[float, int]]:
        """By index: the share of time in which the GPU computes, and the memory in use."""
        if self._smi is not None and time.monotonic() >= self._gpus_due_s:
            self._gpus_due_s, self._gpus = time.monotonic() + GPU_PERIOD_S, {}
            command = [self._smi, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                said = subprocess.run(
                    command, capture_output=True, text=True, timeout=GPU_PATIENCE_S, check=True
                )
                for index, share, mib in csv.reader(said.stdout.splitlines()):
                    self._gpus[int(index)] = float(share) / 100, int(mib) * 2**20
        return self._gpus


def read_sockets() -> dict[str, int]:
    """Bytes sent and received by each TCP socket, by its name in /proc.

    Queried by netlink, as `ss --info` does: see sock_diag(7) and linux/inet_diag.h.
    """
    found = dict[str, int]()
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as netlink:
            netlink.settimeout(1.0)
            wanted = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0xFFF)
            request = wanted + bytes(48)
            netlink.send(struct.pack("=IHHII", 16 + len(request), BY_FAMILY, DUMP, 1, 0) + request)
            is_over = False
            while not is_over:
                data = netlink.recv(2**18)
                while len(data) >= 16:
                    length, kind = struct.unpack_from("=IH", data)
                    is_over |= kind in (DONE, ERROR) or length < 16
                    if is_over:
                        break
                    name, count = _read_socket(data[16:length])
                    found[name] = count
                    data = data[(length + 3) & ~3 :]
    return found


SOCK_DIAG, BY_FAMILY, DUMP, INFO, ERROR, DONE = 4, 20, 0x301, 2, 2, 3
"""Constants of netlink."""
MESSAGE_BYTES, INODE_AT, COUNTS_AT = 72, 68, 120
"""The size of `inet_diag_msg`, and the offsets of the inode in it and of `tcpi_bytes_acked` in
`tcp_info`."""


def _read_socket(message: bytes) -> tuple[str, int]:
    (inode,) = struct.unpack_from("=I", message, INODE_AT)
    at, count = MESSAGE_BYTES, 0
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == INFO and length >= 4 + COUNTS_AT + 16:
            count = sum(struct.unpack_from("=QQ", message, at + 4 + COUNTS_AT))
        at += max(4, (length + 3) & ~3)
    return f"socket:[{inode}]", count
