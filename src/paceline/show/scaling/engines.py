"""`paceline scale --engines`: the time of a step with each engine, on this machine.

Every engine trains the same model on the same batch in new processes, so that memory and threads of
one do not affect another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import UsageError
from paceline.group import map_tensors
from paceline.launcher import count_cores, launch
from paceline.show.trace.task import find_function
from paceline.telemetry import seconds_text, table_lines

WARM_UP = 3
"""Steps before the first that is timed; in them memory is allocated and libraries are set up."""

BARE = "bare"
DP = "DataParallel"
DP_LOSSES = "DataParallel, loss on replicas"
DDP = "DistributedDataParallel"


def compare_engines(target: str | None, workers: int, steps: int) -> dict[str, float]:
    """The seconds of a usual step in each engine; the model is that of FILE:FUNCTION, if named."""
    made = find_function(target)() if target else _convolutions()
    try:
        model, (inputs, targets), loss_fn = made
    except (TypeError, ValueError):
        raise UsageError(
            f"{target!r} did not return a model, a batch and a loss function.",
            advice="Return (model, (inputs, targets), loss_fn).",
        ) from None
    gpus = torch.accelerator.device_count()  # leaves CUDA usable in forks of this process
    devices = [f"cuda:{i % gpus}" if gpus else f"cpu:{i}" for i in range(workers)]
    batch = (inputs if isinstance(inputs, tuple) else (inputs,), targets)

    def train(engine: str) -> float:
        return _train(engine, model, batch, loss_fn, devices, steps)

    found = {}
    for engine in (BARE, DP, DP_LOSSES, DDP):
        processes = workers if engine == DDP else 1
        threads = max(1, count_cores() // processes)
        times = launch(train, engine, workers=processes, threads=threads, label=False)
        found[engine] = max(times)
    return found


def lines(step_s: dict[str, float]) -> Iterator[str]:
    """The comparison as text: a table and a sentence."""
    bare_s, fastest = step_s[BARE], min(step_s, key=step_s.__getitem__)
    rows = [[name, seconds_text(each), f"{each / bare_s:.2f}"] for name, each in step_s.items()]
    yield from table_lines([["", "step", "of bare"], *rows], "<>>")
    if fastest == BARE:
        yield "Fastest here: the bare model; this batch is too small to be divided."
    else:
        yield f"Fastest here: {fastest}, at {step_s[fastest] / bare_s:.2f} of the bare step."


def _train(
    engine: str, model: Any, batch: tuple[Any, Any], loss_fn: Any, devices: list[str], steps: int
) -> float:
    """The median seconds of a step in this process, which is one of several workers with DDP."""
    device = torch.device(devices[0])
    if engine == DDP:
        world = paceline.init_process_group()
        device = world.device

        def own(tensor: Tensor) -> Tensor:
            return tensor.tensor_split(world.size)[world.rank] if tensor.dim() else tensor

        batch = map_tensors(own, batch)
    args, targets = map_tensors(lambda tensor: tensor.to(device), batch)
    model = model.to(device)
    if engine == DDP:
        model = paceline.DistributedDataParallel(model)
    elif engine != BARE:
        model = paceline.DataParallel(model, devices)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        if engine == DP_LOSSES:
            model.backward(loss_fn, args, targets)
        else:
            loss_fn(model(*args), targets).backward()
        optimizer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def _convolutions() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )
    return model, (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))), F.cross_entropy
