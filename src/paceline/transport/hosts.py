"""Which ranks share a host, and so can share memory.

Two ranks share a host when they run on one boot of one kernel, see each other's process ids, and
belong to one user: then each can open what the other has open.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import env


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of each host, in rank order; hosts in the order of their first ranks."""

    ranks_by_host: tuple[tuple[int, ...], ...]
    mine: int
    """Which host this rank is on."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """All ranks of this host, this one included; the first leads."""
        return self.ranks_by_host[self.mine]

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.ranks_by_host)

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.ranks_by_host) if rank in ranks)


def group_by_host(identities: Sequence[str], rank: int) -> Hosts:
    """Which ranks are together, from what each says of its host."""
    ranks_by_identity: dict[str, list[int]] = {}
    for other, identity in enumerate(identities):
        ranks_by_identity.setdefault(identity, []).append(other)
    ranks_by_host = tuple(tuple(ranks) for ranks in ranks_by_identity.values())
    mine = next(host for host, ranks in enumerate(ranks_by_host) if rank in ranks)
    return Hosts(ranks_by_host, mine)


def host_identity() -> str:
    """The same text for ranks that can share memory, another for those that cannot."""
    boot = _read("/proc/sys/kernel/random/boot_id") or platform.node()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return "/".join([boot, namespace, str(os.geteuid()), env.read_host_override()])


def why_memory_cannot_be_shared() -> str | None:
    """What this machine lacks, if it lacks anything."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"shared memory needs Linux, and this is {platform.system()}"
    # Flags are plain stores after plain stores; only x86 promises that others see them in order.
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory is proven on x86-64 only, and this is {platform.machine()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:  # an old kernel, or a container that forbids it
        return f"processes cannot be watched: {error}"
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
