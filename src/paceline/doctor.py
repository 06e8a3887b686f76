"""`paceline doctor`: whether training works on this machine and what it has, fit for an issue.

Facts are collected as plain data and then written as text or JSON. Of the environment only names
on a list are shown, and what looks like a secret is masked even there.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from paceline import __version__, env
from paceline.errors import PacelineError, check_whole
from paceline.launcher import count_cores, launch
from paceline.launcher.flags import FLAGS, MAX_WORKERS
from paceline.observe.units import bytes_text, table_lines

TEST_TIMEOUT_S = 60
SHOWN_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_)?(RANK|WORLD_SIZE))|MASTER_(ADDR|PORT)|NO_COLOR|PYTHON(UNBUFFERED|_EXEC)"
    r"|(OMP|MKL|KMP|GOMP|MALLOC|CUDA|HIP|NCCL|GLOO|TP|PYTORCH|TORCH|TORCHELASTIC|PACELINE|PET)_\w+"
    r"|SLURM_(JOB_ID|STEP_ID|NTASKS|NNODES|PROCID|LOCALID|NODEID)"
)
_SECRET = re.compile(
    r"token|secret|passw|api_?key|credential|private|://[^/@\s]*:[^/@\s]*@"
    r"|^(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/_=-]{20,}$",
    re.IGNORECASE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline doctor`."""
    parser.description = (
        "Check that workers can start and sum a tensor, and print versions, devices, backends, "
        "environment and settings in plain text, fit to paste into an issue."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--no-test", action="store_true", help="skip the check")
    parser.add_argument(
        "--workers", metavar="N", type=int, help="how many workers the check starts (default: 2)"
    )


def main(args: argparse.Namespace) -> int:
    """Print the findings; 1 if the check failed."""
    check_whole("--workers", args.workers, or_none=True, most=MAX_WORKERS)
    print("Checking this machine ...", file=sys.stderr, flush=True)
    given = {} if args.workers is None else {"nproc_per_node": str(args.workers)}
    findings: dict[str, Any] = {}
    if not args.no_test:
        # Before the devices are looked at: forks of a process that uses CUDA cannot.
        findings["check"] = check(args.workers or 2)
    findings |= collect(os.environ, given) | {"devices": devices()}
    print(json.dumps(findings, indent=2) if args.json else render(findings))
    return 0 if findings.get("check", {}).get("passed", True) else 1


def check(workers: int) -> dict[str, Any]:
    """Start workers and let them sum a tensor."""
    begin_s = time.monotonic()
    expected = workers * (workers + 1) / 2
    try:
        sums = launch(_sum_ranks, workers=workers)
        detail = "" if sums == [expected] * workers else f"got {sums}, expected {expected}"
    except PacelineError as error:
        detail = str(error)
    seconds = round(time.monotonic() - begin_s, 2)
    what = f"{workers} workers, one all-reduce with Gloo"
    return {"what": what, "passed": not detail, "seconds": seconds, "detail": detail}


def _sum_ranks() -> float:
    import torch
    import torch.distributed as dist

    from paceline.comm.world import init_process_group

    # A check that hangs says where, and ends.
    faulthandler.dump_traceback_later(TEST_TIMEOUT_S, exit=True)
    with init_process_group("gloo", timeout=timedelta(seconds=TEST_TIMEOUT_S)) as world:
        value = torch.tensor(float(world.rank + 1))
        dist.all_reduce(value)
    faulthandler.cancel_dump_traceback_later()
    return float(value)


def collect(environ: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Any]:
    """Everything that can be found out without touching a device."""
    import torch
    import torch.distributed as dist

    found = {flag.names[0]: flag.find(given, environ) for flag in FLAGS}
    shown = {name: value for name, value in environ.items() if SHOWN_VARIABLES.fullmatch(name)}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shared_memory = "no /dev/shm"
    with suppress(OSError):
        shared_memory = f"{bytes_text(shutil.disk_usage('/dev/shm').free)} free"
    return {
        "versions": {
            "paceline": __version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "none",
            "system": platform.platform(),
        },
        "machine": {
            "cores": count_cores(),
            "torch threads": torch.get_num_threads(),
            "memory": bytes_text(memory),
            "shared memory": shared_memory,
            "loopback interface": env.loopback_interface() or "none",
        },
        "backends": {
            name: dist.is_available() and getattr(dist, f"is_{name}_available")()
            for name in ("gloo", "nccl", "mpi", "ucc")
        },
        "environment": {
            name: masked(value) for name, value in shown.items() if value and masked(name) == name
        },
        "settings that differ from the defaults": {
            name: [masked(value), source]
            for name, (value, source) in found.items()
            if source != "default"
        },
    }


def masked(value: str) -> str:
    """The value, unless it looks like a secret."""
    return "(masked)" if _SECRET.search(value) else value


def devices() -> dict[str, str]:
    """Each accelerator by name, with what it is."""
    import torch

    found = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {bytes_text(properties.total_memory)}"
    others = {"mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available()}
    return found | {name: "available" for name, is_there in others.items() if is_there}


def render(findings: Mapping[str, Any]) -> str:
    """The findings as plain text, the verdict first."""
    lines = []
    for title, facts in findings.items():
        if title == "check":
            verdict = "Training works here" if facts["passed"] else f"FAILED: {facts['detail']}"
            lines.append(f"{verdict} ({facts['what']}, {facts['seconds']} s).")
            continue
        rows = [
            [name, *(map(str, fact) if isinstance(fact, list) else [str(fact)])]
            for name, fact in facts.items()
        ]
        lines += [title, *(f"  {line}" for line in table_lines(rows or [["none"]]))]
    return "\n".join(lines)
