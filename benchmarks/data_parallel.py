"""Step time in one process: ours, nn.DataParallel, and the bare model on one device.

All contestants alternate in one process; results are ratios, taken round by round. A step is
zero_grad, forward, loss, backward and an SGD update. On a GPU its replicas share the one device,
which shows the overhead; on the CPU each has half of the threads. Memory is the peak
of a step, measured for each contestant alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import GPT, MODELS
from benchmarks.tables import print_table
from paceline.dp import DataParallel

Step = Callable[[], None]

WARM_UP = 6
"""Steps before the first that counts."""


@dataclass(frozen=True, slots=True)
class Task:
    """A model with its batch and loss; `precision` is torch's own, bfloat16 or autocast."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    precision: Literal["float32", "bfloat16", "autocast"] = "float32"


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(50257, (8, 1025), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _gpt2() -> nn.Module:
    return GPT(50257, 768, 12, 12, 1024)


def _deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(300)))


def _rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 64, generator=generator)
    return x, torch.randint(64, (64,), generator=generator)


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (64,), generator=generator)


def _like(name: str, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> Task:
    return Task(MODELS[name].build, MODELS[name].batch, loss)


TASKS = {
    "cuda": {
        "gpt2-124M": Task(_gpt2, _text, _token_loss, "bfloat16"),
        "gpt2-124M-autocast": Task(_gpt2, _text, _token_loss, "autocast"),
        "mlp-300x64": Task(_deep, _rows, F.cross_entropy),
    },
    "cpu": {
        "conv-0.1M": Task(MODELS["conv-0.1M"].build, _images, F.cross_entropy),
        "mlp-8.4M": _like("mlp-8.4M"),
        "gpt-17M": _like("gpt-17M", _token_loss),
        "mlp-300x64": Task(_deep, _rows, F.cross_entropy),
    },
}


def contestants(task: Task, device: str, replicas: int) -> dict[str, Callable[[], Step]]:
    """Functions that build each contestant's step."""
    ids: list[Any] = [0] * replicas if device == "cuda" else [f"cpu:{i}" for i in range(replicas)]
    wraps: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
        "bare": (lambda m: m, False),
        "paceline": (lambda m: DataParallel(m, ids), False),
        "paceline, loss on replicas": (lambda m: DataParallel(m, ids), True),
    }
    if device == "cuda":
        wraps["nn.DataParallel"] = (lambda m: nn.DataParallel(m, ids), False)
    return {
        name: partial(_step, task, device, wrap, on_replicas)
        for name, (wrap, on_replicas) in wraps.items()
    }


def _step(
    task: Task, device: str, wrap: Callable[[nn.Module], nn.Module], on_replicas: bool
) -> Step:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if task.precision == "bfloat16" else torch.float32
    with torch.device(device):
        module = wrap(task.build().to(dtype))
    x, y = (tensor.to(device) for tensor in task.batch(torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    is_mixed = task.precision == "autocast"

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16) if is_mixed else nullcontext():
            if on_replicas:
                cast(DataParallel, module).backward(task.loss, x, y)
            else:
                loss = task.loss(module(x), y)
        if not on_replicas:
            loss.backward()
        optimizer.step()

    return step


def peak_mib(build: Callable[[], Step]) -> tuple[int, int]:
    """Peak GPU memory of tensors in a step, and the memory reserved for them.

    Workspaces of matrix kernels, one per thread, are part of both.
    """
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # otherwise the first contestant would pay for all
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    step = build()
    for _ in range(WARM_UP):
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    reserved = torch.cuda.memory_reserved() - reserved
    del step
    gc.collect()
    return peak // 2**20, reserved // 2**20


def measure(
    builds: dict[str, Callable[[], Step]], device: str, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step, one number a round."""
    stepping = {name: build() for name, build in builds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in builds}
    for number in range(rounds + 1):
        for name, step in stepping.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(steps if number else max(steps, WARM_UP)):
                step()
            _wait(device)
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if has_gpu else "cpu")
    parser.add_argument("--models", default="all", help="comma-separated names, or all")
    parser.add_argument("--replicas", default="2,4" if has_gpu else "2")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after the warm-up")
    parser.add_argument("--steps", type=int, default=5, help="steps per contestant and round")


def main(args: argparse.Namespace) -> dict[str, Any]:
    tasks = TASKS[args.device]
    names = list(tasks) if args.models == "all" else args.models.split(",")
    results: dict[str, Any] = {}
    for name in names:
        for replicas in map(int, args.replicas.split(",")):
            builds = contestants(tasks[name], args.device, replicas)
            memory = {}
            if args.device == "cuda":
                memory = {contestant: peak_mib(build) for contestant, build in builds.items()}
            seconds = measure(builds, args.device, args.rounds, args.steps)
            title = f"{name}, {replicas} replicas on one {args.device.upper()}"
            results[title] = summarise(seconds, memory)
            print_table(title, results[title])
    return results


def summarise(
    seconds: dict[str, list[float]], memory: dict[str, tuple[int, int]]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, times in seconds.items():
        row = {
            "contestant": name,
            "ms": round(statistics.median(times) * 1e3, 2),
            "min": round(min(times) * 1e3, 2),
            "max": round(max(times) * 1e3, 2),
            "/ bare": _ratio(times, seconds["bare"]),
        }
        if "nn.DataParallel" in seconds:
            row["/ nn.DataParallel"] = _ratio(times, seconds["nn.DataParallel"])
        if memory:
            row["peak MiB"], row["reserved MiB"] = memory[name]
        rows.append(row)
    return rows


def _ratio(times: list[float], reference: list[float]) -> float:
    pairs = zip(times, reference, strict=True)
    return round(statistics.median(mine / theirs for mine, theirs in pairs), 3)
