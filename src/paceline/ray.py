"""`RayRun`: a `Run` in the workers of Ray Train, which are on as many machines as Ray has.

    TorchTrainer --starts--> workers, each with a RayRun --metrics, checkpoints--> Ray's storage
         ^                                                                              |
         '------------ a worker dies: all start again from the newest one <-------------'

Ray knows which machines there are, starts workers and replaces them; what they train is a `Run`.
Whenever the run saves, Ray gets the checkpoint and the metrics that are new.
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
    """A `Run`, with its arguments, made by the function that Ray's `TorchTrainer` calls.

    Ray is told after every epoch and every save: `step`, `epoch`, and the metrics since the last
    time by the names that trackers have, `epoch/loss` or `eval/accuracy`; with the checkpoint. A
    run that Ray starts again continues from the newest checkpoint that Ray has. Without a `folder`
    there is one in Ray's session folder on each machine.
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
            # Where Ray keeps what is temporary: it kills workers, which clean nothing.
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
        return self._walk_and_send(super().__iter__())

    def _walk_and_send(self, steps: Any) -> Iterator[Step]:
        with closing(steps):
            for step in steps:
                self._send()
                yield step
        self._send()

    @property
    def _position(self) -> tuple[int, int | None]:
        """What Ray is told of when it changes: epochs that are complete, and the last save."""
        return self.epoch, self._parts.outlets.saving.saved_step

    def _fetch(self) -> None:
        """Put Ray's newest checkpoint where the run looks for it."""
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            home = self._checkpoints / os.path.basename(checkpoint.path)
            if not home.exists():
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                with checkpoint.as_directory() as path:
                    shutil.copytree(path, home)

    def _send(self) -> None:
        """Report what is new; all workers do so after the same step, because Ray waits for all."""
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
    """Keeps what Ray has not been told yet."""

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

    def _keep(self, kind: str, told: StepReport | Summary) -> None:
        self._values |= {f"{kind}/{name}": value for name, value in told.metrics.items()}
