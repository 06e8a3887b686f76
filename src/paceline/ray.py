"""`RayRun`: a `Run` in the workers of Ray Train, on any number of machines.

    TorchTrainer --starts--> workers, each with a RayRun --metrics, checkpoints--> Ray's storage
         ^                                                                              |
        '--------- a worker dies: all restart from the newest checkpoint <-------------'

Ray finds machines, starts workers and replaces them; the workers train a `Run`. Whenever the run
saves, Ray gets the checkpoint and the new metrics.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from paceline.errors import MissingLibraryError, UsageError
from paceline.files import RunFolder
from paceline.run import Run, Step
from paceline.telemetry import Sink, StepReport, Summary, Written

try:
    import ray
    from ray import train
except ModuleNotFoundError as error:
    raise MissingLibraryError(
        f"paceline.ray needs Ray Train: {error}.", advice="Install it: pip install 'paceline[ray]'"
    ) from error

__all__ = ["RayRun"]


class RayRun(Run):
    """A `Run` with the same arguments, to be made in the function that `TorchTrainer` calls.

    After every epoch and every save it reports to Ray: `step`, `epoch`, the metrics since the last
    report under the names that trackers use, such as `epoch/loss` or `eval/accuracy`, and the
    checkpoint. A run that Ray restarts continues from Ray's newest checkpoint. Without `folder` one
    is made in Ray's session folder on each machine.
    """

    def __init__(
        self, *args: Any, folder: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        try:
            context = train.get_context()
        except RuntimeError as error:
            raise UsageError(
                "A RayRun was made outside of a worker of Ray Train.",
                advice="Make it in the function that TorchTrainer calls; elsewhere use "
                "paceline.Run.",
            ) from error
        if folder is None:
            # In Ray's session folder, which Ray removes: killed workers cannot clean up.
            here = ray.get_runtime_context()
            session = Path(here.get_temp_dir(), here.get_session_name())
            folder = Path(mkdtemp(prefix="paceline-", dir=session), context.get_experiment_name())
        self._checkpoints = RunFolder(Path(folder)).checkpoints
        if context.get_world_rank() == 0:
            self._fetch()
        self._metrics = _Metrics()
        sinks = [*kwargs.pop("sinks", ()), self._metrics]
        super().__init__(*args, folder=folder, sinks=sinks, **kwargs)
        self._sent = self._position

    def __iter__(self) -> Iterator[Step]:
        return self._iterate_and_send(super().__iter__())

    def _iterate_and_send(self, steps: Any) -> Iterator[Step]:
        with closing(steps):
            for step in steps:
                self._send()
                yield step
        self._send()

    @property
    def _position(self) -> tuple[int, int | None]:
        """Complete epochs and the last save; Ray gets a report when one of them changes."""
        return self.epoch, self._parts.outlets.saving.saved_step

    def _fetch(self) -> None:
        """Copy Ray's newest checkpoint to the folder in which the run looks for one."""
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            home = self._checkpoints / os.path.basename(checkpoint.path)
            if not home.exists():
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                with checkpoint.as_directory() as path:
                    shutil.copytree(path, home)

    def _send(self) -> None:
        """Report what is new. All workers report after the same step: Ray's call is a barrier."""
        if self._position == self._sent:
            return
        self._sent, saving = self._position, self._parts.outlets.saving
        self._parts.outlets.report_checkpoints(wait=True)
        is_written = saving.written_step == saving.saved_step
        name = self._metrics.take_checkpoint() if is_written else ""
        checkpoint = train.Checkpoint.from_directory(self._checkpoints / name) if name else None
        train.report(
            {"step": self.step, "epoch": self.epoch, **self._metrics.take()},
            checkpoint=checkpoint,
            checkpoint_dir_name=name or None,
        )


class _Metrics(Sink):
    """Collects metrics until they are reported to Ray."""

    def __init__(self) -> None:
        self._checkpoint = ""
        self._values: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        taken, self._values = self._values, {}
        return taken

    def take_checkpoint(self) -> str:
        """The name of the newest checkpoint, if Ray does not have it."""
        taken, self._checkpoint = self._checkpoint, ""
        return taken

    def step(self, report: StepReport) -> None:
        self._keep("train", report)

    def epoch(self, summary: Summary) -> None:
        self._keep("epoch", summary)

    def evaluation(self, summary: Summary) -> None:
        self._keep("eval", summary)

    def checkpoint(self, written: Written) -> None:
        self._checkpoint = written.name

    def _keep(self, kind: str, report: StepReport | Summary) -> None:
        self._values |= {f"{kind}/{name}": value for name, value in report.metrics.items()}
