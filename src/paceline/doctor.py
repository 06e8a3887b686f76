"""`paceline doctor`: what this machine has and whether training works on it, fit for an issue.

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
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline import __version__, env
from paceline.errors import PacelineError, check_whole
from paceline.launcher import count_cores, launch
from paceline.launcher.flags import FLAGS, read_settings
from paceline.observe.units import bytes_text, table_lines

TEST_TIMEOUT_S = 60
SHOWN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"),
    *("MASTER_PORT", "PACELINE_RUN_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_ALGO"),
    *("NCCL_PROTO", "NCCL_NET", "NCCL_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID"),
    *("SLURM_LOCALID", "SLURM_NODEID", "NO_COLOR", "PYTHONUNBUFFERED", "PYTHON_EXEC"),
)
_SECRET = re.compile(
    r"token|secret|passw|api_?key|credential|private|://[^/@\s]*:[^/@\s]*@"
    r"|^(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/_=-]{20,}$",
    re.IGNORECASE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline doctor`."""
    parser.description = (
        "Print versions, devices, backends, environment and settings in plain text, fit to paste "
        "into an issue, and check that workers can start and sum a tensor."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--no-test", action="store_true", help="skip the check")
    parser.add_argument(
        "--workers", metavar="N", type=int, help="how many workers the check starts (default: 2)"
    )


def main(args: argparse.Namespace) -> int:
    """Print the findings; 1 if the check failed."""
    check_whole("--workers", args.workers, or_none=True)
    given = {} if args.workers is None else {"nproc_per_node": str(args.workers)}
    findings = collect(os.environ, given)
    if not args.no_test:
        # Before the devices are looked at: forks of a process that uses CUDA cannot.
        findings["check"] = check(args.workers or 2)
    findings["devices"] = devices()
    print(json.dumps(findings, indent=2) if args.json else render(findings))
    return 0 if findings.get("check", {}).get("passed", True) else 1


def collect(environ: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Any]:
    """Everything that can be found out without touching a device."""
    import torch
    import torch.distributed as dist

    backends = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    settings = read_settings(given, environ).values()
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
            "memory": _memory(),
            "shared memory": _shared_memory(),
            "loopback interface": env.loopback_interface() or "none",
        },
        "backends": {name: getattr(dist, f"is_{name}_available")() for name in backends},
        "environment": {n: masked(environ[n]) for n in SHOWN_VARIABLES if environ.get(n)},
        "settings": {
            flag.names[0]: {"value": setting.value, "source": setting.source}
            for flag, setting in zip(FLAGS, settings, strict=True)
        },
        "devices": [],
    }


def masked(value: str) -> str:
    """The value, unless it looks like a secret."""
    return "(masked)" if _SECRET.search(value) else value


def devices() -> list[str]:
    """Each accelerator by name and memory."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {properties.name}, {bytes_text(properties.total_memory)}")
    if torch.backends.mps.is_available():
        found.append("mps")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found += [f"xpu:{index}" for index in range(torch.xpu.device_count())]
    return found


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


def render(findings: Mapping[str, Any]) -> str:
    """The findings as plain text."""
    settings = [
        [name, masked(each["value"]) or "-", each["source"]]
        for name, each in findings["settings"].items()
    ]
    backends = [name for name, there in findings["backends"].items() if there]
    lines_by_title = {
        **{title: _table(findings[title].items()) for title in ("versions", "machine")},
        "backends": [", ".join(backends) or "none"],
        "devices": findings["devices"] or ["none but the CPU"],
        "environment": _table(findings["environment"].items()) or ["nothing relevant is set"],
        "settings of `paceline run`": _table(settings),
    }
    if "check" in findings:
        done = findings["check"]
        verdict = "works" if done["passed"] else f"FAILED: {done['detail']}"
        lines_by_title["check"] = [f"{done['what']}, {done['seconds']} s: {verdict}"]
    return "\n".join("\n  ".join([title, *lines]) for title, lines in lines_by_title.items())


def _table(rows: Iterable[Iterable[object]]) -> list[str]:
    return table_lines([[*map(str, row)] for row in rows])


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "unknown"
    free = ""
    with suppress(OSError):  # only Linux has it
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = f", {bytes_text(int(found[1]) * 1024)} available" if found else ""
    return bytes_text(total) + free


def _shared_memory() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return "no /dev/shm"
    return f"{bytes_text(usage.free)} free of {bytes_text(usage.total)}"
