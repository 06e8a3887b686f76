"""Manifests for Kubernetes against their projects' schemas, and the Dockerfile by what it says."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from typing import Any

import pytest

from paceline.cli import COMMANDS, Parser
from tests.docs_code import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
MODELS = {
    "jobset.yaml": "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
    "trainjob.yaml": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
}


def check_command(command: list[str]) -> None:
    """It is `paceline` with a command and flags that there are."""
    program, name, *arguments = command
    assert program == "paceline"
    parser = Parser(prog=name)
    importlib.import_module(f"paceline.{COMMANDS[name].module}").add_arguments(parser)
    parser.parse_args(arguments)


def plain(value: Any) -> Any:
    """As JSON has it, without what stands for nothing."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each is not None}
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", MODELS)
def test_a_manifest_has_only_fields_that_its_schema_has(name: str) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="not installed: kubeflow-trainer-api")
    yaml = pytest.importorskip("yaml")
    module, _, model = MODELS[name].rpartition(".")
    kind = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), model)
    manifest = yaml.safe_load((FOLDER / name).read_text())
    # A field that the schema lacks is dropped, and one of another type is refused.
    read = kind.from_dict(manifest)
    again = json.loads(read.to_json())
    assert plain(again) == plain(manifest)


def test_the_commands_in_the_manifests_are_ours() -> None:
    yaml = pytest.importorskip("yaml")
    trainer = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())["spec"]["trainer"]
    check_command([*trainer["command"], *trainer["args"]])
    text = (FOLDER / "jobset.yaml").read_text()
    (line,) = re.findall(r"exec (paceline run .*?train\.py)", text, re.S)
    check_command(shlex.split(line.replace("$JOB_COMPLETION_INDEX", "1")))
    name, job = re.findall(r"^ *-? ?name: (training|node)$", text, re.M)
    assert f"--master-addr {name}-{job}-0-0.{name} " in " ".join(line.split())


def test_the_image_has_what_it_copies_and_does_not_run_as_root() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line[:1].isupper()]
    for word, rest in steps:
        if word == "COPY" and "--from" not in rest:
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
    users = [rest for word, rest in steps if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert any(f"useradd --create-home --uid 1000 {users[-1]}" in rest for _, rest in steps)
    (command,) = (json.loads(rest) for word, rest in steps if word == "CMD")
    check_command(command)
