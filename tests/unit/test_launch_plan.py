"""From flags to a plan: pure data, nothing is started."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import fields
from typing import Any

import pytest

from paceline.env import Placement, read_observation, read_placement
from paceline.errors import DeviceError, SettingError
from paceline.launcher.flags import FLAGS, LaunchOptions, add_flags, read_options
from paceline.launcher.plan import (
    STDERR,
    STDOUT,
    WORKER_FILE,
    Route,
    WorkerSpec,
    count_workers,
    describe_sharing,
    find_gpus,
    plan_workers,
)
from paceline.launcher.run import note_late_workers


def options_of(environ: dict[str, str] | None = None, **given: str) -> LaunchOptions:
    return read_options(given, environ or {}, "train.py", ("--lr", "1"))


def plan(
    size: int,
    environ: dict[str, str] | None = None,
    *,
    where: dict[str, Any] | None = None,
    cores: int = 8,
    interface: str | None = "lo",
    gpus: list[str] | None = None,
    **given: str,
) -> list[WorkerSpec]:
    first = {"master_addr": "127.0.0.1", "master_port": 4567, "size": size, "local_size": size}
    return plan_workers(
        options_of(**given),
        Placement(**first | (where or {})),
        run_id="r1",
        folder="/logs/attempt_1",
        environ={"PATH": "/bin"} if environ is None else environ,
        cores=cores,
        interface=interface,
        attempt=1,
        gpus=gpus or [],
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_worker_knows_its_place(size: int) -> None:
    specs = plan(size)
    places = [read_placement(spec.environment) for spec in specs]
    assert [place and place.rank for place in places] == list(range(size))
    assert all(place and place.size == place.local_size == size for place in places)
    assert all(place and place.agent_has_store for place in places)


def test_ranks_continue_where_the_machines_before_end() -> None:
    where = {"master_addr": "node0", "rank": 3, "size": 5, "local_size": 2, "node": 1, "nodes": 2}
    specs = plan(2, where=where, interface=None, nnodes="2", node_rank="1", master_addr="node0")
    assert [spec.rank for spec in specs] == [3, 4]
    assert [spec.environment["LOCAL_RANK"] for spec in specs] == ["0", "1"]
    assert specs[0].environment["GROUP_RANK"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in specs[0].environment


def test_all_of_torchruns_variables_are_written() -> None:
    spec = plan(2, {}, role="trainer", max_restarts="3")[1]
    assert spec.environment == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4567",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "r1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/attempt_1/1/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PACELINE_RUN_ID": "r1",
        "PACELINE_STORE_PORT": "4567",
        "PACELINE_STORE": "",
        "PACELINE_STALL_S": "120",
        "PACELINE_FAILED_FILE": "/logs/attempt_1/failed",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "lo",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "THP_MEM_ALLOC_ENABLE": "1",
    }


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (5, "2"), (64, "32")])
def test_cores_are_divided_among_workers_but_nobody_gets_none(cores: int, threads: str) -> None:
    assert plan(2, cores=cores)[0].environment["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in plan(1, cores=cores)[0].environment, "torch knows better"


def test_what_the_user_has_set_is_left_alone() -> None:
    environ = {
        "MY_SETTING": "1",
        "OMP_NUM_THREADS": "7",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "THP_MEM_ALLOC_ENABLE": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    found = plan(2, environ)[1].environment
    assert environ.items() <= found.items()
    assert "MALLOC_MMAP_THRESHOLD_" not in found
    assert plan(2, environ, threads="3")[0].environment["OMP_NUM_THREADS"] == "3", "a flag wins"


def test_a_virtual_local_rank_sees_one_device_of_those_visible() -> None:
    seen = plan(2, {"CUDA_VISIBLE_DEVICES": "3, 5"}, virtual_local_rank="1")[1].environment
    assert (seen["LOCAL_RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("0", "5")
    with pytest.raises(SettingError, match="local rank 1"):
        plan(2, {"CUDA_VISIBLE_DEVICES": "3"}, virtual_local_rank="1")


def test_workers_that_share_gpus_are_hosts_of_their_own_to_nccl() -> None:
    specs = plan(3, {"NCCL_IB_DISABLE": "0"}, gpus=["4", "6"])
    seen = [spec.environment for spec in specs]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["4", "6", "4"]
    assert {each["LOCAL_RANK"] for each in seen} == {"0"}
    assert len({each["NCCL_HOSTID"] for each in seen}) == 3
    assert {each["NCCL_SOCKET_IFNAME"] for each in seen} == {"lo"}
    assert {each["NCCL_IB_DISABLE"] for each in seen} == {"0"}, "what the user has set is kept"
    assert "NCCL_HOSTID" not in plan(3)[0].environment


def test_sharing_says_what_cannot_work() -> None:
    with pytest.raises(DeviceError, match="--share-gpus"):
        describe_sharing([], 2, {})
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-5,"}) == ["3", "GPU-5"]
    assert len(describe_sharing(["0"], 4, {"NCCL_SOCKET_IFNAME": "=lo"})) == 1
    theirs = {"NCCL_P2P_DISABLE": "0", "NCCL_HOSTID": "a", "NCCL_SOCKET_IFNAME": "nowhere0"}
    _, *lines = describe_sharing(["0"], 4, theirs)
    assert [name for name in theirs for line in lines if name in line] == list(theirs)


def test_every_worker_is_told_what_to_record() -> None:
    for spec in plan(2, timeline="spans", trace_step="7", stall_after="0"):
        wishes = read_observation(spec.environment)
        assert (wishes.timeline, wishes.trace_step) == (os.path.abspath("spans"), 7)
        assert wishes.stall_s == 0.0
    theirs = plan(2, {"PACELINE_TRACE_STEP": "4", "PACELINE_STALL_S": "5"})[1].environment
    assert (read_observation(theirs).trace_step, read_observation(theirs).stall_s) == (4, 5.0)


def test_every_worker_is_told_how_a_run_shows_itself() -> None:
    theirs = {"PACELINE_PROGRESS": "plain"}
    assert plan(2, theirs)[0].environment["PACELINE_PROGRESS"] == "plain"
    assert plan(2, theirs, quiet="1")[1].environment["PACELINE_PROGRESS"] == "quiet"
    assert plan(2, json="1")[0].environment["PACELINE_PROGRESS"] == "json"
    assert "PACELINE_PROGRESS" not in plan(2)[0].environment


def test_the_command_is_the_same_on_every_rank_and_ends_in_the_scripts_arguments() -> None:
    first, second = plan(2)
    assert first.argv == second.argv
    assert first.argv[:2] == (sys.executable, "-u")
    assert first.argv[-4:] == (WORKER_FILE, "train.py", "--lr", "1")


def test_a_single_worker_takes_the_terminal_and_several_do_not() -> None:
    assert plan(1)[0].takes_terminal
    assert not plan(2)[0].takes_terminal
    assert not plan(1, redirects="1")[0].takes_terminal
    assert [spec.label for spec in plan(2)] == [0, 1]
    assert plan(2, no_label="1")[1].label is plan(1)[0].label is None


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
    spec = plan(2, **given)[1]  # type: ignore[arg-type]

    def named(route: Route) -> Route:
        return Route(route.on_console, route.log_file.replace("/logs/attempt_1/1/", ""))

    assert (named(spec.routes[STDOUT]), named(spec.routes[STDERR])) == (stdout, stderr)


def test_a_flag_wins_over_torchruns_variable_which_wins_over_the_default() -> None:
    environ = {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2"}
    found = {flag.dest: flag.find({"nproc_per_node": "4"}, environ) for flag in FLAGS}
    assert found["nproc_per_node"] == ("4", "--nproc-per-node or --workers")
    assert found["max_restarts"] == ("2", "PET_MAX_RESTARTS")
    assert found["role"] == ("default", "default")
    assert options_of(environ).max_restarts == 2
    assert options_of({"PET_MAX_RESTARTS": ""}).max_restarts is None, "empty is as good as unset"


def test_an_option_has_the_name_of_its_flag_and_can_be_given_in_python() -> None:
    names = [declared.name for declared in fields(LaunchOptions)]
    assert names == ["program", "arguments", *(flag.dest for flag in FLAGS)]
    assert LaunchOptions(program="x.py", max_restarts=2).told()["TORCHELASTIC_MAX_RESTARTS"] == "2"


def test_torchs_variable_for_the_shutdown_timeout_counts() -> None:
    assert options_of({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}).shutdown_timeout == 7.0


def test_defaults_are_those_of_a_single_machine_that_chooses_its_own_port() -> None:
    options = options_of()
    assert (options.nproc_per_node, options.nnodes) == ("1", (1, 1))
    assert options.meeting_point == ("", 0)
    assert options.signals_to_handle == (
        *(signal.SIGTERM, signal.SIGINT),
        *(signal.SIGHUP, signal.SIGQUIT),
    )
    assert options.shutdown_timeout is None


@pytest.mark.parametrize(
    ("given", "where"),
    [
        # One machine need not meet anybody, so an endpoint's port is not fought over.
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:29400"}, ("", 0)),
        ({"rdzv_endpoint": "localhost:29400"}, ("localhost", 29400)),
        ({"master_port": "1234"}, ("", 1234)),
        (
            {"nnodes": "2:4", "rdzv_backend": "c10d", "rdzv_endpoint": "[::1]:29401"},
            ("::1", 29401),
        ),
        ({"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "node0"}, ("node0", 29400)),
        ({"nnodes": "2", "node_rank": "1", "master_addr": "node0"}, ("node0", 29500)),
    ],
)
def test_machines_meet_where_the_flags_say(given: dict[str, str], where: tuple[str, int]) -> None:
    assert options_of(**given).meeting_point == where


def test_rendezvous_settings_are_read() -> None:
    options = options_of(rdzv_conf="join_timeout=5,last_call_timeout=1,is_host=no,store=file")
    assert options.rdzv_conf == {"join_timeout": 5.0, "last_call_timeout": 1.0, "is_host": False}


def test_words_to_filter_by_may_contain_a_doubled_comma() -> None:
    options = options_of(duplicate_stdout_filters="apple,a,,b")
    assert options.duplicate_stdout_filters == ("apple", "a,b")


def test_workers_are_counted_by_number_or_by_core() -> None:
    assert count_workers("3") == 3
    assert count_workers("cpu") >= 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nproc_per_node": "0"}, r"--nproc-per-node or --workers.* 0.\n.* from 1 to 4096"),
        ({"nproc_per_node": "4097"}, "--workers.* 4097"),
        ({"nproc_per_node": "9" * 20}, "--workers.* 99999999999999999999"),
        ({"nproc_per_node": "9" * 5000}, "--workers.* '999"),
        ({"threads": "9" * 5000}, "--threads.* '999"),
        ({"nnodes": "9" * 20, "master_addr": "a"}, "--nnodes.* 9999"),
        ({"nproc_per_node": "-2"}, "--workers.* -2"),
        ({"nproc_per_node": "many"}, "--workers.* 'many'"),
        ({"nproc_per_node": "xpu"}, "--workers.* 'xpu'.*\n.*XPUs"),
        ({"threads": "0"}, "--threads.* 0"),
        ({"nnodes": "0"}, "--nnodes.* 0"),
        ({"nnodes": "3:2"}, "--nnodes.* 3:2"),
        ({"nnodes": "2"}, "--nnodes.* machines meet.*\n.*first machine"),
        ({"nnodes": "2", "master_addr": "a"}, "which of them this machine"),
        (
            {"nnodes": "2", "node_rank": "2", "master_addr": "a"},
            "--node-rank.* 2, but --nnodes.* 2",
        ),
        ({"nnodes": "1:2", "node_rank": "0", "master_addr": "a"}, "how many there are"),
        ({"nnodes": "2", "rdzv_backend": "c10d"}, "where.* machines meet"),
        ({"nnodes": "2", "standalone": "1"}, "--standalone means one machine"),
        ({"rdzv_backend": "etcd"}, "'etcd'.*\n.*static with"),
        ({"rdzv_endpoint": "a:b:c"}, "HOST:PORT"),
        ({"rdzv_endpoint": "a:70000"}, "HOST:PORT"),
        ({"rdzv_id": "../x"}, "'../x'.*\n.*up to 64 letters"),
        ({"rdzv_conf": "timeout"}, "has no value"),
        ({"rdzv_conf": "timeout=soon"}, "--rdzv-conf.* 'timeout=soon'.*\n.*seconds"),
        ({"master_port": "70000"}, "--master-port.* 70000.*\n.*65535"),
        ({"master_port": "-1"}, "--master-port.* -1.*\n.* 0 .*65535"),
        ({"max_restarts": "-1"}, "--max-restarts.* -1"),
        ({"max_restarts": "x"}, "'x'.*\n.*a whole number"),
        ({"min_workers": "0"}, "--min-workers.* 0.\n.*from 1 to 4096"),
        ({"min_workers": "-1"}, "--min-workers.* -1"),
        ({"shutdown_timeout": "-1"}, "number of seconds"),
        ({"shutdown_timeout": "nan"}, "number of seconds"),
        ({"redirects": "4"}, "--redirects.* 4.*\n.*0 none, 1 stdout"),
        ({"tee": "0:1,"}, "--tee.* '0:1,'.*\n.*0 none, 1 stdout"),
        ({"local_ranks_filter": "a"}, "--local-ranks-filter.* 'a'.*\n.*0,1,2"),
        ({"signals_to_handle": "SIGNOPE"}, "SIGNOPE.* not a signal"),
        ({"signals_to_handle": "SIGKILL"}, "not a signal that a process can handle"),
        ({"trace_step": "0"}, "--trace-step.* 0"),
        ({"numa_binding": "moon"}, "'moon'.*\n.*node, socket"),
        ({"module": "1", "no_python": "1"}, "contradict"),
        ({"quiet": "1", "json": "1"}, "--quiet and --json contradict"),
    ],
)
def test_an_impossible_flag_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        options_of(**given)


def test_an_impossible_variable_is_named_as_the_variable() -> None:
    with pytest.raises(SettingError, match=r"PET_NPROC_PER_NODE.* 0"):
        options_of({"PET_NPROC_PER_NODE": "0"})


def test_every_flag_of_torchrun_is_accepted_in_both_spellings() -> None:
    run = pytest.importorskip("torch.distributed.run")
    theirs = {
        name
        for action in run.get_args_parser()._actions
        for name in action.option_strings
        if name not in {"-h", "--help"}
    }
    ours = argparse.ArgumentParser()
    add_flags(ours)
    assert theirs <= set(ours._option_string_actions)


def test_workers_that_are_given_to_the_script_are_noticed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: dict[str, str | None] = {"nproc_per_node": None}
    for late in (("--workers", "2"), ("--workers=2",), ("--nproc-per-node", "2")):
        note_late_workers(read_options({}, {}, "train.py", late), given, {})
        assert late[0].partition("=")[0] in capsys.readouterr().err
    late = ("--workers", "2")
    note_late_workers(read_options({}, {}, "train.py", ("--lr", "1")), given, {})
    note_late_workers(read_options({}, {}, "train.py", late), {"nproc_per_node": "1"}, {})
    note_late_workers(read_options({}, {}, "train.py", late), given, {"PET_NPROC_PER_NODE": "1"})
    assert not capsys.readouterr().err
