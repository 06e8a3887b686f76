"""Fails a test that leaves something behind, and skips the tests that need a GPU without one.

Clean tests pay a few listings. Only what looks like a leak gets a garbage collection and a moment
to close by itself, because sockets and threads of a process group end a little after it.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# A busy machine draws inputs slowly, which says nothing about the code.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

PATIENCE_S = 20.0
# Set on purpose by paceline itself, or by torch once it compiles: put back without complaint.
OWN_VARIABLES = ("GLOO_SOCKET_IFNAME", "PYTEST_", "TORCHINDUCTOR_", "TRITON_", "KMP_")
OWN_FILES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}
OWN_THREADS = ("pytest_timeout", "tqdm_monitor")  # torch.compile has a bar where tqdm is installed


@dataclass(frozen=True)
class Belongings:
    """What a test could leave behind, each as text that would tell a reader what it is."""

    variables: frozenset[str]
    threads: frozenset[str]
    children: frozenset[str]
    descriptors: frozenset[str]
    files: frozenset[str]
    groups: frozenset[str]
    settings: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        folder = os.getcwd()
        return cls(
            variables=frozenset(
                f"{name}={value[:40]}"
                for name, value in os.environ.items()
                if not name.startswith(OWN_VARIABLES)
            ),
            threads=frozenset(
                f"{thread.name} ({thread.ident})"
                for thread in threading.enumerate()
                if not thread.name.startswith(OWN_THREADS)
            ),
            children=frozenset(child_processes()),
            descriptors=frozenset(open_descriptors()),
            files=frozenset(
                os.path.join(folder, name) for name in os.listdir(folder) if name not in OWN_FILES
            ),
            groups=frozenset(["the default one"] if default_group_exists() else []),
            settings=frozenset([*signal_handlers(), *torch_settings()]),
        )

    def since(self, before: Belongings) -> list[str]:
        """What is here now and was not before."""
        is_torch_new = len(self.settings) > len(before.settings)
        settings = frozenset() if is_torch_new else self.settings - before.settings
        kinds = {
            "environment variables": self.variables ^ before.variables,
            "threads": self.threads - before.threads,
            "child processes": self.children - before.children,
            "open files or sockets": self.descriptors - before.descriptors,
            "files in the working directory": self.files - before.files,
            "process groups": self.groups - before.groups,
            "signal handlers or settings of torch": settings,
        }
        return [f"{kind}: {', '.join(sorted(found))}" for kind, found in kinds.items() if found]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    environ = dict(os.environ)
    before = Belongings.now()
    yield
    left = Belongings.now().since(before)
    if left:
        gc.collect()
        deadline = time.monotonic() + PATIENCE_S
        while (left := Belongings.now().since(before)) and time.monotonic() < deadline:
            time.sleep(0.01)
    put_back(environ)
    if left:
        pytest.fail("This test leaves something behind.\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session")
def _half_of_torch() -> None:
    """The first optimizer imports half of torch: once here, and not in every worker that forks."""
    importlib.import_module("torch._dynamo")


def put_back(environ: dict[str, str]) -> None:
    """Undo what can be undone, so that one leak fails one test."""
    if dict(os.environ) != environ:
        os.environ.clear()
        os.environ.update(environ)
    if default_group_exists():
        sys.modules["torch.distributed"].destroy_process_group()


def default_group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def child_processes() -> Iterator[str]:
    """This process's children, and those that the fork server made for it."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    for parent in filter(None, (os.getpid(), server)):
        for listing in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                pids = listing.read_text().split()
            except OSError:  # the thread has just ended
                continue
            for pid in pids:
                if int(pid) not in (server, tracker):
                    yield f"process {pid}"


def open_descriptors() -> Iterator[str]:
    """Descriptors and what they point to, without those that multiprocessing keeps for good."""
    own = {
        multiprocessing.forkserver._forkserver._forkserver_alive_fd,
        multiprocessing.resource_tracker._resource_tracker._fd,
    }
    if not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor
            continue
        if int(name) not in own and not target.startswith("/dev/"):
            yield f"{name} -> {target}"


def signal_handlers() -> Iterator[str]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        yield f"{number.name}: {signal.getsignal(number)}"


def torch_settings() -> Iterator[str]:
    """What holds for the whole process; nothing where a test has only now imported torch."""
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_num_threads"):
        yield f"{torch.get_num_threads()} threads"
        yield f"deterministic algorithms: {torch.are_deterministic_algorithms_enabled()}"
        yield f"gradients: {torch.is_grad_enabled()}"
        yield f"{torch.get_default_dtype()} by default"


def pytest_configure() -> None:
    # A shell that starts this in the background makes it ignore interrupts, and nohup that the
    # terminal is gone; then so would everything that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if "gpu" in item.path.parent.parts[-1:]]
    if not gpu_items:
        return
    import torch

    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        if torch.cuda.device_count() == 0:  # is_available() would initialise the driver
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # Several processes test at a time, and torch's threads wait for each other by spinning.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    # What was imported by now stays for good: a later collection need not look at it again.
    gc.collect()
    gc.freeze()
