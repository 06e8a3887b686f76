"""Groups that cannot be formed leave nothing behind that keeps the next one from being formed."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
import threading
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.errors import PeerError
from paceline.group.link import Generation, meeting_place
from paceline.group.sockets import Connections
from paceline.group.world import LauncherStore
from paceline.launcher.store import StoreServer
from paceline.run import member
from paceline.run.member import Groups, Overtaken
from paceline.torch_private import PrefixStore, Store


def form(maker: Groups, store: Store, generation: Generation) -> None:
    """Meet with others that are there, and then do not answer."""
    for other in range(1, generation.size):
        PrefixStore(meeting_place(generation.number), store).set(f"here/{other}", "")
    maker.make(generation, maker.meet(generation, bool))


def test_a_worker_that_failed_to_form_a_group_calls_the_next_one_as_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member, "BUILD_TIMEOUT", timedelta(milliseconds=50))
    store = HashStore()
    maker = Groups(store, Connections(), "gloo", timedelta(seconds=5))
    for number in (1, 2):
        with pytest.raises(PeerError, match=f"Generation {number} could not form"):
            form(maker, store, Generation(number, rank=0, size=2))
    form(maker, store, Generation(3, rank=0, size=1))
    try:
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
    finally:
        maker.leave()


def test_a_group_in_which_something_never_ends_is_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    maker = Groups(store, Connections(), "gloo", timedelta(seconds=5))
    for has_ended in (True, False):
        monkeypatch.setattr(member, "have_ended", lambda ended=has_ended: ended)
        form(maker, store, Generation(1, rank=0, size=1))
        group = dist.group.WORLD
        maker.leave()
        assert not dist.is_initialized()
        kept = sys.getrefcount(group) - 2  # ours, and the argument's
        assert kept == (0 if has_ended else 1)
        if kept:
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(id(group)))
        del group


def test_a_group_is_given_up_where_a_member_died_after_they_had_met(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(member, "BUILD_TIMEOUT", timedelta(seconds=600))
    with closing(StoreServer(str(tmp_path))) as server:
        server.start()
        store = LauncherStore(server.path)
        maker = Groups(store, Connections(), "gloo", timedelta(seconds=5))
        timer = threading.Timer(0.2, server.give_up, [meeting_place(1)])
        timer.start()
        with pytest.raises(PeerError, match="Generation 1 could not form"):
            form(maker, store, Generation(1, rank=0, size=2))
        timer.join()
        assert store.num_keys() > 0  # the same connection serves on


def test_a_member_that_waits_for_one_who_is_not_coming_is_called_off_by_the_launcher(
    tmp_path: Path,
) -> None:
    with closing(StoreServer(str(tmp_path))) as server:
        server.start()
        maker = Groups(LauncherStore(server.path), Connections(), "gloo", timedelta(seconds=5))
        timer = threading.Timer(0.2, server.give_up, [f"{meeting_place(1)}/here"])
        timer.start()
        heard: list[bool] = []

        def is_overtaken() -> bool:
            heard.append(len(heard) == 2)  # the announcement may come a little later
            return heard[-1]

        with pytest.raises(Overtaken):
            maker.meet(Generation(1, rank=0, size=2), is_overtaken)
        timer.join()
        assert heard == [False, False, True]


def test_connections_are_shut_where_a_process_has_no_descriptor_left() -> None:
    shut, limits = Connections(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with shut.recorded():
            near = stack.enter_context(socket.create_connection(listener.getsockname()))
        far = stack.enter_context(listener.accept()[0])
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull))
        shut._before = {}  # as while a group is being made
        shut.shut()
        assert near.recv(1) == b""
        far.sendall(b"it can still be written to")
