"""The command line: its surface is frozen, its mistakes are explained, and it starts quickly."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from paceline import __version__
from paceline.cli import COMMANDS, Parser, main
from paceline.launcher import run

# Change this on purpose only: scripts of users depend on it.
SURFACE = {
    "run": {
        "--nproc-per-node --nproc_per_node --workers",
        "--island",
        "--threads",
        "--as-torch --as_torch",
        "--stall-end --stall_end",
        "--share-gpus --share_gpus",
        "--virtual-local-rank --virtual_local_rank",
        "--numa-binding --numa_binding",
        "--role",
        "--module -m",
        "--no-python --no_python",
        "--nnodes",
        "--node-rank --node_rank",
        "--master-addr --master_addr",
        "--master-port --master_port",
        "--rdzv-backend --rdzv_backend",
        "--rdzv-endpoint --rdzv_endpoint",
        "--rdzv-id --rdzv_id",
        "--rdzv-conf --rdzv_conf",
        "--machine-timeout --machine_timeout",
        "--standalone",
        "--local-addr --local_addr",
        "--max-restarts --max_restarts",
        "--min-workers --min_workers",
        "--no-survive --no_survive",
        "--survive-errors --survive_errors",
        "--no-template --no_template",
        "--shutdown-timeout --shutdown_timeout",
        "--signals-to-handle --signals_to_handle",
        "--monitor-interval --monitor_interval",
        "--no-label --no_label",
        "--quiet",
        "--json",
        "--log-dir --log_dir",
        "--redirects -r",
        "--tee -t",
        "--local-ranks-filter --local_ranks_filter",
        "--duplicate-stdout-filters --duplicate_stdout_filters",
        "--duplicate-stderr-filters --duplicate_stderr_filters",
        "--timeline",
        "--trace-step --trace_step",
        "--watch",
        "--stall-after --stall_after",
        "--run-path --run_path",
        "--start-method --start_method",
        "--event-log-handler --event_log_handler",
        "--log-line-prefix-template --log_line_prefix_template",
        "--logs-specs --logs_specs",
        "script",
        "script_args",
    },
    "ckpt": {"verb", "arguments"},  # flags of the verbs: test_ckpt_command.py
    "doctor": {"--json", "--workers"},
    "demo": {"--kill", "--workers", "--epochs", "--seed", "--folder", "--json", "--quiet"},
    "timeline": {"-o --output", "--steps", "run"},
    "scale": {
        "--workers",
        "--repeats",
        "--steps",
        "--threads",
        "--mode",
        "--predict",
        "--network",
        "--latency-us",
        "--bandwidth-gbps",
        "--fail-under",
        "--folder",
        "--json",
        "--as-torch",
        "-m --module",
        "--engines",
        "script",
        "script_args",
    },
    "report": {"run", "-o --output", "--force"},
    "trace": {
        "recorded",
        "--engine",
        "--workers",
        "--batch",
        "--seed",
        "--epochs",
        "--model",
        "--device",
        "--sample",
        "--weight",
        "--predict",
        "--values --no-values",
        "--step-by-step",
        "--step",
        "--folder",
        "--svg",
        "--json",
        "--ascii",
    },
    "learn": {
        "lesson",
        "--seed",
        "--workers",
        "--batch",
        "--model",
        "--answers",
        "--json",
        "--html",
        "--forget",
        "--ascii",
    },
    "policy": {
        "--batch",
        "--workers",
        "--rows",
        "--parameters",
        "--step-ms",
        "--bandwidth-gbps",
        "--json",
    },
    "watch": {"run", "--port", "--no-open", "--token-file", "--terminal", "--beside-training"},
    "compare": {"runs", "--json"},
    "replay": {"run", "--step", "--script"},
    "fit": {"--workers", "--json", "script", "arguments"},
    "speedup": {"before", "after", "--workers", "--json"},
}


def parser_of(command: str) -> Parser:
    parser = Parser(prog=f"paceline {command}")
    import_module(f"paceline.{COMMANDS[command].module}").add_arguments(parser)
    return parser


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", sorted(SURFACE))
def test_the_surface_changes_on_purpose_only(command: str) -> None:
    found = {
        " ".join(action.option_strings) or action.dest
        for action in parser_of(command)._actions
        if action.dest != "help"
    }
    assert found == SURFACE[command]


@pytest.mark.parametrize("command", sorted(SURFACE))
def test_every_flag_has_a_line_of_help(command: str) -> None:
    assert all(action.help for action in parser_of(command)._actions)


def test_the_commands_change_on_purpose_only() -> None:
    assert {"run", "doctor", "demo"} <= set(COMMANDS)


def test_no_help_nor_the_launcher_nor_arithmetic_imports_torch() -> None:
    """Which takes seconds, in which nothing would be to be seen."""
    code = (
        "import sys, paceline.cli, paceline.launcher.run\n"
        "lines = [[name, '--help'] for name in paceline.cli.COMMANDS]\n"
        "for line in [*lines, ['--version'], ['policy', '--batch', '8', '--workers', '2']]:\n"
        "    try: paceline.cli.main(line)\n"
        "    except SystemExit: pass\n"
        "    if 'torch' in sys.modules: sys.exit(f'{line} imports torch')"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_as_the_command() -> None:
    done = run_python("-m", "paceline", "--version")
    assert (done.returncode, done.stdout) == (0, f"paceline {__version__}\n")


def test_no_command_prints_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["no command 'rnu'", "'run'?"]),
        (["xyzzy"], ["no command 'xyzzy'", *COMMANDS]),
        (["--verson"], ["'--verson'", "'--version'?"]),
        (["run"], ["required: script.", "paceline run --help"]),
        (["fit"], ["required: script.", "paceline fit --help"]),
        (["run", "--wrokers", "2", "x.py"], ["'--wrokers'", "Did you mean '--workers'?"]),
        (["run", "--nproc", "2", "x.py"], ["Did you mean '--nproc-per-node'?"]),
        (["run", "--nproc_per_nod=2", "x.py"], ["Did you mean '--nproc-per-node'?"]),
        (["--workers", "2", "train.py"], ["'--workers'", "paceline run --workers 2 train.py"]),
        (["train.py", "--lr", "1"], ["'train.py'", "`paceline run train.py --lr 1`"]),
        (["run", "--workers"], ["--workers needs a value"]),
        (["learn", "--seed", "x"], ["--seed is 'x'", "whole number"]),
        (["speedup", "1", "y", "--workers", "2"], ["fter is 'y'", "a number"]),
        (["run", "--workers", "0", "x.py"], ["--workers", " 0.", "from 1 to 4096"]),
        (["run", "--workers", "-3", "x.py"], ["--workers"]),
        (["run", "--workers=-3", "x.py"], ["--workers", " -3.", "from 1 to 4096"]),
        (["run", "--workers", "9" * 20, "x.py"], ["--workers", " 9999", "from 1 to 4096"]),
        (["run", "no/such/script.py"], ["no script 'no/such/script.py'", "Looked for it in"]),
        (["run", "-m", "no_such_module_here"], ["no module 'no_such_module_here'"]),
        (["run", "--no-python", "no-such-program"], ["no program 'no-such-program'"]),
        (["fit", "no/such/script.py"], ["no script 'no/such/script.py'", "Looked for it in"]),
        (["scale", "no/such/script.py"], ["no script 'no/such/script.py'", "Looked for it in"]),
        (["scale", "-m", "no_such_module_here"], ["no module 'no_such_module_here'"]),
        (["doctor", "--jsn"], ["'--json'?"]),
        (["doctor", "--workers", "0"], ["--workers", " 0."]),
        (["doctor", "--workers", "x"], ["'x'"]),
        (["doctor", "--workers", "5000"], ["--workers", " 5000.", "to 4096"]),
    ],
)
def test_a_mistake_is_explained_and_exits_with_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("paceline")
    assert all(word in said for word in words), said
    assert len(said.rstrip().splitlines()) <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        *(["report", path] for path in ("n" * 300, "/proc/1/fdinfo")),
        *(["timeline", path] for path in ("n" * 300, "x/" * 3000)),
        *(["ckpt", "ls", path] for path in ("n" * 300, "x/" * 3000)),
        *(["ckpt", "show", path] for path in ("n" * 300, "/proc/self/mem")),
        ["trace", "n" * 300],
        ["replay", "--step", "1", "n" * 300],
    ],
)
def test_a_path_that_the_system_refuses_is_said_in_a_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith(f"paceline {arguments[0]}: ")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments", [["replay", "--step", "1"], ["trace", "--folder"], ["ckpt", "show"], ["report"]]
)
def test_a_link_to_itself_is_a_path_like_any_other(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (link := tmp_path / "link").symlink_to(link)
    assert main([*arguments, str(link)]) in (1, 2)
    assert capsys.readouterr().err.startswith(f"paceline {arguments[0]}: ")


def test_a_path_may_have_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "\udcff").mkdir()
    command = [sys.executable, "-m", "paceline", "ckpt", "ls", "\udcff"]
    environ = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, timeout=60, check=False
    )
    assert done.stdout == b"\\udcff: 0 checkpoints\n"
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "script", "script_args"),
    [
        (["x.py"], "x.py", []),
        (["x.py", "--workers", "3"], "x.py", ["--workers", "3"]),
        (["--workers", "2", "x.py", "--", "-m", "--no-such"], "x.py", ["--", "-m", "--no-such"]),
        (["--workers=2", "-t", "3", "-r3", "x.py", "-h"], "x.py", ["-h"]),
        (["--standalone", "--nproc_per_node", "2", "x.py", "y"], "x.py", ["y"]),
        (["-m", "pkg.train", "--lr", "1"], "pkg.train", ["--lr", "1"]),
        (["--workers", "2", "--", "x.py", "--", "a"], "x.py", ["--", "a"]),
    ],
)
def test_what_follows_the_script_goes_to_the_script_untouched(
    given: list[str], script: str, script_args: list[str]
) -> None:
    parser = Parser(prog="paceline run")
    run.add_arguments(parser)
    args = parser.parse_args(given)
    assert (args.script, args.script_args) == (script, script_args)


def test_help_is_complete_and_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "exit codes" in shown
    assert "--as-torch" in shown


def test_a_parser_without_a_script_is_plain_argparse() -> None:
    parser = Parser(prog="x")
    parser.add_argument("--size", type=int)
    assert parser.parse_args(["--size", "3"]) == argparse.Namespace(size=3)
