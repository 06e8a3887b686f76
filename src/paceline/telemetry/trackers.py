"""One class for every tracker; each imports its library when a run begins."""

from __future__ import annotations

import csv
import netrc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, did_you_mean
from paceline.files import RunFolder, RunInfo
from paceline.telemetry.tracker import Point, Tracker

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
        """Write the columns anew, with the rows of no step after `up_to`."""
        rows: list[dict[str, str]] = []
        if self._path.exists():
            with open(self._path, newline="") as file:
                found = csv.DictReader(file)
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
    """Weights & Biases, in the mode that `wandb` itself is set to."""

    extra = "wandb"
    holds_newest = True

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
    """MLflow, at the place that `mlflow` itself is set to (MLFLOW_TRACKING_URI)."""

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
    """The sinks for what `Run(trackers=...)` was given: names, or sinks of one's own."""
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
