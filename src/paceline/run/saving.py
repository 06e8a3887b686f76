"""When a run saves, what it goes on from, and which checkpoints are the best ones.

Rank 0 writes; on the others saving is only a step in the same place. Nothing is saved that has
not been looked at: `FiniteCheck.ask` comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.checkpoint import Checkpoints, Saved
from paceline.observe.run_folder import RunFolder, read_info
from paceline.run.evaluation import gather
from paceline.run.folder_lock import Tenancy
from paceline.run.loader import Position
from paceline.run.metrics import Sums
from paceline.run.options import RunOptions
from paceline.run.record import Record
from paceline.run.state import RunState, hand_out, position_in, refuse_other_run


class Saving:
    """The checkpoints of one run, seen by one worker."""

    def __init__(
        self,
        folder: RunFolder | None,
        options: RunOptions,
        *,
        group: Any,
        word_device: torch.device,
    ) -> None:
        self._options, self._group, self._word_device = options, group, word_device
        self._folder = folder
        self.is_on = folder is not None and options.checkpoint_every != 0
        self._checkpoints: Checkpoints | None = None
        self._tenancy: Tenancy | None = None
        if folder is not None and group.rank() == 0:
            self._tenancy = Tenancy(folder)
            self._checkpoints = Checkpoints(
                folder.checkpoints,
                keep=options.keep,
                keep_best=options.keep_best,
                better=options.better,
            )
        self.saved_step: int | None = None
        """How far the run in the newest checkpoint is, known to every worker."""
        self._has_metric = False

    def find(self) -> tuple[Any, dict[str, Any]] | None:
        """State and facts of the newest good checkpoint, on every worker; None without one."""
        saved: Saved | None = None
        problem: Exception | None = None
        if self._checkpoints is not None:
            try:
                self.begin()
                saved = self._checkpoints.load()
            except Exception as error:
                problem = error
        text = "" if problem is None else str(problem)
        found = hand_out(self._group, saved, text, self._word_device)
        if problem is not None:
            raise problem
        if found is not None:
            self.saved_step = position_in(found[0]).step
        return found

    def begin(self) -> None:
        """Have the folder to ourselves until `end`."""
        if self._tenancy is not None:
            self._tenancy.take()

    def end(self) -> None:
        if self._tenancy is not None:
            self._tenancy.give_up()

    def refuse_other_run(self, here: Mapping[str, Any], there: Mapping[str, Any] | None) -> None:
        """Raise if the folder is another run's: by its checkpoint, or else by its `run.json`."""
        if self._folder is None:
            return
        if there is None:
            info = read_info(self._folder) if self._group.rank() == 0 else None
            keys = ("seed", "global_batch", "dataset_size")
            there = {} if info is None else {key: getattr(info, key) for key in keys}
        refuse_other_run(here, there, self._folder.path)

    def is_due(self, step: int, ends_epoch: bool, scores: Mapping[str, float]) -> bool:
        """Whether to save after this step; a `best_metric` that is known of it is not lost."""
        every = self._options.checkpoint_every
        is_rated = self._options.best_metric in scores
        return self.is_on and (ends_epoch or is_rated or bool(every and step % every == 0))

    def save(
        self,
        state: RunState,
        position: Position,
        *,
        facts: Mapping[str, Any],
        epoch_sums: Sums,
        scores: Mapping[str, float],
    ) -> None:
        """Save, unless this very step has been; a collective: every worker calls it."""
        best = self._options.best_metric
        metric = scores.get(best) if best is not None else None
        is_news = metric is not None and not self._has_metric
        if not self.is_on or (self.saved_step == position.step and not is_news):
            return
        self.saved_step, self._has_metric = position.step, metric is not None
        sums = gather(self._group, epoch_sums, self._word_device, "Adding up the epoch so far")
        if self._checkpoints is not None:
            self._checkpoints.save(
                position.step, state.gather(position, sums), facts=facts, metric=metric
            )

    def report(self, record: Record, *, wait: bool = False) -> None:
        """Say what has reached the disk since."""
        if self._checkpoints is None:
            return
        if wait:
            self._checkpoints.close()
        for written in self._checkpoints.take_finished():
            record.checkpoint(written)
