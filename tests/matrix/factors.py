"""What the cases are made of: options, faults, and which of them exclude each other.

A case has a level of every factor. All factors but the last are options of the run, of its engine
and of the launcher; the last is what goes wrong, and when.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from hashlib import sha256

from tests.faults import TrainingFaults

FACTORS: dict[str, tuple[str, ...]] = {
    "workers": ("2", "3"),
    "victim": ("0", "1"),
    "update": ("whole", "sharded", "auto"),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": ("sgd", "adamw"),
    "ema": ("no", "yes"),
    "clipping": ("no", "yes"),
    "scheduler": ("no", "step", "plateau"),
    "groups": ("all", "added"),
    "shards": ("four", "merged", "two"),
    "data": ("map", "stream", "files", "own loader"),
    "loading": ("here", "in a process"),
    "model": ("plain", "norm", "counter"),
    "loss": ("samples", "whole batch"),
    "evaluation": ("no", "yes"),
    "stopping": ("no", "early"),
    "checkpoints": ("no", "epochs", "steps"),
    "timeline": ("no", "--timeline", "timeline="),
    "trace": ("no", "--trace-step", "trace_step="),
    "noise": ("no", "yes"),
    "memory": ("plentiful", "short"),
    "stall": ("120 s", "2 s"),
    "watch": ("no", "yes"),
    "tracker": ("no", "csv", "broken"),
    "transport": ("auto", "c10d"),
    "engine": ("buckets", "checked", "naive", "audited"),
    "islands": ("no", "one"),
    "hosts": ("1", "2"),
    "output": ("plain", "json", "quiet"),
    "fault": (
        "none",
        "kill: first step",
        "kill: forward",
        "kill: between buckets",
        "kill: after the last bucket",
        "kill: in the commit",
        "kill: while evaluating",
        "kill: while saving",
        "kill: at the vote",
        "kill: last step",
        "kill: after the loop",
        "segfault: forward",
        "kill, then: while healing",
        "kill, then: while a group is formed",
        "kill, then: while starting",
        "kill, then: while joining",
        "kill all: forward",
        "stop: forward",
        "stop: between buckets",
        "stop: while evaluating",
        "stop: after the loop",
        "hang: forward",
        "cut: forward",
        "raise: first step",
        "raise: forward",
        "raise: while evaluating",
        "raise: last step",
        "raise: after the loop",
        "exit: forward",
        "exit: while evaluating",
        "NaN: first step",
        "NaN: forward",
        "NaN: last step",
        "full disk: once",
        "full disk: for good",
        "SIGTERM: forward",
    ),
}
OF_NUMBERS = (
    *("precision", "optimizer", "ema", "clipping", "scheduler", "groups", "shards", "data"),
    *("model", "loss", "evaluation", "stopping", "noise", "memory"),
)
"""Options on which the result depends, and be it the last bit of a short float: cases that agree in
them share a reference."""
EXIT_CODE = 3
MIDDLE = 6
"""The step in which most faults strike: the second of the second epoch."""

Case = Mapping[str, str]


def is_possible(case: Case) -> bool:
    """Whether no two levels exclude each other; a factor may still be missing."""
    return not any(all(case.get(name) in levels for name, levels in rule) for rule in _EXCLUDED)


def name_of(case: Case) -> str:
    """A short name, the same for the same case at any seed."""
    text = "\n".join(f"{name}={case[name]}" for name in FACTORS)
    return sha256(text.encode()).hexdigest()[:8]


def survives(case: Case) -> bool:
    """Whether the run outlives its workers: documented exceptions are a loader of the user's own,
    and an update that is shared out with neither memory that all map nor a checkpoint."""
    maps_all = case["transport"] == "auto" and case["hosts"] == "1"
    is_lost = case["update"] == "sharded" and case["checkpoints"] == "no" and not maps_all
    return case["data"] != "own loader" and not is_lost


def plan(case: Case, last: int) -> TrainingFaults:
    """The faults of a case whose training has `last` steps."""
    kind, _, moment = case["fault"].partition(": ")
    rank, faults = int(case["victim"]), TrainingFaults()
    # The moments that these names stand for, and their steps.
    where = {"first step": "forward", "last step": "forward"}.get(moment, moment)
    step = {"first step": 1, "last step": last, "at the vote": 1, "after the loop": last}.get(
        moment, MIDDLE
    )
    match kind:
        case "none":
            return faults
        case "kill":
            who = None if moment == "while saving" else rank
            return faults.kill(rank=who, step=step, where=where)
        case "segfault":
            return faults.kill(rank=rank, step=step, where=where, signal=signal.SIGSEGV)
        case "kill, then":
            first = faults.kill(rank=rank, step=MIDDLE, where="forward")
            return first.kill(rank=None, step=MIDDLE, where=moment)
        case "kill all":
            for each in range(int(case["workers"])):
                faults = faults.kill(rank=each, step=MIDDLE, where=where)
            return faults
        case "stop":
            return faults.stop(rank=rank, step=step, where=where)
        case "hang":
            return faults.delay(rank=rank, step=step, where=where, seconds=10**6)
        case "cut":
            return faults.cut(rank=rank, step=step, where=where)
        case "raise":
            return faults.fail(rank=rank, step=step, where=where)
        case "exit":
            return faults.exit(rank=rank, step=step, where=where, code=EXIT_CODE)
        case "NaN":
            return faults.nan(rank=rank, step=step)
        case "full disk":
            return faults.fill_disk(step=MIDDLE, stays=moment == "for good")
    return faults.terminate(rank=rank, step=step, where=where)


def _faults(*beginnings: str) -> tuple[str, ...]:
    return tuple(each for each in FACTORS["fault"] if each.startswith(beginnings))


def _at(*moments: str) -> tuple[str, ...]:
    return tuple(each for each in FACTORS["fault"] if each.endswith(moments))


_EXCLUDED: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...] = (
    # What a level needs.
    (("tracker", ("csv",)), ("checkpoints", ("no",))),
    (("timeline", ("timeline=",)), ("checkpoints", ("no",))),
    (("watch", ("yes",)), ("checkpoints", ("no",))),
    (("update", ("sharded",)), ("engine", ("naive",))),
    # Refused, as documented: what same_bits and an audit cannot keep.
    (("engine", ("audited",)), ("shards", ("merged",))),
    (("engine", ("audited",)), ("data", ("stream", "files", "own loader"))),
    (("engine", ("audited",)), ("loss", ("whole batch",))),
    (("engine", ("audited",)), ("noise", ("yes",))),
    # Refused, as documented: what cannot be computed in pieces.
    (("memory", ("short",)), ("model", ("norm",))),
    (("memory", ("short",)), ("engine", ("audited",))),
    # Refused, as documented: what islands cannot average or deal. One that assigns its own average
    # has the bits of a run without; several would be another training, see docs/decisions/0090.
    (("islands", ("one",)), ("update", ("sharded", "auto"))),
    (("islands", ("one",)), ("ema", ("yes",))),
    (("islands", ("one",)), ("stopping", ("early",))),
    (("islands", ("one",)), ("data", ("stream", "files", "own loader"))),
    (("islands", ("one",)), ("engine", ("audited",))),
    (("islands", ("one",)), ("groups", ("added",))),
    # What one worker alone makes NaN is wrong, and the audit replaces that worker.
    (("engine", ("audited",)), ("fault", _faults("NaN"))),
    # Not exact, as documented: what is computed over a batch, or rounded in it, is another one.
    (("shards", ("merged",)), ("model", ("norm",))),
    (("shards", ("merged",)), ("precision", ("bf16", "fp16"))),
    (("data", ("own loader",)), ("precision", ("bf16", "fp16"))),
    (("data", ("own loader",)), ("model", ("norm",))),  # whose batches are those of the workers
    (("data", ("own loader",)), ("shards", ("merged", "two"))),
    (("data", ("own loader",)), ("loading", ("in a process",))),
    (("loss", ("whole batch",)), ("noise", ("yes",))),
    # Moments that a training does not pass.
    (("fault", _at("while evaluating")), ("evaluation", ("no",))),
    (("fault", _at("while saving")), ("checkpoints", ("no",))),
    (("fault", _faults("full disk")), ("checkpoints", ("no",))),
    (
        ("fault", _at("between buckets", "after the last bucket")),
        ("engine", ("naive", "audited")),
    ),
    (("fault", _faults("stop", "hang")), ("stall", ("120 s",))),
    # Where the first death ends the run, there is no second.
    (("fault", _faults("kill, then")), ("data", ("own loader",))),
    (("fault", _faults("kill, then")), ("update", ("sharded",)), ("checkpoints", ("no",))),
)
