"""`paceline.compare` and `paceline compare`: the two engines on this machine, one table.

Every contestant trains the same model on the same batch in fresh processes of its own, so that
neither memory nor threads of one disturb another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DeviceError, UsageError, check_whole
from paceline.observe.units import bytes_text, seconds_text, table_lines

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

WARM_UP = 3
"""Steps before the first that is timed: memory is allocated and libraries are set up in them."""

BARE = "bare"
DP = "DataParallel"
DP_LOSSES = "DataParallel, loss on replicas"
DDP = "DistributedDataParallel"
COLUMNS = ("", "processes", "step", "of bare", "memory")


@dataclass(frozen=True, slots=True)
class EngineCost:
    """One way to train, and what it costs."""

    name: str
    processes: int
    step_s: float
    memory_bytes: dict[str, int]
    """Memory that training takes besides the loaded libraries, by device or process."""


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """The rows, in the order in which they were measured; printing it prints the table."""

    rows: list[EngineCost]

    def __str__(self) -> str:
        bare_s = self.rows[0].step_s
        cells = [list(COLUMNS)]
        for row in self.rows:
            place, most = max(row.memory_bytes.items(), key=lambda pair: pair[1])
            cells.append(
                [
                    row.name,
                    str(row.processes),
                    seconds_text(row.step_s),
                    f"{row.step_s / bare_s:.2f}",
                    f"{bytes_text(most)} on {place}",
                ]
            )
        fastest = min(self.rows, key=lambda row: row.step_s)
        verdict = (
            f"Fastest here: {fastest.name}, at {fastest.step_s / bare_s:.2f} of the bare step."
        )
        if fastest.name == BARE:
            verdict = "Fastest here: the bare model; this batch is too small to be worth sharing."
        return "\n".join([*table_lines(cells, align="<>>><"), verdict])


def compare(
    module: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    device_ids: Sequence[Any] | None = None,
    steps: int = 10,
) -> EngineComparison:
    """Train `module` on `batch` under both engines for a few steps, and say what each costs.

    With a `loss_fn`, the batch is a pair of inputs and targets; without, it is the inputs, and the
    mean square of the outputs is minimised. A tuple of inputs is several arguments. By default
    there is a replica, or a worker, for every GPU, or two on the CPU. The module itself stays as
    it is: it is trained in forked processes.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{module!r} is not a module.", advice="Pass the model to be trained.")
    check_whole("steps", steps)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            "This process already uses CUDA, and processes forked from it could not.",
            advice="Call compare() first, with the model on the CPU, or use `paceline compare`.",
        )
    if loss_fn is not None and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise UsageError(
            "With a loss_fn, a batch is a pair of inputs and targets.",
            advice="Pass compare(module, (inputs, targets), loss_fn).",
        )
    inputs, targets = batch if loss_fn is not None else (batch, None)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if device_ids is None:
        gpus = torch.accelerator.device_count()  # leaves CUDA usable in forks of this process
        device_ids = list(range(gpus)) if gpus > 1 else [0, 0] if gpus else ["cpu:0", "cpu:1"]
    for number, entry in enumerate(device_ids):
        _check_device(f"device_ids[{number}]", entry)
    train = partial(_train, module, args, targets, loss_fn or _mean_square, list(device_ids), steps)
    sizes = {BARE: 1, DP: 1, DP_LOSSES: 1, DDP: len(device_ids)}
    return EngineComparison([_measure(name, size, train) for name, size in sizes.items()])


def _check_device(what: str, entry: Any) -> None:
    """Refuse a device that is not there, without using CUDA, which forks could not use then."""
    import torch

    try:
        device = torch.device("cuda", entry) if isinstance(entry, int) else torch.device(entry)
        is_there = device.type == "cpu" or (device.index or 0) < torch.accelerator.device_count()
    except (RuntimeError, TypeError):
        is_there = False
    if not is_there:
        raise DeviceError(
            f"{what} is {entry!r}, and this machine has no such device.",
            advice='Name devices as "cuda:0", 0 or "cpu:1".',
        )


def _mean_square(output: Any, *_targets: Any) -> Tensor:
    import torch

    from paceline.comm import tree

    found = [tensor.square().mean() for tensor in tree.tensors(output) if tensor.requires_grad]
    if not found:
        raise UsageError("No output depends on a parameter.", advice="Pass a loss_fn.")
    return torch.stack([value.to(found[0].device) for value in found]).sum()


def _measure(name: str, processes: int, train: Callable[..., dict[str, Any]]) -> EngineCost:
    from paceline.launcher import count_cores, launch

    threads = max(1, count_cores() // processes)
    ranks = launch(train, name, workers=processes, threads=threads, label=False)
    memory = {
        device if processes == 1 else f"{device} of rank {number}": used
        for number, rank in enumerate(ranks)
        for device, used in rank["memory_bytes"].items()
    }
    return EngineCost(name, processes, max(rank["step_s"] for rank in ranks), memory)


def _train(
    module: nn.Module,
    args: tuple[Any, ...],
    targets: Any,
    loss_fn: Callable[..., Tensor],
    device_ids: list[Any],
    steps: int,
    name: str,
) -> dict[str, Any]:
    """Train with one engine in this process, one of its ranks if there are several."""
    import torch

    import paceline
    from paceline.comm import tree
    from paceline.dp.devices import ReplicaDevice, find_devices
    from paceline.dp.scatter import scatter

    device = find_devices(device_ids)[0].device
    if name == DDP:
        world = paceline.init_process_group()
        device = world.device
        chunks = scatter(
            args, {}, [ReplicaDevice(str(device), device)] * world.size, targets=targets
        )
        own = chunks[min(world.rank, len(chunks) - 1)]  # a batch too small for all is repeated
        args, targets = own.args, own.targets
    args, targets = tree.map_tensors(lambda tensor: tensor.to(device), (args, targets))
    model: Any = module.to(device)
    if name == DDP:
        model = paceline.DistributedDataParallel(model)
    elif name != BARE:
        model = paceline.DataParallel(model, device_ids)

    def step() -> None:
        if name == DP_LOSSES:
            model.backward(loss_fn, args, targets)
        else:
            wanted = () if targets is None else (targets,)
            torch.autograd.backward(loss_fn(model(*args), *wanted))

    return _time(model, device, step, steps)


def _time(
    model: nn.Module, device: torch.device, step: Callable[[], None], steps: int
) -> dict[str, Any]:
    """Take the steps, and report what they cost as plain data."""
    import torch

    before = _private_bytes()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-6)
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        step()
        optimizer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    memory = {"cpu": max(0, _private_bytes() - before)}
    if device.type == "cuda":
        used = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
        memory = {f"cuda:{i}": number for i, number in enumerate(used) if number}
    return {"step_s": statistics.median(times[WARM_UP:]), "memory_bytes": memory}


def _private_bytes() -> int:
    """This process's memory that no other process shares; 0 where the system does not say."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline compare`."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="FILE:FUNCTION",
        help="a function that returns (model, (inputs, targets), loss_fn); "
        "default: a small convolutional network",
    )
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help='such as "cpu:0,cpu:1" or "0,1"; default: every GPU, or two parts of the CPU',
    )
    parser.add_argument("--steps", metavar="N", type=int, default=10, help="steps to time")


def main(args: argparse.Namespace) -> int:
    """Print the table."""
    print(f"Timing {args.steps} steps of each engine ...", file=sys.stderr, flush=True)
    module, batch, loss_fn = _load(args.target) if args.target else _convolutions()
    names = [name.strip() for name in args.devices.split(",")] if args.devices else None
    devices = names and [int(name) if name.isdecimal() else name for name in names]
    print(compare(module, batch, loss_fn, device_ids=devices, steps=args.steps))
    return 0


def _load(target: str) -> tuple[nn.Module, Any, Any]:
    from paceline.explain.trace.task import find_function

    made = find_function(target)()
    if not (isinstance(made, tuple) and len(made) == 3):
        raise UsageError(
            f"{target!r} returned {type(made).__name__}.",
            advice="Return a tuple: the model, a pair of inputs and targets, the loss function.",
        )
    return made


def _convolutions() -> tuple[nn.Module, Any, Any]:
    import torch
    from torch import nn
    from torch.nn import functional as F

    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )
    return model, (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))), F.cross_entropy
