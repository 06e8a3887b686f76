"""Starting, watching and ending processes: here they are not workers but `sleep`."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sentences import says

from paceline.env import FAILURE_VARIABLE, Placement
from paceline.errors import UsageError
from paceline.group.link import receive, send
from paceline.launcher import nodes, roster, supervise
from paceline.launcher.deaths import StopReason, WorkerExit
from paceline.launcher.flags import LaunchOptions
from paceline.launcher.generations import Generations, without_survival
from paceline.launcher.islands import Archipelago
from paceline.launcher.output import Console, Pipes
from paceline.launcher.plan import WorkerSpec, plan_workers
from paceline.launcher.process import SignalInbox, WorkerProcess, private_folder
from paceline.launcher.roster import Roster
from paceline.launcher.run import LocalRun
from paceline.launcher.store import StoreServer
from paceline.launcher.supervise import Supervisor
from paceline.launcher.worker import FAILED_UNSAID, LOST_UNSAID

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)


class Sleepers:
    """Starts `sleep` for a worker, and remembers whom it started."""

    def __init__(self, folder: Path, size: int, stall_s: float = 0.0) -> None:
        self.options = LaunchOptions(program="sleep", stall_after=stall_s)
        first = Placement(size=size, local_size=size, master_addr="127.0.0.1", master_port=1)
        self.specs = plan_workers(
            self.options, first, run_id="r", folder=str(folder), environ=os.environ, cores=1
        )
        self.started: list[WorkerProcess] = []

    def start(self, spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        process = subprocess.Popen(["sleep", "60"], process_group=0)
        worker = WorkerProcess(spec.rank, process.pid, process.poll, spec.error_file, pipes)
        self.started.append(worker)
        return worker

    def supervisor(
        self, inbox: SignalInbox | None = None, generations: Generations | None = None
    ) -> Supervisor:
        console = Console({1: lambda data: None, 2: lambda data: None})
        return Supervisor(
            *(self.specs, self.start, self.options, console),
            inbox=inbox,
            generations=generations or without_survival(),
        )


def test_a_signal_ends_the_start_of_many_workers(tmp_path: Path) -> None:
    sleepers = Sleepers(tmp_path, 50)

    def start_and_signal(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        if spec.rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return sleepers.start(spec, pipes)

    with closing(SignalInbox([signal.SIGTERM])) as inbox:
        supervisor = sleepers.supervisor(inbox)
        supervisor.start = start_and_signal
        result = supervisor.run()
    assert len(sleepers.started) == 3
    assert result.reason is not None
    assert (result.reason.signal, result.exit_code) == (signal.SIGTERM, 143)
    assert all(worker.poll() is not None for worker in sleepers.started)


def test_on_several_machines_the_one_that_leads_survives_errors_if_it_was_asked_to() -> None:
    options = LaunchOptions(
        program="train.py",
        nnodes=(2, 2),
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
        survive_errors=True,
    )
    with ExitStack() as stack:
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # which a launcher ignores from then on
            stack.callback(signal.signal, number, signal.getsignal(number))
        run = LocalRun(options, stack)
        rendezvous = nodes.Rendezvous(run)
        rendezvous.server = stack.enter_context(closing(StoreServer(run.private)))
        rendezvous.sizes = [1, 1]
        workers = nodes._make_workers(run, rendezvous)
        assert isinstance(workers, Generations)
        assert workers.survives_errors


def test_a_signal_while_islands_start_ends_those_that_start_later_too() -> None:
    class Signalled(Archipelago):
        def _command(self, number: int) -> list[str]:
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            return ["sleep", "60"]

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert Signalled(LaunchOptions(program="train.py"), {}, "", 2, 1).run() == 143
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("is_stop", [True, False])
def test_a_signal_that_another_machine_has_passed_on_before_kills_no_worker(
    is_stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "REPEAT_NS", 0)
    sleepers = Sleepers(tmp_path, 1)
    end = StopReason.by_signal(signal.SIGTERM) if is_stop else StopReason(text="it failed")
    with closing(SignalInbox([signal.SIGTERM])) as inbox:
        generations = Generations(say=lambda text: None, roster=Roster(size=1), end=end)
        supervisor = sleepers.supervisor(inbox, generations)
        supervisor._start_all()
        supervisor._keep_alive()
        killed = []
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            supervisor.on_signal()
            killed.append(supervisor.is_killed)
        assert killed == [not is_stop, True]
        while supervisor.alive:
            supervisor._turn()
        supervisor._close()


def test_islands_that_fail_at_the_same_moment_end_the_run_with_the_first_ones_code(
    tmp_path: Path,
) -> None:
    class Failing(Archipelago):
        def _command(self, number: int) -> list[str]:
            told = f"while [ ! -e {tmp_path}/told ]; do sleep 0.01; done"
            return ["sh", "-c", f"{told}; exit 4" if number else "exit 3"]

        def _tell_why(self, number: int) -> None:
            (tmp_path / "told").touch()
            os.waitid(os.P_PID, self._launchers[1].pid, os.WEXITED | os.WNOWAIT)

    assert Failing(LaunchOptions(program="train.py"), {}, "", 2, 1).run() == 3


def test_a_signal_that_another_thread_gets_ends_islands_too() -> None:
    """As one of the meeting place's does where it begins just then."""

    class Sleeping(Archipelago):
        def _command(self, number: int) -> list[str]:
            return ["sleep", "20"]

        def _wait(self) -> None:
            if not thread.is_alive() and not thread.ident:
                thread.start()
            super()._wait()

    def get_signal() -> None:
        deadline_s = time.monotonic() + 5
        while "poll" not in Path("/proc/self/wchan").read_text() and time.monotonic() < deadline_s:
            time.sleep(0.01)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread = threading.Thread(target=get_signal)
    assert Sleeping(LaunchOptions(program="train.py"), {}, "", 2, 1).run() == 143
    thread.join()


def test_a_worker_that_was_not_started_when_another_failed_has_its_line(tmp_path: Path) -> None:
    sleepers = Sleepers(tmp_path, 3)
    supervisor = sleepers.supervisor()

    def start(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        if spec.rank == 1:
            (first,) = sleepers.started
            os.kill(first.pid, signal.SIGSEGV)
            while first.poll() is None:
                time.sleep(0.01)
            supervisor.on_exit(first)
        return sleepers.start(spec, pipes)

    supervisor.start = start
    result = supervisor.run()
    assert len(sleepers.started) == 2
    first, *others = str(result).splitlines()
    assert first == "paceline: worker 0 was killed by signal 11 (SIGSEGV)."
    assert others == ["  worker 1: ended by the launcher", "  worker 2: not started"]


def test_a_worker_that_cannot_be_started_ends_those_that_were(tmp_path: Path) -> None:
    sleepers = Sleepers(tmp_path, 5)

    def start_some(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        if spec.rank == 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return sleepers.start(spec, pipes)

    supervisor = sleepers.supervisor()
    supervisor.start = start_some
    with pytest.raises(UsageError, match="Cannot start rank 3: Too many open files"):
        supervisor.run()
    assert [worker.poll() for worker in sleepers.started] == [-signal.SIGKILL] * 3


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EMFILE, "open files"), (errno.EAGAIN, "processes"), (errno.ENOMEM, "memory")],
)
def test_a_replacement_that_cannot_be_started_is_tried_five_times_and_ends_nobody(
    tmp_path: Path, number: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "FIRST_BACKOFF_S", 0.01)
    sleepers, said, tried = Sleepers(tmp_path, 3), list[str](), list[float]()
    generations = Generations(say=said.append, roster=Roster(size=3), is_on=True)
    for worker in range(3):
        generations.roster.on_joined(worker, 0)

    def start(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        if len(sleepers.started) == 3:
            tried.append(time.monotonic())
            raise OSError(number, os.strerror(number))
        pipes.theirs += generations.open_worker_channel(spec.rank).theirs
        return sleepers.start(spec, pipes)

    def say(text: str) -> None:
        said.append(text)
        if "not replaced" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    generations.say = say
    with closing(SignalInbox([signal.SIGTERM])) as inbox:
        supervisor = sleepers.supervisor(inbox, generations)
        supervisor.start = start
        supervisor._after(0.0, "kill one", lambda: sleepers.started[1].send(signal.SIGKILL))
        result = supervisor.run()
    waits = [after - before for before, after in pairwise(tried)]
    assert len(tried) == 5
    assert all(wait >= 0.01 * 2**n for n, wait in enumerate(waits)), "later and later"
    assert says(said[-1], "worker 1", "5 tries", reason)
    assert (result.exit_code, generations.roster.size) == (143, 2)
    assert [worker.poll() for worker in sleepers.started] == [-15, -9, -15]


def test_a_launcher_that_ends_its_workers_sleeps_until_they_have_ended(tmp_path: Path) -> None:
    """Although one of them had lost its group, which is due for another."""
    sleepers = Sleepers(tmp_path, 2)
    generations = Generations(say=lambda text: None, roster=Roster(size=2), is_on=True)
    supervisor, turns = sleepers.supervisor(None, generations), 0

    def start(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        command = ["sh", "-c", "trap '' TERM; sleep 60"] if spec.rank else ["false"]
        process = subprocess.Popen(command, process_group=0)
        worker = WorkerProcess(spec.rank, process.pid, process.poll, spec.error_file, pipes)
        sleepers.started.append(worker)
        return worker

    turn = supervisor._turn

    def counted() -> None:
        nonlocal turns
        turns += 1
        turn()

    supervisor.start, supervisor._turn = start, counted  # type: ignore[method-assign]
    generations.roster.on_lost(1, 0, time.monotonic() - 60)
    assert supervisor.run().exit_code == 1
    assert turns < 100


@pytest.mark.timeout(60)
def test_a_run_that_fails_ends_although_rank_0_was_to_be_made_up_for(tmp_path: Path) -> None:
    sleepers, lines = Sleepers(tmp_path, 2), dict[int, socket.socket]()
    lost = Roster(size=2, max_replacements=0)
    generations = Generations(say=lambda text: None, roster=lost, is_on=True)
    for worker in range(2):
        lost.on_joined(worker, 0)

    def start(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        line, page = generations.open_worker_channel(spec.rank).theirs
        os.close(page)
        lines[spec.rank] = socket.socket(fileno=line)
        command = ["sh", "-c", "read word; exit 3"] if spec.rank else ["sleep", "60"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
        workers[spec.rank] = process
        worker = WorkerProcess(spec.rank, process.pid, process.poll, spec.error_file, pipes)
        sleepers.started.append(worker)
        return worker

    def finish_and_fail(text: str) -> None:
        if "not replaced" in text:
            send(lines[1], {"said": "finished", "is_left": False, "is_saved": True})
            workers[1].stdin.close()  # type: ignore[union-attr]
            os.waitid(os.P_PID, workers[1].pid, os.WEXITED | os.WNOWAIT)

    workers: dict[int, subprocess.Popen[bytes]] = {}
    generations.say = finish_and_fail
    supervisor = sleepers.supervisor(None, generations)
    supervisor.start = start
    supervisor._after(0.0, "kill rank 0", lambda: sleepers.started[0].send(signal.SIGKILL))
    result = supervisor.run()
    assert generations.has_finished(1)
    assert (result.exit_code, len(sleepers.started)) == (3, 2)
    for line in lines.values():
        line.close()


@pytest.mark.parametrize(("word", "is_survived"), [(LOST_UNSAID, True), (FAILED_UNSAID, False)])
def test_a_worker_without_room_for_its_error_ends_the_run_only_for_one_of_the_script(
    word: bytes, is_survived: bool, tmp_path: Path
) -> None:
    sleepers = Sleepers(tmp_path, 2)
    generations = Generations(say=lambda text: None, roster=Roster(size=2), is_on=True)
    for worker in range(2):
        generations.roster.on_joined(worker, 0)

    def start(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        pipes.theirs += generations.open_worker_channel(spec.rank).theirs
        if spec.rank == 0:
            return sleepers.start(spec, pipes)
        os.write(pipes.status_writer, word)
        process = subprocess.Popen(["false"], process_group=0)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return WorkerProcess(spec.rank, process.pid, process.poll, spec.error_file, pipes)

    supervisor = sleepers.supervisor(None, generations)
    supervisor.start = start
    supervisor._start_all()
    while len(supervisor.alive) == 2:
        supervisor._turn()
    assert generations.roster.members == ((0,) if is_survived else (0, 1))
    assert (generations.end is None) == is_survived
    supervisor.end_all()
    while supervisor.alive:
        supervisor._turn()
    supervisor._close()


def test_a_replacement_that_waits_to_be_started_is_not_started_when_rank_0_is_made_up_for(
    tmp_path: Path,
) -> None:
    sleepers = Sleepers(tmp_path, 2)
    generations = Generations(say=lambda text: None, roster=Roster(size=2), is_on=True)
    supervisor = sleepers.supervisor(None, generations)
    for worker in range(2):
        generations.roster.on_joined(worker, 0)
    assert generations.on_exit(WorkerExit(rank=0, exit_code=-9, step=39), {})
    supervisor._keep_alive()
    assert [spec.rank for spec in supervisor.starts.queue] == [0]
    generations._hear(1, {"said": "finished", "is_left": False, "is_saved": True})
    supervisor._keep_alive()
    waiting = [(spec.rank, spec.is_alone) for spec in supervisor.starts.queue]
    assert waiting == [(0, True)]
    supervisor._close()


def test_a_death_does_not_overtake_what_the_others_said_before_it() -> None:
    generations = Generations(say=lambda text: None, roster=Roster(size=3))
    for worker in range(3):
        line, page = generations.open_worker_channel(worker).theirs
        with socket.socket(fileno=line) as theirs:
            send(theirs, {"said": "joined", "generation": 0})
        os.close(page)
    ledger = generations.close_worker_channel(1)
    assert generations.on_exit(WorkerExit(rank=1, exit_code=-9, step=1), ledger), "it is survived"
    assert generations.roster.members == (0, 2)
    for worker in (0, 2):
        generations.drop_worker_channel(worker)


def test_a_worker_that_closes_its_channel_keeps_nobody_awake(tmp_path: Path) -> None:
    """As one does that becomes another program."""
    sleepers = Sleepers(tmp_path, 2)
    generations = Generations(say=lambda text: None, roster=Roster(size=2))
    supervisor = sleepers.supervisor(None, generations)

    def start(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        for descriptor in generations.open_worker_channel(spec.rank).theirs:
            os.close(descriptor)
        return sleepers.start(spec, pipes)

    supervisor.start = start
    supervisor._start_all()
    supervisor._turn()
    heard = {key.fd for key in supervisor.selector.get_map().values()}
    channels = [each.socket.fileno() for each in generations.worker_channels.values()]
    assert len(channels) == 2
    assert heard.isdisjoint(channels)
    supervisor.end_all()
    while supervisor.alive:
        supervisor._turn()
    supervisor._close()


class Silent:
    """Stands for the channel to another machine."""

    def receive(self) -> list[dict[str, Any]]:
        return []

    def send(self, message: dict[str, Any]) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_death_in_the_first_step_waits_for_word_of_the_workers_on_other_machines(
    is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines: dict[int, Any] = {1: Silent()}
    roster_of_both = Roster(size=2, machine_by_worker={1: 1})
    generations = Generations(
        say=lambda text: None, roster=roster_of_both, channels=machines, is_run=True
    )
    joined = {"said": "joined", "generation": 0}
    generations._hear(0, joined)
    assert generations.on_exit(WorkerExit(rank=0, exit_code=-9, step=1), {})
    generations.take_starts()
    assert generations.is_needed
    if is_heard:
        generations._hear_machine({**joined, "worker": 1, "ledger": {}})
        assert generations.roster.members == (1,)
        assert generations.end is None
    else:
        monkeypatch.setattr(generations, "_early_s", 0.0)
        generations.take_starts()
        assert generations.end is not None
        assert generations.end.worker == 0


@pytest.mark.parametrize("is_signal", [True, False])
def test_a_stop_that_another_machine_was_asked_for_too_breaks_no_step_off(is_signal: bool) -> None:
    generations = Generations(
        say=lambda text: None, roster=Roster(size=2, machine_by_worker={1: 1}), is_on=True
    )
    channel = generations.open_worker_channel(0)
    with socket.socket(fileno=channel.theirs[0]) as theirs:
        theirs.setblocking(False)
        assert receive(theirs) == {}, "the facts"
        generations.on_stop()
        end = StopReason.by_signal(signal.SIGTERM) if is_signal else StopReason(text="it failed")
        generations._hear_machine({"do": "end", **asdict(end)})
        told = receive(theirs)
        assert told is None if is_signal else told["ends"] == "it failed"
    os.close(channel.theirs[1])
    generations.drop_worker_channel(0)


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_worker_is_named_and_ended_before_the_others_are_done(
    tmp_path: Path, stopped: int
) -> None:
    sleepers = Sleepers(tmp_path, 3, stall_s=0.8)
    supervisor = sleepers.supervisor()

    def start(spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        worker = sleepers.start(spec, pipes)
        if spec.rank == stopped:
            os.kill(worker.pid, signal.SIGSTOP)
        return worker

    supervisor.start = start
    result = supervisor.run()
    first = result.first_failure
    assert first is not None
    assert first.rank == stopped
    assert str(result).startswith(f"paceline: worker {stopped} was stopped by a signal for 0.6 s")
    assert result.exit_code == 1
    assert Path(sleepers.specs[0].environment[FAILURE_VARIABLE]).exists(), "the others can know why"


def test_only_a_worker_that_has_spoken_before_and_computes_nothing_can_be_silent(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        pipes = Pipes(Sleepers(tmp_path, 1).specs[0], Console({}))
        worker = WorkerProcess(0, process.pid, process.poll, "", pipes)
        worker.look(1.0)
        assert (worker.looks_stopped, worker.looks_silent) == (0, 0), "it never spoke"
        worker.beats = True
        worker.look(1.0)
        worker.look(1.0)
        assert (worker.looks_stopped, worker.looks_silent) == (0, 2)
        worker.cpu_s = -1.0
        worker.look(1.0)
        assert worker.looks_silent == 2, "it computed for a second"
        process.kill()
        worker.close()


def test_a_folder_where_nothing_can_be_locked_is_used_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with private_folder() as first, private_folder() as second:
        assert sorted(map(str, tmp_path.iterdir())) == sorted([first, second])
    assert not list(tmp_path.iterdir())


def test_what_a_killed_launcher_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, logs = tmp_path / "paceline-run-left", tmp_path / "paceline-logs-kept"
    (left / "attempt_0").mkdir(parents=True)
    logs.mkdir()
    (tmp_path / "paceline-run-link").symlink_to(logs)
    with private_folder() as first, private_folder() as second:
        assert not left.exists()
        assert Path(first).is_dir(), "its launcher lives"
        assert Path(second).stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == [logs.name, "paceline-run-link"]
