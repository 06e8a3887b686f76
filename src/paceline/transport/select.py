"""Which transport a model gets: decided by all ranks together, in every generation.

Two ranks share a host when they run on one boot of one kernel, see each other's process ids, and
belong to one user: then each can open what the other has open, and they can share memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from paceline import env
from paceline.errors import UsageError
from paceline.group import Group, Membership, exchange
from paceline.transport.hosts import BetweenHosts, SharedMemory
from paceline.transport.interface import C10d, Transport, check_methods, describe
from paceline.transport.segment import Hosts, share_segment
from paceline.transport.shared_buckets import SLOT_BYTES, SLOTS, HostChannel, Peers

Kind = Literal["auto", "shared_memory", "c10d"]

log = logging.getLogger("paceline.transport")


def check_transport(wanted: str | Transport) -> Kind | Transport:
    """What was asked for, or an error if there is no such transport."""
    if not isinstance(wanted, str):
        return check_methods(wanted)
    if wanted not in get_args(Kind):
        names = ", ".join(repr(name) for name in get_args(Kind))
        raise UsageError(
            f"transport is {wanted!r}.", advice=f"Use one of {names}, or a transport object."
        )
    return cast("Kind", wanted)


class TransportChoice:
    """A transport that is chosen when it is first needed, because choosing takes all ranks.

    One rank alone may copy or load a wrapped model; only training it is done by all. Another
    generation has other ranks, so the choice is made again.
    """

    def __init__(
        self, membership: Membership, devices: Sequence[torch.device], wanted: Kind | Transport
    ) -> None:
        self._membership = membership
        self._devices = devices
        self._wanted = wanted
        self._generation = membership.generation
        self._chosen: Transport | None = None

    def get(self) -> Transport:
        """The transport; the first call in a generation is made by all ranks at one point."""
        generation = self._membership.generation
        if self._chosen is None or self._generation != generation:
            self._chosen = self._choose(is_first=self._generation == generation)
            self._generation = generation
        return self._chosen

    @property
    def description(self) -> str:
        if self._chosen is not None and self._generation == self._membership.generation:
            return describe(self._chosen)
        is_alone = self._membership.size == 1
        return "a world of one has nothing to send" if is_alone else "not chosen yet"

    def _choose(self, *, is_first: bool) -> Transport:
        if isinstance(self._wanted, str):
            return choose_transport(self._membership.group, self._devices, self._wanted)
        if not is_first:
            raise UsageError(
                f"The transport {describe(self._wanted)} belongs to a process group that was left.",
                advice="Use a transport by its name where the group changes.",
            )
        return self._wanted


def choose_transport(group: Group, devices: Sequence[torch.device], kind: Kind) -> Transport:
    """The fastest transport that all ranks can use, or the one asked for.

    All ranks of the group must call it. `kind` may differ between them: one rank that cannot or
    does not want to share memory decides for all.
    """
    if kind == "auto":
        kind = cast("Kind", check_transport(env.read(env.TRANSPORT_VARIABLE) or "auto"))
    if group.size() == 1:
        return C10d(group, "a world of one has nothing to send")
    others = ", ".join(sorted({device.type for device in devices if device.type != "cpu"}))
    elsewhere = f"the model is on {others}" if others else None
    if elsewhere and kind != "shared_memory":
        return C10d(group, elsewhere)  # the usual case there
    obstacle = "it was asked for" if kind == "c10d" else elsewhere or why_memory_cannot_be_shared()
    mine = [host_identity(), os.getpid(), obstacle, secrets.token_hex(8)]
    everyone = exchange(group, mine, torch.device("cpu"), "Choosing a transport")
    transport, why = _try_to_share(group, everyone)
    if transport is not None:
        keep_freed_memory()
        return transport
    if kind == "shared_memory":
        raise UsageError(
            f"Rank {group.rank()} asked for shared memory, but {why}.",
            advice="Use transport='auto' to fall back to torch.distributed in such a case.",
        )
    level = logging.INFO if kind == "c10d" else logging.WARNING
    if group.rank() == 0:
        log.log(level, "Gradients go through c10d instead of shared memory: %s.", why)
    return C10d(group, why)


def _try_to_share(group: Group, everyone: Sequence[list[str]]) -> tuple[Transport | None, str]:
    for rank, (_, _, obstacle, _) in enumerate(everyone):
        if obstacle:
            return None, f"on rank {rank} {obstacle}"
    hosts = group_by_host([entry[0] for entry in everyone], group.rank())
    if max(map(len, hosts.ranks_by_host)) == 1:
        return None, "every rank is on a host of its own"
    segment, problem = share_segment(group, hosts, [SLOT_BYTES] * SLOTS, "Sharing memory")
    if segment is None:
        return None, problem
    ranks = hosts.neighbours
    peers = Peers(group, ranks, [int(everyone[rank][1]) for rank in ranks])
    channel = HostChannel(segment, peers)
    if len(hosts.ranks_by_host) == 1:
        return SharedMemory(hosts, peers, channel), ""
    name = everyone[0][3]  # another one for every model
    return BetweenHosts(hosts, peers, channel, name), ""


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
    boot, namespace = platform.node(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return "/".join([boot, namespace, str(os.geteuid()), env.read(env.HOST_VARIABLE)])


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


# Parameters of mallopt(3), and their largest values: blocks from 32 MiB on are mapped one by one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM, _LARGEST_ON_HEAP = 2**31 - 1, 2**25


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, unless the environment has settled that; whether it did."""
    # Gradients move into their bucket in the middle of backward and are freed there. glibc gives
    # large blocks back to the system at once, and the next layer's gradient has its pages mapped
    # and cleared again: in a step of a 17M-parameter model that was 10,000 page faults and a tenth
    # of its time. The process's memory then stays near its peak, as with torch's allocator for
    # GPUs.
    if platform.libc_ver()[0] != "glibc" or env.has_malloc_settings():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    is_kept = mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM) == 1
    return bool(is_kept and mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP) == 1)
