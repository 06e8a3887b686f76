"""Which transport a model gets, decided by all ranks together; and the one that shares memory.

    ready --(slices summed into the leader's bucket)--> summed on this host
          --(the leaders' all-reduce)--> arrived --(every rank copies the leader's)--> the sum

Where there are several hosts, only their leaders' sums cross the network, once per host instead of
once per rank. Two ranks share a host when they run on one boot of one kernel, see each other's
process ids, and belong to one user: then each can open what the other has open.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import platform
import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from paceline import env
from paceline.errors import UsageError
from paceline.group import (
    Group,
    Membership,
    Pending,
    broadcast,
    exchange,
    explain_failure,
    gloo_subgroup,
    have_left,
)
from paceline.transport.interface import (
    Buckets,
    C10d,
    Flat,
    Reduction,
    Scattered,
    Transport,
    check_methods,
    describe,
)
from paceline.transport.segment import COPIED, Hosts, Segment, share_memory, share_segment
from paceline.transport.shared_buckets import (
    SLOTS,
    WORDS_EVERY_S,
    HostChannel,
    Peers,
    SharedBuckets,
    SharedSum,
    Work,
)

log = logging.getLogger("paceline.transport")


class SharedMemory:
    """All ranks are on one host.

    Buckets are placed in memory that the ranks share. Buffers that were not placed, and buckets for
    which no memory can be had, are left to c10d.
    """

    has_cheap_messages = True

    def __init__(self, hosts: Hosts, peers: Peers, channel: HostChannel) -> None:
        self.group = peers.group
        self.description = f"shared memory between the {self.group.size()} ranks of this host"
        self.hosts = hosts
        self.peers = peers
        self.channel = channel
        self._unplaced = C10d(self.group, "it was not placed")
        self._has_complained = False
        weakref.finalize(self, peers.close)

    def place(self, flats: Sequence[Flat], what: str) -> Buckets:
        """Memory in which buckets are summed where they lie."""
        self.meet(what)
        segment, problem = share_segment(self.group, self.hosts, flats, what)
        if segment is not None:
            return self.make_buckets(segment)
        if not self._has_complained and self.group.rank() == 0:
            log.warning("Gradients go through c10d instead of shared memory: %s.", problem)
        self._has_complained = True
        self.description = f"c10d: {problem}"
        return Scattered(self._unplaced, len(flats))

    def share(self, used_bytes: int, total_bytes: int, what: str) -> mmap.mmap | None:
        """Memory that all ranks map, and that outlives each of them; all begin to use it together.

        None where it is not to be had. Its first line is taken.
        """
        self.meet(what)
        return share_memory(self.group, self.hosts, used_bytes, total_bytes, what)[0]

    def sum(self, flat: Tensor, what: str) -> Reduction:
        self.meet(what)
        return self._unplaced.sum(flat, what)

    def gather(self, flat: Tensor, what: str) -> Reduction:
        self.meet(what)
        return self._unplaced.gather(flat, what)

    def copy(
        self, flat: Tensor, root: int, what: str, ahead: Callable[[], Sequence[int]] = list
    ) -> None:
        self.channel.copy(flat.view(torch.uint8), root, what, ahead)

    def make_buckets(self, segment: Segment) -> SharedBuckets:
        return SharedBuckets(segment, self.peers)

    def meet(self, what: str, look: Callable[[], object] = bool) -> None:
        """To be called before waiting in the process group, which notices no stopped rank."""
        self.channel.meet(what, look)


class BridgedBuckets(SharedBuckets):
    """Buckets that are summed on this host first, and then with those of the other hosts."""

    applies_weights = False  # this host does not know the weights of the others
    writes_to_all = False  # they copy the leader's, once it holds the sum of all hosts

    def __init__(self, segment: Segment, peers: Peers, leaders: Any) -> None:
        super().__init__(segment, peers)
        self._leaders = leaders
        self._copied = segment.places.rows[COPIED]
        """The leader's says that the sum has arrived; the others' that they have taken it."""
        self._unsent: deque[tuple[int, str]] = deque()
        self._sent: deque[tuple[int, int, Pending, str]] = deque()
        self._abroad = [rank for rank in range(self._size) if rank not in peers.ranks]
        self._awaited = (0, 0)
        """Which bucket, in which turn, was on its way when this leader last waited."""
        self._look_at_s = 0.0

    def begin(self, number: int, buffer: Tensor, work: Work, what: str) -> SharedSum:
        if self.position == 0:
            # Before it begins, which may find it summed already and send it.
            self._unsent.append((number, what))
        return super().begin(number, buffer, work, what)

    def gather(self, number: int, buffer: Tensor, what: str) -> Reduction:
        return C10d(self.group, "slices belong to single ranks").gather(buffer, what)

    def advance(self) -> None:
        super().advance()
        while self._unsent and self._is_summed_here(self._unsent[0][0]):
            number, what = self._unsent.popleft()
            what = f"{what}, between hosts,"
            flat = self._leaders_bucket(number)
            try:
                work = self._leaders.allreduce([flat])
            except RuntimeError as error:
                raise explain_failure(self.group, what, error) from error
            pending = Pending(work, self.group, what, flat.is_cpu)
            self._sent.append((number, self.turns[number], pending, what))
        while self._sent and self._sent[0][2].is_completed():
            number, turn, pending, _ = self._sent.popleft()
            # It has ended, perhaps with an error, which this raises.
            pending.wait()
            self.words[self._copied[0] + number] = turn

    def has_arrived(self, number: int, turn: int) -> bool:
        # The leader's gradients are what the others copy: it may not touch them before all have.
        rows = [self._copied[self.position]] if self.position else self._copied
        return all(self.words[row + number] >= turn for row in rows)

    def is_done(self, number: int, turn: int) -> bool:
        self.advance()
        words, mine = self.words, self._copied[self.position] + number
        if words[self._copied[0] + number] < turn:
            if self._sent:
                self._look_abroad()
            return False
        if self.position and words[mine] < turn:
            is_private = words[self.ready[self.position] + number] & 1
            own = self.spare(number) if is_private else self.homes[number]
            own.copy_(self._leaders_bucket(number))
            words[mine] = turn
        return self.has_arrived(number, turn)

    def missing(self, number: int, turn: int) -> list[int]:
        waits_for = self._copied if self.position == 0 else self._copied[:1]
        return super().missing(number, turn) or self._behind(waits_for, number, turn)

    def _look_abroad(self) -> None:
        """Raise if a rank of another host has given up, while its leader's connection stands.

        A leader that is stopped is noticed by its neighbours only; this is how others hear of it.
        """
        number, turn, _, what = self._sent[0]
        now_s = time.monotonic()
        if self._awaited != (number, turn):
            self._awaited, self._look_at_s = (number, turn), now_s + WORDS_EVERY_S
        elif now_s > self._look_at_s:
            self._look_at_s = now_s + WORDS_EVERY_S
            if have_left(self.group, self._abroad):
                cause = RuntimeError("a rank of another host has left")
                raise explain_failure(self.group, what, cause)

    def _is_summed_here(self, number: int) -> bool:
        return super().has_arrived(number, self.turns[number])

    def _leaders_bucket(self, number: int) -> Tensor:
        is_spare = bool(self.words[self.ready[0] + number] & 1)
        return self.segment.bucket(0, number, spare=is_spare)


class BetweenHosts(SharedMemory):
    """Ranks on several hosts, at least two of them on one."""

    def __init__(self, hosts: Hosts, peers: Peers, channel: HostChannel, name: str) -> None:
        super().__init__(hosts, peers, channel)
        group = self.group
        count = len(hosts.ranks_by_host)
        self.description = f"shared memory on each of {count} hosts, c10d between their leaders"
        self._leaders: Any = None
        if group.rank() in hosts.leaders:
            self._leaders = gloo_subgroup(group, hosts.leaders, name)

    def make_buckets(self, segment: Segment) -> SharedBuckets:
        return BridgedBuckets(segment, self.peers, self._leaders)

    def copy(
        self, flat: Tensor, root: int, what: str, ahead: Callable[[], Sequence[int]] = list
    ) -> None:
        """From the root to its host, from its leader to the other leaders, from these to all."""
        hosts, source, tensor = self.hosts, self.hosts.host_of(root), flat.view(torch.uint8)
        if hosts.mine == source:
            self.channel.copy(tensor, root, what, ahead)
        if self._leaders is not None:
            broadcast(self._leaders, tensor, source, what, blame=self.group)
        if hosts.mine != source:
            self.channel.copy(tensor, hosts.neighbours[0], what, ahead)


Kind = Literal["auto", "shared_memory", "c10d"]


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
    wanted, host = map(env.read, (env.TRANSPORT_VARIABLE, env.HOST_VARIABLE))
    if kind == "auto":
        kind = cast("Kind", check_transport(wanted or "auto"))
    if group.size() == 1:
        return C10d(group, "a world of one has nothing to send")
    others = ", ".join(sorted({device.type for device in devices if device.type != "cpu"}))
    elsewhere = f"the model is on {others}" if others else None
    if elsewhere and kind != "shared_memory":
        return C10d(group, elsewhere)  # the usual case there
    obstacle = "it was asked for" if kind == "c10d" else elsewhere or why_memory_cannot_be_shared()
    mine = [host_identity(host), os.getpid(), obstacle, secrets.token_hex(8)]
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
    ranks = hosts.neighbours
    segment, problem = share_segment(group, hosts, SLOTS, "Sharing memory")
    if segment is None:
        return None, problem
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


def host_identity(name: str = "") -> str:
    """The same text for ranks that can share memory, another for those that cannot; `name` sets
    ranks of one machine apart."""
    boot, namespace = platform.node(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return "/".join([boot, namespace, str(os.geteuid()), name])


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
