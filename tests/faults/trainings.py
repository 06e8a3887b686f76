"""Whole trainings under planned faults, and whether they end as if nothing had happened.

Three things are compared, because each alone misses a real bug: applying half a sum leaves a
correct ledger of samples, skipping a step leaves equal replicas, and both need an undisturbed
training beside them to be seen.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError, did_you_mean
from paceline.files import decode, separate_tensors
from paceline.testing import assert_replicas_equal
from tests.faults.planned import Fault, Faults
from tests.faults.plans import MOMENTS, OF_SHARING

PLAN, STEP = "plan.json", "step"
STRUCK, WROTE, ENDED = "struck", "worker", "ended"
"""What the names of the files begin with that a worker leaves."""
NOTHING, TIMED_OUT = Faults(), 10**6
HOME = str(Path(__file__).parents[2])
"""Where workers import `tests` from."""
ALONE_S, JOINING_S = 100.0, 30.0
LAST_LINES = 60
"""So much is shown of the output of a training that does not end."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault as it happened."""

    fault: Fault
    worker: int
    step: int
    """The newest that any worker had begun."""
    generation: int
    """That the worker was in; -1 for a replacement that was in none."""
    attempt: int
    """How often all workers had started again."""
    time_s: float


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """A step that entered the parameters, with the samples of all workers that computed it."""

    number: int
    epoch: int
    generation: int
    attempt: int
    samples: tuple[int, ...]
    """In order; where the dataset is a stream, -1 for each."""
    time_s: float
    """When the first worker had applied it."""


@dataclass(frozen=True, slots=True)
class Training:
    """What came of a script under `paceline run`."""

    exit_code: int
    output: str
    """Of the launcher and all workers."""
    planned: Faults
    strikes: list[Strike]
    """In the order in which they happened."""
    steps: list[AppliedStep]
    """Every one that was applied, in order; with `attempts` above 1 those that stayed applied."""
    beginnings: list[tuple[int, float]] = field(repr=False)
    """Every process that applied a step: which worker it was, and when it first did."""
    footprints: list[dict[str, Any]] = field(repr=False)
    """Once per worker and generation, with `pid` and `generation`: descriptors, threads and KiB of
    the worker and of the launcher, and how many keys the store has."""
    states: dict[int, Any] = field(repr=False)
    """By worker, what it ended with: model, optimizer, scheduler, scaler, state objects."""

    @property
    def replacements_s(self) -> list[float]:
        """For every strike, how long it took until its worker's replacement had done a step."""
        taken = []
        for strike in self.strikes:
            after = [t for w, t in self.beginnings if w == strike.worker and t > strike.time_s]
            taken += [min(after) - strike.time_s] if after else []
        return taken

    @property
    def recoveries_s(self) -> list[float]:
        """For every strike, how long it took until a step was finished without that worker."""
        taken = []
        for strike in self.strikes:
            before = strike.attempt, strike.generation
            later = [s.time_s for s in self.steps if (s.attempt, s.generation) > before]
            after = [time_s for time_s in later if time_s > strike.time_s]
            taken += [min(after) - strike.time_s] if after else []
        return taken


def run_training(
    script: str | os.PathLike[str],
    *arguments: object,
    workers: int,
    faults: Faults = NOTHING,
    flags: Sequence[object] = (),
    environ: Mapping[str, str] = {},
    hosts: int = 1,
    timeout_s: float = 300.0,
) -> Training:
    """Run a script under `paceline run`, with faults at the `MOMENTS` of its `Run`.

    A fault's rank is the number of the worker, as the launcher names it; a replacement has the
    number of the one it replaces. It strikes once, when its worker first passes its moment at its
    step or later and, unless the moment is one of a recovery, all workers train. `flags` are the
    launchers', of which there is one per host; the first has the worker more, if there is one.
    """
    for fault in faults.planned:
        if fault.where not in (*MOMENTS, *OF_SHARING):
            meant = did_you_mean(fault.where, MOMENTS)
            raise UsageError(
                f"A training does not pass the moment {fault.where!r}.{meant}",
                advice=f"There are: {', '.join(MOMENTS)}.",
            )
    with tempfile.TemporaryDirectory(prefix="paceline-training-") as name:
        folder = Path(name)
        write_plan(folder, faults)
        own = ["-m", "tests.faults", name, script, *arguments]
        port = free_port() if hosts > 1 else 0
        started: list[subprocess.Popen[bytes]] = []
        with open(folder / "output", "w+b") as output:
            for host in range(hosts):
                count = ["--workers", workers // hosts + (host < workers % hosts)]
                where = ["--nnodes", hosts, "--node-rank", host, "--master-addr", "127.0.0.1"]
                place = [*where, "--master-port", port] if hosts > 1 else []
                command = list(map(str, [*launcher(), *count, *place, *flags, *own]))
                variables = {**environment(), **environ}
                if hosts > 1:
                    variables["PACELINE_HOST"] = f"host {host}"
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=variables
                )
                started.append(process)
            code = max(wait_for(started, timeout_s))
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        if code == TIMED_OUT:
            last = "\n".join(text.splitlines()[-LAST_LINES:])
            raise AssertionError(f"the training did not end within {timeout_s} s; last:\n{last}")
        try:
            return read_training(folder, faults, code, text)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{text}") from None


def train_alone(
    script: str | os.PathLike[str], *arguments: object, faults: Faults = NOTHING
) -> Training:
    """The script as the only worker, without a launcher: what others are compared with."""
    with tempfile.TemporaryDirectory(prefix="paceline-alone-") as name:
        folder = Path(name)
        write_plan(folder, faults)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "tests.faults.moments"])
        own = [name, *map(str, (script, *arguments))]
        process = context.Process(target=_work_alone, args=(own,))
        process.start()
        process.join(ALONE_S)
        code, text = process.exitcode, (folder / "output").read_text()
        process.kill()
        process.join()
        assert code == 0, f"the undisturbed training ended with {code}:\n{text}"
        return read_training(folder, faults, 0, text)


def _work_alone(arguments: list[str]) -> None:
    from tests.faults.moments import main  # which imports this module

    output = os.open(Path(arguments[0], "output"), os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(names, "1")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    main(arguments)
    sys.stdout.flush()
    os._exit(0)


def wait_for_replacements(run: Any) -> None:
    """In a script: let workers join before the training is over or the next fault strikes."""
    deadline_s = time.monotonic() + JOINING_S
    while run.membership.size < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline_s:
        recovery = run._parts.recovery
        if not recovery.is_on or recovery.is_due():
            return  # it can join after the next step
        time.sleep(0.003)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """The exit codes, once all have ended; `TIMED_OUT` for those that are killed for their time."""
    deadline_s, codes = time.monotonic() + timeout_s, []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(TIMED_OUT)
    for process in processes:
        process.kill()
        process.wait()
    return codes


def write_plan(folder: Path, plan: Faults) -> None:
    (folder / PLAN).write_text(json.dumps(plan.pack()))
    (folder / STEP).write_bytes(bytes(8))


def read_plan(folder: Path) -> Faults:
    return Faults.unpack(json.loads((folder / PLAN).read_text()))


def launcher() -> list[str]:
    """The command that starts workers."""
    return [sys.executable, "-m", "paceline", "run"]


def environment() -> dict[str, str]:
    """This process's own, with which workers find this package too."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([HOME, *([before] if before else [])])}


def read_training(folder: Path, plan: Faults, exit_code: int, output: str) -> Training:
    """What the workers have written down."""
    strikes = []
    for number, fault in enumerate(plan.planned):
        path = folder / f"{STRUCK}{number}"
        if path.exists() and (text := path.read_text()):
            said = json.loads(text)
            strikes.append(Strike(fault, **said))
    records, footprints, beginnings = [], [], []
    for path in folder.glob(f"{WROTE}*.jsonl"):
        own = [json.loads(line) for line in path.read_text().splitlines()]
        records += own
        first_s = [record["time_s"] for record in own if record["kind"] == "applied"][:1]
        worker = int(path.name.removeprefix(WROTE).partition(".")[0])
        beginnings += [(worker, time_s) for time_s in first_s]
        for record in own:
            if footprint := record.get("footprint"):
                place = {"pid": path.name, "generation": record["generation"]}
                footprints.append({**place, **footprint})
    states = {
        int(path.name.removeprefix(ENDED)): decode(path.read_bytes())
        for path in folder.glob(f"{ENDED}*")
    }
    strikes.sort(key=lambda strike: strike.time_s)
    footprints.sort(key=lambda each: each["generation"])
    steps = applied_steps(records)
    return Training(exit_code, output, plan, strikes, steps, beginnings, footprints, states)


def applied_steps(records: Sequence[dict[str, Any]]) -> list[AppliedStep]:
    """The steps that stayed applied, put together from what each worker wrote.

    A worker writes its samples before the sum, so that they are there even if it dies as soon as
    its part is in. What counts is the generation in which somebody applied the step. All workers
    may have started again from a checkpoint, or gone back to one, and then the last time counts,
    as it does where they agree to compute a step once more.
    """
    computed: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    applied: dict[int, dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: (record["attempt"], record["time_s"])):
        key = record["attempt"], record["generation"], record["step"]
        if record["kind"] == "computed":
            computed.setdefault(key, {})[record["worker"]] = record["samples"]
            continue
        if record["kind"] == "repeated":  # nobody has applied it: it is computed once more
            computed.get(key, {}).pop(record["worker"], None)
            continue
        if record["kind"] == "went back":
            for step, before in list(applied.items()):
                if step > record["step"] and before["generation"] < record["generation"]:
                    del applied[step]
            continue
        before = applied.setdefault(record["step"], record)
        if before["attempt"] < record["attempt"]:
            applied[record["step"]] = record
        elif before["generation"] != record["generation"]:
            raise AssertionError(
                f"step {record['step']} was applied twice, in generations {before['generation']} "
                f"and {record['generation']}"
            )
    steps = []
    for number, record in sorted(applied.items()):
        by_worker = computed.get((record["attempt"], record["generation"], number), {})
        samples = [sample for each in by_worker.values() for sample in each]
        facts = {key: record[key] for key in ("epoch", "generation", "attempt", "time_s")}
        steps.append(AppliedStep(number, samples=tuple(sorted(samples)), **facts))
    return steps


def assert_survived(
    training: Training, undisturbed: Training, *, rtol: float = 1e-6, atol: float = 1e-8
) -> None:
    """Fail unless faults have left no trace: every planned one struck, and afterwards

    - every step was applied once, with the samples of the undisturbed training, and in no epoch
      was a sample used twice;
    - all workers ended with the same state, to the last bit;
    - and with that of the undisturbed training, to `rtol` and `atol`.
    """
    assert training.exit_code == 0, f"it ended with {training.exit_code}:\n{training.output}"
    missed = Counter(training.planned.planned) - Counter(each.fault for each in training.strikes)
    assert not missed, f"{missed.total()} faults did not strike, such as {next(iter(missed))}"
    assert_ledger(training.steps, undisturbed.steps)
    assert training.states, "no worker has kept its state: did the script end normally?"
    parts = [separate_tensors(state) for _, state in sorted(training.states.items())]
    assert_replicas_equal([tensors for tensors, _ in parts])
    for worker, (_, rest) in zip(sorted(training.states), parts, strict=True):
        assert rest == parts[0][1], f"worker {worker} ended with another state than the first"
    first, theirs = (next(iter(each.states.values())) for each in (training, undisturbed))
    _assert_close(first, theirs, "state", rtol, atol)


def assert_ledger(steps: Sequence[AppliedStep], undisturbed: Sequence[AppliedStep]) -> None:
    numbers = [step.number for step in steps]
    expected = [step.number for step in undisturbed]
    assert numbers == expected, f"applied steps are {numbers}, and not {expected}"
    used: Counter[tuple[int, int]] = Counter()
    for step, other in zip(steps, undisturbed, strict=True):
        assert step.samples == other.samples, (
            f"step {step.number} had the samples {step.samples}, and not {other.samples}"
        )
        used.update((step.epoch, sample) for sample in step.samples if sample >= 0)
    twice = [place for place, count in used.items() if count > 1]
    assert not twice, f"epoch {twice[0][0]} used sample {twice[0][1]} more than once"


def _assert_close(one: Any, other: Any, path: str, rtol: float, atol: float) -> None:
    if isinstance(one, dict):
        odd = sorted(map(str, one.keys() ^ other.keys()))
        assert list(one) == list(other), f"{path} has other keys, or another order: {odd}"
        for key in one:
            _assert_close(one[key], other[key], f"{path}[{key!r}]", rtol, atol)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{path} has another length"
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            _assert_close(mine, theirs, f"{path}[{number}]", rtol, atol)
    elif isinstance(one, torch.Tensor | float | int):
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{path}: {m}"
        )
    else:
        assert one == other, f"{path} is {one!r}, and not {other!r}"
