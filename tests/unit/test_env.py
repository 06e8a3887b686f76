"""What a launcher's environment says, read back; and what ours writes."""

from __future__ import annotations

import pytest

from paceline.env import (
    Observation,
    Placement,
    command_line,
    expand_repeats,
    first_host,
    leave_nccl_to_us,
    offer_command,
    read_command,
    read_observation,
    read_placement,
)
from paceline.errors import SettingError
from paceline.telemetry import read_terminal

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "3",
    "SLURM_NODELIST": "gpu[07-09]",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}


def test_without_a_launcher_there_is_no_placement() -> None:
    assert read_placement({"PATH": "/bin"}) is None


def test_torchruns_variables_are_read() -> None:
    assert read_placement(TORCHRUN) == Placement(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node=1,
        nodes=2,
        master_addr="node0",
        master_port=29400,
        agent_has_store=True,
        source="torchrun",
    )


def test_our_run_id_tells_our_launcher_from_torchrun() -> None:
    place = read_placement({**TORCHRUN, "PACELINE_RUN_ID": "abc"})
    assert place is not None
    assert place.source == "paceline run"


def test_rank_and_size_alone_mean_one_machine() -> None:
    place = read_placement({"RANK": "1", "WORLD_SIZE": "3"})
    assert place is not None
    assert (place.local_rank, place.local_size, place.nodes) == (1, 3, 1)
    assert place.is_single_node
    assert place.source == "environment"
    assert not place.agent_has_store


def test_a_slurm_step_is_read() -> None:
    place = read_placement(SLURM)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 6, 1, 2)
    assert (place.node, place.nodes, place.master_addr) == (1, 3, "gpu07")
    assert place.source == "slurm"


def test_slurms_own_step_numbers_differ_between_neighbouring_jobs() -> None:
    first = read_placement(SLURM)
    second = read_placement({**SLURM, "SLURM_JOB_ID": "4712"})
    assert first is not None
    assert second is not None
    assert first.master_port != second.master_port


@pytest.mark.parametrize("step", ["", "4294967294", "4294967291", "batch"])
def test_a_slurm_batch_script_is_not_a_worker(step: str) -> None:
    environ = {**SLURM, "SLURM_STEP_ID": step}
    assert read_placement(environ) is None


def test_a_batch_script_without_a_step_is_not_a_worker() -> None:
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert read_placement(environ) is None


def test_a_launcher_inside_a_slurm_step_wins_over_slurm() -> None:
    place = read_placement({**SLURM, **TORCHRUN})
    assert place is not None
    assert (place.rank, place.source) == (5, "torchrun")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "one"}, "RANK.* 'one'"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"RANK": "-1"}, "rank -1 of 8"),
        ({"WORLD_SIZE": "0"}, "of 0 workers"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"LOCAL_WORLD_SIZE": "9", "LOCAL_RANK": "8"}, "9 workers on this machine"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT.* 0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT.* 65536"),
        ({"MASTER_PORT": ""}, "MASTER_PORT.* ''"),
    ],
)
def test_an_impossible_value_names_the_variable(change: dict[str, str], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        read_placement({**TORCHRUN, **change})


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_half_an_environment_is_an_error_that_says_what_is_missing(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(SettingError, match=f"{missing}.* not set"):
        read_placement(environ)


def test_repeats_are_expanded() -> None:
    assert expand_repeats("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(SettingError, match="cannot be read"):
        expand_repeats("2(x")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("", ""),
        ("login", "login"),
        ("gpu[01-03,7],login", "gpu01"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("rack[2-3]n[7-8]", "rack2n7"),
    ],
)
def test_the_first_host_of_a_list_is_found(text: str, host: str) -> None:
    assert first_host(text) == host


def test_a_host_list_that_cannot_be_read_is_an_error_of_ours() -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        first_host("gpu[a-b]")


@pytest.mark.parametrize(
    ("environ", "colour"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colour_is_for_those_who_want_it(environ: dict[str, str], colour: bool) -> None:
    assert read_terminal(environ).has_colour is colour


PLACE = Placement(
    rank=2,
    size=4,
    local_rank=0,
    local_size=2,
    node=1,
    nodes=2,
    master_addr="127.0.0.1",
    master_port=4567,
    agent_has_store=True,
    source="paceline run",
)


def test_what_the_launcher_writes_is_what_a_worker_reads() -> None:
    written = PLACE.as_variables() | {"PACELINE_RUN_ID": "r1"}
    assert read_placement(written) == PLACE
    # A script that chooses its own port serves its own store.
    place = read_placement({**written, "MASTER_PORT": "12355"})
    assert place is not None
    assert not place.agent_has_store


def test_what_to_watch_is_read_from_the_environment() -> None:
    environ = {"PACELINE_TIMELINE": "/spans", "PACELINE_STALL_S": "120", "PACELINE_TRACE_STEP": "7"}
    assert read_observation(environ) == Observation("/spans", 120.0, True, 7, 1200.0)


def test_without_a_launcher_only_paces_are_compared() -> None:
    assert read_observation({}) == Observation(timeline="", stall_s=0.0, blames=True)
    assert not read_observation({"PACELINE_BLAME": "0"}).blames


@pytest.mark.parametrize(
    "environ",
    [
        {"PACELINE_STALL_S": "soon"},
        {"PACELINE_STALL_S": "-1"},
        {"PACELINE_BLAME": "yes"},
        {"PACELINE_TRACE_STEP": "first"},
        {"PACELINE_TRACE_STEP": "-1"},
    ],
)
def test_impossible_wishes_name_their_variable(environ: dict[str, str]) -> None:
    (name,) = environ
    with pytest.raises(SettingError, match=name):
        read_observation(environ)


def test_a_training_knows_how_it_was_started_if_anybody_does() -> None:
    arguments = ["/usr/bin/paceline", "run", "--workers", "2", "train.py", "--name", "a b"]
    offered = offer_command(arguments)
    command = "paceline run --workers 2 train.py --name 'a b'"
    assert read_command(["train.py", "--name", "a b"], offered | TORCHRUN) == command
    assert offer_command(["/usr/bin/pytest", "-q"]) == {}
    assert read_command(["train.py", "-x"], {}) == "python train.py -x"
    assert read_command(["train.py", "-x"], TORCHRUN) == ""
    assert read_command(["/usr/lib/ipykernel_launcher"], {}) == ""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--api-key=abc", "--api-key=HIDDEN"),
        ("--hf_token abc --lr 1", "--hf_token HIDDEN --lr 1"),
        ("--password --lr 1", "--password --lr 1"),
        ("--max-tokens 512 --tokenizer gpt2", "--max-tokens 512 --tokenizer gpt2"),
        ("https://me:secret@host/x", "https://HIDDEN@host/x"),
    ],
)
def test_secrets_on_a_command_line_are_not_written_down(given: str, shown: str) -> None:
    assert command_line(given.split()) == shown


def test_what_the_user_has_set_for_nccl_is_kept_and_named() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert leave_nccl_to_us(environ) == ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
