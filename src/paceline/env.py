"""The environment between launcher and worker: variables have their names and meanings here.

A launcher tells each worker its place through variables. `paceline run` uses torchrun's names, and
a few of its own; SLURM's names count only inside a job step, because a batch script sees them too.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paceline.errors import SettingError

LOOPBACK = "127.0.0.1"
FAILURE_VARIABLE = "PACELINE_FAILED_FILE"
"""Names a file that is there once a worker has failed, before the others are asked to end."""
SURVIVAL_VARIABLE = "PACELINE_SURVIVAL"
UNSAVED_VARIABLE = "PACELINE_UNSAVED"
FOLDER_VARIABLE = "PACELINE_FOLDER_FILE"
"""Names the file in which a training names its run folder to the process that started it."""
COMMAND_VARIABLE = "PACELINE_COMMAND"
SECRET_VARIABLE = "PACELINE_SECRET"
"""What launchers of one run know and others do not."""
HOST_VARIABLE = "PACELINE_HOST"
"""A name that sets ranks of one machine apart, as if they were on several."""
RUNS_VARIABLE = "PACELINE_RUNS"
"""A folder for the run folders of a script, in the place of those that it names."""
REPLAY_VARIABLE = "PACELINE_REPLAY"
"""The step whose hashes are wanted, and after which a run ends its process."""
ISLAND_VARIABLE = "PACELINE_ISLAND"
"""Tells a worker its island, as a launcher with --island has decided."""
PARENT_VARIABLE = "PACELINE_PARENT"
"""Tells the launcher of an island which process has started it, to end with that."""
REASON_VARIABLE = "PACELINE_REASON_FILE"
"""Tells a launcher that another one has started where to write why its run has failed."""
FIT_VARIABLE = "PACELINE_FIT"
"""A folder for what a run finds out about the sizes of pieces; then it ends its process."""
TRANSPORT_VARIABLE = "PACELINE_TRANSPORT"
"""The transport to use where the code leaves the choice open."""

_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credentials", "auth"}

# Step ids from here up are SLURM's own: the batch script, an interactive shell, an extern step.
_FIRST_RESERVED_SLURM_STEP = 0xFFFFFFFA
_SLURM_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""Tells glibc to keep what is freed for the next step. By default it gives large blocks back to the
system, and every step has its activations and gradients paged in again."""

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Tells torch to ask Linux for huge pages in blocks from 2 MiB on. glibc cannot keep blocks above
32 MiB; with these they are at least paged in 2 MiB at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One worker's place in the world, as its launcher told it."""

    rank: int = 0
    size: int
    local_rank: int = 0
    local_size: int
    node: int = 0
    nodes: int = 1
    master_addr: str
    master_port: int
    store: str = ""
    """Where the launcher serves what Paceline agrees on: the path of a socket, or host:port."""
    agent_has_store: bool = True
    """The launcher already serves the store, so no worker may."""
    source: str = "paceline run"
    """Where this was read: `torchrun`, `paceline run`, `slurm` or `environment`."""

    def __post_init__(self) -> None:
        here = f"local rank {self.local_rank} of {self.local_size} workers on this machine"
        if not (
            0 <= self.rank < self.size
            and 0 <= self.local_rank < self.local_size <= self.size
            and self.node < self.nodes
        ):
            raise SettingError(
                f"{self.source}: rank {self.rank} of {self.size} workers, {here} (number "
                f"{self.node} of {self.nodes}) is impossible.",
                advice="Ranks count from 0, WORLD_SIZE counts the workers of all machines and "
                "LOCAL_WORLD_SIZE those of this one; `paceline run` sets them all.",
            )
        if not 0 < self.master_port < 2**16:
            raise SettingError(
                f"MASTER_PORT is {self.master_port}, which is not a port.",
                advice="Use a number from 1 to 65535.",
            )

    @property
    def is_single_node(self) -> bool:
        return self.local_size == self.size

    @property
    def is_on_loopback(self) -> bool:
        return self.nodes == 1 or is_loopback(self.master_addr)

    def as_variables(self) -> dict[str, str]:
        """What a launcher of ours sets: torchrun's variables, and a port to know its store by."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_has_store),
            "PACELINE_STORE_PORT": str(self.master_port),
            "PACELINE_STORE": self.store,
        }


def read(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A variable as it is; empty where it is not set."""
    return environ.get(name, "")


def put(name: str, value: str | None) -> None:
    """Set a variable of this process; None removes it."""
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def read_survival(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """What a launcher that replaces dead workers told this one; None for any other process."""
    try:
        given = json.loads(environ.get(SURVIVAL_VARIABLE, "null"))
    except ValueError:
        return None
    # A child of the worker's must not speak for it, nor a program that it has become by `exec`.
    is_for_us = isinstance(given, dict) and given.get("pid") == os.getpid()
    return given if is_for_us and _is_inode(given["line"], given["inode"]) else None


def _is_inode(descriptor: int, inode: int) -> bool:
    """Whether a descriptor is still open, and for the same thing."""
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def take_survival() -> dict[str, Any] | None:
    """The same, once: the next caller gets None."""
    given = read_survival()
    os.environ.pop(SURVIVAL_VARIABLE, None)
    return given


def take_parent() -> int:
    """The process with which this launcher is to end, once; 0 for none."""
    text = os.environ.pop(PARENT_VARIABLE, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


@dataclass(frozen=True, slots=True)
class Launched:
    """What the launcher of this process has told it, read at one time; no place: there is none."""

    place: Placement | None
    attempt: int
    """How often the workers were started again."""
    survives: bool
    joins_running: bool
    """Whether workers that die are replaced; and whether this one replaces one that did."""
    hears_of_failures: bool
    """Whether this worker is told when another one has failed."""
    island: str
    """Its island, if there are any."""
    fit_folder: str
    """Where to write what is found out about the sizes of pieces, if that is wanted."""


def read_launched(environ: Mapping[str, str] = os.environ) -> Launched:
    survival = read_survival(environ)
    return Launched(
        place=read_placement(environ),
        attempt=read_int(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        survives=survival is not None,
        joins_running=survival is not None and bool(survival["is_replacement"]),
        hears_of_failures=FAILURE_VARIABLE in environ,
        island=environ.get(ISLAND_VARIABLE, ""),
        fit_folder=environ.get(FIT_VARIABLE, ""),
    )


def read_placement(environ: Mapping[str, str] = os.environ) -> Placement | None:
    """Read this worker's place, or None where no launcher has set one."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    # A batch script has the job's variables too, but no step, or one of SLURM's own.
    step = _first(environ, "SLURM_STEP_ID", "SLURM_STEPID") or ""
    is_step = step.isdecimal() and int(step[:20]) < _FIRST_RESERVED_SLURM_STEP
    if is_step and "SLURM_PROCID" in environ and _first(environ, *_SLURM_SIZE):
        return _from_slurm(environ)
    return None


def _from_torchrun(environ: Mapping[str, str]) -> Placement:
    rank = read_int(environ, "RANK")
    size = read_int(environ, "WORLD_SIZE")
    # Without LOCAL_WORLD_SIZE nothing says how many machines there are; a loopback master
    # cannot be reached from another machine, so then it is one.
    master_addr = environ.get("MASTER_ADDR", LOOPBACK)
    one_node = is_loopback(master_addr)
    local_size = read_int(environ, "LOCAL_WORLD_SIZE", default=size if one_node else 1)
    default_node = 0 if one_node else rank // max(local_size, 1)
    # A script that has chosen a port of its own since serves a store of its own.
    port, ours = environ.get("MASTER_PORT"), environ.get("PACELINE_STORE_PORT")
    is_launchers = ours in (port, None)
    source = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"
    return Placement(
        rank=rank,
        size=size,
        local_rank=read_int(environ, "LOCAL_RANK", default=rank),
        local_size=local_size,
        node=read_int(environ, "GROUP_RANK", default=default_node),
        nodes=read_int(environ, "GROUP_WORLD_SIZE", default=-(-size // max(local_size, 1))),
        master_addr=master_addr,
        master_port=read_int(environ, "MASTER_PORT", default=29500),
        store=environ.get("PACELINE_STORE", "") if port == ours else "",
        agent_has_store=is_launchers and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        source="paceline run" if "PACELINE_RUN_ID" in environ else source,
    )


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    size = read_int(environ, *_SLURM_SIZE)
    nodes = read_int(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    node = read_int(environ, "SLURM_NODEID", default=0)
    host = first_host(_first(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST") or "")
    job = read_int(environ, "SLURM_JOB_ID", default=0)
    step = read_int(environ, "SLURM_STEP_ID", default=0)
    tasks_per_node = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    local_sizes = expand_repeats(tasks_per_node) if tasks_per_node else []
    return Placement(
        rank=read_int(environ, "SLURM_PROCID"),
        size=size,
        local_rank=read_int(environ, "SLURM_LOCALID"),
        local_size=local_sizes[node] if node < len(local_sizes) else -(-size // nodes),
        node=node,
        nodes=nodes,
        master_addr=environ.get("MASTER_ADDR", host if host and nodes > 1 else LOOPBACK),
        # Below Linux's ephemeral ports, and different for neighbouring jobs and steps.
        master_port=read_int(environ, "MASTER_PORT", default=20000 + (job * 31 + step) % 12000),
        agent_has_store=False,
        source="slurm",
    )


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    """The value of the first of these variables that is set."""
    return next((environ[name] for name in names if name in environ), None)


def read_int(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """Read a whole number from the first variable that is set, or name what is missing or wrong."""
    text = _first(environ, *names)
    if text is None and default is not None:
        return default
    if text is None:
        raise SettingError(
            f"{names[0]} is not set, although other variables of the launcher are.",
            advice="Start with `paceline run`, torchrun or srun, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT together.",
        )
    try:
        return int(text)
    except ValueError:
        name = next(name for name in names if name in environ)
        raise SettingError(f"{name} is {text!r}, which is not a whole number.") from None


def is_loopback(address: str) -> bool:
    """Whether the address can only mean this machine."""
    return address in {"localhost", "::1"} or address.startswith("127.")


def expand_repeats(text: str) -> list[int]:
    """SLURM's `2(x3),1` as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise SettingError(f"SLURM_TASKS_PER_NODE is {text!r}, which cannot be read.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """The first of SLURM's `gpu[01-03,7]-ib,login`: gpu01-ib."""
    match = re.match(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text)
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0]) if match else ""
    if "[" in first:
        raise SettingError(f"SLURM's node list is {text!r}, which cannot be read.")
    return first


def note_ending(environ: Mapping[str, str], stopped: str) -> None:
    """As a launcher, tell workers why they are ended: `stopped` says by which signal to all of
    them; it is empty for a failure."""
    path = signal_file(environ) if stopped else environ[FAILURE_VARIABLE]
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        file.write(stopped)


def is_ending(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher ends all workers, because of a failure or a signal."""
    return has_failed_peer(environ) or os.path.exists(signal_file(environ))


def signal_file(environ: Mapping[str, str] = os.environ) -> str:
    folder = os.path.dirname(environ.get(FAILURE_VARIABLE, ""))
    return folder and os.path.join(folder, "signalled")


def offer_command(arguments: Sequence[str]) -> dict[str, str]:
    """As a launcher that was started as `paceline run ...`, tell the workers how."""
    is_ours = list(arguments[1:2]) == ["run"]
    return {COMMAND_VARIABLE: command_line(["paceline", *arguments[1:]])} if is_ours else {}


def read_command(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """What starts this training again, from the same folder; nothing where that is not known."""
    if COMMAND_VARIABLE in environ:
        return environ[COMMAND_VARIABLE]
    is_alone = "RANK" not in environ and not any(name in environ for name in _SLURM_SIZE)
    is_script = bool(arguments) and arguments[0].endswith(".py")
    return command_line(["python", *arguments]) if is_alone and is_script else ""


def command_line(arguments: Sequence[str]) -> str:
    """Arguments as a shell takes them, with `HIDDEN` in place of what looks like a secret."""
    shown, is_secret = list[str](), False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_flag = name.startswith("-")
        words = set(re.split(r"[-_]", name.lower())) if is_flag else set()
        if is_secret and not is_flag:
            argument = "HIDDEN"
        elif words & _SECRET_WORDS and equals:
            argument = f"{name}=HIDDEN"
        is_secret = bool(words & _SECRET_WORDS) and not equals
        shown.append(re.sub(r"(?<=://)[^/@\s]+(?=@)", "HIDDEN", argument))
    return shlex.join(shown)


def announce_folder(folder: str, environ: Mapping[str, str] = os.environ) -> None:
    """As a worker, say where the run folder is, if a process waits for it: one line of a file."""
    if path := environ.get(FOLDER_VARIABLE, ""):
        with suppress(OSError), open(path, "a") as file:
            file.write(f"{os.path.abspath(folder)}\n")


def find_announced(path: str) -> str:
    """The run folder that a worker has named so; "" where none has."""
    with suppress(OSError), open(path) as file:
        return next((line.rstrip("\n") for line in list(file)[1:] if line.endswith("\n")), "")
    return ""


def has_failed_peer(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher ends this worker because another one has failed."""
    return os.path.exists(environ.get(FAILURE_VARIABLE, ""))


def step_file(error_file: str) -> str:
    """Where a worker keeps the number of its step, next to the file for its error."""
    return os.path.join(os.path.dirname(error_file), "step")


def open_step_note(environ: Mapping[str, str] = os.environ) -> memoryview | None:
    """One number for this worker's step, which its launcher finds however it ends."""
    if FAILURE_VARIABLE in environ and "TORCHELASTIC_ERROR_FILE" in environ:
        path = step_file(environ["TORCHELASTIC_ERROR_FILE"])
        with suppress(OSError), open(path, "wb+", buffering=0) as file:
            file.write(bytes(8))  # on a full disk to touch a hole would kill the process
            return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    return None


def loopback_interface() -> str | None:
    """The name of the loopback interface: `lo`, or `lo0` on macOS and BSD."""
    return next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)


def bind_gloo(interface: str | None) -> None:
    """Bind Gloo to an interface through the one variable it reads, unless the user has set it."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Let groups that are made in this block stay on this machine, whatever the others do."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    put("GLOO_SOCKET_IFNAME", loopback_interface() or before)
    try:
        yield
    finally:
        put("GLOO_SOCKET_IFNAME", before)


def leave_nccl_to_us(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Before a group is made: have torch's watchdog not end this process when another one dies.

    What the user has set otherwise stays, and is returned.
    """
    # A sum that a dead peer broke is complete, with anything in memory: its error is in a wait.
    off = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT")
    wanted = {f"TORCH_NCCL_{name}": "0" for name in off} | {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    kept = [name for name, value in wanted.items() if environ.setdefault(name, value) != value]
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:  # the old name, of which torch 2.15 warns
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    if os.path.isdir("/proc/driver/nvidia"):  # what NCCL logs of a dead peer is raised, too
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    return kept


SOCKETS_OF_NCCL = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""With these NCCL talks over sockets alone, as it must between workers that share a GPU."""


def may_share_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether NCCL takes this worker although others use its GPU, as with `--share-gpus`."""
    return "NCCL_HOSTID" in environ or environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def has_malloc_settings(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment tells glibc how to treat freed memory."""
    return any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environ)


@dataclass(frozen=True, slots=True)
class Observation:
    """What a launcher or a user wants to know about a worker while it trains."""

    timeline: str = ""
    """The folder to record spans to; none if empty."""
    stall_s: float = 0.0
    """After how long without progress a rank says where it is; 0 for never."""
    blames: bool = True
    """Whether ranks compare their pace; all ranks must want the same."""
    trace_step: int = 0
    """The step that a `Run` records stage by stage; 0 for none."""
    stall_end_s: float = 0.0
    """After how long a rank that hangs, while others wait for it, is ended, by default ten times
    `stall_s`; 0 for never."""


def read_observation(environ: Mapping[str, str] = os.environ) -> Observation:
    """Read PACELINE_TIMELINE, _STALL_S, _STALL_END_S, _BLAME and _TRACE_STEP."""
    stall_s = _read_seconds(environ, "PACELINE_STALL_S", 0.0)
    end_s = _read_seconds(environ, "PACELINE_STALL_END_S", 10 * stall_s)
    blame = environ.get("PACELINE_BLAME", "1")
    if blame not in {"0", "1"}:
        raise SettingError(f"PACELINE_BLAME is {blame!r}.", advice="Use 0 or 1.")
    trace_step = read_int(environ, "PACELINE_TRACE_STEP", default=0)
    if trace_step < 0:
        advice = "Steps count from 1; 0 means none."
        raise SettingError(f"PACELINE_TRACE_STEP is {trace_step}.", advice=advice)
    timeline = environ.get("PACELINE_TIMELINE", "")
    return Observation(timeline, stall_s, blame == "1", trace_step, end_s)


def _read_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, str(default))
    if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text):
        raise SettingError(
            f"{name} is {text!r}, which is not a number of seconds.",
            advice="Use a number from 0 up; 0 means never.",
        )
    return float(text)


def read_process(pid: int) -> tuple[bytes, float]:
    """What the kernel says a process does, as a letter, and how many seconds it has computed."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:  # not Linux, or just gone
        return b"", 0.0
    return state, (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
