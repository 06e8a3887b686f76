"""Where planned faults strike inside a run, and what its workers write down: no hook in the engine.

`python -m paceline.testing FOLDER SCRIPT ...`, started as a worker, wraps some functions of the
engine and then runs the script. The plan is in the folder, where each worker also writes which
samples it computed and which steps it applied. In any other process nothing is wrapped, so that
faults cost nothing where there are none.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import env
from paceline.checkpoint import directory
from paceline.comm.codec import encode
from paceline.gradients.reducer import Reducer
from paceline.launcher.worker import run_script
from paceline.run import continuity, loop
from paceline.run.continuity import Continuity
from paceline.run.loop import Run
from paceline.run.step import Step
from paceline.survive.groups import Groups
from paceline.survive.member import Survival
from paceline.testing.faults import OF_SHARING, OF_STEPS, Fault
from paceline.testing.trainings import ENDED, STEP, STRUCK, WROTE, read_plan
from paceline.update.shares import FlatShares
from paceline.update.whole import ScaledUpdate, WholeUpdate


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

    def wrap(self) -> None:
        """Have the engine call this object."""
        names = {0: "before the sum", 1: "between buckets"}
        _call_before(Reducer, "_start_next", lambda _, at: self.on(names.get(len(at.in_flight))))
        _call_before(Reducer, "_settle", lambda *_: self.on("after the last bucket"))
        for update in (WholeUpdate, ScaledUpdate):
            _call_after(update, "_step_optimizer", lambda *_: self.on("in the commit"))
        _call_before(FlatShares, "gather", lambda *_: self.on("before the gather"))
        _call_after(Continuity, "go_back", lambda *_: self._on_going_back())
        _call_after(loop, "evaluate", lambda *_: self.on("while evaluating"))
        _call_before(directory, "_rename", lambda *_: self.on("while saving"))
        _call_before(Groups, "meet", lambda *_: self.on("while joining") if self.is_joining else 0)
        _call_after(Groups, "make", lambda groups, _: setattr(self, "_groups", groups))
        _call_before(Groups, "make", lambda *_: self.on("while a group is formed"))
        _call_before(continuity, "hand_over", lambda *_: self.on("while healing"))
        _call_before(Survival, "begin", self._on_begin)
        _call_after(Survival, "begin", lambda *_: setattr(self, "is_joining", False))
        _call_after(Run, "__init__", lambda run, *_: setattr(self, "_run", run))
        _call_after(Step, "__enter__", self._on_step)
        _call_before(Step, "_batches", lambda *_: self.on("step"))
        _call_before(Step, "backward", self._on_backward)
        _call_before(Run, "_on_step_end", self._on_step_end)
        _call_after(Run, "_on_step_end", lambda *_: self.on("between steps"))

    def on(self, where: str | None) -> None:
        """This worker passes a moment: do what is planned for it."""
        if where in (*OF_STEPS, *OF_SHARING) and self._size < int(os.environ["WORLD_SIZE"]):
            return
        for number, fault in list(self._due.get(where or "", ())):
            if self.step >= fault.step and (where not in OF_STEPS or self._is_turn_of(fault)):
                self._due[fault.where].remove((number, fault))
                if fault.action == "kill" and fault.seconds:
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
        """The script is over: keep the state that it ends with."""
        if self._run is not None:
            context = self._run._context
            state = encode(context.state.gather(context.position, {}))
            (self._folder / f"{ENDED}{self._worker}").write_bytes(state)

    def _strike(self, number: int, fault: Fault) -> None:
        """Do it, unless another process of this worker has."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            file = os.open(self._folder / f"{STRUCK}{number}", flags, 0o600)
        except FileExistsError:
            return
        facts = {"worker": self._worker, "step": self.step, "attempt": env.read_attempt()}
        said = {**facts, "generation": self._generation, "time_s": time.monotonic()}
        os.write(file, json.dumps(said).encode())
        os.close(file)
        fault.strike()

    def _on_begin(self, survival: Survival, *_: Any) -> None:
        self.is_joining = survival.number < 0
        if self.is_joining:
            self.on("while starting")

    def _on_step(self, step: Step) -> None:
        struct.pack_into("<q", self._step, 0, max(self.step, step.number))

    def _on_backward(self, step: Step, *_: Any) -> None:
        if step._shard is step._shards[-1]:
            samples = [index for shard in step._shards for index in shard.indices]
            self._write("computed", step.number, epoch=step.epoch, samples=samples)

    def _on_step_end(self, _run: Run, step: Step) -> None:
        if step.state == "applied" and not step._is_healed:
            is_first = self._generation != self._measured
            self._measured = self._generation
            footprint = self._footprint() if is_first else None
            self._write("applied", step.number, epoch=step.epoch, footprint=footprint)

    def _on_going_back(self) -> None:
        if self._run is not None:
            self._write("went back", self._run.step)

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
            found["store"] = [self._groups._store.num_keys()]
        return found

    def _write(self, kind: str, step: int, **more: Any) -> None:
        record = {
            "kind": kind,
            "time_s": time.monotonic(),
            "attempt": env.read_attempt(),
            "generation": self._generation,
            "step": step,
            **more,
        }
        os.write(self._file, json.dumps(record).encode() + b"\n")

    @property
    def _size(self) -> int:
        return 0 if self._run is None else self._run.membership.size

    @property
    def _generation(self) -> int:
        survival = None if self._run is None else self._run._context.survival
        return -1 if survival is None else survival.number


def main(arguments: list[str]) -> None:
    """Run a script, as a worker whose faults are planned."""
    folder, script, *rest = arguments
    moments = Moments(Path(folder), int(os.environ["RANK"]))
    moments.wrap()
    run_script(script, rest)
    moments.keep_end()


def _call_before(owner: Any, name: str, act: Callable[..., object]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def _call_after(owner: Any, name: str, act: Callable[..., object]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act(*args)
        return result

    setattr(owner, name, wrapped)
