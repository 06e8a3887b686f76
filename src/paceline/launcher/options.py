"""What the flags of `paceline run` say together, checked and as plain data.

Text becomes numbers and names here and nowhere else; the first impossible value is named in the
error, together with the flag or the variable it came from.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import SettingError
from paceline.launcher.flags import Setting

SIGNAL_TIMEOUT_S = 30.0
JOIN_TIMEOUT_S = 600.0
LAST_CALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything the flags say, checked."""

    program: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"
    """`script`, `module` or `program`."""
    workers: str = "1"
    """A number, or `auto`, `gpu`, `cpu`, `xpu`: how many this machine has."""
    threads: int | None = None
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    """This machine's number; None where the machines are numbered as they arrive."""
    host: str = ""
    """Where the machines meet; empty on a single machine that may choose for itself."""
    port: int = 0
    """0 lets the system choose a free one."""
    is_host: bool | None = None
    join_timeout_s: float = JOIN_TIMEOUT_S
    last_call_s: float = LAST_CALL_S
    run_id: str = ""
    role: str = "default"
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    shutdown_timeout_s: float = 0.5
    """How long workers have to end after another one has failed."""
    signal_timeout_s: float = SIGNAL_TIMEOUT_S
    """How long they have after a signal from the user: a step and a checkpoint should fit in."""
    signals: tuple[signal.Signals, ...] = ()
    log_dir: str = ""
    redirects: Mapping[int, int] = field(default_factory=dict)
    """Streams that go to a file instead of the console, by local rank; -1 stands for all."""
    tee: Mapping[int, int] = field(default_factory=dict)
    """Streams that go to a file as well as to the console, in the same form."""
    shown_local_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    label: bool = True
    progress: str = ""
    """How a run shows itself; empty leaves it to the variable, or the script."""
    as_torch: bool = False
    virtual_local_rank: bool = False
    numa: str = ""
    timeline: str = ""
    """The folder for recordings; empty for none."""
    trace_step: int | None = None
    """The step that a `Run` records; None leaves it to the variable, or the script."""
    stall_after_s: float | None = None
    """None leaves it to the variable, or the default."""


def read_options(
    settings: Mapping[str, Setting], program: str, arguments: tuple[str, ...] = ()
) -> RunOptions:
    """Check all settings together. The first impossible one is named in the error."""
    least, most = _node_range(settings["nnodes"])
    single = settings["standalone"].is_on or most == 1
    if settings["standalone"].is_on and most > 1:
        raise SettingError(
            f"--standalone means one machine, but --nnodes is {settings['nnodes'].value}.",
            advice="Drop one of the two.",
        )
    if settings["module"].is_on and settings["no_python"].is_on:
        raise SettingError(
            "--module and --no-python contradict each other.",
            advice="A module runs under Python; drop one of the two.",
        )
    backend = settings["rdzv_backend"].value
    if backend not in {"static", "c10d"}:
        raise SettingError(
            f"{settings['rdzv_backend'].name} is {backend!r}, which is not supported.",
            advice="Use static with --node-rank, or c10d with --rdzv-endpoint.",
        )
    configuration = _configuration(settings["rdzv_conf"])
    host, port = _meeting_place(settings, backend, single)
    node_rank = None
    if backend == "static" or single:
        node_rank = _number(settings["node_rank"], default=0, at_least=0)
        if node_rank >= most:
            raise SettingError(
                f"{settings['node_rank'].name} is {node_rank}, but there are {most} machines.",
                advice=f"Machines are numbered from 0 to {most - 1}; set --nnodes as well.",
            )
        if settings["node_rank"].source == "default" and not single:
            raise SettingError(
                f"--nnodes is {most}, but nothing says which of them this machine is.",
                advice="Pass --node-rank, a different one on each machine, or use "
                "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, which numbers them.",
            )
        if least != most and not single:
            raise SettingError(
                f"--nnodes is {settings['nnodes'].value}, but with --node-rank the number of "
                "machines is fixed.",
                advice="Pass one number, or use --rdzv-backend c10d.",
            )
    return RunOptions(
        program=program,
        arguments=arguments,
        kind=_kind(settings),
        workers=_workers(settings["nproc_per_node"]),
        threads=_optional_number(settings["threads"], at_least=1),
        min_nodes=1 if single else least,
        max_nodes=1 if single else most,
        node_rank=node_rank,
        host=host,
        port=port,
        is_host=_switch(configuration.get("is_host")),
        join_timeout_s=_seconds(configuration, ("join_timeout", "timeout"), JOIN_TIMEOUT_S),
        last_call_s=_seconds(configuration, ("last_call_timeout",), LAST_CALL_S),
        run_id=_run_id(settings["rdzv_id"]),
        role=settings["role"].value,
        max_restarts=_number(settings["max_restarts"], default=0, at_least=0),
        monitor_interval_s=_duration(settings["monitor_interval"]),
        shutdown_timeout_s=_duration(settings["shutdown_timeout"]),
        signal_timeout_s=_signal_timeout_s(settings["shutdown_timeout"]),
        signals=_signals(settings["signals_to_handle"]),
        log_dir=settings["log_dir"].value,
        redirects=_streams(settings["redirects"]),
        tee=_streams(settings["tee"]),
        shown_local_ranks=_ranks(settings["local_ranks_filter"]),
        stdout_filters=_words(settings["duplicate_stdout_filters"]),
        stderr_filters=_words(settings["duplicate_stderr_filters"]),
        label=not settings["no_label"].is_on,
        progress=_progress(settings),
        as_torch=settings["as_torch"].is_on,
        virtual_local_rank=settings["virtual_local_rank"].is_on,
        numa=_numa(settings["numa_binding"]),
        timeline=settings["timeline"].value,
        trace_step=_optional_number(settings["trace_step"], at_least=1),
        stall_after_s=(
            _duration(settings["stall_after"]) if settings["stall_after"].value else None
        ),
    )


def split_endpoint(setting: Setting, default_port: int) -> tuple[str, int]:
    """`host`, `host:port` or `[::1]:port` as host and port."""
    match = re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]+))(?::(\d+))?", setting.value)
    port = int(match[3] or default_port) if match else -1
    if match is None or not 0 <= port < 2**16:
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which is not HOST:PORT.",
            advice="Write it as node0:29400, or [::1]:29400 for IPv6.",
        )
    return match[1] or match[2], port


def _meeting_place(settings: Mapping[str, Setting], backend: str, single: bool) -> tuple[str, int]:
    endpoint = settings["rdzv_endpoint"]
    if backend == "c10d":
        if single:
            return "", 0  # one machine need not meet anybody
        if not endpoint.value:
            raise SettingError(
                "--rdzv-backend c10d needs to know where the machines meet.",
                advice="Pass --rdzv-endpoint HOST:PORT, the same on all machines, with the "
                "address of one of them.",
            )
        return split_endpoint(endpoint, 29400)
    if endpoint.value:
        return split_endpoint(endpoint, 29500)
    address = settings["master_addr"].value
    if not single and not address:
        raise SettingError(
            "Several machines need the address of the first one.",
            advice="Pass --master-addr, the same on all machines.",
        )
    port = _number(settings["master_port"], default=0 if single else 29500, at_least=0)
    if port >= 2**16:
        raise SettingError(
            f"{settings['master_port'].name} is {port}, which is not a port.",
            advice="Use a number from 1 to 65535, or leave it out on a single machine.",
        )
    return address.strip("[]"), port


def _kind(settings: Mapping[str, Setting]) -> str:
    if settings["module"].is_on:
        return "module"
    return "program" if settings["no_python"].is_on and not settings["run_path"].is_on else "script"


def _workers(setting: Setting) -> str:
    text = setting.value.strip()
    if text in {"auto", "gpu", "cpu", "xpu"}:
        return text
    if not re.fullmatch(r"-?\d+", text):
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which is no number of workers.",
            advice="Pass a whole number from 1 up, or auto, gpu, cpu or xpu.",
        )
    if int(text) < 1:
        raise SettingError(
            f"{setting.name} is {text}, but a run needs at least one worker.",
            advice="Pass a whole number from 1 up, or auto for one per GPU or core.",
        )
    return text


def _node_range(setting: Setting) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d+)(?::(-?\d+))?", setting.value.strip())
    if match is None:
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which is no number of machines.",
            advice="Pass a whole number, or MIN:MAX.",
        )
    least = int(match[1])
    most = int(match[2] or match[1])
    if not 1 <= least <= most:
        raise SettingError(
            f"{setting.name} is {setting.value}, which is impossible.",
            advice="There is at least one machine, and MIN is not above MAX.",
        )
    return least, most


def _number(setting: Setting, *, default: int, at_least: int) -> int:
    number = _optional_number(setting, at_least=at_least)
    return default if number is None else number


def _optional_number(setting: Setting, *, at_least: int) -> int | None:
    if not setting.value:
        return None
    try:
        number = int(setting.value)
    except ValueError:
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which is not a whole number."
        ) from None
    if number < at_least:
        raise SettingError(
            f"{setting.name} is {number}, which is too small.",
            advice=f"Use a whole number from {at_least} up.",
        )
    return number


def _signal_timeout_s(shutdown_timeout: Setting) -> float:
    is_chosen = shutdown_timeout.source != "default"
    return _duration(shutdown_timeout) if is_chosen else SIGNAL_TIMEOUT_S


def _duration(setting: Setting) -> float:
    try:
        seconds = float(setting.value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which is no number of seconds.",
            advice="Use a number from 0 up.",
        )
    return seconds


def _configuration(setting: Setting) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in setting.value.split(",") if pair.strip()]
    wrong = next((key + equals for key, equals, value in pairs if not equals or not value), None)
    if wrong is not None:
        raise SettingError(
            f"{setting.name} is {setting.value!r}; {wrong!r} has no value.",
            advice="Write it as join_timeout=60,is_host=1.",
        )
    return {key.strip(): value.strip() for key, _, value in pairs}


def _seconds(configuration: Mapping[str, str], keys: tuple[str, ...], default: float) -> float:
    for key in keys:
        if key in configuration:
            return _duration(Setting(configuration[key], "flag", f"{key} in --rdzv-conf"))
    return default


def _switch(text: str | None) -> bool | None:
    return None if text is None else text.lower() in {"1", "true", "yes", "t", "y"}


def _run_id(setting: Setting) -> str:
    # It becomes part of a folder's name.
    if setting.value and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", setting.value):
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which cannot name a run.",
            advice="Use up to 64 letters, digits, dots, dashes and underscores.",
        )
    return setting.value


def _streams(setting: Setting) -> dict[int, int]:
    """`3` as {-1: 3} (all local ranks), `0:3,1:2` as {0: 3, 1: 2}."""
    if re.fullmatch(r"[0-3]", setting.value):
        return {-1: int(setting.value)}
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", setting.value):
        pairs = [pair.split(":") for pair in setting.value.split(",")]
        return {int(rank): int(streams) for rank, streams in pairs}
    raise SettingError(
        f"{setting.name} is {setting.value!r}, which names no streams.",
        advice="Use 0 none, 1 stdout, 2 stderr or 3 both; by local rank as in 0:3,1:2.",
    )


def _ranks(setting: Setting) -> frozenset[int] | None:
    if not setting.value:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", setting.value):
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which is no list of local ranks.",
            advice="Write it as 0,1,2.",
        )
    return frozenset(map(int, setting.value.split(",")))


def _words(setting: Setting) -> tuple[str, ...]:
    """Words between commas; a doubled comma stands for one."""
    parts = re.split(r"(?<!,),(?!,)", setting.value)
    return tuple(part.replace(",,", ",") for part in parts if part)


def _signals(setting: Setting) -> tuple[signal.Signals, ...]:
    found = []
    for name in filter(None, (part.strip() for part in setting.value.split(","))):
        try:
            found.append(signal.Signals[name])
        except KeyError:
            raise SettingError(
                f"{setting.name} names {name!r}, which is no signal.",
                advice="Write names such as SIGTERM,SIGUSR1.",
            ) from None
        if found[-1] in {signal.SIGKILL, signal.SIGSTOP}:
            raise SettingError(
                f"{setting.name} names {name}, which no process can handle.",
                advice="Leave it out: the workers end with the launcher in any case.",
            )
    return tuple(found)


def _progress(settings: Mapping[str, Setting]) -> str:
    chosen = [name for name in ("quiet", "json") if settings[name].is_on]
    if len(chosen) > 1:
        raise SettingError(
            "--quiet and --json contradict each other.",
            advice="Drop one of the two.",
        )
    return chosen[0] if chosen else ""


def _numa(setting: Setting) -> str:
    modes = {"", "node", "socket", "exclusive", "core-complex"}
    if setting.value not in modes:
        raise SettingError(
            f"{setting.name} is {setting.value!r}, which is not a way of binding.",
            advice="Use node, socket, exclusive or core-complex.",
        )
    return setting.value
