"""Trackers: sinks that write to a tracking library from a thread of their own.

    training: step, epoch, evaluation --point--> queue --thread--> the tracker's library

The loop only puts a point into a queue. An exception of the library is raised by the sink's next
method, which switches the sink off with one warning. When the queue is full because a tracker does
not keep up, points are dropped, and the end of the run reports how many: training never waits.

A run that is resumed goes back to its last checkpoint and repeats some steps. The tracker has those
already, so a small file in the run folder records the last step of each kind of point, and the
identifier of the run in the tracker. A library is imported when a run begins.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import netrc
import os
import queue
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import PacelineError, UsageError, did_you_mean
from paceline.files import RunFolder, RunInfo, open_plain, read_json, replace_file
from paceline.telemetry.units import count_text

if TYPE_CHECKING:
    from paceline.telemetry.sinks import Message, StepReport, Summary, Written


QUEUE_POINTS = 10_000
STATE_LIMIT_BYTES = 2**16
STATE_PERIOD_S = 1.0
"""How far the file in the run folder may lag behind."""
CLOSE_TIMEOUT_S = 60.0
"""How long the end of a run waits for a tracker that is still writing, for example to a network."""
_VOLATILE = {"created", "updated", "status", "step", "policy", "schema"}


class Point(NamedTuple):
    """Some values after a step."""

    kind: str
    """`train`: a step, as rank 0 saw it; `epoch`: exact, over all workers; `eval`."""
    step: int
    epoch: int
    values: Mapping[str, float]
    """By name, with the kind before it: `eval/accuracy`."""


class Tracker:
    """What all trackers share; a subclass calls one library, in the tracker's thread only."""

    extra = ""
    """What to install, as `paceline[extra]`, and to import."""
    rewinds = False
    """Whether the tracker can delete its points of steps that are repeated."""
    buffers_newest = False
    """Whether the library writes a step only when a later one arrives."""

    def __init__(self, project: str = "", folder: RunFolder | None = None) -> None:
        self.project, self.folder = project, folder
        self.known: dict[str, Any] = {}
        """What is saved in the run folder from one start to the next, such as the run's id."""
        self._last: dict[str, int] = {}
        """By kind, the step of the last point passed to the library."""
        self._flushed: dict[str, int] = {}
        """The same without the newest step, which a library may still buffer."""
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_POINTS)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lost = 0
        self._saved, self._saved_s = "", 0.0
        self._newest: str = ""

    def check(self) -> None:
        """Raise a UsageError if this cannot work here, before the run begins."""
        if self.extra and importlib.util.find_spec(self.extra) is None:
            raise UsageError(
                f"The tracker {self.extra!r} needs {self.extra}, which is not installed.",
                advice=f"pip install 'paceline[{self.extra}]'",
            )

    def open(self, info: RunInfo, settings: Mapping[str, Any], step: int) -> None:
        """The run begins, or continues, after `step` steps."""
        raise NotImplementedError

    def write(self, points: Sequence[Point]) -> None:
        raise NotImplementedError

    def keep_checkpoint(self, path: Path) -> None:
        """Keep the last checkpoint as an artifact, where the tracker has such."""

    def close(self, status: str) -> None:
        """The run has ended: `finished`, `stopped` or `failed`."""
        raise NotImplementedError

    def start(self, info: RunInfo, step: int, lines: Sequence[str]) -> None:
        self._thread = threading.Thread(
            target=self._work, args=(info, step), name=f"paceline {self.name}", daemon=True
        )
        self._thread.start()

    def step(self, report: StepReport) -> None:
        values = {f"train/{name}": value for name, value in report.metrics.items()}
        if report.lr is not None:
            values["train/lr"] = report.lr
        values["train/samples_per_s"] = report.samples / max(report.seconds, 1e-9)
        self._put(Point("train", report.step, report.epoch, values))

    def epoch(self, summary: Summary, kind: str = "epoch") -> None:
        values = {f"{kind}/{name}": value for name, value in summary.metrics.items()}
        self._put(Point(kind, summary.step, summary.epoch, values))

    def evaluation(self, summary: Summary) -> None:
        self.epoch(summary, "eval")

    def message(self, message: Message) -> None:
        if message.kind == "noise":
            numbers = {k: v for k, v in message.facts.items() if isinstance(v, int | float)}
            if (step := numbers.pop("step", None)) is not None:
                values = {f"noise/{name}": float(value) for name, value in numbers.items()}
                self._put(Point("noise", int(step), 0, values))

    def checkpoint(self, written: Written) -> None:
        self._raise_error()
        self._newest = written.name

    def stop(self, step: int, status: str, reason: str) -> None:
        if self._thread is not None:
            with suppress(queue.Full):  # it hangs, as the warning will say
                self._queue.put(status, timeout=CLOSE_TIMEOUT_S)
                self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                warnings.warn(
                    f"{self.name} still writes after {CLOSE_TIMEOUT_S:.0f} s: what it has not "
                    "sent by the end of this process is missing there.",
                    stacklevel=2,
                )
        if self._lost:
            lost = count_text(self._lost, "point")
            warnings.warn(f"{self.name} could not keep up: {lost} are missing.", stacklevel=2)
        self._raise_error()

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def _state_path(self) -> Path | None:
        name = f"tracker-{self.name.lower()}.json"
        return None if self.folder is None else self.folder.path / name

    def _put(self, point: Point) -> None:
        self._raise_error()
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            self._lost += 1

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise PacelineError(f"{type(error).__name__}: {error}") from error

    def _work(self, info: RunInfo, step: int) -> None:
        try:
            self._read_state()
            if self.rewinds:  # `open` will drop the points of steps that are repeated
                self._last = {kind: min(last, step) for kind, last in self._last.items()}
            settings = {k: v for k, v in asdict(info).items() if k not in _VOLATILE}
            settings = {**settings.pop("settings"), **settings}
            self.open(info, settings, step)
            self._save_state()
            # Steps up to `before` are repeated after a resume: the tracker has their points
            # already.
            status, before = "", dict(self._last)
            while not status:
                points, status = self._take()
                new = [p for p in points if p.step > before.get(p.kind, -1)]
                if new:
                    self.write(new)
                for point in new:
                    if point.step > max(self._last.values(), default=-1):
                        self._flushed = dict(self._last)
                    self._last[point.kind] = point.step
                if time.monotonic() > self._saved_s + STATE_PERIOD_S:
                    self._save_state()
            if self._newest and self.folder is not None:
                path = self.folder.checkpoints / self._newest
                if path.is_dir():
                    self.keep_checkpoint(path)
            self.close(status)
            self._flushed = self._last
            self._save_state()
        except BaseException as error:  # some of wandb's do not derive from Exception
            self._error = error

    def _take(self) -> tuple[list[Point], str]:
        """The queued points, or none after a while; and the run's status once it has ended."""
        points: list[Point] = []
        try:
            item = self._queue.get(timeout=STATE_PERIOD_S)
            while isinstance(item, Point):
                points.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return points, ""
        return points, item

    def _read_state(self) -> None:
        """Read the file of an earlier start, if there is a valid one."""
        if self._state_path is None:
            return
        try:
            with open_plain(self._state_path) as file:
                state = read_json(file, STATE_LIMIT_BYTES, self._state_path)
        except (OSError, PacelineError):
            return
        match state:
            case {"last": dict(last), "known": dict(known)}:
                self._last = {k: v for k, v in last.items() if isinstance(v, int)}
                self._flushed = dict(self._last)
                self.known = {k: v for k, v in known.items() if isinstance(v, str)}

    def _save_state(self) -> None:
        self._saved_s = time.monotonic()
        last = self._flushed if self.buffers_newest else self._last
        state = json.dumps({"last": last, "known": self.known})
        if self._state_path is not None and state != self._saved:
            self._saved = state
            replace_file(self._state_path, [state, "\n"])


_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class CSV(Tracker):
    """`metrics.csv` in the run folder: a row for every point, a column for every value."""

    rewinds = True
    FIXED = ("step", "epoch", "kind")

    def check(self) -> None:
        if self.folder is None:
            raise UsageError(
                "The tracker 'csv' has nowhere to write.",
                advice='Give the run a folder: Run(..., folder="runs/first").',
            )

    def open(self, info: RunInfo, settings: Mapping[str, Any], step: int) -> None:
        assert self.folder is not None
        self._path = self.folder.path / "metrics.csv"
        self._columns: list[str] = list(self.FIXED)
        self._rewrite(step)
        self._file = open(self._path, "a", newline="")  # noqa: SIM115

    def write(self, points: Sequence[Point]) -> None:
        names = dict.fromkeys(name for point in points for name in point.values)
        if more := [name for name in names if name not in self._columns]:
            self._file.close()
            self._columns += more
            self._rewrite(None)
            self._file = open(self._path, "a", newline="")  # noqa: SIM115
        writer = csv.DictWriter(self._file, self._columns)
        for point in points:
            fixed = {"step": point.step, "epoch": point.epoch, "kind": point.kind}
            writer.writerow({**fixed, **point.values})
        self._file.flush()

    def close(self, status: str) -> None:
        self._file.close()

    def _rewrite(self, up_to: int | None) -> None:
        """Rewrite the file with the current columns, without rows of steps after `up_to`."""
        rows: list[dict[str, str]] = []
        if self._path.exists():
            with open(self._path, newline="") as file:
                # A full disk may have cut the last row, even within the number of its step.
                found = csv.DictReader(line for line in file if line.endswith(("\r", "\n")))
                known = [name for name in found.fieldnames or () if name not in self._columns]
                self._columns += known
                rows = [
                    row
                    for row in found
                    if (row["step"] or "").isdecimal()
                    and (up_to is None or int(row["step"]) <= up_to)
                ]
        new = self._path.with_suffix(".csv.new")
        with open(new, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self._path)


class TensorBoard(Tracker):
    """Event files, in `tensorboard` of the run folder or in the folder given."""

    extra = "tensorboard"
    rewinds = True

    def check(self) -> None:
        super().check()
        if self.folder is None and not self.project:
            raise UsageError(
                "The tracker 'tensorboard' has nowhere to write.",
                advice='Give the run a folder, or name one: trackers=["tensorboard:logs"].',
            )

    def open(self, info: RunInfo, settings: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = self.project or str(self.folder and self.folder.path / "tensorboard")
        purge = step + 1 if self._last else None
        self._writer: Any = SummaryWriter(place, purge_step=purge)
        if not self._last:
            rows = [f"| {name} | {value} |" for name, value in settings.items()]
            text = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._writer.add_text("settings", text, step)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


class RunLog(Tracker):
    """A library whose run has a method `log`."""

    _run: Any

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, "epoch": point.epoch}, step=point.step)


class WandB(RunLog):
    """Weights & Biases, in the mode that `wandb` itself is configured for."""

    extra = "wandb"
    buffers_newest = True

    def check(self) -> None:
        super().check()
        mode = os.environ.get("WANDB_MODE", "online")
        if mode in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
            return
        try:
            hosts = netrc.netrc().hosts
        except (OSError, netrc.NetrcParseError):
            hosts = {}
        if not any("wandb" in host for host in hosts) and "WANDB_BASE_URL" not in os.environ:
            raise UsageError(
                "The tracker 'wandb' is not logged in.",
                advice="Run `wandb login`, or set WANDB_MODE=offline and send it later with "
                "`wandb sync`.",
            )

    def open(self, info: RunInfo, settings: Mapping[str, Any], step: int) -> None:
        import wandb

        self._run = wandb.init(
            project=self.project or "paceline",
            name=info.name,
            id=self.known.get("id"),
            resume="allow",
            config=dict(settings),
            dir=None if self.folder is None else str(self.folder.path),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.known["id"] = self._run.id

    def keep_checkpoint(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class MLflow(Tracker):
    """MLflow, at the address that `mlflow` itself is configured for (MLFLOW_TRACKING_URI)."""

    extra = "mlflow"
    LIMIT = 900
    """Values in one call; MLflow takes 1,000."""

    def open(self, info: RunInfo, settings: Mapping[str, Any], step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if run_id := self.known.get("run_id"):
            self._run_id = run_id
            self._client.set_terminated(run_id, "RUNNING")
            return
        name = self.project or "paceline"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._run_id = self._client.create_run(experiment, run_name=info.name).info.run_id
        self.known["run_id"] = self._run_id
        # Older servers take no more characters.
        params = [Param(name, str(value)[:500]) for name, value in settings.items()]
        self._client.log_batch(self._run_id, params=params)

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now_ms = int(1e3 * time.time())
        metrics = [
            Metric(name, float(value), now_ms, point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), self.LIMIT):
            self._client.log_batch(self._run_id, metrics[start : start + self.LIMIT])

    def keep_checkpoint(self, path: Path) -> None:
        self._client.log_artifacts(self._run_id, str(path), f"checkpoints/{path.name}")

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _MLFLOW_STATUS.get(status, "FINISHED"))


class Trackio(RunLog):
    """trackio, which keeps everything on this machine unless told otherwise."""

    extra = "trackio"

    def open(self, info: RunInfo, settings: Mapping[str, Any], step: int) -> None:
        import trackio

        self.known.setdefault("name", f"{info.name}-{int(info.created)}")
        self._run = trackio.init(
            self.project or "paceline",
            name=self.known["name"],
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def close(self, status: str) -> None:
        self._run.finish()


KINDS: dict[str, type[Tracker]] = {
    "csv": CSV,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}


def make_trackers(wanted: Sequence[Any], folder: str | os.PathLike[str] | None) -> list[Any]:
    """The sinks for `Run(trackers=...)`: names of trackers, or the user's own sinks."""
    place = None if folder is None else RunFolder(folder)
    made: list[Any] = []
    for each in wanted:
        if isinstance(each, str):
            name, _, project = each.partition(":")
            if name not in KINDS:
                raise UsageError(
                    f"There is no tracker {name!r:.80}.{did_you_mean(name, KINDS)}",
                    advice=f"There are: {', '.join(KINDS)}; or pass an object with the methods of "
                    "a sink.",
                )
            each = KINDS[name](project)
        if isinstance(each, Tracker):
            each.folder = each.folder or place
            each.check()
        made.append(each)
    return made
