"""`paceline doctor`: everything an issue needs, and no secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import paceline
from paceline.cli import main
from paceline.doctor import check, collect, masked


def test_it_describes_the_machine_and_the_check_works() -> None:
    environ = {
        **os.environ,
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "hf_do_not_show",
        "PET_MAX_RESTARTS": "3",
    }
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert paceline.__version__ in done.stdout
    assert "gloo" in done.stdout
    verdict = "Training works here (2 workers, one all-reduce with Gloo, "
    assert done.stdout.startswith(verdict)
    assert "do_not_show" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["NCCL_DEBUG", "INFO"] in rows
    assert ["--max-restarts", "3", "PET_MAX_RESTARTS"] in rows
    assert "--tee" not in done.stdout, "only what differs from the defaults"


def test_json_without_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-test", "--workers", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "check" not in found
    settings = found["settings that differ from the defaults"]
    assert settings["--nproc-per-node"] == ["3", "--nproc-per-node or --workers"]
    assert set(found) == {
        *("versions", "machine", "backends", "environment", "devices"),
        "settings that differ from the defaults",
    }


def test_a_check_that_fails_says_why() -> None:
    found = check(workers=0)
    assert not found["passed"]
    assert "workers is 0" in found["detail"]


def test_only_listed_variables_are_shown() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "x", "RANK": "1", "HOME": "/home/me"}
    assert collect(environ, {})["environment"] == {"RANK": "1"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("INFO", "INFO"),
        ("eth0,eth1", "eth0,eth1"),
        ("max_split_size_mb:128,expandable_segments:True", None),
        ("127.0.0.1", "127.0.0.1"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ", "(masked)"),
        ("https://me:pass@host/path", "(masked)"),
        ("my-password", "(masked)"),
    ],
)
def test_values_that_look_like_secrets_are_masked(value: str, shown: str | None) -> None:
    assert masked(value) == (value if shown is None else shown)
