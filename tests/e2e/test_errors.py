"""An exception ends a run, once and everywhere; and every end has one reason, in the same words."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sentences import says

from paceline.files import RunFolder, read_events, read_info
from paceline.launcher.deaths import UNSAID
from paceline.launcher.worker import FAILED_UNSAID
from paceline.run.stop import LEFT, UNKNOWN

SCRIPT = """
import os, pathlib, signal, sys, time
import torch, paceline
from torch import nn

what, where, victim = sys.argv[1], sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(48, 4)
class Rows(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        return {}["label"] if what == "row" and index == 40 else super().__getitem__(index)

data = Rows(x, (x.sum(1) > 0).long())
net = nn.Linear(4, 2)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), data, global_batch=12, epochs=3,
                   shards=4, folder="run", loader_workers=2 * (what == "row"),
                   options=paceline.RunOptions(progress="plain"))
rank, times = os.environ.get("RANK", "0"), pathlib.Path("times")

def strike(moment):
    if (rank, moment) != (victim, where) or run.step < 5:
        return 1.0
    if what == "NaN":
        return float("nan")
    if what == "once" and times.exists():
        return 1.0
    times.touch()
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    if what == "hang":
        time.sleep(600)
    if what == "fill":
        with open("run/filler", "ab", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(1024))
                except OSError:
                    break
        return 1.0
    if what == "nothing":
        return 1.0
    if what == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    if what == "peer":
        raise RuntimeError("the database says: Connection reset by peer")
    if what == "exit":
        sys.exit(5)
    if what in ("save", "evaluate"):
        getattr(run, what)(*[score] * (what == "evaluate"))
        return 1.0
    return {}["label"]

def score(batch):
    strike("evaluation")
    return {"mean": batch[0].mean()}

for step in run:
    with step:
        for x, y in step.batches():
            loss = nn.functional.cross_entropy(run.model(x), y)
            step.backward(loss * strike("step"))
            deadline = time.monotonic() + 10  # let a replacement join before the training is over
            while what != "NaN" and times.exists() and run.membership.size < 2:
                if run._parts.recovery.is_due() or time.monotonic() > deadline:
                    break
                time.sleep(0.003)
    strike("between")
    if what == "unsaved" and step.number == 5:
        run.save()
        break
    if step.ends_epoch:
        run.evaluate(score)
strike("after")
"""
LAUNCHER = [sys.executable, "-m", "paceline", "run"]


def start(folder: Path, command: list[Any], *arguments: object) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [*map(str, command), "train.py", *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


def assert_reason(folder: Path, status: str, reason: str, worker: int | None = None) -> None:
    """Fail unless all that was written says so."""
    run = RunFolder(folder / "run")
    info = read_info(run)
    assert info is not None
    assert (info.status, info.reason, info.failed_worker) == (status, reason, worker)
    stops = [event["reason"] for event in read_events(run) if event["kind"] == "stop"]
    assert stops[-1] == reason
    command = [sys.executable, "-m", "paceline", "report", "run", "--output", "page.html"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    assert json.dumps(reason)[1:-1] in (folder / "page.html").read_text()


def assert_traceback(folder: Path, output: str, summary: str, times: int = 1) -> None:
    """Fail unless the exception was printed once, and is kept."""
    assert output.count("Traceback (most") == output.count(summary) == times, output
    kept = (folder / "run" / "errors.txt").read_text()
    assert kept.count("Traceback (most") == 1
    assert summary in kept


LABEL = "KeyError: 'label'"


@pytest.mark.parametrize(
    ("where", "victim", "flags"),
    [
        ("step", 1, ["--workers", 3]),
        ("evaluation", 0, ["--workers", 2]),
        ("between", 1, ["--workers", 2, "--no-survive"]),
        ("after", 1, ["--workers", 2]),
        ("between", 0, []),
    ],
)
def test_an_exception_ends_the_run_with_one_traceback_and_one_reason(
    tmp_path: Path, where: str, victim: int, flags: list[object]
) -> None:
    done = start(tmp_path, [*LAUNCHER, *flags], "raise", where, victim)
    assert done.returncode == 1, done.stdout
    assert_traceback(tmp_path, done.stdout, LABEL)
    step = {"step": "in step 6", "evaluation": "in step 8", "between": "in step 5"}.get(where)
    when = step or "after its training was over"
    assert f"paceline: worker {victim} failed {when}:\n" in done.stdout
    assert not re.search(r"\d continues?\b", done.stdout)
    assert not any(each in done.stdout for each in (LEFT.reason, str(UNKNOWN)))
    assert_reason(tmp_path, "failed", f"worker {victim} failed {when}: {LABEL}", victim)


def test_an_exception_in_a_process_that_loads_is_the_only_one_that_is_printed(
    tmp_path: Path,
) -> None:
    done = start(tmp_path, [*LAUNCHER, "--workers", 2], "row", "nowhere", 0)
    assert done.returncode == 1, done.stdout
    # That of the loader's process, quoted in the one of the worker.
    assert done.stdout.count("Traceback (most") == 2, done.stdout
    assert says(done.stdout, "KeyError: Caught KeyError in DataLoader", LABEL)


def test_an_error_that_sounds_like_a_lost_worker_is_the_scripts_where_none_is_lost(
    tmp_path: Path,
) -> None:
    done = start(tmp_path, [*LAUNCHER, "--workers", 2], "peer", "step", 1)
    assert done.returncode == 1, done.stdout
    words = "RuntimeError: the database says: Connection reset by peer"
    assert_traceback(tmp_path, done.stdout, words)
    assert_reason(tmp_path, "failed", f"worker 1 failed in step 6: {words}", 1)


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", 2],
        ["--workers", 2, "--no-survive"],
        ["--workers", 2, "--survive-errors"],  # it comes again, on whoever computes that shard
    ],
)
def test_a_loss_that_is_not_finite_says_its_sentence_once(
    tmp_path: Path, flags: list[object]
) -> None:
    done = start(tmp_path, [*LAUNCHER, *flags], "NaN", "step", 1)
    assert done.returncode == 1, done.stdout
    assert_traceback(tmp_path, done.stdout, "NotFiniteError: Step 6: the loss of shard")
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    assert info.status == "failed"
    assert says(info.reason, "failed in step 6: NotFiniteError: Step 6", "on rank 1, is nan")
    assert info.reason.startswith("worker 1 failed")


@pytest.mark.parametrize(
    ("where", "when"),
    [("step", "in step 6"), ("between", "in step 5"), ("after", "after its training was over")],
)
def test_a_run_of_plain_python_says_why_it_failed(tmp_path: Path, where: str, when: str) -> None:
    done = start(tmp_path, [sys.executable], "raise", where, 0)
    assert done.returncode == 1
    assert_traceback(tmp_path, done.stdout, LABEL)
    assert not any(each in done.stdout for each in (LEFT.reason, str(UNKNOWN)))
    assert_reason(tmp_path, "failed", f"worker 0 failed {when}: {LABEL}", 0)


@pytest.mark.parametrize(
    ("command", "code"), [([*LAUNCHER, "--workers", 2], 1), ([sys.executable], 120)]
)
def test_a_loop_that_is_left_after_a_save_that_failed_says_so_everywhere(
    tmp_path: Path, command: list[Any], code: int
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "checkpoints").touch()
    done = start(tmp_path, command, "unsaved", "nowhere", 0)
    assert done.returncode == code, done.stdout
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    left = "The loop was left after step 5, and step 0 is the last that is saved. The checkpoint of"
    assert says(info.reason, "worker 0 failed in step 5: CheckpointError: " + left, "step 5 in")
    assert_reason(tmp_path, "failed", info.reason, 0)


@pytest.mark.parametrize("where", ["step", "between"])
@pytest.mark.parametrize(
    ("command", "victim"), [([sys.executable], 0), ([*LAUNCHER, "--workers", 2], 1)]
)
def test_a_script_that_exits_from_its_loop_with_a_code_ends_the_run_with_it(
    tmp_path: Path, command: list[Any], victim: int, where: str
) -> None:
    done = start(tmp_path, command, "exit", where, victim)
    assert done.returncode == 5, done.stdout
    step = {"step": 6, "between": 5}[where]
    reason = f"worker {victim} ended with exit code 5 in step {step}"
    assert_reason(tmp_path, "failed", reason, victim or None)


@pytest.mark.parametrize(
    ("what", "where", "victim", "reason"),
    [
        ("raise", "step", 1, f"worker 1 failed in step 6: {LABEL}"),
        ("raise", "evaluation", 1, f"worker 1 failed in step 8: {LABEL}"),
        ("SIGKILL", "step", 0, "worker 1 failed in step 6: PeerError: "),
    ],
)
def test_under_torchrun_a_worker_that_failed_or_lost_the_first_says_why(
    tmp_path: Path, what: str, where: str, victim: int, reason: str
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = start(tmp_path, torchrun, what, where, victim)
    assert done.returncode == 1
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    assert (info.status, info.reason[: len(reason)]) == ("failed", reason)


@pytest.mark.parametrize("what", ["once", "raise"])
def test_exceptions_are_survived_where_asked_until_one_comes_again(
    tmp_path: Path, what: str
) -> None:
    where = "step" if what == "raise" else "between"
    command = [*LAUNCHER, "--workers", 2, "--survive-errors"]
    done = start(tmp_path, command, what, where, 1)
    step = "6" if what == "raise" else "5"
    assert f"worker 1 raised {LABEL} in step {step}; 1 continues." in done.stdout
    assert f"paceline: worker 1 failed in step {step}:\nTraceback (most" in done.stdout
    if what == "once":
        assert done.returncode == 0, done.stdout
        assert_reason(tmp_path, "finished", "all steps are applied")
    else:
        assert done.returncode == 1, done.stdout
        info = read_info(RunFolder(tmp_path / "run"))
        assert info is not None
        assert says(info.reason, "the same exception came 2 times at the same line", LABEL)
        assert info.reason.partition(": ")[0] in done.stdout


def test_a_worker_that_crashes_again_and_again_ends_the_run_at_whatever_step(
    tmp_path: Path,
) -> None:
    done = start(tmp_path, [*LAUNCHER, "--workers", 2], "SIGSEGV", "between", 1)
    assert done.returncode == 128 + signal.SIGSEGV, done.stdout
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    assert says(info.reason, "worker 1 failed 3 times within 100", "signal 11 (SIGSEGV)")
    assert f"paceline: {info.reason}.\n" in done.stdout


def test_a_run_that_is_interrupted_twice_is_stopped_and_says_so(tmp_path: Path) -> None:
    """It hangs in its step, so that it cannot say so itself."""
    command = [*LAUNCHER, "--workers", 2, "--shutdown-timeout", 1]
    done = start(tmp_path, command, "interrupt", "step", 1)
    assert done.returncode == 128 + signal.SIGINT, done.stdout
    assert done.stdout.endswith("paceline: stopped by Ctrl-C.\n")
    assert_reason(tmp_path, "stopped", "stopped by Ctrl-C")


@pytest.mark.parametrize("victim", [0, 1])
def test_two_machines_end_with_the_same_words(tmp_path: Path, victim: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    (tmp_path / "train.py").write_text(SCRIPT)
    launchers = []
    for machine in range(2):
        command = [*LAUNCHER, "--nnodes", 2, *where, "--rdzv-conf", f"is_host={1 - machine}"]
        launchers.append(
            subprocess.Popen(
                [*map(str, command), "train.py", "raise", "step", str(victim)],
                cwd=tmp_path,
                env={**os.environ, "PACELINE_HOST": f"machine {machine}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [each.communicate(timeout=100)[0] for each in launchers]
    assert [each.returncode for each in launchers] == [1, 1], outputs
    for output in outputs:
        assert output.count("Traceback (most") == output.count(LABEL) == 1
        assert f"paceline: worker {victim} failed in step 6:\n" in output
    assert_reason(tmp_path, "failed", f"worker {victim} failed in step 6: {LABEL}", victim)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system that is soon full."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("what", ["nothing", "raise"])
def test_a_temporary_folder_that_is_full_ends_nobody_and_hides_nothing(
    what: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with small_disk(tmp_path / "tmp"):
        environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        command = [*LAUNCHER, "--workers", "2", "train.py", what, "step", "1"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=tmp_path, env=environ, text=True, **pipes) as launcher:
            assert launcher.stdout is not None
            said = launcher.stdout.readline()  # that workers are started
            with suppress(OSError), open(tmp_path / "tmp" / "filler", "ab", buffering=0) as file:
                while True:
                    file.write(bytes(1024))
            said += launcher.communicate(timeout=100)[0]
    if what == "nothing":
        assert launcher.returncode == 0, said
        assert_reason(tmp_path, "finished", "all steps are applied")
    else:
        assert launcher.returncode == 1, said
        assert (said.count("Traceback (most"), said.count(LABEL)) == (1, 1), said
        assert_reason(tmp_path, "failed", f"worker 1 failed: {UNSAID[FAILED_UNSAID]['summary']}", 1)


@pytest.mark.parametrize("survives", [True, False])
@pytest.mark.parametrize("what", ["save", "evaluate"])
def test_workers_that_wait_for_each_other_are_ended_with_where_they_are(
    tmp_path: Path, what: str, survives: bool
) -> None:
    """Here for a call that one of them leaves out."""
    flags = ["--workers", 2, "--stall-after", 1, "--stall-end", 2]
    done = start(
        tmp_path, [*LAUNCHER, *flags, *["--no-survive"] * (not survives)], what, "between", 1
    )
    assert done.returncode == 1, done.stdout
    reason = "all 2 workers have waited for each other for 2 s"
    assert_reason(tmp_path, "failed", reason)
    kept = (tmp_path / "run" / "errors.txt").read_text()
    for text in (done.stdout, kept):
        assert says(text, reason, "Worker 0 was at:", "Worker 1 was at:", "in strike")


@pytest.mark.parametrize(
    ("what", "flags", "parts"),
    [
        ("SIGKILL", [], ("worker 1 was killed by signal 9 (SIGKILL) in step 6",)),
        ("NaN", [], ("NotFiniteError: Step 6", "on rank 1, is nan. Its samples are")),
        ("hang", ["--stall-after", 1, "--stall-end", 3], ("worker 1 was hanging", "in step 6")),
        ("fill", [], ("CheckpointError", "No space left on device")),
    ],
    ids=["kill", "NaN", "stall", "full disk"],
)
def test_terminal_run_json_report_and_live_page_say_the_same_reason(
    tmp_path: Path, browser: Any, what: str, flags: list[object], parts: tuple[str, ...]
) -> None:
    if what == "fill":
        with small_disk(tmp_path / "run"):
            compare_all_that_say_why(tmp_path, browser, what, flags, parts)
    else:
        compare_all_that_say_why(tmp_path, browser, what, flags, parts)


def compare_all_that_say_why(
    folder: Path, browser: Any, what: str, flags: list[object], parts: tuple[str, ...]
) -> None:
    done = start(folder, [*LAUNCHER, "--workers", 3, "--no-survive", *flags], what, "step", 1)
    assert done.returncode, done.stdout
    info = read_info(RunFolder(folder / "run"))
    assert info is not None
    assert (info.status, info.failed_worker is not None) == ("failed", True)
    assert says(info.reason, *parts)
    for part in info.reason.split(": ", 1):  # an exception stands below its traceback
        assert part in done.stdout
    paceline = [sys.executable, "-m", "paceline"]
    command = [*paceline, "report", "run", "--output", "page.html"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    command = [*paceline, "watch", "--no-open", "run"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for address in ((folder / "page.html").as_uri(), server.stdout.readline().split()[-1]):
            page = browser.new_page()
            page.set_default_timeout(60_000)
            page.goto(address)
            summary = page.locator("#overview", has_text="It failed after")
            assert info.reason[1:] in summary.inner_text()
            page.close()
        server.terminate()
