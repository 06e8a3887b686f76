"""Workers of a run are killed at every moment, and the training ends as if nothing had happened."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says
from torch.nn.functional import cross_entropy

from paceline import Run, RunOptions

SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch, paceline
from torch.nn.functional import cross_entropy
from survive_model import build, data

here = pathlib.Path(__file__).parent
plan = json.loads((here / "plan.json").read_text())
rank = os.environ["RANK"]
first, *wanted = map(int, sys.argv[1:] or [0])  # after this step, so many, one after the other

def strike(step, moment):
    for number, (who, when, where, what) in enumerate(plan):
        done = here / f"done{number}.{who}"
        if (str(who), when, where) == (rank, step, moment) and not done.exists():
            if "always" not in what:
                done.touch()
            if what == "differ":
                net[3].weight.data[0, 0] += 1e-9
                return
            if what == "leave":
                sys.exit(0)
            os.kill(os.getpid(), getattr(signal, what.removeprefix("always ")))

def settle():
    # Until as many train as are wanted, or can after the next step; then the launcher is asked.
    while wanted and run.membership.size != wanted[0] and not run._parts.recovery.is_due():
        time.sleep(0.01)
    if len(wanted) > 1 and run.membership.size == wanted[0]:
        before = wanted.pop(0)
        if rank == "1":
            while before < wanted[0] and os.path.exists(f"/proc/{(here / '0').read_text()}"):
                time.sleep(0.01)  # whose place is free then
            os.kill(os.getppid(), signal.SIGUSR1 if before < wanted[0] else signal.SIGUSR2)

(here / rank).write_text(str(os.getpid()))
strike(0, "imported")
net, optimizer = build()
current = [0]
optimizer.register_step_pre_hook(lambda *_: strike(current[0], "commit"))
run = paceline.Run(net, optimizer, data(), global_batch=12, epochs=3, shards=4,
                   scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9),
                   folder=here / "run", options=paceline.RunOptions(progress="plain"))
strike(0, "built")
before = run.evaluate(lambda batch: {"mean": batch[0].mean()})  # a replacement does it alone
assert abs(before["mean"] - data().tensors[0].mean()) < 1e-9
for step in run:
    current[0] = step.number
    with step:
        for x, y in step.batches():
            strike(step.number, "forward")
            step.backward(cross_entropy(run.model(x), y))
        strike(step.number, "batches")
    strike(step.number, "between")
    if step.number > first:
        settle()
    if step.ends_epoch:
        scored = []
        def score(batch):
            scored.append(batch)
            strike(step.number, "evaluation" if len(scored) <= 32 // 3 + 1 else "again")
            return {"mean": run.model(batch[0]).mean()}
        run.evaluate(score)
torch.save([net.state_dict(), run.step], here / f"end{rank}.pt")
other, optimizer = build()
again = paceline.Run(other, optimizer, data(), global_batch=12, epochs=1, shards=4)
for step in again:
    with step:
        for x, y in step.batches():
            step.backward(cross_entropy(again.model(x), y))
"""

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    torch.manual_seed(0)
    first, last = nn.Linear(6, 16, bias=False), nn.Linear(16, 3)
    net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Dropout(0.2), last).double()
    return net, torch.optim.AdamW(net.parameters(), lr=0.02)

def data():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) * 2).long() % 3)
"""


def paceline_run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def prepare(folder: Path, plan: list[tuple[int, int, str, str]]) -> Path:
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "survive_model.py").write_text(MODEL)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


def reference() -> tuple[dict[str, Any], dict[int, float]]:
    """The same training in one process; its parameters, and the losses of its epochs."""
    scope: dict[str, Any] = {}
    exec(compile(MODEL, "model", "exec"), scope)
    net, optimizer = scope["build"]()
    losses = {}

    class Sink:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_: None

        def epoch(self, summary: Any) -> None:
            losses[summary.epoch] = summary.metrics["loss"]

    names = ("start", "step", "evaluation", "message", "checkpoint", "stop")
    sink: Any = type("Quiet", (Sink,), {name: lambda *_: None for name in names})()
    run = Run(
        net,
        optimizer,
        scope["data"](),
        global_batch=12,
        epochs=3,
        shards=4,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9),
        sinks=[sink],
        options=RunOptions(progress="quiet"),
    )
    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(cross_entropy(run.model(x), y))
    return net.state_dict(), losses


def losses_in(folder: Path) -> dict[int, float]:
    """By epoch, from the event files, in which each epoch must be written once."""
    found: dict[int, float] = {}
    for path in sorted((folder / "run" / "events").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "epoch":
                assert event["epoch"] not in found
                found[event["epoch"]] = event["metrics"]["loss"]
    return found


def test_a_run_ends_as_if_nobody_had_died(tmp_path: Path) -> None:
    plan = [(2, 8, "evaluation", "SIGKILL"), (1, 8, "again", "SIGKILL")]
    script = prepare(tmp_path, plan)
    # A habit: torch's own function, which would have a replacement wait for a group that is gone.
    init = 'torch.distributed.init_process_group("gloo")\n'
    script.write_text(script.read_text().replace("\nnet, opt", f"\n{init}net, opt"))
    done = paceline_run(tmp_path, "--workers", 3, script, 8, 3)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"worker \d was killed", done.stderr)) == len(plan)
    expected, losses = reference()
    for rank in range(3):
        state, steps = torch.load(tmp_path / f"end{rank}.pt")
        assert steps == 24
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-11)
    assert losses_in(tmp_path) == pytest.approx(losses, rel=1e-6)


def test_workers_leave_and_join_between_two_steps_and_nothing_is_done_again(tmp_path: Path) -> None:
    script = prepare(tmp_path, [(0, 3, "batches", "SIGTERM")])
    done = paceline_run(tmp_path, "--workers", 3, script, 3, 2, 3, 2)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"worker (\d) has left after step (\d+), as asked; 2 continue", done.stderr)
    assert [rank for rank, _ in said] == ["0", "0"]  # a seat that is free is taken again
    assert int(said[0][1]) >= 3
    assert "all 3 workers train again" in done.stderr
    assert "continue after" not in done.stderr
    expected, losses = reference()
    for rank in (1, 2):
        state, steps = torch.load(tmp_path / f"end{rank}.pt")
        assert steps == 24
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-11)
    assert losses_in(tmp_path) == pytest.approx(losses, rel=1e-6)


def test_what_follows_a_step_that_was_lost_at_its_end_talks_to_nobody(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOST_AT_THE_END)
    done = paceline_run(tmp_path, "--workers", 3, script)
    assert done.returncode == 0, done.stderr
    for rank in (0, 2):
        told = json.loads((tmp_path / f"told{rank}.json").read_text())
        states, numbers = [each[1] for each in told], [each[2] for each in told]
        assert [each[0] for each in told] == [1, 2, 3, 3, 4]
        assert states == ["applied", "applied", "undone", "applied", "applied"]
        assert numbers[2] == numbers[1]  # those of the whole dataset, and the model of before
    assert (tmp_path / "told0.json").read_bytes() == (tmp_path / "told2.json").read_bytes()


LOST_AT_THE_END = """
import json, os, pathlib, signal
import torch, torch.distributed as dist, paceline

here, rank = pathlib.Path(__file__).parent, int(os.environ["RANK"])
data = [(torch.randn(3, generator=torch.Generator().manual_seed(n)).double(),) for n in range(24)]
torch.manual_seed(0)
net = torch.nn.Linear(3, 1).double()
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), data, global_batch=6, epochs=1,
                   folder=here / "run", options=paceline.RunOptions(progress="quiet"))
told = []
for step in run:
    with step:
        for (x,) in step.batches():
            step.backward(run.model(x).square().mean())
        if rank == 1 and step.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))  # the script's own
    scores = run.evaluate(lambda batch: {"square": run.model(batch[0]).square().mean()})
    scores |= run.evaluate(lambda batch: run.model(batch[0]), collect=lambda p: {"mean": p.mean()})
    run.save()
    told.append([step.number, step.state, scores])
(here / f"told{rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize("late", [1, 2])
def test_the_last_save_is_done_again_by_all_though_one_heard_its_end_and_another_did_not(
    late: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOST_IN_THE_LAST_SAVE)
    done = paceline_run(tmp_path, "--workers", 3, script, late)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run/checkpoints").glob("step-00000004.*"))
    # The replacement of worker 0 runs the script again, and finds the training complete.
    assert sorted(done.stdout.splitlines()) == [f"[worker {worker}] trained" for worker in range(3)]


LOST_IN_THE_LAST_SAVE = """
import os, pathlib, signal, sys, time
import torch, paceline
from paceline.errors import PeerError
from paceline.run import recovery

here, rank, late = pathlib.Path(__file__).parent, int(os.environ["RANK"]), int(sys.argv[1])
(here / f"pid{rank}").write_text(str(os.getpid()))
exchange = recovery.exchange

def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

def exchange_last(group, value, device, what):
    found = exchange(group, value, device, what)
    if what == "Adding up the epoch so far" and run.step == 4 and group.size() == 3:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while is_alive((here / "pid0").read_text()):
            time.sleep(0.001)
        if rank == late:  # it has not heard the end of it
            raise PeerError("rank 0 is gone")
    return found

recovery.exchange = exchange_last
net = torch.nn.Linear(3, 1)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(24, 3),
                   global_batch=6, epochs=1, folder=here / "run",
                   options=paceline.RunOptions(progress="quiet"))
for step in run:
    with step:
        for x in step.batches():
            step.backward(run.model(x).square().mean())
torch.distributed.barrier()
print("trained")
"""


def test_a_death_while_shares_of_the_last_state_are_gathered_leaves_it_saved(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOST_WHILE_GATHERING)
    done = paceline_run(tmp_path, "--workers", 3, script)
    assert done.returncode == 0, done.stderr
    assert "worker 2 was killed" in done.stderr
    assert list((tmp_path / "run/checkpoints").glob("step-00000004.*"))


LOST_WHILE_GATHERING = """
import os, pathlib, signal
import torch, paceline
from paceline.run.state import RunState

take_part = RunState.take_part

def take_part_or_die(state):
    if os.environ["RANK"] == "2" and run.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    take_part(state)

RunState.take_part = take_part_or_die
net = torch.nn.Linear(30, 10)
run = paceline.Run(net, torch.optim.AdamW(net.parameters()), torch.ones(24, 30), global_batch=6,
                   epochs=1, folder=pathlib.Path(__file__).parent / "run",
                   options=paceline.RunOptions(progress="quiet", update="sharded"))
for step in run:
    with step:
        for x in step.batches():
            step.backward(run.model(x).square().mean())
"""


def test_a_worker_that_is_added_to_one_measures_what_that_one_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(GROWS)
    done = paceline_run(tmp_path, "--workers", 1, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained by 2") == 2


GROWS = """
import os, signal, time
import torch, paceline

net = torch.nn.Linear(3, 1)
options = paceline.RunOptions(progress="quiet", merge_shards=True, noise_every=2)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(24, 3),
                   global_batch=4, epochs=2, shards=4, options=options)
for step in run:
    with step:
        for x in step.batches():
            step.backward(run.model(x).square().mean())
    if step.number == 3:
        os.kill(os.getppid(), signal.SIGUSR1)
        while not run._parts.recovery.is_due():
            time.sleep(0.01)
print(f"trained by {run.membership.size}")  # one write: another worker writes beside it
"""


def test_a_step_that_kills_whoever_computes_it_is_a_bug_and_stops_the_run(tmp_path: Path) -> None:
    plan = [(rank, 4, "forward", "always SIGSEGV") for rank in range(3)]
    done = paceline_run(tmp_path, "--workers", 3, prepare(tmp_path, plan))
    assert done.returncode == 139
    assert "step 4 ended a worker 3 times" in done.stderr


def test_replicas_that_differ_end_a_run_that_would_survive_a_death(tmp_path: Path) -> None:
    script = prepare(tmp_path, [(1, 6, "between", "differ")])
    done = paceline_run(tmp_path, "--workers", 3, script)
    assert done.returncode == 1, done.stderr
    assert "ReplicaError" in done.stderr
    assert says(done.stderr, "'3.weight' on rank 1", "not what it", "on rank 0")
    assert "continue" not in done.stderr


def test_a_loop_that_is_left_is_not_a_death(tmp_path: Path) -> None:
    left = [(rank, 20, "between", "leave") for rank in (0, 1)]
    plan = [(2, 6, "between", "leave"), *left]
    done = paceline_run(tmp_path, "--workers", 3, prepare(tmp_path, plan))
    assert done.returncode == 0, done.stderr
    said = ["starting 3 workers.", "worker 2 has left its loop; 2 continue."]
    assert done.stderr.splitlines() == [f"paceline: {line}" for line in said]
    assert losses_in(tmp_path)[0] == pytest.approx(reference()[1][0], rel=1e-6)


def test_without_survivors_a_run_starts_again_from_its_checkpoint_if_there_is_one(
    tmp_path: Path,
) -> None:
    before = [(1, 0, "imported", "SIGKILL"), (0, 0, "built", "SIGSEGV")]
    plan = [*before, *((rank, 12, "forward", "SIGKILL") for rank in range(2))]
    done = paceline_run(tmp_path, "--workers", 2, prepare(tmp_path, plan))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing was trained yet; all start again") == 2
    assert done.stderr.count("all start again") == 3
    torch.testing.assert_close(
        torch.load(tmp_path / "end0.pt")[0], reference()[0], rtol=1e-9, atol=1e-11
    )


def test_the_third_kill_before_training_began_is_a_bug(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
import paceline
run = paceline.Run(net, optimizer, data, global_batch=12, epochs=3)
"""
    )
    done = paceline_run(tmp_path, "--no-template", "--workers", 2, script)
    assert done.returncode == 137
    assert "worker 1 was killed by signal 9 (SIGKILL)" in done.stderr
    assert says(done.stderr, "that was", "third time")


def test_more_workers_than_there_are_cannot_be_waited_for(tmp_path: Path) -> None:
    done = paceline_run(tmp_path, "--workers", 2, "--min-workers", 3, prepare(tmp_path, []))
    assert done.returncode == 2
    assert says(done.stderr, "--min-workers", "3, but there are 2 workers")


def test_the_first_death_ends_a_run_that_is_not_to_survive(tmp_path: Path) -> None:
    plan = [(1, 3, "forward", "SIGKILL")]
    done = paceline_run(tmp_path, "--no-survive", "--workers", 2, prepare(tmp_path, plan))
    assert done.returncode == 137
