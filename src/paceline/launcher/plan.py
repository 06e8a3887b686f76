"""The plan of a run on this machine: what to start, with which environment, writing where.

A plan is plain data computed from the flags and a few facts, so a test can check it without
starting anything.
"""

from __future__ import annotations

import glob
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from paceline import env
from paceline.env import Placement
from paceline.errors import DeviceError, SettingError
from paceline.launcher.flags import LaunchOptions

WORKER_FILE = str(Path(__file__).with_name("worker.py"))
STDOUT, STDERR = 1, 2
# A script without a launcher is not watched for standstill unless it asks.
STALL_S = "120"

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
TRAIN_ALONE = (
    "{} train without a process group: each has a model of its own, which learns nothing from the "
    "others. For one training use paceline.Run, or paceline.init_process_group() and "
    "DistributedDataParallel; Accelerate needs Accelerator(cpu=True) on CPUs."
)


@dataclass(frozen=True, slots=True)
class Route:
    """Where one stream of a worker goes."""

    on_console: bool = True
    log_file: str = ""
    filtered_file: str = ""
    """Takes the lines with one of `words` in them, from all workers."""
    words: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to be started."""

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    error_file: str
    routes: Mapping[int, Route]
    """By stream: standard output and standard error."""
    label: int | None
    """The rank to put before its lines, if any."""
    may_lead: bool
    """Whether it is rank 0, or may become it when that one dies."""
    takes_terminal: bool
    """Alone on the console, it inherits the launcher's streams as they are."""
    is_alone: bool = False
    """Whether it does what is left of a script whose training is over, without the others."""

    def alone(self) -> WorkerSpec:
        """The same worker in a world of its own, with keys of its own in the store."""
        only = dict.fromkeys(("RANK", "ROLE_RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
        only |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        attempt = int(self.environment["TORCHELASTIC_RESTART_COUNT"]) + 1
        only |= {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        return replace(self, environment={**self.environment, **only}, is_alone=True)

    @property
    def speaks_for_all(self) -> bool:
        """Whether it may say where the run is, and a person sees it."""
        return self.may_lead and self.routes[STDOUT].on_console

    @property
    def marks_lines(self) -> bool:
        """Whether it marks lines of the whole run: only where we alone read them."""
        is_ours = not self.takes_terminal and not self.routes[STDOUT].log_file
        return is_ours and self.speaks_for_all


def plan_workers(
    options: LaunchOptions,
    first: Placement,
    *,
    run_id: str,
    folder: str,
    environ: Mapping[str, str],
    cores: int,
    interface: str | None = None,
    attempt: int = 0,
    gpus: Sequence[str] = (),
) -> list[WorkerSpec]:
    """One spec for each worker of this machine, by local rank; `first` is the first one's place.

    `folder` takes the attempt's error and log files; `interface` is the one Gloo should use;
    `gpus` are the devices that workers share, if they do.
    """
    argv = (*python_argv(environ), WORKER_FILE, options.program, *options.arguments)
    defaults = _defaults(environ, first.local_size, cores, interface)
    if gpus:
        defaults |= env.SOCKETS_OF_NCCL
        if first.is_single_node and interface is not None:
            defaults["NCCL_SOCKET_IFNAME"] = interface
    specs = []
    for local_rank in range(first.local_size):
        place = replace(first, rank=first.rank + local_rank, local_rank=local_rank)
        error_file = os.path.join(folder, str(local_rank), "error.json")
        ours = place.as_variables() | {
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_ERROR_FILE": error_file,
            "PACELINE_RUN_ID": run_id,
            env.FAILURE_VARIABLE: os.path.join(folder, "failed"),
        }
        if gpus:
            # To NCCL, which refuses two workers of one host on one GPU, each is a host of its own.
            defaults["NCCL_HOSTID"] = f"{run_id}-{place.rank}"
            ours |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpus[local_rank % len(gpus)]}
        elif options.virtual_local_rank:
            visible = _visible_device(environ, local_rank)
            ours |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible}
        routes = {n: _route(options, local_rank, n, folder) for n in (STDOUT, STDERR)}
        is_plain = set(routes.values()) == {Route()}
        specs.append(
            WorkerSpec(
                rank=place.rank,
                argv=argv,
                environment={**defaults, **environ, **ours, **options.told()},
                error_file=error_file,
                routes=routes,
                label=None if options.no_label or place.size == 1 else place.rank,
                may_lead=place.rank == 0 or place.is_single_node,
                takes_terminal=place.size == 1 and is_plain,
            )
        )
    return specs


def python_argv(environ: Mapping[str, str]) -> tuple[str, ...]:
    """How Python is started for a worker: unbuffered, as under torchrun."""
    # -X, -W, -O and the like hold for the workers as they do for the launcher.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return (environ.get("PYTHON_EXEC", sys.executable), "-u", *flags)


def _defaults(
    environ: Mapping[str, str], local_size: int, cores: int, interface: str | None
) -> dict[str, str]:
    """What workers get unless the user has set it."""
    found = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PACELINE_STALL_S": STALL_S, **env.HUGE_PAGES}
    if not env.has_malloc_settings(environ):
        found |= env.KEEP_FREED_MEMORY
    if local_size > 1:  # one worker alone is left to torch, which knows physical cores from logical
        found["OMP_NUM_THREADS"] = str(max(1, cores // local_size))
    if interface is not None:
        found["GLOO_SOCKET_IFNAME"] = interface
    return found


def _visible_device(environ: Mapping[str, str], local_rank: int) -> str:
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return str(local_rank)
    devices = find_gpus(environ)
    if local_rank >= len(devices):
        visible = environ["CUDA_VISIBLE_DEVICES"]
        raise SettingError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}: nothing there for local rank {local_rank}.",
            advice="Start fewer workers, or make more devices visible.",
        )
    return devices[local_rank]


def _route(options: LaunchOptions, local_rank: int, stream: int, folder: str) -> Route:
    redirected, teed = (
        bool(by_rank.get(local_rank, by_rank.get(-1, 0)) & stream)
        for by_rank in (options.redirects, options.tee)
    )
    shown = options.local_ranks_filter is None or local_rank in options.local_ranks_filter
    name, words = {
        STDOUT: ("stdout.log", options.duplicate_stdout_filters),
        STDERR: ("stderr.log", options.duplicate_stderr_filters),
    }[stream]
    log_file = os.path.join(folder, str(local_rank), name)
    # As under torchrun, what is both redirected and teed is teed.
    return Route(
        on_console=shown and (teed or not redirected),
        log_file=log_file if redirected or teed else "",
        filtered_file=os.path.join(folder, f"filtered_{name}") if words else "",
        words=tuple(word.encode() for word in words),
    )


def count_cores() -> int:
    """Cores this process may use: by affinity, and by a container's limit where there is one."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
        limit = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or `max`: no limit
        return cores
    return max(1, min(cores, limit))


def count_workers(wanted: str) -> int:
    """How many workers `--nproc-per-node` means here: a number, or auto, gpu, cpu."""
    if wanted == "cpu":
        return count_cores()
    if wanted not in {"auto", "gpu"}:
        return int(wanted)
    may_have_gpus = sys.platform != "linux" or any(map(glob.glob, _GPU_FILES))
    count = _ask_torch() if may_have_gpus or wanted == "gpu" else 0
    if count == 0 and wanted == "gpu":
        raise DeviceError(
            "--nproc-per-node is gpu, but torch finds none on this machine.",
            advice="Pass a number, or look at `paceline doctor`.",
        )
    return count or count_cores()


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that workers may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(_ask_torch())]
    return [name.strip() for name in visible.split(",") if name.strip()]


def describe_sharing(gpus: Sequence[str], workers: int, environ: Mapping[str, str]) -> list[str]:
    """What to say of workers that share GPUs, before they start."""
    if not gpus:
        raise DeviceError(
            "--share-gpus was passed, but there is no GPU to share.",
            advice="Leave it out to train on the CPU, or look at `paceline doctor`.",
        )
    each = math.ceil(workers / len(gpus))
    here = f"up to {each} workers share each of {len(gpus)} GPUs" if len(gpus) > 1 else ""
    here = here or f"{workers} worker{'s' * (workers > 1)} on one GPU and its memory"
    lines = [f"{here}, with NCCL over sockets between them: to try the script, not for speed."]
    for name, value in env.SOCKETS_OF_NCCL.items():
        if (theirs := environ.get(name, value)) != value:
            lines.append(f"{name}={theirs} is kept, although sharing a GPU needs {value}.")
    if "NCCL_HOSTID" in environ:
        lines.append("NCCL_HOSTID is kept, although NCCL refuses workers for whom it is the same.")
    wanted = environ.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
    there = [name for _, name in socket.if_nameindex()]
    is_there = any(name.startswith(tuple(wanted.split(","))) for name in there)
    if not wanted.startswith("^") and not is_there:
        lines.append(f"NCCL_SOCKET_IFNAME is {wanted!r}, but there is only {', '.join(there)}.")
    return lines


@cache  # restarts are not to pay for it again
def _ask_torch() -> int:
    """Count GPUs in a process of its own: only torch knows all the ways to hide a device."""
    question = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    last_line = answer.stdout.strip().rpartition("\n")[2]
    return int(last_line) if answer.returncode == 0 and last_line.isdigit() else 0
