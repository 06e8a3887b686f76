"""`paceline run --island`: a launcher for each island, and the place where islands meet.

    --island 2       one machine: its workers in islands of two, each with a launcher of its own,
                     which this one starts, and starts again if it is killed
    --island host    several machines: each is an island with its own launcher; the meeting place is
                     at machine 0's address, where machines of one island would meet

An island is a run by itself: it survives and replaces its workers as ever. If all of them die, its
launcher starts them again, and they get the state of the other islands at the next round.
"""

from __future__ import annotations

import glob
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any

from paceline import env
from paceline.errors import UsageError
from paceline.group import listen, short_path
from paceline.islands import ISLAND_VARIABLE, IslandPlace, RoundServer
from paceline.islands import island_key as make_island_key
from paceline.launcher.deaths import ASKS_TO_END, end_file
from paceline.launcher.flags import FLAGS, LaunchOptions
from paceline.launcher.plan import count_cores, count_workers, find_gpus
from paceline.launcher.process import private_folder
from paceline.launcher.workers import RESIZING

LONGEST_WAIT_S = 0.5
LINGER_S = 60.0
"""How long the meeting place stays for islands that have yet to get the result."""
_EVERYWHERE = "0.0.0.0"
_OWN = ("island", "nproc_per_node", "watch", "timeline", "log_dir", "threads")
"""Flags that differ from island to island."""


def check_island(options: LaunchOptions) -> None:
    """Refuse what does not go with --island."""
    reasons = {
        "--as-torch": (options.as_torch, "torch's class averages in every step"),
        "--standalone": (options.standalone and options.island == "host", "hosts are several"),
        "--rdzv-backend c10d": (
            not options.is_single_node and options.rdzv_backend == "c10d",
            "islands are numbered by --node-rank",
        ),
        "--nnodes": (
            not options.is_single_node and options.island != "host",
            "a number of workers forms islands on one machine",
        ),
    }
    for name, (is_there, why) in reasons.items():
        if is_there:
            raise UsageError(
                f"{name} does not go with --island {options.island}: {why}.",
                advice="Drop one of them.",
            )


@contextmanager
def as_host(options: LaunchOptions, environ: dict[str, str]) -> Iterator[LaunchOptions]:
    """This machine as an island: how it is launched alone; the workers hear of it in `environ`."""
    host, port = options.meeting_point
    number, count = options.node_rank or 0, options.nnodes[1]
    environ[ISLAND_VARIABLE] = str(IslandPlace(number, count, f"{host}:{port}"))
    alone: dict[str, Any] = {"nnodes": (1, 1), "node_rank": None, "rdzv_endpoint": None}
    alone |= {"master_addr": "", "master_port": None}
    server = None
    if number == 0:
        if not env.is_loopback(host) and not env.read(env.SECRET_VARIABLE):
            _say(
                f"PACELINE_SECRET is not set: whoever can reach {host}:{port} can take part in "
                "this run. Set it to the same value on every machine."
            )
        listener = listen(host if env.is_loopback(host) else _EVERYWHERE, port)
        server = RoundServer(listener, count, _say, make_island_key())
    try:
        yield replace(options, **alone)
        if server is not None:
            server.wait_until_left(LINGER_S)
            _tell_unused(server)
    finally:
        if server is not None:
            server.close()


def run_islands(options: LaunchOptions, given: Mapping[str, str | None]) -> int:
    """Run all islands of this machine; the exit code."""
    each, workers = int(options.island), count_workers(options.nproc_per_node)
    if workers % each:
        raise UsageError(
            f"{workers} workers do not form islands of {each}.",
            advice=f"Use a number of workers that {each} divides, or another --island.",
        )
    with private_folder() as folder:
        path = os.path.join(folder, "islands")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as short:
            listener.bind(short)
        listener.listen()
        archipelago = Archipelago(options, given, path, workers // each, each)
        server = RoundServer(listener, workers // each, archipelago.say)
        try:
            if not (code := archipelago.run()):
                _tell_unused(server)
            return code
        finally:
            server.close()


def _tell_unused(server: RoundServer) -> None:
    """A script without a run would train each island by itself, and nothing else would show it."""
    if server.is_unused:
        _say(
            "the islands never met: no Run with islands=Islands(...) was trained. Whatever else "
            "the script has trained was trained on each island separately."
        )


class Archipelago:
    """The launchers of all islands of a machine."""

    def __init__(
        self,
        options: LaunchOptions,
        given: Mapping[str, str | None],
        address: str,
        count: int,
        workers: int,
    ) -> None:
        self._options, self._given, self._address = options, given, address
        self._count, self._workers = count, workers
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = [0] * count
        self._readers: list[threading.Thread] = []
        self._signal = 0
        """With which this launcher was asked to end."""
        self._code = 0

    def run(self) -> int:
        # What nohup or a shell has switched off stays off.
        wanted = self._options.signals_to_handle
        numbers = [each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._pass_on) for number in numbers}
        for each in {*RESIZING} - {*wanted}:
            before[each] = signal.signal(each, self._resize)
        try:
            for number in range(self._count):
                self._start(number)
            while self._launchers:
                self._wait()
            return self._code
        finally:
            self._end(signal.SIGKILL)
            for reader in self._readers:
                reader.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def say(self, text: str) -> None:
        """Say what happens between islands, unless all of them are being ended."""
        if not self._signal and not self._code:
            _say(text)

    def _pass_on(self, number: int, _frame: Any) -> None:
        self._signal = number
        self._end(number)

    def _resize(self, number: int, _frame: Any) -> None:
        """Every island gets a worker more, or has one less."""
        for launcher in self._launchers.values():
            if _catches(launcher.pid, number):  # one that is starting would be ended
                os.kill(launcher.pid, number)

    def _end(self, number: int) -> None:
        # Not by the methods of Popen, which bury one that has ended: it is yet to be heard of.
        for launcher in self._launchers.values():
            os.kill(launcher.pid, number)

    def _wait(self) -> None:
        """Wait until a launcher ends, and start it again if it was killed."""
        descriptors = {os.pidfd_open(p.pid): n for n, p in self._launchers.items()}
        try:
            # A signal that comes just before the wait, or to another thread, does not end it.
            ready, _, _ = select.select(list(descriptors), [], [], LONGEST_WAIT_S)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for number in [descriptors[descriptor] for descriptor in ready]:
            self._on_end(number, self._launchers.pop(number).wait())

    def _on_end(self, number: int, code: int) -> None:
        most = self._options.max_restarts
        is_left = most is None or self._starts[number] <= most
        if code < 0 and not self._signal and not self._code and self._launchers and is_left:
            name = signal.Signals(-code).name
            _say(f"the launcher of island {number} was killed by {name}; it is started again.")
            self._start(number)
        elif code:
            if not self._code and not self._signal:
                if (asked := code - 128) in ASKS_TO_END:
                    name = signal.Signals(asked).name
                    _say(f"island {number} was stopped by {name}; so are the others.")
                else:
                    asked = signal.SIGTERM
                    _say(f"island {number} has failed; the others are ended.")
                    self._tell_why(number)
                self._end(asked)
            self._code = self._code or (code if code > 0 else 128 - code)

    def _tell_why(self, number: int) -> None:
        """Let the other launchers know what the signal is for that they get."""
        text = f"island {number}"
        with suppress(OSError):
            try:
                with open(self._reason_file(number), encoding="utf-8") as file:
                    text += f": {file.read()}"
            except FileNotFoundError:
                text += " has failed"
            with open(end_file(self._reason_file(number)), "w", encoding="utf-8") as file:
                file.write(text)

    def _reason_file(self, number: int) -> str:
        return os.path.join(os.path.dirname(self._address), f"why {number}")

    def _start(self, number: int) -> None:
        self._starts[number] += 1
        place = IslandPlace(number, self._count, self._address)
        own = {ISLAND_VARIABLE: str(place), **env.offer_command(sys.argv), **self._devices(number)}
        own[env.PARENT_VARIABLE] = str(os.getpid())
        own[env.REASON_VARIABLE] = self._reason_file(number)
        shown = subprocess.PIPE if number else None
        launcher = subprocess.Popen(
            self._command(number),
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL if number else None,
            stdout=shown,
            stderr=subprocess.STDOUT if number else None,
            process_group=0,  # a terminal's Ctrl-C comes once, through this launcher
        )
        self._launchers[number] = launcher
        if self._signal:  # it came while this one was started, and has reached only the others
            os.kill(launcher.pid, self._signal)
        if launcher.stdout is not None:
            label = (
                b"" if self._options.json or self._options.no_label else b"[island %d] " % number
            )
            reader = threading.Thread(target=_copy_lines, args=(launcher.stdout, label))
            reader.start()
            self._readers.append(reader)

    def _command(self, number: int) -> list[str]:
        """This command line for one island."""
        words = [sys.executable, "-m", "paceline", "run", "--workers", str(self._workers)]
        for flag in FLAGS:
            if (text := self._given[flag.dest]) and flag.dest not in _OWN:
                words += [flag.names[0], text] if flag.metavar else [flag.names[0]]
        for name in ("timeline", "log_dir"):
            if folder := getattr(self._options, name):
                words += ["--" + name.replace("_", "-"), IslandPlace(number, 1, "").folder(folder)]
        threads = self._options.threads
        if threads is None and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, count_cores() // (self._workers * self._count))
        words += [] if threads is None else ["--threads", str(threads)]
        words += ["--watch"] if self._options.watch and not number else []
        return [*words, "--", self._options.program, *self._options.arguments]

    def _devices(self, number: int) -> dict[str, str]:
        """Its own GPUs for each island, where there are enough of them."""
        # Looked for first: to ask torch for them takes seconds.
        if not glob.glob("/dev/nvidia[0-9]*"):
            return {}
        gpus = find_gpus(os.environ)
        if len(gpus) < self._workers * self._count:
            return {}
        mine = gpus[number * self._workers : (number + 1) * self._workers]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def _copy_lines(stream: IO[bytes], label: bytes) -> None:
    with stream:
        for line in stream:
            with suppress(OSError, ValueError):
                os.write(1, label + line)


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"paceline run: {text}", file=sys.stderr, flush=True)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = next((line for line in file if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    except OSError:
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
