"""A small GPT on text that ships with Python, with the usual recipe: what `islands` measures."""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import paceline
from benchmarks.models import GPT

LENGTH, BATCH, WARM_UP = 64, 32, 60


class Text(Dataset[Tensor]):
    """Consecutive pieces of a text."""

    def __init__(self, data: Tensor, count: int) -> None:
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        start = index * 61 % (len(self._data) - LENGTH - 1)
        return self._data[start : start + LENGTH + 1]


def read_text() -> tuple[Tensor, Tensor]:
    """Bytes for training, and bytes for evaluation."""
    text = Path(str(pydoc_data.topics.__file__)).read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


class Sent:
    """Counts the bytes that an island has sent."""

    bytes = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def message(self, message: Any) -> None:
        self.bytes = message.facts.get("bytes", self.bytes)


def schedule(steps: int, done: int) -> float:
    """The learning rate relative to its highest: a warm-up, then a cosine to a tenth."""
    fallen = max(0.0, (done - WARM_UP) / max(1, steps - WARM_UP))
    return min(1.0, (done + 1) / WARM_UP) * (0.1 + 0.45 * (1 + math.cos(math.pi * fallen)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--islands", default="", help="as JSON; nothing: one training of all")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.003)
    args = parser.parse_args()
    torch.set_num_threads(1)
    paceline.seed_everything(args.seed)
    train, held_out = read_text()
    net = GPT(256, width=96, layers=3, heads=4, length=LENGTH)
    for param in (param for param in net.parameters() if param.dim() > 1):
        torch.nn.init.normal_(param, std=0.02)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(schedule, args.steps))
    islands = paceline.Islands(**json.loads(args.islands)) if args.islands else None
    sent = Sent()
    run = paceline.Run(
        net,
        optimizer,
        Text(train, args.steps * BATCH),
        global_batch=BATCH,
        epochs=1,
        seed=args.seed,
        scheduler=scheduler,
        sinks=[sent],
        options=paceline.RunOptions(
            islands=islands, clip_norm=1.0, progress="quiet", handle_signals=False
        ),
    )
    for step in run:
        with step:
            for x in step.batches():
                logits = run.model(x[:, :-1])
                step.backward(cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()))

    def score(x: Tensor) -> dict[str, Tensor]:
        logits = net(x[:, :-1])
        return {"loss": cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())}

    loss = run.evaluate(score, Text(held_out, 512), batch=64, reduction="mean")["loss"]
    number = os.environ.get("PACELINE_ISLAND", "0").partition("/")[0]
    if run.membership.leads and number == "0":
        size = sum(param.numel() for param in net.parameters())
        # What a ring moves between two workers: every gradient one way and its sum back.
        moved = sent.bytes if islands else 4 * size * args.steps
        args.out.write_text(json.dumps({"loss": loss, "bytes": moved, "parameters": size}))


if __name__ == "__main__":
    main()
