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
from typing import Any

from paceline.errors import SettingError

MAX_WORKERS = 4096
"""More never start on one machine: it runs out of processes, ports and memory long before."""
SHUTDOWN_TIMEOUT_S = 0.5
# After a signal from the user a step and a checkpoint should fit in.
SIGNAL_TIMEOUT_S = 30.0

Reader = Callable[[str], Any]
"""Turns text into a value; a ValueError says what is possible instead."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: how it is written, and what it does."""

    usage: str
    """Its spellings, the first of which names it, then a word for its value unless it is a switch:
    `--tee -t STREAMS`."""
    help: str
    reader: Reader = str
    default: str = ""
    """As one would write it on the command line; an empty value means the default."""
    tells: str = ""
    """The variable that tells workers the value; for a switch with what it is set to, NAME=TEXT."""
    group: str = ""
    """Begins a new group of flags in the help."""

    @property
    def names(self) -> list[str]:
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def metavar(self) -> str:
        return self.usage.replace(" ".join(self.names), "").strip()

    @property
    def dest(self) -> str:
        return self.names[0].lstrip("-").replace("-", "_")

    def find(self, given: Mapping[str, str | None], environ: Mapping[str, str]) -> tuple[str, str]:
        """The value as text, and its source: the flag, a variable or `default`."""
        if text := given.get(self.dest):
            return text, " or ".join(name for name in self.names if name.startswith("--"))
        for variable in (f"PET_{self.dest.upper()}", f"TORCH_ELASTIC_{self.dest.upper()}"):
            if text := environ.get(variable):
                return text, variable
        return self.default, "default"

    def read(self, text: str, source: str) -> Any:
        """The option's value. A switch is on unless its variable is 0."""
        if not self.metavar:
            return text not in {"", "0"}
        try:
            return self.reader(text.strip())
        except ValueError as error:
            shown = text if re.fullmatch(r"-?\d{1,20}", text) else repr(text[:80])
            raise SettingError(f"{source} is {shown}.", advice=str(error)) from None


def matching(pattern: str, advice: str) -> Reader:
    """A reader of text that matches a pattern as a whole."""

    def read(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(advice)
        return text

    return read


def whole(least: int, most: int = 10**9) -> Reader:
    """A reader of whole numbers; nothing is None."""

    def read(text: str) -> int | None:
        if text and not (re.fullmatch(r"-?\d{1,18}", text) and least <= int(text) <= most):
            raise ValueError(f"Use a whole number from {least} to {most}.")
        return int(text) if text else None

    return read


def seconds(text: str) -> float | None:
    """A number of seconds; nothing is None."""
    if text and re.fullmatch(r"\d{1,9}(\.\d*)?|\.\d+", text) is None:
        raise ValueError("Use a number of seconds from 0 to 999999999.")
    return float(text) if text else None


def workers(text: str) -> str:
    """A number, or a word for as many as there are."""
    if text not in {"auto", "gpu", "cpu"}:
        try:
            whole(1, MAX_WORKERS)(text)
        except ValueError as error:
            words = ", or auto, gpu or cpu." + " XPUs are not supported yet." * (text == "xpu")
            raise ValueError(f"{str(error)[:-1]}{words}") from None
    return text


def nodes(text: str) -> tuple[int, int]:
    """`2` as (2, 2), `1:4` as (1, 4)."""
    if re.fullmatch(r"[1-9]\d{0,3}(:[1-9]\d{0,3})?", text) is None:
        raise ValueError("Use a whole number from 1 to 9999, or MIN:MAX.")
    least, _, most = text.partition(":")
    return int(least), int(most or least)


def endpoint(text: str) -> tuple[str, int | None] | None:
    """`host`, `host:port` or `[::1]:port` as host and port."""
    match = re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    if text and (match is None or int(match[3] or 0) >= 2**16):
        raise ValueError("Write it as HOST:PORT: node0:29400, or [::1]:29400 for IPv6.")
    return (match[1] or match[2], int(match[3]) if match[3] else None) if match else None


def rendezvous_conf(text: str) -> dict[str, float]:
    """`join_timeout=60,is_host=1` as numbers, without what only torchrun's backends know."""
    found: dict[str, float] = {}
    for pair in filter(str.strip, text.split(",")):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not value:
            raise ValueError(f"{key} has no value: write it as join_timeout=60,is_host=1.")
        if key == "is_host":
            found[key] = value.lower() in {"1", "true", "yes", "t", "y"}
        elif key in {"join_timeout", "timeout", "last_call_timeout"}:
            found[key] = seconds(value) or 0.0
    return found


def streams(text: str) -> dict[int, int]:
    """`3` as {-1: 3} (all local ranks), `0:3,1:2` as {0: 3, 1: 2}."""
    if re.fullmatch(r"[0-3]|\d{1,6}:[0-3](,\d{1,6}:[0-3])*", text) is None:
        raise ValueError("Use 0 none, 1 stdout, 2 stderr or 3 both; by local rank as in 0:3,1:2.")
    pairs = [("-1:" + part).split(":")[-2:] for part in text.split(",")]
    return {int(rank): int(which) for rank, which in pairs}


def local_ranks(text: str) -> frozenset[int] | None:
    if text and re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) is None:
        raise ValueError("Write it as 0,1,2.")
    return frozenset(map(int, text.split(","))) if text else None


def words(text: str) -> tuple[str, ...]:
    """Words between commas; a doubled comma stands for one."""
    parts = re.split(r"(?<!,),(?!,)", text)
    return tuple(part.replace(",,", ",") for part in parts if part)


def signals(text: str) -> tuple[signal.Signals, ...]:
    possible = {s.name: s for s in signal.Signals if s not in {signal.SIGKILL, signal.SIGSTOP}}
    names = text.replace(",", " ").split()
    if unknown := [name for name in names if name not in possible]:
        raise ValueError(
            f"{unknown[0]} is not a signal that a process can handle: write SIGTERM,SIGUSR1."
        )
    return tuple(possible[name] for name in names)


def flag(usage: str, help: str, reader: Reader = str, **more: str) -> Any:
    """Declare a field of `LaunchOptions` that is also a flag."""
    made = Flag(usage, help, reader, **more)
    return field(
        default_factory=lambda: made.read(made.default, "default"), metadata={"flag": made}
    )


def refuse(is_wrong: object, problem: str, advice: str) -> None:
    if is_wrong:
        raise SettingError(problem, advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Everything the flags say, each in a field named as the flag, and checked together."""

    program: str
    arguments: tuple[str, ...] = ()

    nproc_per_node: str = flag(
        "--nproc-per-node --workers N",
        "how many workers to start here: a number, or auto, gpu or cpu for as many as there are",
        workers,
        default="1",
        group="workers",
    )
    island: str = flag(
        "--island host|N",
        "form islands, which average rarely, of each machine or of N workers: for Run with islands",
        matching("|host|[1-9][0-9]{0,3}", "Use host, or a number of workers from 1 to 9999."),
    )
    threads: int | None = flag(
        "--threads N",
        "CPU threads per worker; by default OMP_NUM_THREADS, else the cores divided among them",
        whole(1),
        tells="OMP_NUM_THREADS",
    )
    as_torch: bool = flag(
        "--as-torch",
        "give the script Paceline's DistributedDataParallel and DistributedSampler for torch's",
    )
    share_gpus: bool = flag(
        "--share-gpus",
        "let several workers use one GPU, with NCCL between them: to try a script for many GPUs "
        "on the ones there are, not for speed",
    )
    virtual_local_rank: bool = flag(
        "--virtual-local-rank",
        "show each worker only its own GPU, as device 0, and set LOCAL_RANK to 0",
    )
    numa_binding: str = flag(
        "--numa-binding MODE",
        "bind each worker to the CPUs near its GPU: node, socket, exclusive or core-complex",
        matching(
            "|node|socket|exclusive|core-complex", "Use node, socket, exclusive, core-complex."
        ),
    )
    role: str = flag("--role NAME", "a name for the workers", default="default", tells="ROLE_NAME")
    module: bool = flag("--module -m", "run a module, as `python -m` does", group="program")
    no_python: bool = flag("--no-python", "run a program that is not a Python script")
    nnodes: tuple[int, int] = flag(
        "--nnodes N",
        "how many machines take part, or MIN:MAX",
        nodes,
        default="1",
        group="several machines",
    )
    node_rank: int | None = flag(
        "--node-rank R", "this machine's number, from 0 (static rendezvous)", whole(0)
    )
    master_addr: str = flag(
        "--master-addr ADDR", "the address of machine 0 (static rendezvous); 127.0.0.1 by default"
    )
    master_port: int | None = flag(
        "--master-port PORT",
        "the port on machine 0 (static rendezvous); 29500, on a single machine a free one",
        whole(0, 2**16 - 1),
    )
    rdzv_backend: str = flag(
        "--rdzv-backend NAME",
        "static: machines have a --node-rank; c10d: they get it on arrival at --rdzv-endpoint",
        matching("static|c10d", "Use static with --node-rank, or c10d with --rdzv-endpoint."),
        default="static",
    )
    rdzv_endpoint: tuple[str, int | None] | None = flag(
        "--rdzv-endpoint HOST:PORT", "where they meet: an address of one of the machines", endpoint
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
    machine_timeout: float = flag(
        "--machine-timeout S",
        "how long a machine may be out of reach before others continue; as machine 0 says",
        seconds,
        default="15",
    )
    standalone: bool = flag("--standalone", "a single machine, whatever is said about others")
    max_restarts: int | None = flag(
        "--max-restarts N",
        "replace workers of a run, or restart all workers of another script, up to N times; by "
        "default a run replaces any number, and another script ends with its first failure",
        whole(0),
        group="failures and signals",
    )
    min_workers: int = flag(
        "--min-workers N",
        "of a run that loses workers: with fewer than N it waits for replacements",
        whole(1, MAX_WORKERS),
        default="1",
    )
    no_survive: bool = flag(
        "--no-survive", "end a run with its first worker, instead of replacing it"
    )
    survive_errors: bool = flag(
        "--survive-errors",
        "replace a worker whose script raised, too, until the same exception comes twice at a line",
    )
    no_template: bool = flag(
        "--no-template",
        "start every worker as a new Python, instead of forking one that has imported torch",
    )
    shutdown_timeout: float | None = flag(
        "--shutdown-timeout S",
        "seconds between asking workers to end and killing them (TORCH_ELASTIC_SHUTDOWN_TIMEOUT); "
        f"by default {SHUTDOWN_TIMEOUT_S:g} after a failure, {SIGNAL_TIMEOUT_S:g} after a signal",
        seconds,
    )
    signals_to_handle: tuple[signal.Signals, ...] = flag(
        "--signals-to-handle NAMES",
        "signals to the launcher that are passed on to the workers and end the run",
        signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )
    no_label: bool = flag("--no-label", "do not put `[worker N]` before each line", group="output")
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
        streams,
        default="0",
    )
    tee: Mapping[int, int] = flag(
        "--tee -t STREAMS",
        "send streams to log files as well as the console, in the same form",
        streams,
        default="0",
    )
    local_ranks_filter: frozenset[int] | None = flag(
        "--local-ranks-filter RANKS",
        "show only these local ranks on the console, separated by commas",
        local_ranks,
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
        lambda text: os.path.abspath(text) if text else "",
        tells="PACELINE_TIMELINE",
        group="watching the training",
    )
    trace_step: int | None = flag(
        "--trace-step N",
        "record this step of a paceline.Run stage by stage, for `paceline trace RUN`",
        whole(1),
        tells="PACELINE_TRACE_STEP",
    )
    watch: bool = flag("--watch", "open the live page of the run, as `paceline watch RUN` does")
    stall_after: float | None = flag(
        "--stall-after S",
        "seconds of standstill after which a worker says where it is and whom it waits for; 0 for "
        "never; by default PACELINE_STALL_S, else 120",
        seconds,
        tells="PACELINE_STALL_S",
    )
    stall_end: float | None = flag(
        "--stall-end S",
        "seconds of standstill in its own code after which a worker that others wait for is ended, "
        "and replaced in a run that survives; 0 for never; by default PACELINE_STALL_END_S, else "
        "ten times --stall-after",
        seconds,
        tells="PACELINE_STALL_END_S",
    )

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; of several reasons, the first is told."""
        least, most = self.nnodes
        said = f"--nnodes is {most if least == most else f'{least}:{most}'}"
        is_numbered = self.rdzv_backend == "static"
        has_address = self.rdzv_endpoint is not None or (is_numbered and self.master_addr)
        drop = "Drop one of the two."
        refuse(self.module and self.no_python, "--module and --no-python contradict.", drop)
        both = self.no_survive and self.survive_errors
        refuse(both, "--no-survive and --survive-errors contradict.", drop)
        refuse(self.quiet and self.json, "--quiet and --json contradict.", drop)
        refuse(least > most, f"{said}, which is impossible.", "MIN is not above MAX.")
        refuse(self.standalone and most > 1, f"--standalone means one machine, but {said}.", drop)
        refuse(
            most > 1 and not has_address,
            f"{said}, but nothing says where the machines meet.",
            "Pass --master-addr, or --rdzv-endpoint HOST:PORT with --rdzv-backend c10d: an address "
            "of the first machine, the same on all.",
        )
        refuse(
            is_numbered and (self.node_rank or 0) >= most,
            f"--node-rank is {self.node_rank}, but {said}.",
            f"Machines are numbered from 0 to {most - 1}; set --nnodes as well.",
        )
        refuse(
            is_numbered and most > 1 and (self.node_rank is None or least < most),
            f"{said}, but nothing says which of them this machine is, or how many there are.",
            "Pass one number and a different --node-rank on each machine, or use --rdzv-backend "
            "c10d --rdzv-endpoint HOST:PORT, which numbers them.",
        )

    @property
    def kind(self) -> str:
        """What `program` is: `script`, `module` or `program`."""
        if self.module:
            return "module"
        return "program" if self.no_python else "script"

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
            port = 29400 if self.rdzv_backend == "c10d" else 29500  # torchrun's
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
        variables = {"TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts or 0)}
        for one in FLAGS:
            value = getattr(self, one.dest)
            if one.tells and value is not None and value is not False and value != "":
                name, _, text = one.tells.partition("=")
                variables[name] = text or str(value)
        return variables


FLAGS: tuple[Flag, ...] = tuple(
    declared.metadata["flag"] for declared in fields(LaunchOptions) if declared.metadata
)
IGNORED = (
    Flag("--run-path", "no effect here", group="accepted as torchrun does"),
    Flag("--start-method NAME", "no effect here"),
    Flag("--event-log-handler NAME", "no effect here"),
    Flag("--log-line-prefix-template TEXT", "no effect here: lines begin with [worker N]"),
    Flag("--logs-specs NAME", "no effect here"),
    Flag("--local-addr ADDR", "no effect here"),
    Flag("--monitor-interval S", "no effect here: nothing is polled"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags to a parser, leaving every default to `read_options`."""
    group: argparse._ActionsContainer = parser
    for flag in (*FLAGS, *IGNORED):
        if flag.group:
            group = parser.add_argument_group(flag.group)
        default = f" (default: {flag.default})" if flag.default else ""
        kind: dict[str, Any] = {"action": "store_const", "const": "1"}
        if flag.metavar:
            kind = {"metavar": flag.metavar}
        # As torchrun, also with underscores.
        both = [name for dashed in flag.names for name in (dashed, "--" + flag.dest)]
        group.add_argument(*dict.fromkeys(both), dest=flag.dest, help=flag.help + default, **kind)


def read_options(
    given: Mapping[str, str | None],
    environ: Mapping[str, str],
    program: str,
    arguments: tuple[str, ...] = (),
) -> LaunchOptions:
    """Read and check all flags. The first impossible value is named in the error."""
    values = {flag.dest: flag.read(*flag.find(given, environ)) for flag in FLAGS}
    return LaunchOptions(program=program, arguments=arguments, **values)
