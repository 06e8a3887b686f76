"""`paceline run` itself, with real processes. Scripts import torch only where they must."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

# Far below the seconds that the workers of these tests would sleep.
PATIENCE_S = 60.0
WAITS = "import time\ntime.sleep(3600)\n"
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline", "run", *map(str, arguments)]


def paceline_run(
    folder: Path, *arguments: object, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@contextmanager
def started(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return name


def lines_of(text: str) -> list[str]:
    return sorted(text.splitlines())


def wait_for_files(folder: Path, pattern: str, count: int) -> list[Path]:
    deadline = time.monotonic() + PATIENCE_S
    while len(found := sorted(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{count} files {pattern} did not appear"
        time.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "workers are still there"
        time.sleep(0.01)


def test_every_worker_runs_the_script_with_its_arguments_and_labelled_output(
    tmp_path: Path,
) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv)
        print("to stderr", file=sys.stderr)
        """,
    )
    done = paceline_run(tmp_path, "--workers", 3, script, "--workers", "9", "--", "-x")
    assert done.returncode == 0
    arguments = "['script.py', '--workers', '9', '--', '-x']"
    assert lines_of(done.stdout) == [f"[worker {r}] {r} 3 {arguments}" for r in range(3)]
    said = [f"[worker {r}] to stderr" for r in range(3)]
    assert lines_of(done.stderr) == [*said, "paceline: starting 3 workers."]


def test_a_single_worker_writes_as_if_nobody_were_between(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print('out', end=''); print('err', file=sys.stderr)")
    done = paceline_run(tmp_path, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out", "err\n")


def test_the_script_sees_what_plain_python_shows_it(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import json, sys
        main = sys.modules["__main__"]
        names = sorted(name for name in globals() if name.startswith("__"))
        print(json.dumps([
            __name__, __file__, __spec__, __package__, __annotations__, names, sys.argv,
            sys.path[0], main.__file__, main.__dict__ is globals(), "torch" in sys.modules,
        ]))
        """,
    )
    plain = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert paceline_run(tmp_path, script).stdout == plain.stdout
    # The launcher postpones annotations in its own files; the script must not notice.
    script = write(tmp_path, "x: undefined_name = 1")
    assert "NameError" in paceline_run(tmp_path, script).stderr


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    write(package, "", "__init__.py")
    write(
        package,
        """
        import sys
        print(__name__, __package__, __spec__.name, sys.argv[1:], sys.argv[0] == __file__)
        """,
        "train.py",
    )
    done = paceline_run(tmp_path, "-m", "pkg.train", "--lr", "1")
    assert done.stdout == "__main__ pkg pkg.train ['--lr', '1'] True\n", done.stderr


def test_functions_of_the_script_reach_spawned_children(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import multiprocessing, os

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """,
    )
    done = paceline_run(tmp_path, script)
    assert done.stdout == "[2, 4]\n", done.stderr


def test_the_first_real_traceback_is_printed_once_and_everyone_ends(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, pathlib, sys, time

        def work(rank):
            if rank == 1:
                while not all(pathlib.Path(f"up{r}").exists() for r in (0, 2)):
                    time.sleep(0.01)
                raise ValueError("boom")
            pathlib.Path(f"up{rank}").touch()
            time.sleep(3600)

        work(int(os.environ["RANK"]))
        """,
    )
    done = paceline_run(tmp_path, "--workers", 3, script)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    said = ["starting 3 workers.", "worker 1 failed:"]
    assert done.stderr.splitlines()[:2] == [f"paceline: {line}" for line in said]
    assert done.stderr.splitlines()[2] == "Traceback (most recent call last):"
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert [Path(frame.split('"')[1]).name for frame in frames] == ["script.py", "script.py"]
    assert "ValueError: boom\n" in done.stderr
    assert done.stderr.endswith(
        "  worker 0: ended by the launcher\n  worker 2: ended by the launcher\n"
    )


def test_a_failure_shows_even_if_the_worker_hangs_while_it_ends(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import atexit, os, time
        if os.environ["RANK"] == "0":
            atexit.register(time.sleep, 3600)
            raise ValueError("boom")
        time.sleep(3600)
        """,
    )
    done = paceline_run(tmp_path, "--workers", 2, script)
    assert (done.returncode, done.stderr.count("ValueError: boom")) == (1, 1)


def test_hooks_of_the_users_run_and_print_no_second_traceback(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import sys
        before = sys.excepthook
        def hook(kind, error, frames):
            print("hook saw", kind.__name__)
            before(kind, error, frames)
        sys.excepthook = hook
        raise ValueError("boom")
        """,
    )
    done = paceline_run(tmp_path, script)
    assert done.stdout == "hook saw ValueError\n"
    assert done.stderr.count("Traceback") == 1


def test_a_machine_that_has_no_room_is_no_traceback(tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh", *command(write(tmp_path, WAITS))]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert done.stderr == "paceline run: Too many open files.\n"


def test_a_signal_ends_a_run_although_its_parent_had_blocked_it(tmp_path: Path) -> None:
    script = write(tmp_path, f"import os\nopen('up' + os.environ['RANK'], 'w').close()\n{WAITS}")
    blocking = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
    blocking += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    given = [sys.executable, "-c", blocking, *command("--workers", 2, script)[1:]]
    with subprocess.Popen(given, cwd=tmp_path) as launcher:
        try:
            wait_for_files(tmp_path, "up*", 2)
            launcher.terminate()
            assert launcher.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            launcher.kill()


def test_workers_have_exit_codes_also_where_the_parent_ignores_ends_of_children(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, "import os, sys  # torch\nsys.exit(3 * int(os.environ['RANK']))\n")
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    ignoring += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    for workers, code in ((1, 0), (2, 3)):
        given = command("--workers", workers, script)[1:]
        done = subprocess.run(
            [sys.executable, "-c", ignoring, *given], cwd=tmp_path, capture_output=True, timeout=90
        )
        assert done.returncode == code, done.stderr


EXITS_SLOWLY = """
import atexit, os, pathlib, sys, time
import paceline

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

def leave():
    pathlib.Path("leaves").touch()
    wait_for(os.environ["PACELINE_FAILED_FILE"])

if os.environ["RANK"] == "1":
    atexit.register(leave)
    sys.exit(3)
wait_for("leaves")
raise paceline.errors.PeerError("Rank 1 is gone.")
"""


def test_a_worker_that_exits_slowly_is_the_one_that_has_failed(tmp_path: Path) -> None:
    """Python can take longer to exit than the others take to find that the worker is gone."""
    done = paceline_run(tmp_path, "--workers", 2, write(tmp_path, EXITS_SLOWLY))
    assert done.returncode == 3, done.stderr
    assert "worker 1 ended with exit code 3" in done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, "worker 0 ended with exit code 3"),
        ("sys.exit('no data')", 1, "no data\n"),
        ("os._exit(7)", 7, "worker 0 ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "worker 0 was killed by signal 9 (SIGKILL)"),
        ("os.abort()", 134, "worker 0 was killed by signal 6 (SIGABRT)"),
        ("1 +", 1, "SyntaxError"),
    ],
)
def test_exit_codes_of_a_worker(tmp_path: Path, ending: str, code: int, words: str) -> None:
    script = write(tmp_path, f"import os, sys\n{ending}\n")
    done = paceline_run(tmp_path, script)
    assert done.returncode == code
    assert words in done.stderr
    if "Fatal Python error" not in done.stderr:  # the fault handler shows every frame there is
        assert "launcher/" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_workers_and_what_they_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = write(
        tmp_path,
        """
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "3600"])
        pathlib.Path(f"pid{child.pid}").touch()
        pathlib.Path(f"pid{os.getpid()}").touch()
        time.sleep(3600)
        """,
    )
    with started(tmp_path, "--workers", 2, script) as launcher:
        pids = [int(path.name[3:]) for path in wait_for_files(tmp_path, "pid*", 4)]
        launcher.send_signal(number)
        assert launcher.wait(timeout=PATIENCE_S) == 128 + number
        wait_until_gone(pids)
        _, said = launcher.communicate()
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert said == f"paceline: starting 2 workers.\npaceline: stopped by {name}.\n"


def test_a_worker_may_use_the_grace_it_is_given(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import pathlib, signal, sys, time
        def on_term(number, frame):
            time.sleep(1)
            pathlib.Path("saved").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, on_term)
        pathlib.Path("up").touch()
        time.sleep(3600)
        """,
    )
    with started(tmp_path, script) as launcher:
        wait_for_files(tmp_path, "up", 1)
        launcher.terminate()
        assert launcher.wait(timeout=PATIENCE_S) == 143
    assert (tmp_path / "saved").exists()


def test_a_worker_that_ignores_everything_is_killed(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"pid{os.getpid()}").touch()
        time.sleep(3600)
        """,
    )
    with started(tmp_path, "--workers", 2, "--shutdown-timeout", 0.5, script) as launcher:
        pids = [int(path.name[3:]) for path in wait_for_files(tmp_path, "pid*", 2)]
        launcher.terminate()
        assert launcher.wait(timeout=PATIENCE_S) == 143
        wait_until_gone(pids)


def test_the_second_signal_kills(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, pathlib, signal, time
        def hold(number, frame):
            pathlib.Path("asked").touch()
        signal.signal(signal.SIGTERM, hold)
        pathlib.Path(f"pid{os.getpid()}").touch()
        while True:
            time.sleep(3600)
        """,
    )
    with started(tmp_path, "--shutdown-timeout", 3600, script) as launcher:
        pids = [int(path.name[3:]) for path in wait_for_files(tmp_path, "pid*", 1)]
        launcher.terminate()
        wait_for_files(tmp_path, "asked", 1)
        deadline_s = time.monotonic() + PATIENCE_S
        while launcher.poll() is None and time.monotonic() < deadline_s:
            launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(timeout=0.3)
        assert launcher.poll() == 143
        wait_until_gone(pids)


def test_killing_the_launcher_leaves_nobody_behind(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "3600"])
        pathlib.Path(f"pid{child.pid}").touch()
        pathlib.Path(f"pid{os.getpid()}").touch()
        time.sleep(3600)
        """,
    )
    with started(tmp_path, "--workers", 2, script) as launcher:
        pids = [int(path.name[3:]) for path in wait_for_files(tmp_path, "pid*", 4)]
        launcher.kill()
        launcher.wait()
        wait_until_gone(pids)


def test_what_a_finished_worker_left_running_is_ended(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import pathlib, subprocess
        child = subprocess.Popen(["sleep", "3600"])
        pathlib.Path(f"pid{child.pid}").touch()
        """,
    )
    done = paceline_run(tmp_path, "--workers", 2, script)
    assert done.returncode == 0
    wait_until_gone([int(path.name[3:]) for path in wait_for_files(tmp_path, "pid*", 2)])


def test_restarts_begin_afresh_and_say_what_was_lost(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
        if attempt == "0":
            if os.environ["RANK"] == "1":
                raise ValueError("boom")
            time.sleep(3600)
        """,
    )
    done = paceline_run(tmp_path, "--workers", 2, "--max-restarts", 2, script)
    assert done.returncode == 0
    assert done.stderr.count("ValueError: boom") == 1
    assert "restarting all 2 workers (restart 1 of 2)" in done.stderr
    assert {"[worker 0] 1 2", "[worker 1] 1 2"} <= set(done.stdout.splitlines())


def test_restarts_run_out(tmp_path: Path) -> None:
    script = write(tmp_path, "raise ValueError('boom')")
    done = paceline_run(tmp_path, "--max-restarts", 1, script)
    assert (done.returncode, done.stderr.count("ValueError: boom")) == (1, 2)


def test_logs_go_where_the_flags_say(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import sys; print('apple'); print('pear'); print('error', file=sys.stderr)",
    )
    done = paceline_run(
        *(tmp_path, "--workers", 2, "--log-dir", "logs", "--tee", 1, "--redirects", "1:2"),
        *("--local-ranks-filter", 0, "--duplicate-stdout-filters", "app", "--rdzv-id", "job"),
        script,
    )
    assert done.returncode == 0
    assert lines_of(done.stdout) == ["[worker 0] apple", "[worker 0] pear"]
    assert "[worker 0] error" in done.stderr
    assert "[worker 1]" not in done.stderr
    (attempt,) = (tmp_path / "logs").glob("job_*/attempt_0")
    assert (attempt / "0" / "stdout.log").read_text() == "apple\npear\n"
    assert (attempt / "1" / "stdout.log").read_text() == "apple\npear\n"
    assert (attempt / "1" / "stderr.log").read_text() == "error\n"
    assert not (attempt / "0" / "stderr.log").exists()
    assert (attempt / "filtered_stdout.log").read_text() == "apple\napple\n"


def test_binary_output_passes_through(tmp_path: Path) -> None:
    script = write(tmp_path, "import os; os.write(1, bytes([255, 0, 128, 10]))")
    done = subprocess.run(
        command("--workers", 2, script), cwd=tmp_path, capture_output=True, timeout=60, check=True
    )
    assert sorted(done.stdout.splitlines()) == [
        b"[worker 0] \xff\x00\x80",
        b"[worker 1] \xff\x00\x80",
    ]


def test_the_end_of_a_reader_ends_the_run(tmp_path: Path) -> None:
    script = write(tmp_path, "while True: print('y' * 1000)")
    with started(tmp_path, "--workers", 2, script) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(timeout=PATIENCE_S) == 141
        launcher.stdout = None


def test_a_reader_that_stops_holds_nobody_up(tmp_path: Path) -> None:
    """Workers wait with what they print; deaths and signals are dealt with, and nothing is lost."""
    script = write(
        tmp_path,
        """
        import os, pathlib, time
        if os.environ["RANK"] == "1":
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
            os._exit(3)
        pathlib.Path(f"pid{os.getpid()}").touch()
        for number in range(10**6):
            print(number, "y" * 1000, flush=True)
            if number == 1000:
                pathlib.Path("printed").touch()
        """,
    )
    with started(tmp_path, "--workers", 2, script) as launcher:
        wait_for_files(tmp_path, "printed", 1)  # pipes have room for a tenth of that
        (tmp_path / "go").touch()
        wait_until_gone([int(path.name[3:]) for path in wait_for_files(tmp_path, "pid*", 1)])
        out, err = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 3
    assert "paceline: worker 1 ended with exit code 3." in err
    *lines, _ = out.splitlines()  # the last may be half a line
    assert lines == [f"[worker 0] {n} {'y' * 1000}" for n in range(len(lines))]
    assert len(lines) >= 1000


def test_a_port_that_is_taken_is_a_usage_error(tmp_path: Path) -> None:
    script = write(tmp_path, WAITS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = paceline_run(tmp_path, "--master-port", port, script)
    assert done.returncode == 2
    assert f"Cannot listen on 127.0.0.1, port {port}: Address already in use." in done.stderr


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--log-dir", "script.py/logs"], {}, "Cannot write log files in 'script.py/logs'"),
        ([], {"PYTHON_EXEC": "/no/such/python"}, "Cannot start '/no/such/python' for rank 0"),
        (["--master-addr", "192.0.2.1"], {}, "Cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_started_is_a_usage_error(
    tmp_path: Path, flags: list[str], environ: dict[str, str], words: str
) -> None:
    script = write(tmp_path, WAITS)
    done = paceline_run(tmp_path, *flags, script, **environ)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_master_nobody_can_reach_is_said_in_time(tmp_path: Path) -> None:
    script = write(tmp_path, WAITS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = paceline_run(
        *(tmp_path, "--nnodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1"),
        *("--master-port", port, "--rdzv-conf", "join_timeout=1", script),
    )
    assert done.returncode == 1
    assert f"Waited 1 s at 127.0.0.1:{port} for a launcher to listen there" in done.stderr


TRAINS = """
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
"""
ALL_REDUCE = """
    import os, subprocess, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    print("sum", int(total), torch.nn.parallel.DistributedDataParallel.__module__.split(".")[0])
    if dist.get_rank() == 0:
        listeners = subprocess.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"],
                                   capture_output=True, text=True).stdout.splitlines()
        folders = ["/proc/self/fd", f"/proc/{os.getppid()}/fd"]  # its own and the launcher's
        paths = [f"{folder}/{fd}" for folder in folders for fd in os.listdir(folder)]
        inodes = {os.readlink(path) for path in paths if os.path.islink(path)}
        rows = [row.split() for row in listeners]
        mine = {row[1].rpartition(":")[0] for row in rows
                if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
        print("listens on", mine)
"""


def test_an_unmodified_script_meets_on_loopback_only_and_rank_0_may_finish_first(
    tmp_path: Path,
) -> None:
    """And without --as-torch it finds torch's own classes."""
    script = write(
        tmp_path,
        textwrap.dedent(ALL_REDUCE)
        + TRAINS
        + textwrap.dedent("""
            dist.destroy_process_group()
            if os.environ["RANK"] == "1":
                import time
                time.sleep(0.5)
                dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                              is_master=False).set("still", "there")
            """),
    )
    done = paceline_run(tmp_path, "--workers", 2, script)
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == [
        "[worker 0] listens on {'0100007F'}",
        "[worker 0] sum 3 torch",
        "[worker 1] sum 3 torch",
    ]
    assert "DistributedDataParallel" not in done.stderr, "they do not train alone"


def test_a_program_that_is_not_python_is_told_what_a_script_is_told(tmp_path: Path) -> None:
    shell = tmp_path / "train.sh"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "PACELINE_RUN_ID")
    shell.write_text("#!/bin/sh\necho " + " ".join(f"${{{name}:?}}" for name in names) + " $1\n")
    shell.chmod(0o700)
    done = paceline_run(tmp_path, "--workers", 2, "--no-python", "./train.sh", "--lr")
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(lines_of(done.stdout)):
        assert re.fullmatch(rf"\[worker {rank}\] {rank} {rank} 2 127\.0\.0\.1 \S+ --lr", line)


RUN = """
import os, sys, torch, paceline
if not os.environ.get("AGAIN") and "again" in sys.argv:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
net = torch.nn.Linear(3, 1)
rows = torch.utils.data.TensorDataset(torch.ones(24, 3))
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), rows, global_batch=12, epochs=1)
for step in run:
    with step:
        for (x,) in step.batches():
            step.backward(run.model(x).square().mean())
print("trained", run.step, "steps")
"""


def test_a_program_that_runs_python_trains_and_so_does_a_script_that_starts_itself_again(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, RUN)
    for words in (["--no-python", "nice", sys.executable, script], [script, "again"]):
        done = paceline_run(tmp_path, "--workers", 2, "--quiet", *words)
        assert done.returncode == 0, done.stderr
        assert lines_of(done.stdout) == [f"[worker {rank}] trained 2 steps" for rank in range(2)]


def test_what_a_script_starts_and_forgets_is_not_left_to_the_launcher(tmp_path: Path) -> None:
    script = """
        import os, pathlib, time
        deadline_s = time.monotonic() + 60  # the workers are forks, as this mentions torch
        def wait_for(name, count):
            with open(name, "a") as file:
                print(file=file, flush=True)
                while os.fstat(file.fileno()).st_size < count:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
        wait_for("started", 2)
        for _ in range(5):
            os.system("echo >> ended &")
        wait_for("ended", 12)
        launcher = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
        forgotten = ["sh"]
        while forgotten and time.monotonic() < deadline_s:
            stats = [pathlib.Path(f"/proc/{pid}/stat") for pid in launcher.read_text().split()]
            forgotten = [each for each in stats if " (sh) Z " in each.read_text()]
        print("left to the launcher:", len(forgotten))
    """
    done = paceline_run(tmp_path, "--workers", 2, write(tmp_path, script))
    assert lines_of(done.stdout) == [f"[worker {rank}] left to the launcher: 0" for rank in (0, 1)]


@pytest.mark.parametrize("survival", [[], ["--no-survive"]])
def test_two_machines_make_one_world_and_a_failure_on_one_restarts_both(
    tmp_path: Path, survival: list[str]
) -> None:
    script = """
        import os, socket, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                raise ValueError("boom")
            time.sleep(3600)
        at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.create_connection(at, timeout=30):
            print("reached port", at[1], "as one of", os.environ["WORLD_SIZE"])
    """
    script = write(tmp_path, script)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    flags = ["--nnodes", 2, *where, "--max-restarts", 1, *survival]
    with started(tmp_path, *flags, script) as second:
        first = paceline_run(tmp_path, *flags, "--workers", 2, script)
        out, err = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + err
    for said in (first.stderr, err):  # the same on both
        assert "paceline: worker 1 failed:\nTraceback" in said
        assert said.count("ValueError: boom") == 1
    reached = [line for line in (first.stdout + out).splitlines() if "reached" in line]
    (at,) = {line.split()[4] for line in reached}
    assert sorted(reached) == [f"[worker {r}] reached port {at} as one of 3" for r in range(3)]


def test_errors_recorded_by_torchs_decorator_are_shown_once(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("boom")

        main()
        """,
    )
    done = paceline_run(tmp_path, script)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: boom") == 1
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_at_a_terminal_ends_the_run_without_a_traceback(
    tmp_path: Path, workers: int
) -> None:
    script = write(
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path(f"pid{os.getpid()}").touch()
        time.sleep(3600)
        """,
    )
    ours, its = pty.openpty()
    try:
        launcher = subprocess.Popen(
            # A session of its own, with the terminal as the one that controls it.
            [sys.executable, "-c", TAKE_TERMINAL, *command("--workers", workers, script)[1:]],
            cwd=tmp_path,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
        pids = [int(path.name[3:]) for path in wait_for_files(tmp_path, "pid*", workers)]
        os.write(ours, b"\x03")
        assert launcher.wait(timeout=PATIENCE_S) == 130
        wait_until_gone(pids)
        said = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(its)
    assert "paceline: stopped by Ctrl-C." in said
    assert "Traceback" not in said


def test_workers_that_train_without_each_other_are_told_of(tmp_path: Path) -> None:
    done = paceline_run(tmp_path, "--workers", 2, write(tmp_path, "import torch\n" + TRAINS))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DistributedDataParallel") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_stream_that_is_closed_ends_no_launcher(tmp_path: Path, closed: str) -> None:
    (tmp_path / "note.py").write_text(
        "import os; print('heard'); open(f\"ran{os.environ['RANK']}\", 'x').close()"
    )
    command = f"exec {sys.executable} -m paceline run --workers 2 note.py {closed}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("ran*")} == {"ran0", "ran1"}
    assert done.stdout.count("heard") == (0 if closed == ">&-" else 2)
