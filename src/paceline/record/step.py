"""`record_step`: one step of a training, recorded while it happens.

    with record_step(model, optimizer, step=run.step, folder="runs/digits") as recording:
        loss = loss_fn(model(x), y)
        recording.note_loss(loss)
        loss.backward()
        optimizer.step()
    print(recording.trace)

The step is the caller's own, on the real engine; see `watch`. When the block ends, workers tell
each other what they saw, rank 0 computes the step once more by itself, and writes the file. All of
them call it, in the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm import tree
from paceline.ddp import DistributedDataParallel
from paceline.ddp.wrapper import bare
from paceline.dp import DataParallel
from paceline.errors import UsageError
from paceline.observe.run_folder import NAME, RunFolder
from paceline.record import schema
from paceline.record.evidence import Evidence, Notes, first_line
from paceline.record.follow import find_weight
from paceline.record.ranks import trace_ranks
from paceline.record.reference import Reference
from paceline.record.replicas import trace_replicas
from paceline.record.stages import Trace
from paceline.record.watch import Watch


class Recording:
    """One step being recorded; `trace` is there when the block has ended."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.notes = Notes()

    def note_batch(self, indices: Sequence[int]) -> None:
        """Say which rows of the dataset this worker's batch has, in order."""
        self.notes.indices = [int(index) for index in indices]

    def note_loss(self, loss: Tensor, weight: float | None = None, targets: Any = None) -> None:
        """Say what the loss is, before backward; of several, their sum is shown.

        `weight` is over how many items it is a sum, where it is not what `weighted()` was told.
        With `targets`, and a `loss_fn` for the whole step, the check computes the loss of the whole
        batch too.
        """
        notes = self.notes
        notes.targets.append(tree.map_tensors(lambda tensor: tensor.detach().clone(), targets))
        value = loss.detach().clone()
        notes.loss = value if notes.loss is None else notes.loss + value
        if weight is not None:
            notes.loss_weight = (notes.loss_weight or 0.0) + weight


@contextmanager
def record_step(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int = 1,
    folder: str | os.PathLike[str] | None = None,
    dataset: Any = None,
    sample: int | None = None,
    weight: str | None = None,
    values: bool = False,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    check: bool = True,
) -> Iterator[Recording]:
    """Record the step inside the block; on `DistributedDataParallel`, in all workers at once.

    `model` is wrapped by one of our engines. With `folder` the file `pipeline/step{n}.json` is
    written there. `sample` is a row of the dataset, `weight` is written like `"fc.weight[0, 3]"`.
    Without `values` shapes and statistics are kept, but no value of data, weights or outputs.
    `loss_fn(output, targets)`, a mean over rows, makes the check compute the loss as well.
    `check=False` spares the copy of the model, and the second computation.
    """
    if not isinstance(model, (DataParallel, DistributedDataParallel)):
        raise UsageError(
            f"record_step got a {type(model).__name__}.",
            advice="Wrap the model in paceline.DataParallel or DistributedDataParallel first.",
        )
    if step < 1:
        raise UsageError(f"step is {step}.", advice="Steps are counted from 1.")
    target = None if folder is None else RunFolder(folder)
    if target is not None and not NAME.fullmatch(target.name):  # refused by every worker alike
        raise UsageError(
            f"A run folder cannot be named {target.name!r}.",
            advice="Use up to 64 letters, digits, dots, dashes and underscores.",
        )
    parameters = {n: p for n, p in bare(model).named_parameters() if p.requires_grad}
    followed = find_weight(weight, parameters)
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    is_main = group is None or group.rank() == 0
    reference, trouble = _copy(model, optimizer) if check and is_main else (None, "")
    before = None if followed is None else followed.read(parameters)
    watch = Watch(model, optimizer, keeps_tensors=check)
    recording = Recording()
    begin_ns = time.perf_counter_ns()
    with watch:
        yield recording
    step_s = (time.perf_counter_ns() - begin_ns) / 1e9
    if not watch.calls and group is None:
        raise UsageError(
            "The model was not called in the recorded step.",
            advice="Put forward, backward and the optimizer's step into the block.",
        )
    evidence = Evidence(
        model=model,
        watch=watch,
        notes=recording.notes,
        reference=reference,
        trouble=trouble,
        wants_check=check,
        followed=followed,
        before=before,
        sample=sample,
        values=values,
        dataset=dataset,
        step=step,
        step_s=step_s,
        loss_fn=loss_fn,
    )
    with torch.no_grad():
        trace = trace_replicas(evidence) if group is None else trace_ranks(evidence, group)
    recording.trace = trace
    if target is not None and is_main:
        target.create()
        schema.write(trace, target.pipeline_of(step))


def _copy(model: Any, optimizer: Optimizer | None) -> tuple[Reference | None, str]:
    try:
        return Reference(model.module, optimizer), ""
    except Exception as error:  # some modules cannot be copied; the step matters more
        return None, f"the model cannot be copied: {first_line(error)}"
