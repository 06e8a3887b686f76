"""`paceline doctor`: checks that training works on this machine, and describes it for an issue.

Only environment variables with known names are shown, and values that look like secrets are masked.
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

from paceline import __version__
from paceline.errors import PacelineError, check_whole
from paceline.launcher import MAX_WORKERS, count_cores, launch
from paceline.telemetry import bytes_text, table_lines

CHECK_TIMEOUT_S = 60
SHOWN_VARIABLES = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|PYTHON_EXEC"
    r"|(CUDA|NCCL|GLOO|TORCH|PYTORCH|PACELINE|PET|SLURM)_\w+"
)
_SECRET = re.compile(
    r"token|secret|passw|api_?key|credential|private|://[^/@\s]*:[^/@\s]*@"
    r"|^(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/_=-]{20,}$",
    re.IGNORECASE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check that workers can train a step here, and print versions, devices, backends and "
        "environment variables, to paste into an issue."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="(default: 2)")


def main(args: argparse.Namespace) -> int:
    """Print the result of the check and the facts; returns 1 if the check failed."""
    check_whole("--workers", args.workers, most=MAX_WORKERS)
    print("Checking this machine ...", file=sys.stderr, flush=True)
    begin_s = time.monotonic()
    problem = check(args.workers)  # before `collect` uses CUDA, which does not survive a fork
    what = f"({args.workers} workers, one step with Gloo, {time.monotonic() - begin_s:.1f} s)"
    facts = {"check": f"FAILED: {problem} {what}" if problem else f"Training works here {what}"}
    facts |= collect(os.environ)
    lines = [f"{facts['check']}.", *table_lines(list(facts.items())[1:])]
    print(json.dumps(facts, indent=2) if args.json else "\n".join(lines))
    return 1 if problem else 0


def check(workers: int) -> str:
    """Train one step on several workers; what went wrong, or nothing."""
    expected = [-(workers + 1) / 2] * workers
    try:
        weights = launch(_train_step, workers=workers)
    except PacelineError as error:
        return str(error)
    return "" if weights == expected else f"The weight is {weights}, expected {expected}."


def _train_step() -> float:
    """Each rank's gradient is rank + 1, so the weight becomes minus their mean."""
    import torch

    from paceline.ddp import DistributedDataParallel
    from paceline.group import init_process_group

    # If the check hangs, print where, and exit.
    faulthandler.dump_traceback_later(CHECK_TIMEOUT_S, exit=True)
    with init_process_group("gloo") as world:
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        weight = next(model.parameters())
        torch.nn.init.zeros_(weight)
        model(torch.full((1, 1), world.rank + 1.0)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    faulthandler.cancel_dump_traceback_later()
    return weight.item()


def collect(environ: Mapping[str, str]) -> dict[str, str]:
    """The facts: versions, devices, backends, shared memory, environment variables."""
    import torch
    import torch.distributed as dist

    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    names = [f"{each.name}, {bytes_text(each.total_memory)}" for each in devices]
    if len(devices) == 1:
        names[0] += " (several workers with NCCL: `paceline run --share-gpus`)"
    names += ["mps"] * torch.backends.mps.is_available()
    backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    shared_memory = "no /dev/shm"
    with suppress(OSError):
        shared_memory = f"{bytes_text(shutil.disk_usage('/dev/shm').free)} free"
    return {
        "paceline": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "devices": "; ".join([f"{count_cores()} CPU cores", *names]),
        "backends": ", ".join(backends) or "none",
        "shared memory": shared_memory,
        **{
            name: "(masked)" if _SECRET.search(name) or _SECRET.search(value) else value
            for name, value in environ.items()
            if value and SHOWN_VARIABLES.fullmatch(name)
        },
    }
