"""One piece of memory that all ranks of a host have mapped, and what lies where in it.

    header | status by rank | ready by rank | summed by rank | copied by rank | weights by rank |
    buckets of rank 0 | buckets of rank 1 | ... | spare buckets of rank 0 | ...

It is a file that never has a name: the leader creates it in memory, the others open it through
the leader's entry in /proc, which only the same user can. So nothing is ever left behind, however
a rank ends. A random number at its beginning proves that it is the right one.

Every rank writes its own words only, and they lie on cache lines of their own. Spare buckets
cost nothing until they are touched: they are used while other code still holds a gradient of an
earlier step that lives in the bucket itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from paceline.group import Group, exchange
from paceline.transport.interface import Flat

LINE_BYTES, PAGE_BYTES, WORD_BYTES = 64, 4096, 8
NONCE_BYTES = 16

READY, SUMMED, COPIED, WEIGHT, KINDS = range(5)
"""Kinds of words: each rank has a row of every kind, with a word for every bucket."""
ALIVE, LEFT, FAILED = 0, 1, 2
"""What a rank's status word says of it."""

_CPU = torch.device("cpu")


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


class SegmentMap:
    """Where things lie for `ranks` ranks and buckets of the sizes given, found once.

    `status` and `rows` are indices of words: a rank's status, and by kind the first word of each
    rank's row; bucket b's is b on. Rows fill whole cache lines, buckets of a rank whole pages.
    """

    def __init__(self, ranks: int, buckets_bytes: Sequence[int]) -> None:
        line = LINE_BYTES // WORD_BYTES
        row = line * max(1, -(-len(buckets_bytes) // line))
        head = (1 + ranks) * line
        self.status = [(1 + rank) * line for rank in range(ranks)]
        self.rows = [
            [head + (kind * ranks + rank) * row for rank in range(ranks)] for kind in range(KINDS)
        ]
        words = head + KINDS * ranks * row
        self.control_bytes = -(-words * WORD_BYTES // PAGE_BYTES) * PAGE_BYTES
        lines = [-(-size // LINE_BYTES) * LINE_BYTES for size in buckets_bytes]
        *self._starts, end = accumulate(lines, initial=0)
        self._ranks, self._rank_bytes = ranks, -(-end // PAGE_BYTES) * PAGE_BYTES
        self.used_bytes = self.control_bytes + ranks * self._rank_bytes
        """What will surely be touched."""
        self.total_bytes = self.used_bytes + ranks * self._rank_bytes

    def bucket_offset(self, rank: int, bucket: int, spare: bool) -> int:
        block = rank + self._ranks * spare
        return self.control_bytes + block * self._rank_bytes + self._starts[bucket]


class Segment:
    """The mapped memory, with its words and the buckets of every rank as tensors."""

    def __init__(self, memory: mmap.mmap, places: SegmentMap, flats: Sequence[Flat]) -> None:
        self.places, self.flats = places, flats
        self.words = memoryview(memory)[: places.control_bytes].cast("Q")
        self.weights = memoryview(memory)[: places.control_bytes].cast("d")
        self._memory = memory

    def bucket(self, rank: int, number: int, *, spare: bool = False) -> Tensor:
        """One rank's bucket, as a tensor with a storage of its own."""
        flat = self.flats[number]
        length = flat.numel + flat.trailer
        if not length:
            return torch.empty(0, dtype=flat.dtype, device=_CPU)
        # It outlives the block it is made in, and is written to outside of it.
        with torch.inference_mode(False):
            return torch.frombuffer(
                self._memory,
                dtype=flat.dtype,
                count=length,
                offset=self.places.bucket_offset(rank, number, spare),
            )

    def join(self, owner: object, rank: int) -> list[Tensor]:
        """A rank's buckets. Those that would wait for it are told when its `owner` is gone, or its
        process ends."""
        weakref.finalize(owner, _leave, self.words, self.places.status[rank], os.getpid())
        return [self.bucket(rank, number) for number in range(len(self.flats))]


def share_segment(
    group: Group, hosts: Hosts, flats: Sequence[Flat], what: str
) -> tuple[Segment | None, str]:
    """Map one segment per host, on all ranks of the group or on none; if none, say why."""
    places = SegmentMap(len(hosts.neighbours), [flat.nbytes for flat in flats])
    memory, problem = share_memory(group, hosts, places.used_bytes, places.total_bytes, what)
    return None if memory is None else Segment(memory, places, flats), problem


def share_memory(
    group: Group, hosts: Hosts, used_bytes: int, total_bytes: int, what: str
) -> tuple[mmap.mmap | None, str]:
    """Map the same memory on all ranks of each host, or on none; if none, say why.

    Of `total_bytes` about `used_bytes` will be touched.
    """
    leader = hosts.neighbours[0]
    is_leader = group.rank() == leader
    memory: mmap.mmap | None = None
    offer, problem, descriptor = None, "", -1
    if is_leader:
        try:
            descriptor, memory, offer = _create(used_bytes, total_bytes)
        except OSError as error:
            problem = f"rank {group.rank()} got no {used_bytes:,} bytes: {error}"
    try:
        offers = exchange(group, offer, _CPU, what)
        theirs = offers[leader]
        if not is_leader and theirs is not None:
            try:
                memory = _open(*theirs, size_bytes=total_bytes)
            except OSError as error:
                problem = f"rank {group.rank()} cannot open its leader's memory: {error}"
        problems = exchange(group, problem, _CPU, what)
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # the mapping stays
    found = next((text for text in problems if text), "")
    return (None if found else memory), found


def _create(used_bytes: int, total_bytes: int) -> tuple[int, mmap.mmap, tuple[int, int, str]]:
    """New memory: its descriptor, the mapping, and what the others need to open it."""
    if not has_room(used_bytes, limits := available_bytes()):
        raise OSError(f"only {min(limits):,} are free, and half of them stay free")
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, total_bytes)
        # No process may shrink it under the others: touching what is gone kills a process.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        memory = mmap.mmap(descriptor, total_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[:NONCE_BYTES] = nonce
    return descriptor, memory, (os.getpid(), descriptor, nonce.hex())


def _open(pid: int, number: int, nonce: str, *, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != size_bytes:
            raise OSError("it is not the memory that was offered")
        memory = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    if memory[:NONCE_BYTES] != bytes.fromhex(nonce):
        raise OSError("it is not the memory that was offered")
    return memory


def _leave(words: memoryview, status: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the memory too, and must not speak for its parent
        words[status] = LEFT


def has_room(needed_bytes: int, available_bytes: Sequence[int]) -> bool:
    """Whether a segment leaves at least as much memory as it takes, by every limit known."""
    return all(2 * needed_bytes <= available for available in available_bytes)


# By version of control groups: the limit, what is used, and how much of that is files in the
# cache, which are given up when memory is needed.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> list[int]:
    """What every limit that can be read leaves; none where nothing can be read."""
    free_kb = _field(root / "proc/meminfo", "MemAvailable:")
    found = [free_kb * 1024] if free_kb is not None else []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # The line of version 2 names no controllers.
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        limit, used, cached = _VERSION_1 if controllers else _VERSION_2
        own = top / path.lstrip("/")
        for group in (own, *own.parents):  # the limits of all groups around it hold too
            allowed, taken = _read(group / limit).strip(), _read(group / used).strip()
            if allowed.isdigit() and taken.isdigit() and group.is_relative_to(top):
                spare = _field(group / "memory.stat", cached) or 0
                found.append(max(0, int(allowed) - int(taken) + spare))
    return found


def _field(path: Path, name: str) -> int | None:
    """The number behind a name, in a file with a line for each."""
    found = re.search(rf"^{name}\s+(\d+)", _read(path), re.MULTILINE)
    return int(found[1]) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
