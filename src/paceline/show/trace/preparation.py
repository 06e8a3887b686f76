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
from paceline.record import Part, Stage, TensorFacts, flat_facts, merge_stages, tensor_bytes
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
    placed_s = time.perf_counter() - begin_s
    said = f"rank {world.rank} of {world.size}, process {os.getpid()}"
    part = Part(title=f"worker {world.rank}", worker=world.rank, device=str(world.device))
    several = world.size > 1
    own = [
        Stage(
            name="meet",
            title="workers meet",
            text=f"The {world.size} processes call init_process_group(). Now each knows its rank "
            "and how many there are."
            if several
            else "One process: there are no others to meet.",
            parts=[replace(part, text=said, seconds=met_s)],
            seconds=met_s,
        ),
        Stage(
            name="place",
            title="model to the devices",
            text="Every worker moves its copy of the model to its own device."
            + " Then rank 0's weights are sent to all, whatever they had: now all are equal."
            * several,
            parts=[replace(part, tensors=drawn + shared, seconds=placed_s)],
            bytes_moved=tensor_bytes(list(model.parameters())) if world.rank > 0 else 0,
            seconds=placed_s,
        ),
    ]
    sent = [asdict(stage) for stage in own]
    by_rank = exchange(world.group, sent, world.device, "Telling how workers met")
    return wrapped, merge_stages([read_value(list[Stage], each, "stages") for each in by_rank])


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
    title = "model to the device"
    return [Stage(name="place", title=title, text=text, parts=[part], bytes_moved=moved)]


def draw_weights(model: nn.Module, seed: int) -> None:
    """Replace the weights by random ones from the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.copy_(torch.randn(param.shape, generator=generator).mul_(0.1))
