"""Checkpoints of one training: a series of saves, the newest good one to go on from.

ckpts = Checkpoints("runs/digits/checkpoints", keep=3, keep_best=1)
saved = ckpts.load()                                  # None where there is nothing yet
ckpts.save(step, {"model": ..., "optimizer": ...}, facts={"seed": 0}, metric=loss)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or was damaged; training goes on without it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was loaded: verified, on the CPU."""

    step: int
    state: Any
    facts: dict[str, Any]
    path: Path
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that has reached the disk."""

    step: int
    name: str
    bytes: int
    seconds: float
    """What it cost training: the wait for the save before, and the copy into memory."""
    metric: float | None


class Checkpoints:
    """The checkpoints in one folder. One rank saves; every rank may load.

    `keep` counts the newest ones and is at least 2; `keep_best` counts those with the best metric
    beyond them. The folder is made by the first save, so a folder that cannot be written to is a
    `problem` and no error.
    """

    problem: str | None = None
    """Why the last save did not reach the disk; None when it did."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 1,
        better: Literal["lower", "higher"] = "lower",
    ) -> None:
        self.folder = Path(folder)

    def save(
        self, step: int, state: Any, *, facts: Mapping[str, Any], metric: float | None = None
    ) -> None:
        """Copy `state` now and write it in the background. Waits if one is still being written."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until what was saved is on the disk, or is a `problem`."""
        raise NotImplementedError

    def load(self, step: int | None = None) -> Saved | None:
        """The newest good checkpoint, or None where there is none at all.

        A damaged one gives a CheckpointWarning and the one before it. `step` asks for that one and
        no other. All of them damaged is a CheckpointError, because starting anew would hide it.
        """
        raise NotImplementedError

    def take_finished(self) -> list[Written]:
        """What has reached the disk since the last call; never waits."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for the last write and give the memory back."""
        raise NotImplementedError

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
