"""`paceline.compare` and `paceline compare`: the two engines on this machine, one table.

Every contestant trains the same model on the same batch in fresh processes of its own, so that
neither memory nor threads of one disturb another. What passes through the main device is counted
from shapes, not measured: it is what the engine has to move there and back in one step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, check_whole
from paceline.observe.units import bytes_text, table_lines

if TYPE_CHECKING:
    from torch import Tensor, nn

WARM_UP = 3
"""Steps before the first that is timed: memory is allocated and libraries are set up in them."""

BARE = "bare"
DP = "DataParallel"
DP_LOSSES = "DataParallel, loss on replicas"
DDP = "DistributedDataParallel"
COLUMNS = ("", "processes", "outputs gathered on", "through main device", "step", "memory")


@dataclass(frozen=True, slots=True)
class EngineCost:
    """One way to train, and what it costs."""

    name: str
    processes: int
    gathered_on: str
    """The device on which the outputs of all replicas come together, or why they do not."""
    main_device_bytes: int
    """What goes to and comes from the main device in one step."""
    step_s: float
    memory_bytes: dict[str, int]
    """Memory that training takes besides the loaded libraries, by device or process."""


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """The rows, in the order in which they were measured; printing it prints the table."""

    rows: list[EngineCost]

    def __str__(self) -> str:
        cells = [list(COLUMNS)]
        for row in self.rows:
            memory = [f"{name} {n / 2**20:,.0f} MiB" for name, n in row.memory_bytes.items()]
            cells.append(
                [
                    row.name,
                    str(row.processes),
                    row.gathered_on,
                    bytes_text(row.main_device_bytes),
                    f"{row.step_s * 1e3:,.2f} ms",
                    ", ".join(memory) or "unknown",
                ]
            )
        head, *lines = table_lines(cells)
        return "\n".join([head, "-" * max(map(len, [head, *lines])), *lines])


@dataclass(frozen=True)
class _Workload:
    module: nn.Module
    args: tuple[Any, ...]
    targets: Any
    loss_fn: Callable[..., Tensor]
    device_ids: list[Any]
    steps: int

    def backward(self, output: Any, targets: Any) -> None:
        import torch

        loss = self.loss_fn(output) if targets is None else self.loss_fn(output, targets)
        torch.autograd.backward(loss)


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
    workload = _Workload(module, args, targets, loss_fn or _mean_square, list(device_ids), steps)
    return EngineComparison([_measure(name, workload) for name in (BARE, DP, DP_LOSSES, DDP)])


def _mean_square(output: Any, *_targets: Any) -> Tensor:
    import torch

    from paceline.comm import tree

    found = [tensor.square().mean() for tensor in tree.tensors(output) if tensor.requires_grad]
    if not found:
        raise UsageError(
            "The module's output holds no tensor that depends on a parameter.",
            advice="Pass a loss_fn.",
        )
    return torch.stack([value.to(found[0].device) for value in found]).sum()


def _measure(name: str, workload: _Workload) -> EngineCost:
    from paceline.launcher import count_cores, launch

    processes = len(workload.device_ids) if name == DDP else 1
    threads = max(1, count_cores() // processes)
    train = partial(_train_rank, workload) if name == DDP else partial(_train_here, workload, name)
    ranks = launch(train, workers=processes, threads=threads, label=False)
    memory = {
        device if processes == 1 else f"{device} of rank {number}": used
        for number, rank in enumerate(ranks)
        for device, used in rank["memory_bytes"].items()
    }
    step_s = max(rank["step_s"] for rank in ranks)
    first = ranks[0]
    return EngineCost(
        name, processes, first["gathered_on"], first["main_device_bytes"], step_s, memory
    )


def _train_here(workload: _Workload, name: str) -> dict[str, Any]:
    """Without an engine, or with replicas in threads."""
    from paceline.dp import DataParallel
    from paceline.dp.devices import find_devices

    first = find_devices(workload.device_ids)[0]
    args, targets = _on(first.device, (workload.args, workload.targets))
    module = workload.module.to(first.device)
    if name == BARE:
        return _time(workload, module, lambda: workload.backward(module(*args), targets), "-")
    model = DataParallel(module, workload.device_ids)
    moved = _count_moved_bytes(workload, model, on_replicas=name == DP_LOSSES)
    if name == DP_LOSSES:
        step = partial(model.backward, workload.loss_fn, args, targets)
        return _time(workload, model, step, "none, only losses", moved)
    return _time(
        workload, model, lambda: workload.backward(model(*args), targets), first.name, moved
    )


def _train_rank(workload: _Workload) -> dict[str, Any]:
    import paceline
    from paceline.dp.devices import ReplicaDevice
    from paceline.dp.scatter import scatter

    with paceline.init_process_group() as world:
        devices = [ReplicaDevice(str(world.device), world.device)] * world.size
        chunks = scatter(workload.args, {}, devices, targets=workload.targets)
        own = chunks[min(world.rank, len(chunks) - 1)]  # a batch too small for all is repeated
        model = paceline.DistributedDataParallel(workload.module.to(world.device))
        where = "none, each rank keeps its own"
        return _time(
            workload, model, lambda: workload.backward(model(*own.args), own.targets), where
        )


def _time(
    workload: _Workload, model: nn.Module, step: Callable[[], Any], where: str, moved: int = 0
) -> dict[str, Any]:
    """Take the steps, and report what they cost as plain data."""
    import torch

    before = _private_bytes()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-6)
    kind = next((param.device.type for param in trained), "cpu")
    times = []
    for _ in range(WARM_UP + workload.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        step()
        optimizer.step()
        if kind != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    memory = {"cpu": max(0, _private_bytes() - before)}
    if kind == "cuda":
        used = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
        memory = {f"cuda:{i}": number for i, number in enumerate(used) if number}
    return {
        "step_s": statistics.median(times[WARM_UP:]),
        "gathered_on": where,
        "main_device_bytes": moved,
        "memory_bytes": memory,
    }


def _count_moved_bytes(workload: _Workload, model: Any, *, on_replicas: bool) -> int:
    """What the first device sends to the others and gets from them in one step."""
    import torch

    from paceline.dp.devices import find_devices
    from paceline.dp.scatter import scatter

    devices = [each.device for each in find_devices(workload.device_ids)]
    chunks = scatter(workload.args, {}, find_devices(workload.device_ids), targets=workload.targets)
    others = [chunk for chunk in chunks if chunk.replica != 0]
    total = sum(_bytes(chunk.contents if on_replicas else chunk.args) for chunk in others)
    if not on_replicas:  # outputs come, their gradients go
        with torch.no_grad():
            output = model.module(*_on(devices[0], workload.args))
        rows = sum(chunk.rows for chunk in chunks)
        total += round(2 * _bytes(output) * sum(chunk.rows for chunk in others) / max(rows, 1))
    weights = _bytes(list(model.parameters()))
    elsewhere = {devices[chunk.replica] for chunk in others} - {devices[0]}
    total += 2 * weights * len(elsewhere)  # parameters go, gradients come
    if on_replicas and devices[0].type == "cpu":
        total += weights * sum(devices[chunk.replica] == devices[0] for chunk in others)
    return total


def _on(device: Any, value: Any) -> Any:
    from paceline.comm import tree

    return tree.map_tensors(lambda tensor: tensor.to(device), value)


def _bytes(value: Any) -> int:
    from paceline.comm import tree

    return sum(tensor.nbytes for tensor in tree.tensors(value))


def _private_bytes() -> int:
    """This process's memory that no other process shares; 0 where the system does not say."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        return 0
    lines = rollup.read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline compare`."""
    parser.description = (
        "Train one model with DataParallel and with DistributedDataParallel on this machine, and "
        "print what each costs."
    )
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
    module, batch, loss_fn = _load(args.target) if args.target else _convolutions()
    names = None if args.devices is None else args.devices.split(",")
    devices = names and [int(name) if name.strip().isdigit() else name.strip() for name in names]
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
