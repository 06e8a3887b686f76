"""The training of `paceline demo --kill`: an ordinary script, without code for the kill."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from paceline.files import encode
from paceline.run import Run, RunOptions
from paceline.show.demo import BATCH_ROWS
from paceline.show.trace.task import built_in


def main() -> None:
    folder, epochs, seed, shards, pause_s = sys.argv[1:]
    task = built_in(int(seed))
    run = Run(
        task.model,
        task.optimizer(task.model.parameters()),
        task.dataset,
        global_batch=BATCH_ROWS,
        epochs=int(epochs),
        seed=int(seed),
        folder=folder,
        shards=int(shards),
        options=RunOptions(progress="quiet"),
    )
    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(task.loss_fn(run.model(x), y))
            time.sleep(float(pause_s))
    Path(folder, f"parameters{os.environ['RANK']}").write_bytes(encode(task.model.state_dict()))


if __name__ == "__main__":
    main()
