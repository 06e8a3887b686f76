"""`paceline doctor`: everything an issue needs, and no secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from sentences import says

import paceline
from paceline.cli import main
from paceline.doctor import check, collect


def run(**environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_describes_the_machine_and_the_check_works() -> None:
    shown = run(NCCL_DEBUG="INFO", HF_TOKEN="hf_do_not_show", PET_MAX_RESTARTS="3")
    assert shown.startswith("Training works here (2 workers, one step with Gloo, ")
    assert "do_not_show" not in shown
    rows = [line.split() for line in shown.splitlines()]
    for row in (
        ["paceline", paceline.__version__],
        ["backends", "gloo"] if not dist.is_nccl_available() else ["backends", "gloo,", "nccl"],
        ["NCCL_DEBUG", "INFO"],
        ["PET_MAX_RESTARTS", "3"],
    ):
        assert row in rows


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--workers", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"].startswith("Training works here (3 workers")
    assert {"paceline", "python", "torch", "devices", "backends", "shared memory"} <= set(found)


def test_a_check_that_fails_says_why() -> None:
    assert says(check(workers=0), "workers", "0")


def test_only_listed_variables_are_shown() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "x", "RANK": "1", "HOME": "/home/me"}
    assert collect(environ) == collect({}) | {"RANK": "1"}


@pytest.mark.parametrize(
    ("value", "is_shown"),
    [
        ("INFO", True),
        ("eth0,eth1", True),
        ("max_split_size_mb:128,expandable_segments:True", True),
        ("127.0.0.1", True),
        ("ghp_0123456789abcdefghijABCDEFGHIJ", False),
        ("https://me:pass@host/path", False),
        ("my-password", False),
    ],
)
def test_values_that_look_like_secrets_are_masked(value: str, is_shown: bool) -> None:
    assert collect({"NCCL_X": value})["NCCL_X"] == (value if is_shown else "(masked)")
    assert collect({"PACELINE_SECRET": value})["PACELINE_SECRET"] == "(masked)"
