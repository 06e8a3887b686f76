"""What goes wrong around the training, with the launcher and what it needs, ends nobody."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sentences import says

SCRIPT = """
import json, os, pathlib, resource, signal, sys, time
import torch, paceline
from torch.nn.functional import mse_loss

here, rank, launcher = pathlib.Path(__file__).parent, int(os.environ["RANK"]), os.getppid()
torch.set_num_threads(1)

def once(name):
    try:
        (here / name).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

def end(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

def template():
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return min(int(each) for each in children  # its forks have its command line
               if b"template.py" in pathlib.Path(f"/proc/{each}/cmdline").read_bytes())

def limit_files(most):
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, (most, 4096))

def wait_for_words(words):
    while words not in (here / "stderr").read_text():
        time.sleep(0.01)

def wait_for_all():
    # Or can, after the next step.
    while run.membership.size < 3 and not run._parts.recovery.is_due():
        time.sleep(0.01)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12 * STEPS
    def __getitem__(self, n):
        return torch.full((3,), n % 7 / 7), torch.tensor([n % 2 / 1.0])

STEPS = 40
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.01), Rows(), global_batch=12,
                   epochs=1, shards=4, folder=FOLDER,
                   loader_workers=WORKERS)
for step in run:
    with step:
        for x, y in step.batches():
            step.backward(mse_loss(run.model(x), y))
    between(step.number)
after()
(here / f"end{rank}.json").write_text(json.dumps([run.step, float(net.weight.detach().sum())]))
"""
NOTHING = "WORKERS = 0\nFOLDER = here / 'run'\nbetween = lambda step: None\nafter = lambda: None\n"


def train(
    folder: Path, faults: str, *flags: object, workers: int = 3
) -> subprocess.CompletedProcess[str]:
    begin, end = SCRIPT.split("\nSTEPS = 40\n")
    text = f"{begin}\nSTEPS = 40\n{NOTHING}{faults}{end}"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers)]
    with open(folder / "stderr", "w+") as said:
        done = subprocess.run(
            [*command, *map(str, flags), "train.py"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            timeout=115,
            check=False,
        )
        said.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, said.read())


def ends_of(folder: Path) -> dict[int, Any]:
    """By rank, the steps that were applied and what came of them."""
    paths = sorted(folder.glob("end*.json"))
    return {int(path.stem[3:]): json.loads(path.read_text()) for path in paths}


def test_a_replacement_that_cannot_start_is_tried_again_and_so_is_a_stopped_template(
    tmp_path: Path,
) -> None:
    faults = """
def between(step):
    if rank == 1 and step == 3 and once("limited"):
        limit_files(len(os.listdir(f"/proc/{launcher}/fd")) - 4)
        end()
    if rank == 0 and step == 4:
        wait_for_words("open files")
        limit_files(1024)
    if rank == 2 and step > 5 and run.membership.size == 3 and once("stopped"):
        os.kill(template(), signal.SIGSTOP)
        end()
    wait_for_all()
"""
    done = train(tmp_path, faults)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("worker 1 could not be started: there are too many open files") == 1
    assert done.stderr.count("all 3 workers train again") == 2
    assert {steps for steps, _ in ends_of(tmp_path).values()} == {40}
    assert len({weights for _, weights in ends_of(tmp_path).values()}) == 1


def test_a_worker_that_is_killed_after_the_loop_ends_nobody_and_rank_0_is_made_up_for(
    tmp_path: Path,
) -> None:
    faults = """
def after():
    (here / f"there{rank}").touch()
    if rank == 2:
        end()
    if rank == 0 and once("killed"):
        end()
    if rank == 1:
        while not (here / "end0.json").exists():
            time.sleep(0.01)
"""
    done = train(tmp_path, faults)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "worker 2 was killed by signal 9", "is lost")
    assert says(done.stderr, "worker 0 was killed by signal 9", "runs the script again")
    ends = ends_of(tmp_path)
    assert sorted(ends) == [0, 1]
    assert ends[0] == ends[1] == [40, ends[0][1]]
    assert len(list((tmp_path / "run" / "events").glob("*.jsonl"))) >= 1


@pytest.mark.parametrize(
    ("number", "step", "flags"),
    [("SIGKILL", 39, []), ("SIGKILL", 10, ["--max-restarts", 0]), ("SIGTERM", 10, [])],
)
@pytest.mark.parametrize("saves", [True, False])
def test_rank_0_that_is_not_there_at_the_end_is_made_up_for(
    number: str, step: int, flags: list[object], saves: bool, tmp_path: Path
) -> None:
    faults = f"""
FOLDER = here / "run" if {saves} else None
def between(step):
    if step == {step} and rank == 0 and once("ended"):
        end(signal.{number})
    time.sleep(0.005)
"""
    done = train(tmp_path, faults, *flags)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "worker 0 was not there", "runs the script again" if saves else "lost")
    ends = ends_of(tmp_path)
    assert sorted(ends) == [0, 1, 2] if saves else [1, 2]
    assert len({weights for _, weights in ends.values()}) == 1


@pytest.mark.parametrize("first", ["rest", "others"])
def test_who_makes_up_for_rank_0_waits_in_the_next_run_for_the_others_and_they_for_it(
    first: str, tmp_path: Path
) -> None:
    faults = f"""
def between(step):
    if step == 39 and rank == 0 and once("ended"):
        end()
def after():
    is_rest = os.environ["WORLD_SIZE"] == "1"
    while is_rest != {first == "rest"} and not (here / "second" / ".lock").exists():
        time.sleep(0.01)
    net = torch.nn.Linear(3, 1)
    run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.01), Rows(), global_batch=12,
                       epochs=1, shards=4, folder=here / "second")
    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(mse_loss(run.model(x), y))
        time.sleep(0.02)
"""
    done = train(tmp_path, faults)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "worker 0 was not there", "runs the script again")
    assert sorted(ends_of(tmp_path)) == [0, 1, 2]
    assert done.stdout.count("second finished on") == 2, done.stdout
    assert done.stdout.count("Nothing is left to do: all 40 steps are applied.") == 2


@pytest.mark.parametrize(("number", "saves"), [("SIGKILL", False), ("SIGTERM", True)])
def test_rank_0_is_not_made_up_for_where_nothing_is_saved_or_it_was_asked_to_end(
    tmp_path: Path, number: str, saves: bool
) -> None:
    faults = f"""
FOLDER = here / "run" if {saves} else None
def after():
    if rank == 0:
        end(signal.{number})
"""
    done = train(tmp_path, faults, workers=2)
    assert done.returncode == 128 + getattr(signal, number), done.stderr
    assert sorted(ends_of(tmp_path)) == [1], "the other finishes"
    assert "again" not in done.stderr


def test_workers_that_meet_after_the_loop_start_again_from_its_end(tmp_path: Path) -> None:
    faults = """
def after():
    if rank == 1 and once("killed"):
        end()
    torch.distributed.barrier()
"""
    done = train(tmp_path, faults, workers=2)
    assert done.returncode == 0, done.stderr
    assert sorted(ends_of(tmp_path)) == [0, 1]


def test_a_replacement_does_not_run_what_the_script_says_since_somebody_has_edited_it(
    tmp_path: Path,
) -> None:
    faults = """
import model
def between(step):
    if step == 3 and rank == 1 and once("killed"):
        (here / "model.py").write_text("lr = 2.0")
        end()
    if step == 4 and rank == 0:
        wait_for_words("DesyncError")
        (here / "model.py").write_text("lr = 1.0")
        while run.membership.size < 2 and not run._parts.recovery.is_due():
            time.sleep(0.01)
"""
    (tmp_path / "model.py").write_text("lr = 1.0")
    done = train(tmp_path, faults, workers=2)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "model.py has changed since the run began")
    assert says(done.stderr, "all 2 workers train again")
    assert {steps for steps, _ in ends_of(tmp_path).values()} == {40}


def test_sigterm_to_every_worker_stops_the_run(tmp_path: Path) -> None:
    faults = """
def between(step):
    if step == 5:
        end(signal.SIGTERM)
    elif step > 5:
        time.sleep(0.1)  # about ten times a second the workers agree whether to stop
"""
    done = train(tmp_path, faults, workers=2)
    assert done.returncode == 143, done.stderr
    assert "has left" not in done.stderr
    assert "was killed" not in done.stderr
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["status"] == "stopped"
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert 5 <= int(saved.name[5:13]) < 40


def test_a_worker_that_hangs_while_others_wait_is_dumped_ended_and_replaced(tmp_path: Path) -> None:
    faults = """
class Rows(Rows):
    def __getitem__(self, n):
        if n == 300 and torch.utils.data.get_worker_info() and once("loader"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(n)

WORKERS = 1
def hang_here():
    time.sleep(1000)

def between(step):
    if step == 3 and rank == 1 and once("hung"):
        hang_here()
    wait_for_all()
"""
    done = train(tmp_path, faults, "--stall-after", 2, "--stall-end", 4)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "worker 1 was hanging in its own code for 4 s", "in step 3")
    assert len(re.findall(r"line \d+ in hang_here", done.stderr)) == 1
    assert len(re.findall(r"worker \d was hanging", done.stderr)) == 2, "and with a stopped loader"
    assert {steps for steps, _ in ends_of(tmp_path).values()} == {40}
    events = "".join(path.read_text() for path in (tmp_path / "run/events").glob("*.jsonl"))
    assert "in hang_here" in events


def test_a_dataset_that_hangs_before_the_first_step_is_found_too(tmp_path: Path) -> None:
    faults = """
class Rows(Rows):
    def __getitem__(self, n):
        if rank == 1 and once("hung"):
            time.sleep(1000)
        return super().__getitem__(n)
"""
    done = train(tmp_path, faults, "--stall-after", 2, "--stall-end", 4)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "worker 1 was hanging in its own code for 4 s")
    assert {steps for steps, _ in ends_of(tmp_path).values()} == {40}


MISSING = """
if rank == 1 and (here / "killed").exists():
    os.kill(launcher, signal.SIGTERM)
    time.sleep(1000)

def between(step):
    if rank == 1 and step == 3 and once("killed"):
        end()
"""


def test_a_stop_while_workers_are_missing_saves(tmp_path: Path) -> None:
    done = train(tmp_path, MISSING, "--min-workers", 2, workers=2)
    assert done.returncode == 143, done.stderr
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert 3 <= int(saved.name[5:13]) <= 5
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"


def test_a_worker_that_dies_while_the_run_stops_keeps_nobody_from_saving(tmp_path: Path) -> None:
    faults = """
def between(step):
    if rank == 1 and step == 3:
        os.kill(launcher, signal.SIGTERM)
        while not paceline.env.is_ending():
            time.sleep(0.01)
        end()
"""
    done = train(tmp_path, faults, workers=3)
    assert done.returncode == 143, done.stderr
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(saved.name[5:13]) >= 3


def test_survivors_wait_for_replacements_as_long_as_the_launcher_tries(tmp_path: Path) -> None:
    faults = """
from paceline.run import member
member.ANNOUNCE_TIMEOUT_S = 4.0
if (here / "ended").exists():
    time.sleep(8)
def between(step):
    if step == 10 and rank == 1 and once("ended"):
        end()
    wait_for_all()
"""
    done = train(tmp_path, faults, "--min-workers", 3)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("worker 1 was killed by signal 9") == 1
    assert "PeerError" not in done.stderr
    assert {steps for steps, _ in ends_of(tmp_path).values()} == {40}
