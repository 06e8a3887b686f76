"""What a worker leaves behind is whole, and what it hears is for it alone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from paceline.env import SURVIVAL_VARIABLE as VARIABLE
from paceline.group.link import SLOT_BYTES, Generation, Ledger, Link, receive, send
from paceline.launcher.workers import WorkerChannel


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    descriptor = Ledger.create()
    ledger = Ledger(descriptor)
    os.close(descriptor)
    yield ledger
    ledger.close()


def test_a_ledger_is_empty_until_something_is_written(ledger: Ledger) -> None:
    assert ledger.read() == {}


def test_a_ledger_holds_what_was_written_last(ledger: Ledger) -> None:
    for step in range(5):
        ledger.write({"step": step, "sums": {"loss": [0.1 * step, 4.0]}})
    assert ledger.read() == {"step": 4, "sums": {"loss": [0.4, 4.0]}}


def test_what_was_written_half_is_not_seen(ledger: Ledger) -> None:
    ledger.write({"step": 1})
    turn = ledger._words[0]
    ledger.write({"step": 2})
    ledger._words[0] = turn  # as if the worker had died before its last store
    assert ledger.read() == {"step": 1}


def test_what_is_too_long_leaves_the_value_before(ledger: Ledger) -> None:
    ledger.write({"step": 1})
    ledger.write({"name": "x" * SLOT_BYTES})
    assert ledger.read() == {"step": 1}


def test_a_process_started_by_a_worker_does_not_speak_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"pid": os.getpid() + 1, "line": 0, "ledger": 0, "is_replacement": False}
    monkeypatch.setenv(VARIABLE, json.dumps(given))
    assert Link.find() is None


@pytest.mark.parametrize("length", [10, SLOT_BYTES, 10**6])
def test_a_message_of_any_length_arrives_and_leaves_nothing_open(length: int) -> None:
    launcher, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with launcher, worker:
        before = len(os.listdir("/proc/self/fd"))
        for end, other in ((launcher, worker), (worker, launcher)):
            send(end, {"text": "x" * length})
            assert receive(other) == {"text": "x" * length}
        assert len(os.listdir("/proc/self/fd")) == before
        launcher.close()
        assert receive(worker) == {}


def test_the_line_is_for_the_first_run_of_a_replacement_which_hears_the_facts_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = WorkerChannel.open()
    send(line.socket, {"seed": 3})
    numbers = {"line": line.theirs[0], "ledger": line.theirs[1]}
    numbers["inode"] = os.fstat(line.theirs[0]).st_ino
    given = {"pid": os.getpid(), "is_replacement": True, **numbers}
    monkeypatch.setenv(VARIABLE, json.dumps(given))
    link = Link.find()
    assert link is not None
    assert (link.is_replacement, link.facts) == (True, {"seed": 3})
    assert Link.find() is None
    link.tell("ready")
    assert receive(line.socket) == {"said": "ready"}
    line.close()
    link.ledger.close()
    for number in line.theirs:
        os.close(number)


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "3"])
def test_a_variable_that_makes_no_sense_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert Link.find() is None


def test_a_worker_hears_of_every_generation_in_order(ledger: Ledger) -> None:
    launcher, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(worker, ledger)
    announced = [Generation(1, 0, 2), Generation(2, 0, 1, inherited={"worker 1": {"step": 4}})]
    for each in announced:
        launcher.send(json.dumps(asdict(each)).encode())
    launcher.close()
    assert list(link.announcements()) == announced
    worker.close()


def test_a_worker_that_reads_nothing_for_a_while_misses_nothing_that_it_was_told() -> None:
    line = WorkerChannel.open()
    worker = socket.socket(fileno=line.theirs[0])
    told = [{"number": number, "text": "x" * 40_000} for number in range(50)]
    for message in told:
        line.tell(message)
    assert line.unsent  # the kernel has not room for all of it
    heard = []
    while len(heard) < len(told):
        heard.append(receive(worker))
        line.tell()
    assert heard == told
    line.close()
    worker.close()
    os.close(line.theirs[1])
