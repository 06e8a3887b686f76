"""Whether somebody listens at an address, and waiting until somebody does."""

from __future__ import annotations

import re
import socket
import sys
import threading
from datetime import timedelta

import pytest
from sentences import says

from paceline.env import Placement
from paceline.errors import PeerError, UsageError
from paceline.group import world
from paceline.group.sockets import interface_towards, is_served, listen
from paceline.group.world import _wait_until_served, init_process_group


def test_a_port_is_served_from_listening_to_closing() -> None:
    with listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        assert is_served("127.0.0.1", port)
    assert not is_served("127.0.0.1", port)


def test_a_socket_that_meets_itself_is_nobody_who_listens() -> None:
    # Every free port in turn would be found in the end; binding one first is sure and quick.
    class Socket(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            self.bind(address)
            super().connect(address)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    real, socket.socket = socket.socket, Socket  # type: ignore[misc]
    try:
        assert not is_served("127.0.0.1", port)
    finally:
        socket.socket = real  # type: ignore[misc]


def test_an_address_that_cannot_be_looked_up_is_left_to_whoever_connects() -> None:
    assert is_served("a" * 64, 1)  # too long for any name, so nobody is asked


def test_waiting_ends_when_somebody_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        patience = timedelta(seconds=60)
        took: list[timedelta] = []
        waiting = threading.Thread(
            target=lambda: took.append(_wait_until_served("127.0.0.1", port, patience))
        )
        waiting.start()
        server.listen()
        waiting.join()
    assert took[0] < patience


def test_waiting_ends_with_its_patience() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        _wait_until_served("127.0.0.1", server.getsockname()[1], timedelta(milliseconds=5))


def test_gloo_is_shown_the_way_where_the_own_name_is_loopback() -> None:
    found = interface_towards("127.0.0.1", own_name="localhost")
    assert found == ("lo" if sys.platform == "linux" else None)


def test_gloo_is_left_alone_where_the_own_name_is_an_address() -> None:
    assert interface_towards("127.0.0.1", own_name="192.0.2.7") is None


def test_a_machine_that_cannot_be_reached_is_no_error() -> None:
    assert interface_towards("no.such.host.invalid", own_name="localhost") is None


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_a_store_that_cannot_be_reached_is_said_long_before_the_error(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "_LATE_S", 0.1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        place = Placement(rank=1, size=2, local_size=2, master_addr=address, master_port=port)
        with pytest.raises(PeerError, match="found no store"):
            world.connect(place, timedelta(seconds=0.3))
    assert says(capsys.readouterr().err, "still waits", f"{address}, port {port}")


def test_a_store_that_never_answers_is_said_long_before_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "_LATE_S", 0.1)
    with listen("127.0.0.1", 0) as silent:
        port = silent.getsockname()[1]
        place = Placement(rank=1, size=2, local_size=2, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(PeerError, match="found no store"):
            world.connect(place, timedelta(seconds=0.3))
    assert says(capsys.readouterr().err, "still waits", f"port {port}")


@pytest.mark.parametrize("backend", ["foo", "", "cpu:foo", "gloo,cuda:", 3])
def test_a_backend_that_torch_does_not_have_is_refused_by_name(backend: object) -> None:
    with pytest.raises(UsageError, match=rf"backend.* {re.escape(repr(backend))},.*\n.*gloo"):
        init_process_group(backend)  # type: ignore[arg-type]
