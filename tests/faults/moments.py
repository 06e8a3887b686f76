"""Where planned faults strike inside a run, and what its workers write down: no hook in the engine.

`python -m tests.faults FOLDER SCRIPT ...`, started as a worker, wraps some functions of the
engine and then runs the script. The plan is in the folder, where each worker also writes which
samples it computed and which steps it applied. In any other process nothing is wrapped, so that
faults cost nothing where there are none.
"""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import env
from paceline.checkpoint import directory
from paceline.ddp import Reducer
from paceline.files import encode
from paceline.group import CONNECTIONS
from paceline.launcher import run_script
from paceline.run import Run, Step, evaluation, healing
from paceline.run.member import Groups
from paceline.run.parts import Dealing
from paceline.run.recovery import Survival
from paceline.run.stop import Vote
from paceline.run.turns import StepOfTurns, Turn
from paceline.update.shares import ElementShares, FlatShares
from paceline.update.whole import WholeUpdate
from tests.faults.planned import Fault
from tests.faults.plans import (
    AFTER_ALL,
    CUT,
    FULL,
    NAN,
    OF_SHARING,
    OF_STEPS,
    STAYS_FULL,
    TERMINATE,
    is_late_kill,
    kind_of,
)
from tests.faults.trainings import ENDED, STEP, STRUCK, WROTE, read_plan

# Everything private of the engine that this module uses. When a name changes there, it changes here
# and nowhere else: first the functions that are wrapped, with the class or module that has each.
START_BUCKET = Reducer, "_start_next"
SETTLE_BUCKETS = Reducer, "_settle"
STEP_OPTIMIZER = WholeUpdate, "_step_optimizer"
GATHER_SHARES = FlatShares, "gather"
COLLECT_SHARES = ElementShares, "collect"
GO_BACK = Survival, "go_back"
REPEAT_STEP = Dealing, "again"
EVALUATE = evaluation, "score_share"
NAME_CHECKPOINT = directory, "_rename"
MEET = Groups, "meet"
MAKE_GROUP = Groups, "make"
HAND_OVER = healing, "broadcast_state"
BEGIN = Survival, "begin"
BUILD_RUN = Run, "__init__"
ENTER_STEP = Step, "__enter__"
READ_BATCHES = Step, "_batches"
BACKWARD = Step, "backward"
END_STEP = Step, "_close"
READ_VOTE = Vote, "result"
COMPLETE = Run, "_why_over"
END_RUN = Run, "_end"


def buckets_in_flight(at: Any) -> int:
    """How many buckets of this backward have been started; `at` is START_BUCKET's argument."""
    return len(at.in_flight)


def generation_of(run: Run) -> int:
    """-1 where a run does not survive deaths."""
    recovery = run._parts.recovery
    return recovery.member.number if isinstance(recovery, Survival) else -1


def is_replacement(survival: Survival) -> bool:
    """Whether this worker has no generation yet."""
    return survival.member.number < 0


def state_of(run: Run) -> dict[str, Any]:
    """Everything that a checkpoint would hold, but for the noise scale: what a dead worker has
    measured is not in it."""
    parts = run._parts
    state = parts.training.state.gather(parts.progress.position, {})
    return {name: each for name, each in state.items() if name != "noise"}


def module_of(run: Run) -> Any:
    """The user's module, without what keeps it equal."""
    return run._parts.training.module


def samples_of(step: Step) -> list[int] | None:
    """What this worker computes in the step, once it has come to its last shard.

    A worker without a shard computes those that an audit gives it, which are counted elsewhere.
    """
    if not step._shards or step._shard is not step._shards[-1]:
        return None
    return [index for shard in step._shards for index in shard.indices]


def is_applied_here(step: Step) -> bool:
    """Whether this worker has applied the step, and not only been given its result."""
    return step.state == "applied"


def keys_in_store(groups: Groups) -> int:
    """Of the store through which groups are made."""
    return groups._store.num_keys()


def place_of(step: Step) -> tuple[int, int]:
    """Step and epoch under which its samples are counted: of several models each turn by itself."""
    if isinstance(step, Turn):
        return 100 * step.number + step.index, 100 * step.epoch + step.index
    return step.number, step.epoch


class Moments:
    """The plan of faults in one worker, and the worker's own ledger.

    Every fault strikes once, when its worker first passes its moment at its step or a later one; at
    those `OF_STEPS` only while all workers are there, and not in a step in which one struck that
    was planned for an earlier step, so that faults do not pile up faster than the dead are
    replaced. The step is that of the run: a replacement finds it in a file.
    """

    def __init__(self, folder: Path, worker: int) -> None:
        self.is_joining = False
        """Whether this is a replacement that has not been let in yet."""
        self._folder, self._worker = folder, worker
        self._due: dict[str, list[tuple[int, Fault]]] = {}
        self._planned = read_plan(folder).planned
        for number, fault in enumerate(self._planned):
            if fault.rank in (None, worker):
                self._due.setdefault(fault.where, []).append((number, fault))
        path = folder / f"{WROTE}{worker}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(folder / STEP, "r+b") as file:
            self._step = mmap.mmap(file.fileno(), 8)
        self._run: Run | None = None
        self._groups: Groups | None = None
        self._measured = -2
        self._is_kept = False
        self._nan_step = 0
        """In which this worker's passes give NaN, however often they are done."""

    def wrap(self) -> None:
        """Have the engine call this object."""
        names = {0: "before the sum", 1: "between buckets"}
        _call_before(START_BUCKET, lambda _, at: self.on(names.get(buckets_in_flight(at))))
        _call_before(SETTLE_BUCKETS, lambda *_: self.on("after the last bucket"))
        _call_after(STEP_OPTIMIZER, lambda *_: self.on("in the commit"))
        _call_before(GATHER_SHARES, lambda *_: self.on("before the gather"))
        _call_before(COLLECT_SHARES, lambda *_: self.on("while gathering"))
        _call_after(GO_BACK, lambda *_: self._on_going_back())
        _call_before(REPEAT_STEP, lambda *_: self._on_repetition())
        _call_after(EVALUATE, lambda *_: self.on("while evaluating"))
        _call_before(NAME_CHECKPOINT, lambda *_: self._on_saving())
        _call_before(READ_VOTE, lambda *_: self.on("at the vote"))
        _call_after(COMPLETE, lambda *_: self.keep_end())
        _call_after(END_RUN, lambda *_: self.on(AFTER_ALL))
        _call_before(MEET, lambda *_: self.on("while joining") if self.is_joining else 0)
        _call_after(MAKE_GROUP, lambda groups, *_: setattr(self, "_groups", groups))
        _call_before(MAKE_GROUP, lambda *_: self.on("while a group is formed"))
        _call_before(HAND_OVER, lambda *_: self.on("while healing"))
        _call_before(BEGIN, self._on_begin)
        _call_after(BEGIN, lambda *_: setattr(self, "is_joining", False))
        _call_after(BUILD_RUN, lambda run, *_: self._on_run(run))
        _call_after(ENTER_STEP, self._on_step)
        _call_before(READ_BATCHES, lambda *_: self.on("step"))
        _call_before(BACKWARD, self._on_backward)
        _call_before(END_STEP, self._on_step_end)
        _call_after(END_STEP, lambda *_: self.on("between steps"))

    def on(self, where: str | None) -> None:
        """This worker passes a moment: do what is planned for it."""
        if where in (*OF_STEPS, *OF_SHARING) and self._size < int(os.environ["WORLD_SIZE"]):
            return
        for number, fault in list(self._due.get(where or "", ())):
            if self.step >= fault.step and (where not in OF_STEPS or self._is_turn_of(fault)):
                self._due[fault.where].remove((number, fault))
                if is_late_kill(fault):
                    timer = threading.Timer(fault.seconds, self._strike, (number, fault))
                    timer.daemon = True
                    timer.start()
                else:
                    self._strike(number, fault)

    def _is_turn_of(self, fault: Fault) -> bool:
        """Whether those that were planned for earlier steps have struck, in steps before this."""
        for number, other in enumerate(self._planned):
            if other.where in OF_STEPS and other.step < fault.step:
                try:
                    struck = json.loads((self._folder / f"{STRUCK}{number}").read_bytes())
                except (OSError, ValueError):  # not yet, or just now
                    return False
                if struck["step"] >= self.step:
                    return False
        return True

    @property
    def step(self) -> int:
        """The newest step that any worker has begun."""
        return int(struct.unpack_from("<q", self._step)[0])

    def keep_end(self) -> None:
        """The training is over: keep the state that it ends with."""
        if self._run is not None and not self._is_kept:
            self._is_kept = True
            state = encode(state_of(self._run))
            (self._folder / f"{ENDED}{self._worker}").write_bytes(state)

    def _strike(self, number: int, fault: Fault) -> None:
        """Do it, unless another process of this worker has."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            file = os.open(self._folder / f"{STRUCK}{number}", flags, 0o600)
        except FileExistsError:
            return
        facts = {"worker": self._worker, "step": self.step, "attempt": env.read_launched().attempt}
        said = {**facts, "generation": self._generation, "time_s": time.monotonic()}
        os.write(file, json.dumps(said).encode())
        os.close(file)
        kind = kind_of(fault)
        if kind == CUT:
            CONNECTIONS.shut()
        elif kind == NAN:
            self._nan_step = self.step
        elif kind == TERMINATE:
            os.kill(os.getppid(), signal.SIGTERM)
        elif kind in (FULL, STAYS_FULL):
            (self._folder / "full").touch()
            self._on_full_disk(is_once=kind == FULL)
        else:
            fault.strike()

    def _on_saving(self) -> None:
        self.on("while saving")
        self._on_full_disk()

    def _on_full_disk(self, *, is_once: bool = False) -> None:
        full = self._folder / "full"
        if full.exists():
            full.unlink() if is_once else None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _on_run(self, run: Run) -> None:
        self._run = run
        module_of(run).register_forward_hook(self._on_forward)

    def _on_forward(self, module: Any, _inputs: Any, output: Any) -> Any:
        if not module.training:
            return None
        self.on("forward")
        return output * float("nan") if self._nan_step and self._nan_step == self.step else None

    def _on_begin(self, survival: Survival, *_: Any) -> None:
        self.is_joining = is_replacement(survival)
        if self.is_joining:
            self.on("while starting")

    def _on_step(self, step: Step) -> None:
        struct.pack_into("<q", self._step, 0, max(self.step, step.number))

    def _on_backward(self, step: Step, *_: Any) -> None:
        samples = samples_of(step)
        if samples is not None:
            number, epoch = place_of(step)
            self._write("computed", number, epoch=epoch, samples=samples)

    def _on_step_end(self, step: Step, *_: Any) -> None:
        if is_applied_here(step) and not isinstance(step, StepOfTurns):
            is_first = self._generation != self._measured
            self._measured = self._generation
            footprint = self._footprint() if is_first else None
            number, epoch = place_of(step)
            self._write("applied", number, epoch=epoch, footprint=footprint)

    def _on_going_back(self) -> None:
        if self._run is not None:
            self._write("went back", self._run.step)

    def _on_repetition(self) -> None:
        if self._run is not None:
            self._write("repeated", self._run.step + 1)

    def _footprint(self) -> dict[str, list[int]]:
        """Of this worker and of its launcher what they hold, and the number of keys in the store.

        What they hold: descriptors, threads, KiB and processes, dead ones too.

        Read once in a generation, because none of them may grow with their number.
        """
        found = {}
        for name, pid in (("worker", os.getpid()), ("launcher", os.getppid())):
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            numbers = [int(status[key].split()[0]) for key in ("Threads", "VmRSS")]
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found[name] = [len(os.listdir(f"/proc/{pid}/fd")), *numbers, len(children)]
        if self._groups is not None:
            found["store"] = [keys_in_store(self._groups)]
        return found

    def _write(self, kind: str, step: int, **more: Any) -> None:
        record = {
            "kind": kind,
            "time_s": time.monotonic(),
            "attempt": env.read_launched().attempt,
            "generation": self._generation,
            "worker": self._worker,
            "step": step,
            **more,
        }
        os.write(self._file, json.dumps(record).encode() + b"\n")

    @property
    def _size(self) -> int:
        return 0 if self._run is None else self._run.membership.size

    @property
    def _generation(self) -> int:
        return -1 if self._run is None else generation_of(self._run)


def main(arguments: list[str]) -> None:
    """Run a script, as a worker whose faults are planned."""
    folder, script, *rest = arguments
    moments = Moments(Path(folder), int(os.environ["RANK"]))
    moments.wrap()
    run_script(script, rest)
    moments.keep_end()


def _call_before(place: tuple[Any, str], act: Callable[..., object]) -> None:
    function = getattr(*place)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return function(*args, **kwargs)

    setattr(*place, wrapped)


def _call_after(place: tuple[Any, str], act: Callable[..., object]) -> None:
    function = getattr(*place)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act(*args)
        return result

    setattr(*place, wrapped)
