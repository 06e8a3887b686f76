"""A worker's side of survival, with a launcher that is only a socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from paceline.group import collectives
from paceline.group.link import Generation, Ledger, Link
from paceline.group.membership import Membership, NoGroup
from paceline.run.member import Member


class SlowGroups:
    """Groups whose interruption takes a moment, as on a busy machine; all members are there."""

    backend = "none"

    def __init__(self) -> None:
        self.events: list[str] = []

    def interrupt(self) -> None:
        time.sleep(0.1)
        self.events.append("interrupted")

    def leave(self) -> None:
        pass

    def meet(self, generation: Generation, _is_overtaken: Any) -> None:
        self.events.append(f"met in {generation.number}")

    def make(self, _generation: Generation, _store: Any) -> NoGroup:
        return NoGroup()


Told = tuple[socket.socket, Member, list[str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """The launcher's end, a member at the other, and what becomes of the member's groups."""
    monkeypatch.setattr(collectives, "_words_patience_s", [0.0])
    launcher, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = Ledger.create()
    ledger, groups = Ledger(descriptor), SlowGroups()
    member = Member(Link(worker, ledger), Membership(NoGroup()), groups, lambda _: False)  # type: ignore[arg-type]
    yield launcher, member, groups.events
    launcher.close()
    member._listener.join()
    worker.close()
    ledger.close()
    os.close(descriptor)


def test_a_new_group_is_not_interrupted_for_the_one_before(told: Told) -> None:
    launcher, survival, events = told
    launcher.send(json.dumps(asdict(Generation(1, 0, 2))).encode())
    survival.regroup(is_lost=True)
    assert events == ["interrupted", "met in 1"]
    said = [json.loads(launcher.recv(2**16))["said"] for _ in range(2)]
    assert said == ["lost", "joined"]
    assert not survival.is_over
    launcher.send(json.dumps(asdict(Generation(2, 0, 2, is_urgent=False))).encode())
    survival.regroup(is_lost=False)  # all have agreed to change
    said = json.loads(launcher.recv(2**16))
    assert (said["said"], said["generation"]) == ("joined", 2)


def test_a_collective_of_the_scripts_own_may_fail_before_the_launcher_tells_of_the_death(
    told: Told,
) -> None:
    launcher, survival, _ = told
    assert not survival.explains(ValueError("the script's own"))
    launcher.send(json.dumps(asdict(Generation(1, 0, 2))).encode())  # the interruption takes time
    assert survival.explains(RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed"))


def test_a_collective_that_fails_while_all_live_is_an_error_of_the_script(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.member.EXPLAIN_S", 0.01)
    assert not told[1].explains(RuntimeError("gloo: sizes differ"))
