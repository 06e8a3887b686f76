"""Whom an error names when a collective fails: those who left, not those who are late to say."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch

from paceline import group as comm
from paceline.errors import PeerError
from paceline.group import collectives
from paceline.group.world import World
from paceline.testing import run_ranks
from paceline.transport import Flat, place
from paceline.transport.select import choose_transport


def explain(world: World, words_by_rank: dict[int, tuple[str, str]]) -> str:
    """What rank 0 says, after the others have left their words in the store."""
    group = world.group
    if world.rank in words_by_rank:
        kind, text = words_by_rank[world.rank]
        comm.post_last_words(group, text, kind)
    world.barrier()
    said = ""
    if world.rank == 0:
        said = str(comm.explain_failure(group, "Step 3: a sum", RuntimeError("gone.")))
    world.barrier()
    return said


def test_a_rank_that_has_not_spoken_yet_is_not_named_beside_one_that_raised() -> None:
    words = {1: ("raised", "raised ValueError: bad row")}
    said = run_ranks(3, explain, words)[0]
    assert "Rank 1 raised ValueError: bad row." in said
    assert "rank 2" not in said.lower()


@pytest.mark.parametrize(
    "words", [("left", "finished and left"), ("raised", "raised PeerError: a sum failed")]
)
def test_a_rank_that_left_because_it_missed_another_does_not_hide_that_one(
    words: tuple[str, str],
) -> None:
    said = run_ranks(3, explain, {1: words})[0]
    assert f"Rank 1 {words[1]}; no word yet from rank 2: ended, stopped or still at work." in said


@pytest.mark.parametrize("error", ["ValueError", "DesyncError"])
def test_a_sum_that_a_rank_has_left_is_not_a_mismatch(error: str) -> None:
    def body(world: World) -> str:
        if world.rank == 1:
            comm.post_last_words(world.group, f"raised {error}: 8 rows", "raised")
        world.barrier()
        try:
            comm.refuse_lost(world.group, "Step 3: a sum")
        except PeerError as lost:
            return str(lost)
        return "the ranks differ"

    said = run_ranks(2, body)[0]
    assert (f"Rank 1 raised {error}" in said) is (error == "ValueError")


def test_where_nobody_has_left_the_silent_are_not_called_gone() -> None:
    said = run_ranks(3, explain, {})[0]
    assert "No word yet from ranks 1 and 2: ended, stopped or still at work." in said


def test_one_silent_rank_among_waiting_ones_is_named() -> None:
    said = run_ranks(3, explain, {2: ("waiting", "Step 3: a sum")})[0]
    assert "No word yet from rank 1: ended, stopped or still at work." in said


def test_ranks_that_all_wait_are_told_so() -> None:
    words = dict.fromkeys((1, 2), ("waiting", "Step 3: a sum"))
    assert "Ranks 0, 1 and 2 all lost a connection." in run_ranks(3, explain, words)[0]


def test_a_sum_that_was_aborted_is_refused_though_it_seems_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NCCL's do, which end without an error."""
    aborted = [False]
    monkeypatch.setattr(collectives, "_is_aborted", [lambda: aborted[0]])

    def add_up(world: World) -> float:
        total = torch.ones(1)
        work = world.group.allreduce([total])
        comm.Pending(work, world.group, "A sum", is_on_host=False).wait()
        return float(total)

    assert run_ranks(2, add_up) == [2.0, 2.0]
    aborted[0] = True
    with pytest.raises(PeerError, match=r"A sum failed on rank .*: it was aborted"):
        run_ranks(2, add_up)


@pytest.mark.parametrize("error", [None, RuntimeError("the connection is gone")])
def test_a_sum_that_ends_just_after_a_glance_is_judged_by_its_own_result(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Work:
        """Is complete when whoever waited for a moment looks again."""

        def wait(self, timeout: timedelta | None = None) -> None:
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            if error is not None:
                raise error

        def is_completed(self) -> bool:
            return True

    monkeypatch.setattr(collectives, "_is_aborted", [lambda: False])
    with nullcontext() if error is None else pytest.raises(PeerError, match=str(error)):
        run_ranks(1, lambda world: comm.Pending(Work(), world.group, "A sum", True).wait())


def test_a_sum_that_never_ends_is_waited_for_as_long_as_its_group_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo can forget to say that a message will never be sent."""
    aborted = [False]
    monkeypatch.setattr(collectives, "_is_aborted", [lambda: aborted[0]])
    monkeypatch.setattr(collectives, "_GLANCE", timedelta(milliseconds=20))
    monkeypatch.setattr(collectives, "_END_S", 0.05)
    is_given_up = threading.Event()

    def add_up(world: World) -> tuple[float, str]:
        total = torch.ones(1)
        if world.rank == 1:
            time.sleep(0.2)  # many glances
        comm.all_reduce(world.group, total, "A slow sum")
        lost = torch.ones(1)
        if world.rank == 1:  # it never comes, as far as rank 0 can tell
            is_given_up.wait()
            world.group.allreduce([lost]).wait()
            return float(total), ""
        pending = comm.start_all_reduce(world.group, lost, "A lost sum")
        aborted[0] = True
        with pytest.raises(PeerError) as caught:
            pending.wait()
        assert not comm.have_ended()
        is_given_up.set()
        assert comm.have_ended()  # of what it was asked about before
        return float(total), str(caught.value)

    (alone, said), (_, _) = run_ranks(2, add_up)
    assert alone == 2.0
    assert "A lost sum failed on rank 0, one of 2: it was aborted" in said


def test_a_wait_in_shared_memory_ends_with_its_group_though_all_of_its_ranks_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that is late may have left the group already, and waits for this one elsewhere."""
    aborted, has_begun, has_ended = [False], threading.Event(), threading.Event()
    monkeypatch.setattr(collectives, "_is_aborted", [lambda: aborted[0]])

    def add_up(world: World) -> None:
        cpu = torch.device("cpu")
        transport = choose_transport(world.group, [cpu], "shared_memory")
        buckets = place(transport, [Flat(8, torch.float32, cpu)], "Placing")
        if world.rank == 1:
            assert has_begun.wait(60)
            aborted[0] = True
            assert has_ended.wait(60)
            return
        home = buckets.homes[0]
        assert home is not None
        pending = buckets.start(0, home, 1.0, "A sum")
        has_begun.set()
        try:
            with pytest.raises(PeerError, match="the group is given up"):
                pending.wait()
        finally:
            has_ended.set()

    run_ranks(2, add_up)
