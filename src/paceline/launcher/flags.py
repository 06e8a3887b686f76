"""The flags of `paceline run` as a table: torchrun's, with torchrun's meaning, and a few of ours.

A flag's value comes from the command line, else from torchrun's variable `PET_<FLAG>`, else from
the default; a `Setting` remembers which.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: its spellings, the first of which names it, and what it does."""

    names: tuple[str, ...]
    help: str
    default: str | None = ""
    """As one would write it on the command line; None marks a switch, which takes no value."""
    metavar: str = ""

    @property
    def dest(self) -> str:
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def title(self) -> str:
        """How messages call it: `--nproc-per-node (--workers)`."""
        first, *others = [name for name in self.names if name.startswith("--")]
        return f"{first} ({others[0]})" if others else first

    @property
    def variable(self) -> str:
        return f"PET_{self.dest.upper()}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """With dashes and, as torchrun, with underscores."""
        both = [(name, name[:2] + name[2:].replace("-", "_")) for name in self.names]
        return tuple(dict.fromkeys(name for pair in both for name in pair))


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag's value as text, and where it came from: `flag`, `environment` or `default`."""

    value: str
    source: str
    name: str
    """The flag or the variable, for messages."""

    @property
    def is_on(self) -> bool:
        return self.value not in {"", "0"}


FLAGS_BY_GROUP: dict[str, tuple[Flag, ...]] = {
    "workers": (
        Flag(
            ("--nproc-per-node", "--workers"),
            "how many workers to start on this machine: a number, or auto, gpu, cpu or xpu for "
            "as many as it has",
            "1",
            "N",
        ),
        Flag(
            ("--threads",),
            "CPU threads per worker (OMP_NUM_THREADS); unless that variable is set, the default "
            "with several workers is the machine's cores divided among them",
            "",
            "N",
        ),
        Flag(
            ("--as-torch",),
            "give the script Paceline's DistributedDataParallel and DistributedSampler where it "
            "asks for torch's, without changing the script",
            None,
        ),
        Flag(
            ("--virtual-local-rank",),
            "show each worker only its own GPU, as device 0, and set LOCAL_RANK to 0",
            None,
        ),
        Flag(
            ("--numa-binding",),
            "bind each worker to the CPUs near its GPU: node, socket, exclusive or core-complex",
            "",
            "MODE",
        ),
        Flag(("--role",), "a name for the workers (ROLE_NAME)", "default", "NAME"),
    ),
    "program": (
        Flag(("--module", "-m"), "run a module, as `python -m` does", None),
        Flag(("--no-python",), "run a program that is not a Python script", None),
    ),
    "several machines": (
        Flag(("--nnodes",), "how many machines take part, or MIN:MAX", "1", "N"),
        Flag(("--node-rank",), "this machine's number, from 0 (static rendezvous)", "", "R"),
        Flag(
            ("--master-addr",),
            "the address of machine 0 (static rendezvous); 127.0.0.1 by default",
            "",
            "ADDR",
        ),
        Flag(
            ("--master-port",),
            "the port on machine 0 (static rendezvous); a free one on a single machine, "
            "29500 on several",
            "",
            "PORT",
        ),
        Flag(
            ("--rdzv-backend",),
            "how machines find each other: static (numbered by --node-rank) or c10d (numbered "
            "as they arrive at --rdzv-endpoint)",
            "static",
            "NAME",
        ),
        Flag(
            ("--rdzv-endpoint",),
            "where they meet: HOST:PORT of one of the machines",
            "",
            "HOST:PORT",
        ),
        Flag(("--rdzv-id",), "a name for this run, the same on all machines", "", "ID"),
        Flag(
            ("--rdzv-conf",),
            "join_timeout=S, last_call_timeout=S, is_host=0|1, separated by commas",
            "",
            "K=V,...",
        ),
        Flag(("--standalone",), "a single machine, whatever else is said about others", None),
        Flag(
            ("--local-addr",),
            "accepted and ignored: workers find the master by the address of the rendezvous",
            "",
            "ADDR",
        ),
    ),
    "failures and signals": (
        Flag(("--max-restarts",), "restart all workers up to N times after a failure", "0", "N"),
        Flag(
            ("--shutdown-timeout",),
            "seconds between asking workers to end and killing them; 30 after a signal unless it "
            "is given; the variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets it too",
            "0.5",
            "S",
        ),
        Flag(
            ("--signals-to-handle",),
            "signals to the launcher that are passed on to the workers and end the run",
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "NAMES",
        ),
        Flag(
            ("--monitor-interval",),
            "seconds between looks at the other machines; workers of this one are watched "
            "without polling",
            "0.1",
            "S",
        ),
    ),
    "output": (
        Flag(("--no-label",), "do not put `[rank N]` before each line", None),
        Flag(
            ("--quiet",),
            "of a run, say only what is wrong: no bar, no table (PACELINE_PROGRESS=quiet)",
            None,
        ),
        Flag(
            ("--json",),
            "of a run, print one JSON object per line, without a label (PACELINE_PROGRESS=json)",
            None,
        ),
        Flag(
            ("--log-dir",),
            "where log files go: DIR/<run>_<random>/attempt_<n>/<local rank>/; a temporary "
            "folder by default",
            "",
            "DIR",
        ),
        Flag(
            ("--redirects", "-r"),
            "send streams to log files instead of the console: 0 none, 1 stdout, 2 stderr, "
            "3 both, for all workers or by local rank as in 0:3,1:2",
            "0",
            "STREAMS",
        ),
        Flag(
            ("--tee", "-t"),
            "send streams to log files as well as the console, in the same form",
            "0",
            "STREAMS",
        ),
        Flag(
            ("--local-ranks-filter",),
            "show only these local ranks on the console, separated by commas",
            "",
            "RANKS",
        ),
        Flag(
            ("--duplicate-stdout-filters",),
            "also write stdout lines that contain one of these words, separated by commas, to "
            "filtered_stdout.log in the log folder",
            "",
            "WORDS",
        ),
        Flag(
            ("--duplicate-stderr-filters",), "the same for stderr, filtered_stderr.log", "", "WORDS"
        ),
    ),
    "watching the training": (
        Flag(
            ("--timeline",),
            "record what every worker does when, as one Chrome trace per rank in this folder; "
            "`paceline timeline FOLDER` puts them together",
            "",
            "FOLDER",
        ),
        Flag(
            ("--trace-step",),
            "record this step of a script that uses paceline.Run, stage by stage, in the run's "
            "folder; `paceline trace RUN` draws it",
            "",
            "N",
        ),
        Flag(
            ("--stall-after",),
            "seconds without progress after which a worker says where it is and whom it waits "
            "for; 0 for never; 120 unless PACELINE_STALL_S is set",
            "",
            "S",
        ),
    ),
    "accepted as torchrun does, without effect here": (
        Flag(("--run-path",), "a script always runs in the interpreter that prepared it", None),
        Flag(
            ("--start-method",), "workers are fresh processes, whichever is named", "spawn", "NAME"
        ),
        Flag(("--event-log-handler",), "no events are logged", "null", "NAME"),
        Flag(("--logs-specs",), "log files have one layout", "", "NAME"),
    ),
}

FLAGS = tuple(flag for flags in FLAGS_BY_GROUP.values() for flag in flags)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the whole table to a parser, leaving every default to `read_settings`."""
    for title, flags in FLAGS_BY_GROUP.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.default is None:
                group.add_argument(
                    *flag.spellings,
                    dest=flag.dest,
                    action="store_const",
                    const="1",
                    help=flag.help,
                )
            else:
                default = f" (default: {flag.default})" if flag.default else ""
                group.add_argument(
                    *flag.spellings, dest=flag.dest, metavar=flag.metavar, help=flag.help + default
                )


def read_settings(
    given: Mapping[str, str | None], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Each flag's value and its source, by the flag's name in code."""
    settings: dict[str, Setting] = {}
    for flag in FLAGS:
        variables = [flag.variable]
        if flag.dest == "shutdown_timeout":
            variables.append("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        value = given.get(flag.dest)
        variable = next((name for name in variables if name in environ), None)
        if value is not None:
            settings[flag.dest] = Setting(value, "flag", flag.title)
        elif variable is not None:
            settings[flag.dest] = Setting(environ[variable], "environment", variable)
        else:
            settings[flag.dest] = Setting(flag.default or "", "default", flag.title)
    return settings
