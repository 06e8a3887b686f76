"""`paceline run` and `paceline.launch` on a terminal: what a person sees, at several moments.

Most scripts here draw without torch, because what is tested is the way from rank 0 to the screen.
A script goes on until the test has seen what it wants to see, and writes the file `go`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from sentences import says

from paceline.files.run_folder import RunFolder, read_events, read_info
from tests.terminals import PATIENCE_S, Glass, Session

pytest.importorskip("rich")

# Stands for a training: every rank prints, rank 0 shows where the run is.
SCRIPT = """
import os, sys, time
from paceline.telemetry import Progress

rank = int(os.environ["RANK"])

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def train(name="toy", go="go", steps=40):
    with Progress(draws=rank == 0) as progress:
        progress.start(name=name, workers=2, epochs=1, steps=steps)
        print("before", flush=True)
        while not os.path.exists(go):
            time.sleep(0.01)
            progress.step(steps // 2, epoch=0, samples=8, metrics={"loss": 0.5, "accuracy": 0.9})
        print("after", flush=True)
        progress.step(steps, epoch=0, samples=8, metrics={"loss": 0.5})
        progress.epoch(0, {"loss": 0.5}, seconds=1.0, samples=320)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "training.py").write_text(SCRIPT)
    write(tmp_path, "train()\nprint('the end', flush=True)")
    return tmp_path


def write(folder: Path, text: str) -> None:
    (folder / "script.py").write_text(f"from training import *\n{text}\n")


def on_terminal(
    folder: Path, *arguments: object, workers: int = 2, columns: int = 120, **environ: str
) -> Session:
    words = ("-m", "paceline", "run", "--workers", workers, *arguments)
    return Session(folder, *words, columns=columns, environ=environ)


def go(folder: Path, name: str = "go") -> None:
    (folder / name).touch()


def is_half(glass: Glass) -> bool:
    return bool(re.search(r"[━╸] +50%  epoch 1/1  step 20/40  loss 0.5000", glass.bottom))


def of_rank(rank: int, lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith(f"[worker {rank}] ")]


def plain_output(folder: Path, *arguments: object, **environ: str) -> list[str]:
    """What the same command prints into a pipe."""
    inherited = {name: value for name, value in os.environ.items() if name != "PACELINE_PROGRESS"}
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--workers", "2", *map(str, arguments)],
        cwd=folder,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "\x1b" not in result.stdout
    return result.stdout.splitlines()


def timeless(lines: Sequence[str]) -> list[str]:
    """Without what differs from one time to the next: seconds, speeds, whose line came first."""
    lasting = [line for line in lines if "epoch 1/1 " not in line]  # said if it took a second
    return sorted(re.sub(r"finished on .*", "finished", line).rstrip() for line in lasting)


def test_there_is_one_bar_with_the_workers_lines_above_it_and_then_the_summary(
    folder: Path,
) -> None:
    with on_terminal(folder, "script.py") as session:
        session.until(lambda glass: is_half(glass) and len(glass.lines) == 4, "the bar")
        above = ["[worker 0] before", "[worker 1] before", "toy: 2 workers, 1 epoch, 40 steps"]
        assert sorted(session.glass.lines[:3]) == above
        assert "accuracy 90.0%" in session.glass.bottom
        assert "samples/s" in session.glass.bottom
        assert session.glass.bottom.endswith("left")
        go(folder)
        assert session.finish() == 0
        lines = session.glass.lines
    assert "%" not in "".join(lines), "the bar is gone"
    assert session.glass.has_cursor
    assert session.glass.bottom == ""
    own = [line for line in lines if not line.startswith("[worker 1] ")]
    assert own[:3] == ["toy: 2 workers, 1 epoch, 40 steps", "[worker 0] before", "[worker 0] after"]
    assert own[3].startswith("toy finished on 2 workers: 40 steps")
    assert "  epoch     loss   seconds   samples/s" in own
    assert own[-1] == "[worker 0] the end", "in the order in which rank 0 said it"
    assert of_rank(1, lines) == ["[worker 1] before", "[worker 1] after", "[worker 1] the end"]


def test_a_flood_of_lines_arrives_whole_and_in_order_above_the_bar(folder: Path) -> None:
    count = 4_000
    write(
        folder,
        f"""
with Progress(draws=rank == 0) as progress:
    progress.start(name="flood", steps={count})
    for number in range({count}):
        print("line", number, "x" * (number % 50), file=sys.stderr if number % 2 else sys.stdout)
        progress.step(number, epoch=0, samples=1)
""",
    )
    with on_terminal(folder, "script.py", columns=120) as session:
        assert session.finish() == 0
        lines = session.glass.lines
    for rank in (0, 1):
        for odd in (0, 1):  # standard output and standard error are two pipes
            expected = [f"line {n} {'x' * (n % 50)}".rstrip() for n in range(odd, count, 2)]
            found = [line.partition("] ")[2] for line in of_rank(rank, lines)]
            assert [line for line in found if int(line.split()[1]) % 2 == odd] == expected
    assert "━" in session.raw, "there was a bar"
    others = [line for line in lines if not line.startswith("[worker ")]
    assert others[0].startswith("flood: ")
    assert " ".join(others[1:]).startswith("flood finished")
    assert len(others) <= 3


def test_several_runs_one_after_the_other_each_have_their_bar(folder: Path) -> None:
    write(
        folder,
        "train('first', 'go1')\nprint('between', flush=True)\nwait_for('go')\n"
        "train('second', 'go2')",
    )
    with on_terminal(folder, "script.py") as session:
        session.until(is_half, "the first bar")
        go(folder, "go1")
        session.until(
            lambda glass: "[worker 0] between" in glass.lines and not glass.bottom,
            "the time between",
        )
        go(folder)
        session.until(is_half, "the second bar")
        go(folder, "go2")
        assert session.finish() == 0
        text = "\n".join(session.glass.lines)
    assert re.search(r"first: .*first finished.*between.*second: .*second finished", text, re.S)
    assert "50%" not in text


def test_a_terminal_that_becomes_narrow_gets_a_bar_that_fits(folder: Path) -> None:
    with on_terminal(folder, "script.py") as session:
        session.until(is_half, "the bar")
        session.resize(40)
        short = r"[━╸╺]+ +50%  (epoch 1/1  )?loss 0.5000(  .* left)?"  # without the step
        session.until(lambda glass: bool(re.fullmatch(short, glass.bottom)), "a short bar")
        assert len(session.glass.bottom) < 40
        assert "".join(session.glass.lines).count("%") == 1, "nothing is left of the long one"
        session.resize(140)
        session.until(is_half, "the longer bar")
        go(folder)
        assert session.finish() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_leaves_a_clean_screen_and_a_readable_error(
    folder: Path, workers: int
) -> None:
    write(folder, "open(f'pid{rank}', 'w').write(str(os.getpid()))\ntrain()")
    with on_terminal(folder, "script.py", workers=workers) as session:
        session.until(is_half, "the bar")
        os.kill(int((folder / "pid0").read_text()), signal.SIGKILL)
        assert session.finish() == 128 + signal.SIGKILL
        lines = session.glass.lines
    assert "paceline: worker 0 was killed by signal 9 (SIGKILL)." in lines
    assert "50%" not in "\n".join(lines)
    assert session.glass.has_cursor
    assert session.glass.bottom == ""


def test_the_traceback_of_another_rank_is_readable_and_the_bar_is_gone(folder: Path) -> None:
    write(folder, "if rank == 1:\n    wait_for('fail')\n    raise KeyError('lost')\ntrain()")
    with on_terminal(folder, "script.py") as session:
        session.until(is_half, "the bar")
        go(folder, "fail")
        assert session.finish() == 1
        lines = session.glass.lines
    at = lines.index("paceline: worker 1 failed:")
    assert lines[at + 1] == "Traceback (most recent call last):"
    assert "KeyError: 'lost'" in lines
    assert "50%" not in "\n".join(lines)
    assert session.glass.bottom == ""


def test_workers_that_are_restarted_have_a_bar_again(folder: Path) -> None:
    write(
        folder,
        """
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if is_first and rank == 1:
    wait_for("fail")
    os._exit(3)
train(name="first" if is_first else "second")
""",
    )
    with on_terminal(folder, "--max-restarts", 1, "script.py") as session:
        session.until(is_half, "the bar")
        go(folder, "fail")
        session.until(
            lambda glass: is_half(glass) and any(map(_opens_second, glass.lines)), "the second bar"
        )
        go(folder)
        assert session.finish() == 0
        text = "\n".join(session.glass.lines)
    words = r"first: .*\npaceline: worker 1 ended with exit code 3\..*\nsecond: .*second finished"
    assert re.search(words, text, re.S), text
    assert "50%" not in text


def _opens_second(line: str) -> bool:
    return line.startswith("second: ")


TRAINING = """
import sys, time, torch
from paceline import Run
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
net = torch.nn.Linear(2, 1)
run = Run(net, torch.optim.SGD(net.parameters(), lr=0.01), TensorDataset(torch.randn(4000, 2)),
          global_batch=4, epochs=1, shards=2, folder="run")
for step in run:
    with step:
        for (x,) in step.batches():
            step.backward(run.model(x).square().sum(), reduction="sum")
        time.sleep(0.05)
"""


def test_the_first_ctrl_c_finishes_the_step_and_saves_and_the_bar_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING)
    with on_terminal(tmp_path, "script.py") as session:
        session.until(lambda glass: bool(re.search(r"step [1-9]", glass.bottom)), "a step")
        session.press("\x03")
        assert session.finish() == 128 + signal.SIGINT
        lines = session.glass.lines
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    assert info.status == "stopped"
    assert info.step >= 1
    stops = [e for e in read_events(RunFolder(tmp_path / "run")) if e["kind"] == "stop"]
    assert [event["step"] for event in stops] == [info.step] * 2, "both after the same step"
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert "  stopping, once more kills" in session.raw
    assert any(
        says(line, "Ctrl-C: finishing", "step and saving; once more ends it at once.")
        for line in lines
    )
    assert any(line.startswith("run stopped on 2 workers") for line in lines)
    assert lines[-1] == "paceline: stopped by Ctrl-C."
    assert session.glass.bottom == ""
    assert "%" not in "".join(lines)


def test_the_second_ctrl_c_kills_what_hangs_and_leaves_a_clean_screen(folder: Path) -> None:
    write(folder, "import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\ntrain()")
    with on_terminal(folder, "script.py") as session:
        session.until(is_half, "the bar")
        session.press("\x03")
        session.until(lambda glass: "stopping, once more kills" in glass.bottom, "the note")
        # Two presses within a moment count as one.
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            session.read()
        session.press("\x03")
        assert session.finish() == 128 + signal.SIGINT
        lines = session.glass.lines
    assert lines[-1] == "paceline: stopped by Ctrl-C."
    assert "50%" not in "\n".join(lines)
    assert session.glass.bottom == ""
    assert session.glass.has_cursor


def test_without_colours_there_is_a_bar_without_colours(folder: Path) -> None:
    with on_terminal(folder, "script.py", NO_COLOR="1") as session:
        session.until(is_half, "the bar")
        go(folder)
        assert session.finish() == 0
    assert set(re.findall(r"\x1b\[[0-9;]*m", session.raw)) <= {"\x1b[0m"}


def test_without_rich_and_in_ci_and_on_a_dumb_terminal_lines_are_those_of_a_pipe(
    folder: Path,
) -> None:
    go(folder)
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['rich'] = None\n")
    expected = timeless(plain_output(folder, "script.py"))
    assert any(line.startswith("toy finished") for line in expected)
    for environ in (
        {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
        {"CI": "true"},
        {"TERM": "dumb"},
        {"PACELINE_PROGRESS": "plain"},
    ):
        with on_terminal(folder, "script.py", **environ) as session:
            assert session.finish() == 0
        begin, *lines = session.glass.lines
        assert begin == "paceline: starting 2 workers."  # on stderr, in a pipe
        assert timeless(lines) == expected, environ
        assert "\x1b[J" not in session.raw


def test_redirected_output_is_plain_although_errors_go_to_a_terminal(folder: Path) -> None:
    go(folder)
    expected = timeless(plain_output(folder, "script.py"))
    command = (
        "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], stdout=open('out', 'w')))"
    )
    words = (sys.executable, "-m", "paceline", "run", "--workers", "2", "script.py")
    with Session(folder, "-c", command, *words, environ={}) as session:
        assert session.finish() == 0
    assert session.raw == "paceline: starting 2 workers.\r\n"
    assert timeless((folder / "out").read_text().splitlines()) == expected


def test_quiet_leaves_only_what_the_script_prints(folder: Path) -> None:
    go(folder)
    expected = ["[worker 0] after", "[worker 0] before", "[worker 0] the end"]
    with on_terminal(folder, "--quiet", "script.py") as session:
        assert session.finish() == 0
    others = [line for line in session.glass.lines if not line.startswith("[worker 1] ")]
    assert sorted(others) == expected
    piped = plain_output(folder, "--quiet", "script.py")
    assert sorted(line for line in piped if not line.startswith("[worker 1] ")) == expected


def test_json_lines_have_no_label_on_a_terminal_or_in_a_pipe(folder: Path) -> None:
    go(folder)
    with on_terminal(folder, "--json", "script.py", columns=1_000) as session:
        assert session.finish() == 0
    for lines in (session.glass.lines, plain_output(folder, "--json", "script.py")):
        objects = [json.loads(line) for line in lines if not line.startswith("[worker ")]
        kinds = [found["kind"] for found in objects]
        assert kinds[0] == "start"
        assert kinds[-2:] == ["epoch", "finish"]
        assert len(of_rank(0, lines)) == 3


def test_a_terminal_that_does_not_read_does_not_stop_the_training(folder: Path) -> None:
    write(
        folder,
        """
import itertools
# Every look at the clock is a second later. The lines are more than the terminal holds.
with Progress(draws=rank == 0, clock=itertools.count().__next__) as progress:
    progress.start(name="toy", steps=100_000)
    for number in range(300):
        print("x" * 70)
    for number in range(3_000):
        progress.step(number, epoch=0, samples=1, metrics={"loss": 0.5})
    open(f"trained{rank}", "w").close()
""",
    )
    with on_terminal(folder, "script.py") as session:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "trained0").exists():  # and nobody reads the terminal
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert session.finish() == 0
        lines = session.glass.lines
    assert any(line.startswith("toy finished on 1 worker: 2,999 steps") for line in lines)
    assert len([line for line in lines if line.endswith("x" * 70)]) == 600


@pytest.mark.skipif(sys.platform != "linux", reason="nobody is replaced elsewhere")
def test_a_terminal_paused_by_ctrl_s_does_not_hold_the_launcher_up(folder: Path) -> None:
    write(
        folder,
        """
import pathlib, signal, torch, paceline
net = torch.nn.Linear(2, 1)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(4000, 2),
                   global_batch=4, epochs=1, shards=4)
for step in run:
    with step:
        for x in step.batches():
            step.backward(net(x).mean())
    if step.number == 1:
        pathlib.Path(f"began{rank}").touch()
        wait_for("go")
    print("x" * 70, flush=True)
    killed = pathlib.Path("killed")
    if rank and step.number == 200 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step.number > 200 and killed.exists() and run.membership.size == 2:
        run.stop()
pathlib.Path(f"trained{rank}").touch()
""",
    )
    with on_terminal(folder, "script.py") as session:
        session.until(lambda _: (folder / "began1").exists() and (folder / "began0").exists())
        session.press("\x13")  # Ctrl-S
        go(folder)
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "trained1").exists():  # the death was seen, and the dead replaced
            assert time.monotonic() < deadline
            time.sleep(0.01)
        session.press("\x11")  # Ctrl-Q
        assert session.finish() == 0
        assert says("\n".join(session.glass.lines), "killed by signal 9", "no step was lost")


def test_log_files_get_what_a_run_says_without_marks_or_colours(folder: Path) -> None:
    go(folder)
    with on_terminal(folder, "--tee", "3", "--log-dir", "logs", "script.py") as session:
        assert session.finish() == 0
    (log,) = (folder / "logs").glob("*/attempt_0/0/stdout.log")
    text = log.read_text()
    assert "toy finished on 2 workers" in text
    assert "\x1b" not in text


def test_of_two_machines_only_the_first_draws(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port)
    with (
        on_terminal(folder, *flags, "--node-rank", 0, "script.py", workers=1) as first,
        on_terminal(folder, *flags, "--node-rank", 1, "script.py", workers=1) as second,
    ):
        first.until(is_half, "the bar")
        second.until(lambda glass: "[worker 1] before" in glass.lines, "the other machine's line")
        go(folder)
        assert (first.finish(), second.finish()) == (0, 0)
    assert any("toy finished" in line for line in first.glass.lines)
    assert second.glass.lines == ["[worker 1] before", "[worker 1] after", "[worker 1] the end"]
    assert "\x1b[J" not in second.raw


def test_launch_draws_on_its_own_terminal(folder: Path) -> None:
    (folder / "notebook.py").write_text(
        """
import paceline

def work():
    import training
    training.train()
    return training.rank

print(paceline.launch(work, workers=2))
"""
    )
    with Session(folder, "notebook.py", environ={}) as session:
        session.until(
            lambda glass: is_half(glass) and "[worker 1] before" in glass.lines, "the bar"
        )
        go(folder)
        assert session.finish() == 0
        lines = session.glass.lines
    assert lines[-1] == "[0, 1]"
    assert any(line.startswith("toy finished") for line in lines)
    assert "50%" not in "\n".join(lines)
