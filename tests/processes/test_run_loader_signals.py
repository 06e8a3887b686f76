"""Processes that load data and SIGTERM: they outlive the first while a training needs them. What a
script forks besides obeys it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from paceline.run.loader_signals import LoaderSignals
from paceline.run.stop import StopRequest


def load(on_start: Callable[[int], None], wire: Connection) -> None:
    """As a loader: start, then answer whatever comes."""
    on_start(0)
    wire.send("started")
    while True:
        wire.send(wire.recv())


@pytest.mark.parametrize(("method", "is_held"), [("fork", True), ("fork", False), ("spawn", True)])
def test_the_first_sigterm_ends_a_loader_only_if_nobody_needs_it(
    method: str, is_held: bool
) -> None:
    context = multiprocessing.get_context(method)
    signals = LoaderSignals()
    ours, theirs = context.Pipe()
    process = context.Process(target=load, args=(signals.on_start, theirs), daemon=True)
    signals.hold()
    process.start()
    assert ours.recv() == "started"
    if not is_held:
        signals.release()
    os.kill(process.pid or 0, signal.SIGTERM)
    if is_held:
        ours.send("still there?")
        assert ours.recv() == "still there?"
        signals.release()
        os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    process.close()


def test_a_process_that_the_script_forks_during_a_run_obeys_sigterm() -> None:
    """As those of a pool do, which is ended with it and waited for."""
    said: list[str] = []
    request = StopRequest(said.append)
    request.listen()
    try:
        process = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        process.start()
        process.terminate()
        process.join(60)
    finally:
        request.ignore()
    assert process.exitcode == -signal.SIGTERM
    process.close()
    assert said == []
    assert request.signal == 0
