"""What users may rely on: names and arguments change on purpose only.

The command line is frozen in `test_cli.py`.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import paceline
from paceline import DistributedDataParallel, DistributedSampler
from paceline.ddp.torch_compat import TorchSurface
from paceline.dp import DataParallel

# Change these on purpose only, together with CHANGELOG.md: programs of users depend on them.
NAMES_BY_MODULE = {
    "paceline": [
        "Callback",
        "DDPOptions",
        "DPOptions",
        "DataParallel",
        "DistributedBatchSampler",
        "DistributedDataParallel",
        "DistributedSampler",
        "EMA",
        "EpochNotSetWarning",
        "Islands",
        "Run",
        "RunOptions",
        "RunView",
        "SyncBatchNorm",
        "World",
        "__version__",
        "enable",
        "init_process_group",
        "launch",
        "learn",
        "load_weights",
        "record_step",
        "seed_everything",
        "shard_update",
        "spans",
        "speedup",
    ],
    "paceline.checkpoint": [
        "CheckpointWarning",
        "Checkpoints",
        "Saved",
        "WeightsReport",
        "Written",
        "load_weights",
    ],
    "paceline.ddp.compress": [
        "Compression",
        "hook",
    ],
    "paceline.dp": ["DPOptions", "DataParallel"],
    "paceline.record": [
        "Stage",
        "StepRecording",
        "Trace",
        "from_json",
        "read",
        "record_step",
        "to_json",
        "write",
    ],
    "paceline.policy": [
        "BatchPlan",
        "LearningRate",
        "LearningRateScheduler",
        "NoiseEstimate",
        "NoiseMeter",
        "NoiseScale",
        "plan_batch",
        "plan_global_batch",
    ],
    "paceline.show.learn": ["lesson"],
    "paceline.telemetry": ["Progress"],
    "paceline.show.report": ["write"],
    "paceline.run": [
        "Callback",
        "EMA",
        "Message",
        "Run",
        "RunOptions",
        "Sink",
        "Step",
        "StepReport",
        "Summary",
        "Turn",
    ],
    "paceline.data": [
        "Arrow",
        "DistributedBatchSampler",
        "DistributedSampler",
        "EpochNotSetWarning",
        "Files",
        "Format",
        "PaddedDistributedSampler",
        "Parquet",
        "Tar",
    ],
    "paceline.show.trace": ["draw", "observe", "trace_prediction"],
    "paceline.testing": [
        "assert_replicas_equal",
        "gradients",
        "run_processes",
        "run_ranks",
        "seeded",
    ],
}
ERRORS = [
    "AuditError",
    "CheckpointError",
    "DesyncError",
    "DeviceError",
    "FitError",
    "HookError",
    "MissingLibraryError",
    "NotFiniteError",
    "NotInitializedError",
    "PacelineError",
    "PeerError",
    "ReplicaError",
    "SettingError",
    "UsageError",
    "WeightsError",
    "WireError",
    "WorkerError",
]
# Beyond what torch's classes and torch.nn.Module have.
OWN_METHODS = {
    DistributedDataParallel: {
        *("check_in_sync", "compression", "process_group", "transport", "weighted"),
        # Of `Engine`.
        *("begin_step", "has_news", "identity", "on_generation", "run_short"),
        *("take_part", "weigh"),
    },
    DistributedSampler: {"advance", "consumed", "load_state_dict", "of", "state_dict"},
}
# Undocumented steps of torch's own forward pass, and an attribute that ours sets per instance.
TORCHS_INSIDES = {"broadcast_buffers", "gather", "scatter", "to_kwargs", "will_sync_module_buffers"}
# Of torch 2.15.
NEWER_ARGUMENTS = {
    DistributedDataParallel: [("lazy_bucket_allocation", False)],
    paceline.init_process_group: [("enable_reconfigure", False)],
}
OWN_ARGUMENTS = {
    DistributedDataParallel: ["options"],
    DistributedSampler: ["pad", "order"],
    DataParallel: ["split", "options"],
    paceline.init_process_group: [],
}


def positional(function: Any) -> list[tuple[str, Any]]:
    """Names and defaults of everything that can be passed by position; torch's private ones not."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        (p.name, p.default) for p in parameters if p.kind in kinds and not p.name.startswith("_")
    ]


@pytest.mark.parametrize("module", sorted(NAMES_BY_MODULE))
def test_a_modules_public_names_are_these(module: str) -> None:
    imported = importlib.import_module(module)
    assert set(NAMES_BY_MODULE[module]) <= set(imported.__all__)  # the rest is for other packages
    assert all(hasattr(imported, name) for name in imported.__all__)
    if module == "paceline":
        assert sorted(imported.__all__) == sorted(NAMES_BY_MODULE[module])


def test_every_public_name_is_listed_by_dir_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(paceline.__all__) <= set(dir(paceline))
    with pytest.raises(AttributeError, match="no attribute 'DataParalel'") as raised:
        _ = paceline.DataParalel
    # From these Python finds the name that was meant.
    assert (raised.value.name, raised.value.obj) == ("DataParalel", paceline)


def test_the_errors_are_these() -> None:
    errors = importlib.import_module("paceline.errors")
    own = (v for v in vars(errors).values() if inspect.isclass(v))
    classes = [each.__name__ for each in own if each.__module__ == errors.__name__]
    assert sorted(classes) == ERRORS


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (DistributedDataParallel, TorchDDP),
        (DistributedSampler, TorchSampler),
        (DataParallel, nn.DataParallel),
        (paceline.init_process_group, dist.init_process_group),
    ],
    ids=["DistributedDataParallel", "DistributedSampler", "DataParallel", "init_process_group"],
)
def test_positional_arguments_and_defaults_are_torchs_and_ours_are_keywords(
    ours: Any, torchs: Any
) -> None:
    theirs = positional(torchs)
    newer = NEWER_ARGUMENTS.get(ours, [])
    assert positional(ours) == theirs + [each for each in newer if each not in theirs]
    parameters = inspect.signature(ours).parameters.values()
    keywords = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keywords == OWN_ARGUMENTS[ours]


def test_the_page_for_torch_users_explains_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ddp.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    names = inspect.signature(DistributedDataParallel).parameters
    assert [name for name in names if not any(f"`{name}" in row for row in rows)] == []


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(DistributedDataParallel, TorchDDP), (DistributedSampler, TorchSampler)],
    ids=["DistributedDataParallel", "DistributedSampler"],
)
def test_torchs_public_methods_are_there_and_ours_beyond_them_are_these(
    ours: type, torchs: type
) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(torchs) - public(ours) <= TORCHS_INSIDES
    beyond = public(ours) - public(torchs) - public(TorchSurface)
    assert beyond == OWN_METHODS[ours]


@pytest.mark.parametrize("name", ["telemetry.Tracker", "show.report.write"])
def test_a_module_is_there_without_an_import_of_its_own(name: str) -> None:
    # In a process of its own: here other tests have imported it.
    subprocess.run([sys.executable, "-c", f"import paceline; paceline.{name}"], check=True)
