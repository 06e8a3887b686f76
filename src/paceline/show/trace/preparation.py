"""Before the first step: the group is formed, models are moved, rank 0's weights are broadcast.

These stages belong to the start of a training, so only `paceline trace` has them, and not a step
recorded in the middle of a run.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace

import torch
from torch import nn

from paceline.ddp import DistributedDataParallel
from paceline.files import read_value
from paceline.group import World, exchange
from paceline.record import Part, Stage, TensorFacts, flat_facts, tensor_bytes
from paceline.telemetry import bytes_text


def wrap_on_worker(
    model: nn.Module, world: World, *, met_s: float, seed: int, values: bool
) -> tuple[DistributedDataParallel, list[Stage]]:
    """Move and wrap the model; returns it with the stages `meet` and `place` of all workers.

    All workers but the first draw different weights before, to show that these do not matter.
    """
    begin_s = time.perf_counter()
    model = model.to(world.device)
    if world.rank > 0:
        draw_weights(model, seed + world.rank)
    drawn = flat_facts("weights at first", model.parameters(), values=values)
    wrapped = DistributedDataParallel(model)
    shared = flat_facts("weights from rank 0", model.parameters(), values=values)
    said = f"rank {world.rank} of {world.size}, process {os.getpid()}"
    place = Part(title=f"worker {world.rank}", worker=world.rank, device=str(world.device))
    own = [
        replace(place, text=said, seconds=met_s),
        replace(place, tensors=drawn + shared, seconds=time.perf_counter() - begin_s),
    ]
    sent = [asdict(part) for part in own]
    by_rank = exchange(world.group, sent, world.device, "Telling how workers met")
    meet, placed = (
        [read_value(Part, parts[number], "part") for parts in by_rank] for number in (0, 1)
    )
    several = world.size > 1
    moved = tensor_bytes(list(model.parameters())) * (world.size - 1)
    return wrapped, [
        _stage(
            "meet",
            "workers meet",
            f"The {world.size} processes call init_process_group(). Now each knows its rank and "
            "how many there are."
            if several
            else "One process: there are no others to meet.",
            meet,
        ),
        _stage(
            "place",
            "model to the devices",
            "Every worker moves its copy of the model to its own device."
            + " Then rank 0's weights are sent to all, whatever they had: now all are equal."
            * several,
            placed,
            moved,
        ),
    ]


def place_replicas(model: nn.Module, main: str) -> list[Stage]:
    """The stage `place` of one process: the model on the main device."""
    size = tensor_bytes(list(model.parameters()))
    text = (
        f"The model, {bytes_text(size)} of weights, is moved to {main}, the main device, before "
        "it is wrapped; and so is every batch before the call."
    )
    moved = 0 if main.startswith("cpu") else size
    held = [TensorFacts(name="model", shape=[], dtype="", device=main, bytes=size)]
    part = Part(title=main, device=main, tensors=held)
    return [_stage("place", "model to the device", text, [part], moved)]


def draw_weights(model: nn.Module, seed: int) -> None:
    """Replace the weights by random ones from the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.copy_(torch.randn(param.shape, generator=generator).mul_(0.1))


def _stage(name: str, title: str, text: str, parts: list[Part], moved: int = 0) -> Stage:
    known = [part.seconds for part in parts if part.seconds is not None]
    return Stage(
        name=name,
        title=title,
        text=text,
        parts=parts,
        bytes_moved=moved,
        seconds=max(known, default=None),
    )
