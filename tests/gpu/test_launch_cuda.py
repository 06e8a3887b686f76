"""Launching where there is a GPU: forks must come before CUDA, and say so when they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one may have used CUDA already."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


ON_GPU = "lambda: float(torch.ones(2, device='cuda').sum())"


def test_workers_use_the_gpu_if_the_caller_has_not() -> None:
    done = python(f"import torch, paceline; print(paceline.launch({ON_GPU}, workers=2))")
    assert done.stdout == "[2.0, 2.0]\n", done.stderr


def test_a_caller_that_used_cuda_is_told_what_to_do() -> None:
    done = python(
        "import torch, paceline; torch.ones(1, device='cuda')\n"
        f"paceline.launch({ON_GPU}, workers=2)"
    )
    assert "CUDA is already initialised in this process" in done.stderr
    assert "paceline run" in done.stderr


def test_asking_whether_cuda_is_available_counts_as_use() -> None:
    code = "import torch, paceline; torch.cuda.is_available()\n"
    code += f"print(paceline.launch({ON_GPU}, workers=2))"
    assert "CUDA is already initialised in this process" in python(code).stderr
    done = python(code, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert done.stdout == "[2.0, 2.0]\n", done.stderr


def test_as_many_workers_as_gpus(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('here')")
    for wanted in ("gpu", "auto"):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "run", "--nproc-per-node", wanted, "script.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.stdout.count("here") == torch.cuda.device_count(), done.stderr


def test_the_doctor_names_the_gpu_after_its_check() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
    assert done.stdout.startswith("Training works here")
