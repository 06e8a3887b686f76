"""One piece of memory that all ranks of a host have mapped.

It is a file that never has a name: the leader creates it in memory, the others open it through
the leader's entry in /proc, which only the same user can. So nothing is ever left behind, however
a rank ends. A random number at its beginning proves that it is the right one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.gradients.plan import BucketPlan
from paceline.transport.hosts import Hosts
from paceline.transport.memory_limits import available_bytes
from paceline.transport.segment_map import NONCE_BYTES, SegmentMap, has_room

ALIVE, LEFT, FAILED = 0, 1, 2
"""What a rank's status word says of it."""

_CPU = torch.device("cpu")


class Segment:
    """The mapped memory, with its words and its buckets as tensors."""

    def __init__(self, memory: mmap.mmap, places: SegmentMap) -> None:
        self.places = places
        self.words = memoryview(memory)[: places.control_bytes].cast("Q")
        self.weights = memoryview(memory)[: places.control_bytes].cast("d")
        self._memory = memory

    def bucket(self, rank: int, number: int, plan: BucketPlan, *, spare: bool = False) -> Tensor:
        """One rank's bucket, as a tensor with a storage of its own."""
        numel = plan.numel + plan.trailer
        if not numel:
            return torch.empty(0, dtype=plan.dtype, device=_CPU)
        # It outlives the block it is made in, and is written to outside of it.
        with torch.inference_mode(False):
            return torch.frombuffer(
                self._memory,
                dtype=plan.dtype,
                count=numel,
                offset=self.places.bucket_offset(rank, number, spare),
            )

    def leave_with(self, owner: object, rank: int) -> None:
        """Tell those that would wait for a rank when its `owner` is gone, or its process ends."""
        status = self.places.status_word(rank)
        weakref.finalize(owner, _leave, self.words, status, os.getpid())


@dataclass(frozen=True, slots=True)
class _Offer:
    """How the others of a host find their leader's memory."""

    pid: int
    descriptor: int
    nonce: str


def share_segment(
    group: Group, hosts: Hosts, buckets_bytes: Sequence[int], what: str
) -> tuple[Segment | None, str]:
    """Map one segment per host, on all ranks of the group or on none; if none, say why."""
    places = SegmentMap(len(hosts.neighbours), tuple(buckets_bytes))
    is_leader = group.rank() == hosts.neighbours[0]
    memory: mmap.mmap | None = None
    offer, problem, descriptor = None, "", -1
    if is_leader:
        try:
            descriptor, memory, offer = _create(places)
        except OSError as error:
            problem = f"rank {group.rank()} got no {places.used_bytes:,} bytes: {error}"
    try:
        offers = comm.exchange(group, _to_json(offer), _CPU, what)
        theirs = offers[hosts.neighbours[0]]
        if not is_leader and theirs is not None:
            try:
                memory = _open(_Offer(*theirs), places.total_bytes)
            except OSError as error:
                problem = f"rank {group.rank()} cannot open its leader's memory: {error}"
        problems = comm.exchange(group, problem, _CPU, what)
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # the mapping stays
    found = next((text for text in problems if text), "")
    if found or memory is None:
        return None, found
    return Segment(memory, places), ""


def _create(places: SegmentMap) -> tuple[int, mmap.mmap, _Offer]:
    if not has_room(places.used_bytes, limits := available_bytes()):
        raise OSError(f"only {min(limits):,} are free, and half of them stay free")
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, places.total_bytes)
        # Nobody may shrink it under the others: touching what is gone kills a process.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        memory = mmap.mmap(descriptor, places.total_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[:NONCE_BYTES] = nonce
    return descriptor, memory, _Offer(os.getpid(), descriptor, nonce.hex())


def _open(offer: _Offer, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != size_bytes:
            raise OSError("it is not the memory that was offered")
        memory = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    if memory[:NONCE_BYTES] != bytes.fromhex(offer.nonce):
        raise OSError("it is not the memory that was offered")
    return memory


def _leave(words: memoryview, status: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the memory too, and must not speak for its parent
        words[status] = LEFT


def _to_json(offer: _Offer | None) -> list[int | str] | None:
    return None if offer is None else [offer.pid, offer.descriptor, offer.nonce]
