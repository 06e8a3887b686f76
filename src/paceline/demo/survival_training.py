"""The training whose worker `paceline demo --kill` kills: nothing in it knows of that."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torch import Tensor

from paceline.comm.codec import encode
from paceline.demo import BATCH_ROWS
from paceline.explain.trace.task import built_in
from paceline.run import Run, RunOptions


def train(
    folder: str | None, epochs: int, seed: int, shards: int, pause_s: float
) -> dict[str, Tensor]:
    """Train, and return the parameters."""
    task = built_in(seed)
    run = Run(
        task.model,
        task.optimizer(task.model.parameters()),
        task.dataset,
        global_batch=BATCH_ROWS,
        epochs=epochs,
        seed=seed,
        folder=folder,
        shards=shards,
        options=RunOptions(progress="quiet"),
    )
    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(task.loss_fn(run.model(x), y))
            time.sleep(pause_s)
    return {name: each.detach().clone() for name, each in task.model.state_dict().items()}


def main() -> None:
    folder, epochs, seed, shards, pause_s = sys.argv[1:]
    state = train(folder, int(epochs), int(seed), int(shards), float(pause_s))
    Path(folder, f"parameters{os.environ['RANK']}").write_bytes(encode(state))


if __name__ == "__main__":
    main()
