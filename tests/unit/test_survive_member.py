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

from paceline.comm import collectives
from paceline.comm.membership import Membership
from paceline.survive.link import Generation, Ledger, Link
from paceline.survive.member import Survival


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

    def meet(self, generation: Generation) -> Any:
        self.events.append(f"met in {generation.number}")
        return self

    def is_complete(self) -> bool:
        return True

    def make(self, _: Any) -> str:
        return "a group"


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, Link]]:
    """The launcher's end, and the worker's."""
    launcher, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = Ledger.create()
    ledger = Ledger(descriptor)
    yield launcher, Link(worker, ledger)
    launcher.close()
    worker.close()
    ledger.close()
    os.close(descriptor)


def test_a_new_group_is_not_interrupted_for_the_one_before(
    line: tuple[socket.socket, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_words_patience_s", [0.0])
    launcher, link = line
    groups: Any = SlowGroups()
    survival = Survival(link, Membership.of(None), groups, lambda _: None)
    launcher.send(json.dumps(asdict(Generation(1, 0, 2))).encode())
    survival.regroup(is_lost=True)
    assert groups.events == ["interrupted", "met in 1"]
    said = [json.loads(launcher.recv(2**16))["said"] for _ in range(2)]
    assert said == ["lost", "joined"]
    assert not survival.is_over
    launcher.send(json.dumps(asdict(Generation(2, 0, 2, is_urgent=False))).encode())
    survival.regroup(is_lost=False)  # all have agreed to change
    said = json.loads(launcher.recv(2**16))
    assert (said["said"], said["generation"]) == ("joined", 2)
    launcher.close()
    survival._listener.join()
