"""A run for programs: one JSON object on each line, in the words of the run folder's events.

Steps are thinned out, everything else is complete. Numbers that JSON cannot say are the strings
"nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from paceline.progress import numbers
from paceline.progress.painter import Sheet
from paceline.progress.state import Row, State


class JsonPainter:
    """Writes objects with a `kind` and the time `t`, in seconds since 1970."""

    interval_s = 1.0

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet

    def start(self, state: State) -> None:
        facts = asdict(state.facts)
        facts["step"] = facts.pop("first_step")
        self._write("start", facts)

    def step(self, state: State) -> None:
        speed = state.speed
        self._write(
            "step",
            {
                "step": state.step,
                "epoch": state.epoch,
                "samples": state.samples,
                "metrics": dict(state.metrics),
                "samples_per_s": speed.samples_per_s,
                "time_left_s": speed.time_left_s(state.steps_left),
            },
        )

    def epoch(self, state: State, row: Row) -> None:
        what = {"metrics": row.metrics, "seconds": row.seconds, "samples": row.samples}
        self._write("epoch", {"epoch": row.epoch, "step": state.step, **what})

    def evaluation(self, state: State, row: Row) -> None:
        what = {"epoch": row.epoch, "step": state.step, "metrics": row.evaluation}
        self._write("evaluation", what)

    def message(self, state: State | None, text: str, level: str) -> None:
        self._write("message", {"text": text, "level": level})

    def finish(self, state: State, status: str, lines: Sequence[str]) -> None:
        what = {"status": status, "step": state.step, "samples": state.samples}
        self._write("finish", {**what, "seconds": state.elapsed_s, "lines": list(lines)})

    def close(self) -> None:
        """A line is whole as soon as it is written."""

    def _write(self, kind: str, what: dict[str, object]) -> None:
        self.sheet.write(json.dumps(numbers.strict({"kind": kind, "t": time.time(), **what})))
