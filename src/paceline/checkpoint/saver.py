"""Checkpoints of one training: saving in the background, and loading the newest valid one.

checkpoints = Checkpoints("runs/digits/checkpoints", keep=3, keep_best=1)
saved = checkpoints.load()                            # None where there is nothing yet
checkpoints.save(step, {"model": ..., "optimizer": ...}, facts={"seed": 0}, metric=loss)
"""

from __future__ import annotations

import hashlib
import operator
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.checkpoint import directory
from paceline.checkpoint.directory import SKELETON, TENSORS, CheckpointEntry
from paceline.checkpoint.files import BLOCK_BYTES, size_of
from paceline.errors import CheckpointError, UsageError, check_choice, check_whole
from paceline.files import (
    FilePlan,
    memory_of,
    plan_file,
    read_tensors,
    restore_tensors,
    separate_tensors,
)
from paceline.group import runs_ahead
from paceline.telemetry import Written, count_text
from paceline.torch_private import foreach_copy_

LARGEST_STEP = 10**15 - 1
# Of the thread that hashes and writes: it gives way to those that train.
_NICENESS = 10


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or was damaged; training continues without it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was loaded: verified, on the CPU."""

    step: int
    state: Any
    facts: dict[str, Any]
    path: Path
    metric: float | None = None


class Checkpoints:
    """The checkpoints in one folder. One rank saves; every rank may load.

        save ──copy──▶ staging ──thread──▶ .tmp-<random>/ ──rename──▶ step-00000050.0001/

    `keep` counts the newest ones and is at least 2; `keep_best` counts those with the best metric,
    as `better` compares them. The first save makes the folder, so a folder that cannot be written
    to is a `problem`, not an error.

    Invariant: at most one save is being written, and a name `step-…` stands for a whole checkpoint.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 1,
        better: Literal["lower", "higher"] = "lower",
    ) -> None:
        # At least 2: if the newest one is damaged, the one before it is needed.
        check_whole("keep", keep, 2)
        check_whole("keep_best", keep_best, 0)
        check_choice("better", better, ("lower", "higher"))
        self.folder = Path(folder).absolute()  # a script may change its working directory
        self.problem: str | None = None
        """Why the last save did not reach the disk; None if it did."""
        self.saved_step: int | None = None
        """The step of the last checkpoint that was written or loaded here."""
        self._kept: dict[str, Any] = {"keep": keep, "keep_best": keep_best, "better": better}
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._finished: list[Written] = []
        self._damaged: set[str] = set()
        self._has_warned = False
        self._loss = ""

    def save(
        self, step: int, state: Any, *, facts: Mapping[str, Any], metric: float | None = None
    ) -> None:
        """Copy `state` now and write it in the background.

        If the previous save is still being written, this one waits for it: every save is written,
        and a disk that is too slow shows in `Written.seconds`. A state that cannot be saved raises
        UsageError; a disk that fails sets `problem`, and warns the first time.
        """
        begin = time.perf_counter()
        step = operator.index(step)
        check_whole("step", step, 0, most=LARGEST_STEP)
        plain = directory.plain_facts(facts)
        self.wait()  # the previous save still reads from the staging buffer
        tensors, skeleton = separate_tensors(state, "state", UsageError)
        try:
            image = self._staging.fill(tensors)
        except MemoryError as error:
            self._note_failure(step, f"there is not enough memory for a copy: {error}")
            self._warn_once()
            return
        contents = {TENSORS: image, SKELETON: memoryview(skeleton)}
        number = None if metric is None else float(metric)
        cost_s = time.perf_counter() - begin
        given = step, contents, plain, number, cost_s
        # No daemon: a process that ends waits until the checkpoint is written.
        thread = threading.Thread(
            target=self._write_aside, args=given, name=f"checkpoint of step {step}"
        )
        try:
            thread.start()
        except RuntimeError:  # as many threads run as may: training waits for the disk
            self._write(*given)
        else:
            self._thread = thread

    def wait(self) -> None:
        """Wait until the last save is on the disk, or has become a `problem`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._warn_once()

    def take_finished(self) -> list[Written]:
        """The saves that have reached the disk since the last call; never waits."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        count = len(self._finished)  # the thread may append meanwhile
        taken, self._finished[:count] = self._finished[:count], []
        return taken

    def load(self, step: int | None = None) -> Saved | None:
        """The newest valid checkpoint, or None where the folder has none.

        A damaged one causes a CheckpointWarning, and the one before it is tried. `step` asks for
        that one and no other. If all are damaged this raises CheckpointError: starting over would
        hide it.
        """
        self.wait()
        if step is not None:
            saved = read_entry(directory.find_entry(self.folder, step))
            self.saved_step = saved.step
            return saved
        entries = directory.list_entries(self.folder)
        if not entries:
            return None
        for entry in entries:
            try:
                saved = read_entry(entry)
                self.saved_step = saved.step
                return saved
            except CheckpointError as error:
                if not os.path.lexists(entry.path):
                    return self.load()  # another process has just removed it: list them again
                self._damaged.add(entry.name)
                warnings.warn(
                    f"The checkpoint {entry.name} cannot be used. {error}\n"
                    "Going back to the one before it.",
                    CheckpointWarning,
                    stacklevel=2,
                )
        raise CheckpointError(
            f"None of the {len(entries)} checkpoints in {self.folder} can be used.",
            advice="`paceline ckpt verify` says why. To start over, use another folder.",
        )

    def take_over(self) -> None:
        """Continue after another process stopped saving: find the last step that it saved."""
        found = [manifest for _, manifest in directory.list_manifests(self.folder)]
        steps = [each.step for each in found if not isinstance(each, CheckpointError)]
        self.saved_step = max(steps, default=None)

    def close(self) -> None:
        """Wait for the last write, and free the memory."""
        self.wait()
        self._staging = Staging()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_aside(self, *given: Any) -> None:
        """Write on a thread that gives way to those that train."""
        if sys.platform == "linux":  # only there does a thread have its own priority
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._write(*given)

    def _write(
        self,
        step: int,
        contents: dict[str, memoryview],
        facts: dict[str, Any],
        metric: float | None,
        cost_s: float,
    ) -> None:
        """Write one checkpoint. A failure here must not end the training."""
        try:
            # Before the save, because leftovers of killed writers take the space that it needs.
            with suppress(OSError):
                directory.sweep(self.folder)
            entry, manifest = directory.publish(self.folder, step, contents, metric, facts)
        except Exception as error:
            self._note_failure(step, error)
            return
        size, better = manifest.total_bytes, self._kept["better"]
        self._finished.append(Written(step, entry.name, size, cost_s, metric, better))
        self.problem, self.saved_step, self._loss = None, step, ""
        try:
            found = directory.list_manifests(self.folder)
            for old in directory.plan_removals(found, self._damaged, **self._kept):
                directory.remove(old)
        except Exception as error:
            self.problem = f"Old checkpoints in {self.folder} cannot be removed: {error}."
        else:
            self._has_warned = False

    def _note_failure(self, step: int, reason: object) -> None:
        self.problem = f"The checkpoint of step {step} in {self.folder} failed: {reason}."
        lost = count_text(max(0, step - (self.saved_step or 0)), "step")
        self._loss = f"; a crash now would lose the last {lost}"

    def _warn_once(self) -> None:
        """Warn about a problem once, from the thread that trains."""
        if self.problem is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.problem}\nTraining continues{self._loss}. This warning is shown once.",
                CheckpointWarning,
                stacklevel=3,
            )


def read_entry(entry: CheckpointEntry) -> Saved:
    """Load one checkpoint. Nothing of it is used before all hashes have been compared."""
    with directory.open_checkpoint(entry) as checkpoint:
        skeleton = checkpoint.read_skeleton()
        digest = hashlib.sha256()
        with checkpoint.open(TENSORS) as (file, path):
            tensors = read_tensors(file, size_of(file), path, CheckpointError, digest)
        checkpoint.compare(TENSORS, digest.hexdigest())
    state = restore_tensors(skeleton, tensors, entry.path / SKELETON, CheckpointError)
    manifest = checkpoint.manifest
    return Saved(manifest.step, state, manifest.facts, entry.path, manifest.metric)


class Staging:
    """The copy of the state that is being written: one buffer, reused by every save.

    The copy has the layout of the file, so writing is one call and hashing another, both without
    Python's lock.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._prefix = b""
        self._slots: list[Tensor] = []

    def fill(self, tensors: Mapping[str, Tensor]) -> memoryview:
        """Copy the tensors; returns the bytes of their file, valid until the next call.

        Raises MemoryError where there is not enough memory for a copy.
        """
        plan = plan_file(tensors)
        if plan.prefix != self._prefix:
            self._lay_out(plan)
        if plan.tensors:
            foreach_copy_(self._slots, plan.tensors, non_blocking=self._buffer.is_pinned())
        for device in {each.device for each in plan.tensors if runs_ahead(each.device)}:
            # Copies into pinned memory are only queued, and training changes the originals next.
            torch.get_device_module(device).current_stream(device).synchronize()
        return memory_of(self._buffer)[: plan.total_bytes]

    def _lay_out(self, plan: FilePlan) -> None:
        self._prefix, self._slots = b"", []
        if self._buffer.numel() < plan.total_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = _allocate(
                plan.total_bytes, any(runs_ahead(each.device) for each in plan.tensors)
            )
        begin = len(plan.prefix)
        memory_of(self._buffer)[:begin] = plan.prefix
        for place, tensor in zip(plan.header.places.values(), plan.tensors, strict=True):
            raw = self._buffer[begin + place.begin : begin + place.end]
            self._slots.append(raw.view(tensor.dtype).view(place.shape))
        self._prefix = plan.prefix  # last: if an allocation fails, the next `fill` starts over


def _allocate(size: int, needs_pinning: bool) -> Tensor:
    """Memory aligned to a block, pinned where a device copies into it."""
    try:
        whole = torch.empty(size + BLOCK_BYTES, dtype=torch.uint8, pin_memory=needs_pinning)
    except RuntimeError as error:
        if needs_pinning:  # more than the system allows to pin
            return _allocate(size, needs_pinning=False)
        raise MemoryError(f"{size:,} bytes could not be allocated") from error
    begin = -whole.data_ptr() % BLOCK_BYTES
    return whole[begin : begin + size]
