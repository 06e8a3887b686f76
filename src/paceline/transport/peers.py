"""Waiting for the other ranks of a host without wasting its cores, and noticing who is gone.

A rank that waits looks at flags in shared memory. It first looks again and again, then gives its
core away between looks, then sleeps, longer and longer. Meanwhile it watches the processes
behind the flags: one that has ended, was stopped, or has left word of its failure will not answer.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from paceline import comm
from paceline.comm import Group
from paceline.errors import PeerError

SPIN_S = 0.001
"""How long to look without sleeping where every rank has a core of its own."""
FIRST_SLEEP_S, LONGEST_SLEEP_S = 50e-6, 1e-3
LOOK_EVERY_S = 0.02
"""How often to look after the processes while sleeping."""
STOPPED_PATIENCE_S = 10.0
"""A process that is stopped for longer, while this one runs, does not count as alive."""
WORDS_EVERY_S = 1.0
DEFAULT_TIMEOUT_S = 1800.0


class Peers:
    """The processes of the other ranks on this host."""

    def __init__(self, group: Group, ranks: Sequence[int], pids: Sequence[int]) -> None:
        self._group = group
        self._timeout_s = _timeout_s(group)
        self._pid_by_rank = dict(zip(ranks, pids, strict=True))
        others = sorted({pid for pid in pids if pid != os.getpid()})
        self._watched = {os.pidfd_open(pid): pid for pid in others}
        self._poll = select.poll()
        for descriptor in self._watched:
            self._poll.register(descriptor, select.POLLIN)
        cores = len(os.sched_getaffinity(0))
        # Ranks that are threads of one process take turns in Python anyway.
        is_roomy = len(ranks) <= cores and len(others) == len(ranks) - 1
        self._spin_s = SPIN_S if is_roomy else 0.0

    def close(self) -> None:
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched = {}

    def wait(
        self,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        has_left: Callable[[int], bool],
        what: str,
    ) -> None:
        """Return when `is_done()`; raise if one of the `missing()` ranks will never answer.

        `is_done` may do work of its own, and is called between the looks.
        """
        yields = os.sched_yield if self._spin_s else _let_others_run
        begin = time.perf_counter()
        while not is_done():
            yields()
            if time.perf_counter() - begin > self._spin_s:
                self._sleep_until(is_done, missing, has_left, what)
                return

    def _sleep_until(
        self,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        has_left: Callable[[int], bool],
        what: str,
    ) -> None:
        nap_s, waited_s, stopped_s, looked_s = FIRST_SLEEP_S, 0.0, 0.0, 0.0
        words_at_s = WORDS_EVERY_S
        before = time.monotonic()
        while not is_done():
            time.sleep(nap_s)
            nap_s = min(LONGEST_SLEEP_S, nap_s * 1.2)
            now = time.monotonic()
            # Time in which this process itself was stopped does not count against the others.
            passed_s, before = min(now - before, 0.1), now
            waited_s += passed_s
            if waited_s < looked_s:
                continue
            looked_s = waited_s + LOOK_EVERY_S
            late = missing()
            stopped_s = stopped_s + LOOK_EVERY_S if self._is_any_stopped(late) else 0.0
            reason = self._why_gone(late, has_left)
            if not reason and stopped_s > STOPPED_PATIENCE_S:
                reason = f"a process was stopped for {STOPPED_PATIENCE_S:g} s"
            if not reason and waited_s > self._timeout_s:
                reason = f"nothing arrived for {self._timeout_s:g} s"
            if not reason and waited_s > words_at_s:
                words_at_s = waited_s + WORDS_EVERY_S
                reason = "it left word" if comm.have_left(self._group, late) else ""
            if reason and not is_done():
                raise self._explain(what, reason, missing())

    def _why_gone(self, ranks: Sequence[int], has_left: Callable[[int], bool]) -> str:
        ended = {self._watched[descriptor] for descriptor, _ in self._poll.poll(0)}
        for rank in ranks:
            if self._pid_by_rank[rank] in ended:
                return f"process {self._pid_by_rank[rank]} has ended"
            if has_left(rank):
                return "it has left"
        return ""

    def _is_any_stopped(self, ranks: Sequence[int]) -> bool:
        return any(_is_stopped(self._pid_by_rank[rank]) for rank in ranks)

    def _explain(self, what: str, reason: str, late: Sequence[int]) -> PeerError:
        known = comm.world_ranks(self._group)
        names = ", ".join(str(known[rank]) for rank in late)
        cause = RuntimeError(f"waiting for rank{'s' * (len(late) > 1)} {names}: {reason}")
        return comm.explain_failure(self._group, what, cause)


def _let_others_run() -> None:
    time.sleep(0)  # unlike sched_yield, this also lets the other threads of this process run
    os.sched_yield()


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _timeout_s(group: Group) -> float:
    """How long the group's own collectives would wait."""
    with suppress(Exception):  # not every backend has options, and torch does not document them
        options = group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    return DEFAULT_TIMEOUT_S
