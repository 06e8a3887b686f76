"""The options of `paceline run`: each is declared, read and checked here, and nowhere else.

A field of `LaunchOptions` that is made by `flag()` is a flag: torchrun's, with torchrun's meaning,
and a few of ours. Its value comes from the command line, else from torchrun's variable
`PET_<FLAG>`, else from the default; the error about an impossible one names where it came from.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from paceline.errors import SettingError

SHUTDOWN_TIMEOUT_S = 0.5
# After a signal from the user a step and a checkpoint should fit in.
SIGNAL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag's value as text, and where it came from: `flag`, `environment` or `default`."""

    value: str
    source: str
    name: str
    """The flag or the variable, for messages."""

    def error(self, problem: str, advice: str) -> SettingError:
        shown = self.value if re.fullmatch(r"-?\d+", self.value) else repr(self.value)
        return SettingError(f"{self.name} is {shown}, which is {problem}.", advice=advice)


Reader = Callable[[Setting], Any]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: how it is written, and what it does."""

    usage: str
    """Its spellings, the first of which names it, then a word for its value unless it is a switch:
    `--tee -t STREAMS`."""
    help: str
    read: Reader | None
    """Turns text into the option's value, or raises; None for plain text and for switches."""
    default: str = ""
    """As one would write it on the command line."""
    tells: str = ""
    """The variable that tells workers the value; for a switch with what it is set to, NAME=TEXT."""
    variables: tuple[str, ...] = ()
    """Variables that set it, besides `PET_<FLAG>`."""

    @property
    def names(self) -> list[str]:
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def metavar(self) -> str:
        return self.usage.replace(" ".join(self.names), "").strip()

    @property
    def dest(self) -> str:
        return self.names[0].lstrip("-").replace("-", "_")

    def setting(self, given: str | None, environ: Mapping[str, str]) -> Setting:
        """The flag's value as text, and its source."""
        first, *others = [name for name in self.names if name.startswith("--")]
        title = f"{first} ({others[0]})" if others else first
        if given is not None:
            return Setting(given, "flag", title)
        for variable in (f"PET_{self.dest.upper()}", *self.variables):
            if variable in environ:
                return Setting(environ[variable], "environment", variable)
        return Setting(self.default, "default", title)

    def value(self, setting: Setting) -> Any:
        if self.read is not None:
            return self.read(setting)
        return setting.value if self.metavar else setting.value not in {"", "0"}


def optional(read: Reader) -> Reader:
    """Read nothing as None."""
    return lambda setting: read(setting) if setting.value else None


def matching(pattern: str, advice: str, convert: Callable[[str], Any] = str) -> Reader:
    """A reader of text that matches a pattern as a whole; `advice` says what is possible."""

    def read(setting: Setting) -> Any:
        text = setting.value.strip()
        if re.fullmatch(pattern, text) is None:
            raise setting.error("not possible", advice)
        return convert(text)

    return read


def whole(at_least: int, at_most: float = float("inf")) -> Reader:
    """A reader of whole numbers."""

    def read(setting: Setting) -> int:
        is_number = re.fullmatch(r"-?\d+", setting.value) is not None
        if not is_number or not at_least <= int(setting.value) <= at_most:
            upto = "up" if at_most == float("inf") else f"to {at_most}"
            raise setting.error("not possible", f"Use a whole number from {at_least} {upto}.")
        return int(setting.value)

    return read


def seconds(setting: Setting) -> float:
    try:
        number = float(setting.value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise setting.error("not a number of seconds", "Use a number from 0 up.")
    return number


def endpoint(setting: Setting) -> tuple[str, int | None]:
    """`host`, `host:port` or `[::1]:port` as host and port."""
    match = re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]+))(?::(\d+))?", setting.value)
    if match is None or int(match[3] or 0) >= 2**16:
        raise setting.error("not HOST:PORT", "Write it as node0:29400, or [::1]:29400 for IPv6.")
    return match[1] or match[2], int(match[3]) if match[3] else None


def rendezvous_conf(setting: Setting) -> dict[str, float]:
    """`join_timeout=60,is_host=1` as numbers, without what only torchrun's backends know."""
    found: dict[str, float] = {}
    for pair in filter(str.strip, setting.value.split(",")):
        key, _, text = (part.strip() for part in pair.partition("="))
        if not text:
            advice = "Write it as join_timeout=60,is_host=1."
            raise setting.error(f"not complete: {key!r} has no value", advice)
        if key == "is_host":
            found[key] = text.lower() in {"1", "true", "yes", "t", "y"}
        elif key in {"join_timeout", "timeout", "last_call_timeout"}:
            found[key] = seconds(Setting(text, setting.source, f"{key} in {setting.name}"))
    return found


def streams(text: str) -> dict[int, int]:
    """`3` as {-1: 3} (all local ranks), `0:3,1:2` as {0: 3, 1: 2}."""
    pairs = [("-1:" + part).split(":")[-2:] for part in text.split(",")]
    return {int(rank): int(which) for rank, which in pairs}


def words(setting: Setting) -> tuple[str, ...]:
    """Words between commas; a doubled comma stands for one."""
    parts = re.split(r"(?<!,),(?!,)", setting.value)
    return tuple(part.replace(",,", ",") for part in parts if part)


def signals(setting: Setting) -> tuple[signal.Signals, ...]:
    possible = {s.name: s for s in signal.Signals if s not in {signal.SIGKILL, signal.SIGSTOP}}
    names = setting.value.replace(",", " ").split()
    if unknown := [name for name in names if name not in possible]:
        problem = f"not possible: {unknown[0]} is not a signal that a process can handle"
        raise setting.error(problem, "Write names such as SIGTERM,SIGUSR1.")
    return tuple(possible[name] for name in names)


read_streams = matching(
    r"[0-3]|\d+:[0-3](,\d+:[0-3])*",
    "Use 0 none, 1 stdout, 2 stderr or 3 both; by local rank as in 0:3,1:2.",
    streams,
)


def refuse(problem: str, advice: str) -> NoReturn:
    raise SettingError(problem, advice=advice)


def flag(usage: str, help: str, read: Reader | None = None, **more: Any) -> Any:
    """Declare a field of `LaunchOptions` that is also a flag."""
    made = Flag(usage, help, read, **more)
    default = made.value(made.setting(None, {}))
    return field(default_factory=lambda: default, metadata={"flag": made})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Everything the flags say, each in a field named as the flag, and checked together."""

    program: str
    arguments: tuple[str, ...] = ()

    nproc_per_node: str = flag(
        "--nproc-per-node --workers N",
        "how many workers to start here: a number, or auto, gpu or cpu for as many as there are",
        matching(
            r"[1-9]\d*|auto|gpu|cpu",
            "Pass a whole number from 1 up, or auto, gpu or cpu; XPUs are not supported yet.",
        ),
        default="1",
    )
    threads: int | None = flag(
        "--threads N",
        "CPU threads per worker; by default OMP_NUM_THREADS, else the cores divided among them",
        optional(whole(1)),
        tells="OMP_NUM_THREADS",
    )
    as_torch: bool = flag(
        "--as-torch",
        "give the script Paceline's DistributedDataParallel and DistributedSampler for torch's",
    )
    virtual_local_rank: bool = flag(
        "--virtual-local-rank",
        "show each worker only its own GPU, as device 0, and set LOCAL_RANK to 0",
    )
    numa_binding: str = flag(
        "--numa-binding MODE",
        "bind each worker to the CPUs near its GPU: node, socket, exclusive or core-complex",
        matching(
            "|node|socket|exclusive|core-complex", "Use node, socket, exclusive or core-complex."
        ),
    )
    role: str = flag("--role NAME", "a name for the workers", default="default", tells="ROLE_NAME")

    module: bool = flag("--module -m", "run a module, as `python -m` does")
    no_python: bool = flag("--no-python", "run a program that is not a Python script")

    nnodes: tuple[int, int] = flag(
        "--nnodes N",
        "how many machines take part, or MIN:MAX",
        matching(
            r"[1-9]\d*(:[1-9]\d*)?",
            "Pass a whole number from 1 up, or MIN:MAX.",
            lambda text: (int(text.partition(":")[0]), int(text.rpartition(":")[2])),
        ),
        default="1",
    )
    node_rank: int | None = flag(
        "--node-rank R", "this machine's number, from 0 (static rendezvous)", optional(whole(0))
    )
    master_addr: str = flag(
        "--master-addr ADDR", "the address of machine 0 (static rendezvous); 127.0.0.1 by default"
    )
    master_port: int | None = flag(
        "--master-port PORT",
        "the port on machine 0 (static rendezvous); 29500, on a single machine a free one",
        optional(whole(0, 2**16 - 1)),
    )
    rdzv_backend: str = flag(
        "--rdzv-backend NAME",
        "static: machines have a --node-rank; c10d: they get it on arrival at --rdzv-endpoint",
        matching("static|c10d", "Use static with --node-rank, or c10d with --rdzv-endpoint."),
        default="static",
    )
    rdzv_endpoint: tuple[str, int | None] | None = flag(
        "--rdzv-endpoint HOST:PORT",
        "where they meet: an address of one of the machines",
        optional(endpoint),
    )
    rdzv_id: str = flag(
        "--rdzv-id ID",
        "a name for this run, the same on all machines",
        matching(  # it becomes part of a folder's name
            r"[A-Za-z0-9._-]{0,64}", "Use up to 64 letters, digits, dots, dashes and underscores."
        ),
    )
    rdzv_conf: Mapping[str, float] = flag(
        "--rdzv-conf K=V,...",
        "join_timeout=S, last_call_timeout=S, is_host=0|1, separated by commas",
        rendezvous_conf,
    )
    standalone: bool = flag("--standalone", "a single machine, whatever is said about others")
    local_addr: str = flag(
        "--local-addr ADDR",
        "accepted and ignored: workers find the master by the address of the rendezvous",
    )

    max_restarts: int = flag(
        "--max-restarts N",
        "restart all workers up to N times after a failure",
        whole(0),
        default="0",
        tells="TORCHELASTIC_MAX_RESTARTS",
    )
    shutdown_timeout: float | None = flag(
        "--shutdown-timeout S",
        "seconds between asking workers to end and killing them (TORCH_ELASTIC_SHUTDOWN_TIMEOUT); "
        f"by default {SHUTDOWN_TIMEOUT_S:g} after a failure, {SIGNAL_TIMEOUT_S:g} after a signal",
        optional(seconds),
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    signals_to_handle: tuple[signal.Signals, ...] = flag(
        "--signals-to-handle NAMES",
        "signals to the launcher that are passed on to the workers and end the run",
        signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )
    monitor_interval: float = flag(
        "--monitor-interval S",
        "seconds between looks at the other machines; workers here are watched without polling",
        seconds,
        default="0.1",
    )

    no_label: bool = flag("--no-label", "do not put `[rank N]` before each line")
    quiet: bool = flag(
        "--quiet",
        "of a run, say only what is wrong: no bar, no table (PACELINE_PROGRESS=quiet)",
        tells="PACELINE_PROGRESS=quiet",
    )
    json: bool = flag(
        "--json",
        "of a run, print one JSON object per line, without a label (PACELINE_PROGRESS=json)",
        tells="PACELINE_PROGRESS=json",
    )
    log_dir: str = flag(
        "--log-dir DIR",
        "where log files go: DIR/<run>_<random>/attempt_<n>/<local rank>/; else a temporary one",
    )
    redirects: Mapping[int, int] = flag(
        "--redirects -r STREAMS",
        "send streams to log files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both, "
        "for all workers or by local rank as in 0:3,1:2",
        read_streams,
        default="0",
    )
    tee: Mapping[int, int] = flag(
        "--tee -t STREAMS",
        "send streams to log files as well as the console, in the same form",
        read_streams,
        default="0",
    )
    local_ranks_filter: frozenset[int] | None = flag(
        "--local-ranks-filter RANKS",
        "show only these local ranks on the console, separated by commas",
        optional(
            matching(
                r"\d+(,\d+)*",
                "Write it as 0,1,2.",
                lambda text: frozenset(map(int, text.split(","))),
            )
        ),
    )
    duplicate_stdout_filters: tuple[str, ...] = flag(
        "--duplicate-stdout-filters WORDS",
        "also write stdout lines with one of these words to filtered_stdout.log in the log folder",
        words,
    )
    duplicate_stderr_filters: tuple[str, ...] = flag(
        "--duplicate-stderr-filters WORDS", "the same for stderr, filtered_stderr.log", words
    )

    timeline: str = flag(
        "--timeline FOLDER",
        "record what every worker does when, for `paceline timeline FOLDER`",
        lambda setting: os.path.abspath(setting.value) if setting.value else "",
        tells="PACELINE_TIMELINE",
    )
    trace_step: int | None = flag(
        "--trace-step N",
        "record this step of a paceline.Run stage by stage, for `paceline trace RUN`",
        optional(whole(1)),
        tells="PACELINE_TRACE_STEP",
    )
    stall_after: float | None = flag(
        "--stall-after S",
        "seconds of standstill after which a worker says where it is and whom it waits for; 0 for "
        "never; by default PACELINE_STALL_S, else 120",
        optional(seconds),
        tells="PACELINE_STALL_S",
    )

    run_path: bool = flag("--run-path", "a script always runs in the interpreter that prepared it")
    start_method: str = flag(
        "--start-method NAME", "workers are fresh processes, whichever is named", default="spawn"
    )
    event_log_handler: str = flag(
        "--event-log-handler NAME", "no events are logged", default="null"
    )
    logs_specs: str = flag("--logs-specs NAME", "log files have one layout")

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; of several reasons, the first is told."""
        least, most = self.nnodes
        nodes = str(most) if least == most else f"{least}:{most}"
        is_numbered = self.rdzv_backend == "static"
        has_address = self.rdzv_endpoint is not None or (is_numbered and bool(self.master_addr))
        if self.module and self.no_python:
            refuse("--module and --no-python contradict each other.", "Drop one of the two.")
        if self.quiet and self.json:
            refuse("--quiet and --json contradict each other.", "Drop one of the two.")
        if least > most:
            refuse(f"--nnodes is {nodes}, which is impossible.", "MIN is not above MAX.")
        if self.standalone and most > 1:
            refuse(f"--standalone means one machine, but --nnodes is {nodes}.", "Drop one of them.")
        if most > 1 and not has_address:
            refuse(
                f"--nnodes is {nodes}, but nothing says where the machines meet.",
                "Pass --master-addr, the address of the first one, on all machines."
                if is_numbered
                else "Pass --rdzv-endpoint HOST:PORT, an address of one of them, on all machines.",
            )
        if is_numbered and (self.node_rank or 0) >= most:
            refuse(
                f"--node-rank is {self.node_rank}, but there are {most} machines.",
                f"Machines are numbered from 0 to {most - 1}; set --nnodes as well.",
            )
        if is_numbered and most > 1 and self.node_rank is None:
            refuse(
                f"--nnodes is {nodes}, but nothing says which of them this machine is.",
                "Pass --node-rank, a different one on each machine, or use --rdzv-backend c10d "
                "--rdzv-endpoint HOST:PORT, which numbers them.",
            )
        if is_numbered and least < most:
            refuse(
                f"--nnodes is {nodes}, but with --node-rank the number of machines is fixed.",
                "Pass one number, or use --rdzv-backend c10d.",
            )

    @property
    def kind(self) -> str:
        """What `program` is: `script`, `module` or `program`."""
        if self.module:
            return "module"
        return "program" if self.no_python and not self.run_path else "script"

    @property
    def is_single_node(self) -> bool:
        return self.nnodes[1] == 1

    @property
    def meeting_point(self) -> tuple[str, int]:
        """Host and port where machines meet; "" and 0 leave the choice to a single machine."""
        if self.rdzv_backend == "c10d" and self.is_single_node:
            return "", 0  # one machine need not meet anybody
        host, port = self.rdzv_endpoint or (self.master_addr.strip("[]"), self.master_port)
        if port is None:
            port = 29400 if self.rdzv_backend == "c10d" else 29500
            port = 0 if self.is_single_node and self.rdzv_endpoint is None else port
        return host, port

    @property
    def writes_logs(self) -> bool:
        """Whether anything goes to log files, so that their folder must exist."""
        streams = any(self.redirects.values()) or any(self.tee.values())
        words = self.duplicate_stdout_filters or self.duplicate_stderr_filters
        return bool(self.log_dir or streams or words)

    def told(self) -> dict[str, str]:
        """The variables through which workers learn of the flags that concern them."""
        variables: dict[str, str] = {}
        for one in FLAGS:
            value = getattr(self, one.dest)
            if one.tells and value is not None and value is not False and value != "":
                name, _, text = one.tells.partition("=")
                variables[name] = text or str(value)
        return variables


FLAGS: tuple[Flag, ...] = tuple(
    declared.metadata["flag"] for declared in fields(LaunchOptions) if declared.metadata
)
_TITLE_BY_FIRST = {
    "nproc_per_node": "workers",
    "module": "program",
    "nnodes": "several machines",
    "max_restarts": "failures and signals",
    "no_label": "output",
    "timeline": "watching the training",
    "run_path": "accepted as torchrun does, without effect here",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags to a parser, leaving every default to `read_settings`."""
    group: argparse._ActionsContainer = parser
    for flag in FLAGS:
        if flag.dest in _TITLE_BY_FIRST:
            group = parser.add_argument_group(_TITLE_BY_FIRST[flag.dest])
        if flag.metavar:
            default = f" (default: {flag.default})" if flag.default else ""
            kind: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help + default}
        else:
            kind = {"action": "store_const", "const": "1", "help": flag.help}
        # As torchrun, also with underscores.
        both = [name for dashed in flag.names for name in (dashed, "--" + flag.dest)]
        group.add_argument(*dict.fromkeys(both), dest=flag.dest, **kind)


def read_settings(
    given: Mapping[str, str | None], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Each flag's value as text and its source, by the flag's name in code."""
    return {flag.dest: flag.setting(given.get(flag.dest), environ) for flag in FLAGS}


def read_options(
    given: Mapping[str, str | None],
    environ: Mapping[str, str],
    program: str,
    arguments: tuple[str, ...] = (),
) -> LaunchOptions:
    """Read and check all flags. The first impossible value is named in the error."""
    settings = read_settings(given, environ)
    values = {flag.dest: flag.value(settings[flag.dest]) for flag in FLAGS}
    return LaunchOptions(program=program, arguments=arguments, **values)
