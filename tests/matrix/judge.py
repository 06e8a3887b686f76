"""Runs a case, and says what is wrong with how it ended: nothing, if the case holds.

Whatever goes wrong, a run ends as if nothing had, or says why it does not; every sample is used
once, all replicas are equal, and neither processes nor files are left behind.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.faults import Training, TrainingFaults, assert_survived, run_training, train_alone
from tests.faults.trainings import assert_ledger
from tests.matrix.factors import EXIT_CODE, FACTORS, OF_NUMBERS, Case, plan, survives

SCRIPT = Path(__file__).with_name("training.py")
LIMIT_S = 90.0
"""After which a case counts as hanging, on a busy machine too."""
CLOSING_S = 10.0
"""How long what a run leaves may take to end."""
MARK = "PACELINE_MATRIX_CASE"
RAW = re.compile(r"Exception in thread|Exception ignored|terminate called|^\S*\[[WE]\d+ ", re.M)
"""What Python and torch print of errors that no one catches."""
TORCHS = "torchinductor_"
"""How the name of the folder begins that torch leaves, on purpose."""
CHAINED = re.compile("another exception occurred:|direct cause of the following exception:")
TRACEBACK = "Traceback (most recent call last)"


def expected(case: Case) -> str:
    """How the run should end: it `finishes`, `fails`, `stops`, `exits` or `dies` with a worker."""
    kind = case["fault"].partition(": ")[0]
    if kind == "exit":
        return "exits"
    if kind == "NaN":
        return "finishes" if case["precision"] == "fp16" else "fails"  # a scaler skips the step
    if kind == "raise" or case["fault"] == "full disk: for good":
        return "fails"
    if kind == "SIGTERM":
        return "stops"
    if case["fault"].endswith("after the loop") and case["data"] != "own loader":
        # The others need nothing of it any more. What rank 0 has still to do is done once more
        # where a checkpoint has the last step, on one machine.
        has_rest = case["victim"] == "0"
        is_lost = case["checkpoints"] == "no" or case["hosts"] != "1"
        return "dies" if has_rest and is_lost else "finishes"
    return "finishes" if kind in ("none", "full disk") or survives(case) else "dies"


def find_problems(case: Case) -> tuple[list[str], str]:
    """Run a case; what is wrong with it, and all that it printed."""
    problems, output = [], ""
    with tempfile.TemporaryDirectory(prefix="paceline-case-") as name:
        folder, mark = Path(name), secrets.token_hex(8)
        try:
            numbers = {name: case[name] for name in OF_NUMBERS}
            if case["precision"] == "fp32":  # only in 16 bits pieces are rounded as no shard is
                numbers["memory"] = "plentiful"
            calm = refer(*numbers.values(), _lasting_fault(case))
            faults = plan(case, calm.steps[-1].number)
            training = _launch(case, faults, folder, mark)
            output = training.output
            problems += _wrong_words(case, training, folder)
            _check_numbers(case, training, calm)
            if expected(case) == "stops" and case["checkpoints"] != "no":
                again = _launch(case, TrainingFaults(), folder, mark)
                output += again.output
                done = calm.steps[: len(calm.steps) - len(again.steps)]
                again = replace(again, steps=done + again.steps)
                assert_survived(again, calm, rtol=1e-9, atol=1e-9)
        except AssertionError as error:
            problems.append(str(error).strip())
        problems += [f"left behind: {each}" for each in _leftovers(folder / "tmp", mark)]
    return problems, output


def _check_numbers(case: Case, training: Training, calm: Training) -> None:
    """Fail unless every sample was used once, and all that should be equal is."""
    end, code = expected(case), training.exit_code
    if end == "finishes":
        assert_survived(training, calm, rtol=1e-9, atol=1e-9)
        return
    assert training.strikes, "the fault did not strike"
    assert_ledger(training.steps, calm.steps[: len(training.steps)])
    codes = {"fails": [1], "exits": [EXIT_CODE], "stops": [143], "dies": range(1, 256)}[end]
    assert code in codes, f"the exit code is {code}, and not {codes[0]}"


def _wrong_words(case: Case, training: Training, folder: Path) -> Iterator[str]:
    """What is wrong with what was said, on the terminal and in the run folder."""
    end, output = expected(case), training.output
    tracebacks = output.count(TRACEBACK) - len(CHAINED.findall(output))
    # Who goes back to a checkpoint that is not there says so, by an error.
    has_gone_back = end == "dies" and case["update"] == "sharded"
    is_error = end == "fails" or has_gone_back or (end == "dies" and "cut" in case["fault"])
    elsewhere = int(case["hosts"]) - 1 if end in ("fails", "dies") else 0
    if tracebacks > is_error + elsewhere:  # one on each terminal
        yield f"{tracebacks} tracebacks"
    if end == "fails" and not tracebacks:
        yield "no traceback"
    if raw := RAW.search(output):
        yield f"raw output: {raw[0]}"
    for pattern in _words(case, training):
        if not re.search(pattern, output):
            yield f"nothing says {pattern}"
    if case["checkpoints"] != "no" and not (folder / "run" / "run.json").exists():
        yield "there is no run.json"
    elif case["checkpoints"] != "no":
        said = json.loads((folder / "run" / "run.json").read_text())["status"]
        allowed = {"finishes": ["finished"], "stops": ["stopped"]}.get(end, ["failed"])
        if end == "finishes" and case["stopping"] == "early":
            allowed = ["stopped"]
        elif case["fault"].endswith(("after the loop", "for good")):  # all steps are applied
            allowed = ["finished", "stopped", "failed"]
        if said not in allowed:
            yield f"run.json says {said}, and not {allowed[0]}"


def _words(case: Case, training: Training) -> Iterator[str]:
    """Patterns of what somebody must have said."""
    kind = case["fault"].partition(": ")[0]
    for strike in training.strikes:
        who = rf"(worker|rank) {strike.worker}\b[^\n]*"
        number = {"segfault": 11}.get(kind, 9)
        if kind in ("kill", "segfault", "kill, then"):
            yield who + rf"signal {number}\b"
        elif kind in ("stop", "hang"):
            yield who + kind
    if kind == "raise":
        yield "PlannedFault"
    elif kind == "NaN" and expected(case) == "fails":
        yield "NotFiniteError"
    elif kind == "exit":
        yield f"ended with exit code {EXIT_CODE} in step"
    elif kind == "full disk":
        yield "No space left"
    elif kind == "SIGTERM":
        yield "SIGTERM"


def _launch(case: Case, faults: TrainingFaults, folder: Path, mark: str) -> Training:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    flags: list[object] = {"plain": [], "json": ["--json"], "quiet": ["--quiet"]}[case["output"]]
    if case["timeline"] == "--timeline":
        flags += ["--timeline", folder / "timeline"]
    if case["trace"] == "--trace-step":
        flags += ["--trace-step", 7]
    if case["stall"] == "2 s":
        flags += ["--stall-after", 2]
    if case["fault"].startswith("hang"):
        flags += ["--stall-end", 4]
    if case["watch"] == "yes":
        flags += ["--watch"]
    environ = {MARK: mark, "TMPDIR": str(temporary)}
    if case["transport"] == "c10d":
        environ["PACELINE_TRANSPORT"] = "c10d"
    training = run_training(
        *(SCRIPT, json.dumps(dict(case)), folder),
        workers=int(case["workers"]),
        faults=faults,
        flags=flags,
        environ=environ,
        hosts=int(case["hosts"]),
        timeout_s=LIMIT_S,
    )
    return _without_options(training)


def _without_options(training: Training) -> Training:
    """Less what two trainings with the same result may have another state of, or none."""
    for state in training.states.values():
        state.pop("islands", None)
        state.pop("fit", None)
    return training


def _lasting_fault(case: Case) -> str:
    """The fault, if the reference must have it too: what it does to the numbers stays."""
    return case["fault"] if expected(case) == "finishes" and "NaN" in case["fault"] else ""


@functools.cache
def refer(*levels_and_fault: str) -> Training:
    """The training with these options, alone in a process and undisturbed."""
    *levels, fault = levels_and_fault
    options = {name: each[0] for name, each in FACTORS.items()}
    options |= dict(zip(OF_NUMBERS, levels, strict=True))
    faults = TrainingFaults()
    if fault:
        last = refer(*levels, "").steps[-1].number
        faults = plan({**options, "victim": "0", "fault": fault}, last)
    with tempfile.TemporaryDirectory(prefix="paceline-calm-") as folder:
        alone = train_alone(SCRIPT, json.dumps(options), folder, faults=faults)
        return _without_options(alone)


def _leftovers(temporary: Path, mark: str) -> list[str]:
    """Processes and temporary files of the case that are still there; processes are ended."""
    deadline_s = time.monotonic() + CLOSING_S
    while (found := list(_processes(mark))) and time.monotonic() < deadline_s:
        for pid, command in found:
            if "watch" in command:  # stays on purpose
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    for pid, _ in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left = [f"process {pid}: {command}" for pid, command in found]
    files = sorted(temporary.rglob("*")) if temporary.exists() else []
    names = [str(path.relative_to(temporary)) for path in files]
    return left + [f"file {each}" for each in names if not each.startswith(TORCHS)]


def _processes(mark: str) -> Iterator[tuple[int, str]]:
    """Those that were started with the mark in their environment."""
    word = f"{MARK}={mark}".encode()
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if place.name.isdecimal() and word in (place / "environ").read_bytes().split(b"\0"):
                command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield int(place.name), command.strip()[:120]
