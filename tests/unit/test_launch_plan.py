"""From flags to a plan: pure data, nothing is started."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from paceline.env import read_observation, read_placement
from paceline.errors import SettingError
from paceline.launcher.flags import FLAGS, read_settings
from paceline.launcher.options import RunOptions, read_options
from paceline.launcher.plan import (
    WORKER_FILE,
    Facts,
    Meeting,
    Route,
    WorkerSpec,
    plan_workers,
    writes_logs,
)


def options_of(environ: dict[str, str] | None = None, **given: str) -> RunOptions:
    return read_options(read_settings(given, environ or {}), "train.py", ("--lr", "1"))


def plan(size: int, environ: dict[str, str] | None = None, **given: str) -> tuple[WorkerSpec, ...]:
    meeting = Meeting(host="127.0.0.1", port=4567, size=size, local_size=size)
    facts = Facts(
        run_id="r1",
        folder="/tmp/f",
        cores=8,
        environ=environ or {"PATH": "/bin"},
        loopback="lo",
        log_folder="/logs/attempt_0" if writes_logs(options_of(**given)) else "",
    )
    return plan_workers(options_of(**given), meeting, facts)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_worker_knows_its_place(size: int) -> None:
    specs = plan(size)
    places = [read_placement(spec.environment) for spec in specs]
    assert [place and place.rank for place in places] == list(range(size))
    assert all(place and place.size == place.local_size == size for place in places)
    assert all(place and place.agent_has_store for place in places)


def test_ranks_continue_where_the_machines_before_end() -> None:
    meeting = Meeting(host="node0", port=1, size=5, local_size=2, first_rank=3, node=1, nodes=2)
    facts = Facts(run_id="r", folder="/tmp/f", cores=2, environ={}, loopback="lo")
    specs = plan_workers(options_of(nnodes="2", node_rank="1", master_addr="node0"), meeting, facts)
    assert [(spec.rank, spec.local_rank) for spec in specs] == [(3, 0), (4, 1)]
    assert specs[0].environment["GROUP_RANK"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in specs[0].environment


def test_every_worker_is_told_what_to_record() -> None:
    for spec in plan(2, timeline="spans", trace_step="7"):
        wishes = read_observation(spec.environment)
        assert (wishes.timeline, wishes.trace_step) == (os.path.abspath("spans"), 7)
    theirs = plan(2, {"PACELINE_TRACE_STEP": "4"})[1].environment
    assert read_observation(theirs).trace_step == 4


def test_every_worker_is_told_how_a_run_shows_itself() -> None:
    theirs = {"PACELINE_PROGRESS": "plain"}
    assert plan(2, theirs)[0].environment["PACELINE_PROGRESS"] == "plain"
    assert plan(2, theirs, quiet="1")[1].environment["PACELINE_PROGRESS"] == "quiet"
    assert plan(2, json="1")[0].environment["PACELINE_PROGRESS"] == "json"
    assert "PACELINE_PROGRESS" not in plan(2)[0].environment


def test_on_a_single_machine_gloo_stays_on_loopback() -> None:
    assert plan(2)[0].environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert plan(2, {"GLOO_SOCKET_IFNAME": "x"})[0].environment["GLOO_SOCKET_IFNAME"] == "x"


def test_the_command_is_the_same_on_every_rank_and_ends_in_the_scripts_arguments() -> None:
    first, second = plan(2)
    assert first.argv == second.argv
    assert first.argv[:2] == (sys.executable, "-u")
    assert first.argv[-4:] == (WORKER_FILE, "train.py", "--lr", "1")


def test_what_the_user_has_in_the_environment_reaches_the_workers() -> None:
    assert plan(2, {"MY_SETTING": "1"})[1].environment["MY_SETTING"] == "1"


def test_a_single_worker_takes_the_terminal_and_several_do_not() -> None:
    assert plan(1)[0].takes_terminal
    assert not plan(2)[0].takes_terminal
    assert not plan(1, redirects="1")[0].takes_terminal


@pytest.mark.parametrize(
    ("given", "stdout", "stderr"),
    [
        ({}, Route(), Route()),
        ({"redirects": "3"}, Route(False, "stdout.log"), Route(False, "stderr.log")),
        ({"redirects": "1:2"}, Route(), Route(False, "stderr.log")),
        ({"redirects": "0:3"}, Route(), Route()),
        ({"tee": "1"}, Route(True, "stdout.log"), Route()),
        ({"tee": "1", "redirects": "3"}, Route(True, "stdout.log"), Route(False, "stderr.log")),
        ({"local_ranks_filter": "0"}, Route(False), Route(False)),
        ({"local_ranks_filter": "0,1", "tee": "2"}, Route(), Route(True, "stderr.log")),
    ],
)
def test_streams_of_local_rank_1_go_where_the_flags_say(
    given: dict[str, str], stdout: Route, stderr: Route
) -> None:
    spec = plan(2, **given)[1]

    def named(route: Route) -> Route:
        return Route(route.on_console, route.log_file.rpartition("/1/")[2])

    assert (named(spec.stdout), named(spec.stderr)) == (stdout, stderr)


def test_log_files_lie_in_the_log_folder_and_error_files_beside_them() -> None:
    spec = plan(2, tee="3")[1]
    assert spec.stdout.log_file == "/logs/attempt_0/1/stdout.log"
    assert spec.error_file == "/logs/attempt_0/1/error.json"
    assert spec.environment["TORCHELASTIC_ERROR_FILE"] == spec.error_file


def test_a_flag_wins_over_torchruns_variable_which_wins_over_the_default() -> None:
    environ = {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2"}
    settings = read_settings({"nproc_per_node": "4"}, environ)
    assert (settings["nproc_per_node"].value, settings["nproc_per_node"].source) == ("4", "flag")
    assert settings["max_restarts"].source == "environment"
    assert settings["role"].source == "default"
    assert read_options(settings, "x.py").max_restarts == 2


def test_torchs_variable_for_the_shutdown_timeout_counts() -> None:
    options = options_of({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"})
    assert (options.shutdown_timeout_s, options.signal_timeout_s) == (7.0, 7.0)


def test_defaults_are_those_of_a_single_machine_that_chooses_its_own_port() -> None:
    options = options_of()
    assert (options.workers, options.max_nodes, options.host, options.port) == ("1", 1, "", 0)
    assert options.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert (options.shutdown_timeout_s, options.signal_timeout_s) == (0.5, 30.0)


def test_an_endpoint_is_needless_on_one_machine_so_its_port_is_not_fought_over() -> None:
    options = options_of(rdzv_backend="c10d", rdzv_endpoint="localhost:29400")
    assert (options.host, options.port) == ("", 0)


def test_machines_without_numbers_meet_at_the_endpoint() -> None:
    options = options_of(nnodes="2:4", rdzv_backend="c10d", rdzv_endpoint="[::1]:29401")
    assert (options.host, options.port, options.node_rank) == ("::1", 29401, None)
    assert (options.min_nodes, options.max_nodes) == (2, 4)


def test_machines_with_numbers_meet_at_the_master() -> None:
    options = options_of(nnodes="2", node_rank="1", master_addr="node0")
    assert (options.host, options.port, options.node_rank) == ("node0", 29500, 1)


def test_rendezvous_settings_are_read() -> None:
    options = options_of(rdzv_conf="join_timeout=5,last_call_timeout=1,is_host=0")
    assert (options.join_timeout_s, options.last_call_s, options.is_host) == (5.0, 1.0, False)


def test_words_to_filter_by_may_contain_a_doubled_comma() -> None:
    assert options_of(duplicate_stdout_filters="apple,a,,b").stdout_filters == ("apple", "a,b")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nproc_per_node": "0"}, r"--nproc-per-node \(--workers\) is 0, .* at least one"),
        ({"nproc_per_node": "-2"}, "is -2"),
        ({"nproc_per_node": "many"}, "is 'many'"),
        ({"threads": "0"}, "--threads is 0"),
        ({"nnodes": "0"}, "--nnodes is 0"),
        ({"nnodes": "3:2"}, "--nnodes is 3:2"),
        ({"nnodes": "2"}, "address of the first"),
        ({"nnodes": "2", "master_addr": "a"}, "which of them this machine is"),
        ({"nnodes": "2", "node_rank": "2", "master_addr": "a"}, "there are 2 machines"),
        ({"nnodes": "1:2", "node_rank": "0", "master_addr": "a"}, "number of machines is fixed"),
        ({"nnodes": "2", "rdzv_backend": "c10d"}, "where the machines meet"),
        ({"nnodes": "2", "standalone": "1"}, "--standalone means one machine"),
        ({"rdzv_backend": "etcd"}, "'etcd', which is not supported"),
        ({"rdzv_endpoint": "a:b:c"}, "not HOST:PORT"),
        ({"rdzv_endpoint": "a:70000"}, "not HOST:PORT"),
        ({"rdzv_id": "../x"}, "cannot name a run"),
        ({"rdzv_conf": "timeout"}, "has no value"),
        ({"rdzv_conf": "timeout=soon"}, "'soon'"),
        ({"master_port": "70000"}, "not a port"),
        ({"master_port": "-1"}, "too small"),
        ({"max_restarts": "-1"}, "--max-restarts is -1"),
        ({"max_restarts": "x"}, "not a whole number"),
        ({"shutdown_timeout": "-1"}, "no number of seconds"),
        ({"monitor_interval": "nan"}, "no number of seconds"),
        ({"redirects": "4"}, "names no streams"),
        ({"tee": "0:1,"}, "names no streams"),
        ({"local_ranks_filter": "a"}, "no list of local ranks"),
        ({"signals_to_handle": "SIGNOPE"}, "'SIGNOPE', which is no signal"),
        ({"signals_to_handle": "SIGKILL"}, "no process can handle"),
        ({"trace_step": "0"}, "--trace-step is 0"),
        ({"numa_binding": "moon"}, "not a way of binding"),
        ({"module": "1", "no_python": "1"}, "contradict"),
        ({"quiet": "1", "json": "1"}, "--quiet and --json contradict"),
    ],
)
def test_an_impossible_flag_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        options_of(**given)


def test_an_impossible_variable_is_named_as_the_variable() -> None:
    with pytest.raises(SettingError, match="PET_NPROC_PER_NODE is 0"):
        options_of({"PET_NPROC_PER_NODE": "0"})


def test_every_flag_of_torchrun_is_accepted_in_both_spellings() -> None:
    run = pytest.importorskip("torch.distributed.run")
    theirs = {
        name
        for action in run.get_args_parser()._actions
        for name in action.option_strings
        if name not in {"-h", "--help"}
    }
    ours = {name for flag in FLAGS for name in flag.spellings}
    assert theirs <= ours
