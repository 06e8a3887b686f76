"""A study of scaling: what was measured, compared, predicted and suggested, as one value.

Everything here is computed from profiles, so a test can make a study without running anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.explain.scaling.attribution import (
    Machine,
    Mode,
    Result,
    attribute,
    detect_mode,
)
from paceline.explain.scaling.prediction import Check, Prediction, check, fit
from paceline.explain.scaling.profile import Profile
from paceline.explain.scaling.simulation import Network
from paceline.explain.scaling.suggestion import Suggestion, suggest
from paceline.observe.run_folder import RunFolder

SCHEMA = 1
GOOD_ERROR = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One job at several sizes."""

    name: str
    machine: Machine
    threads: int
    repeats: int
    mode: Mode
    mode_why: str
    profiles: tuple[Profile, ...]
    results: tuple[Result, ...]
    suggestion: Suggestion | None = None
    predictions: tuple[Prediction, ...] = ()
    checks: tuple[Check, ...] = ()
    fitted: tuple[int, ...] = ()
    """The sizes that the predictions were learned from."""

    @property
    def is_whole_job(self) -> bool:
        return any(profile.is_whole_job for profile in self.profiles)

    @property
    def others_cores(self) -> float:
        """How many cores other programs used at most during the runs of one size."""
        return max(profile.others_cores for profile in self.profiles)

    @property
    def check_text(self) -> str:
        """How far predictions are from what was measured, in a sentence or two."""
        if not self.fitted:
            return ""
        learned = " and ".join(map(str, self.fitted))
        if not self.checks:
            return (
                f"The prediction was learned from {learned} workers, and no other size was "
                "measured to check it."
            )
        parts = [
            f"{each.workers} workers: predicted {each.predicted_s * 1e3:.2f} ms, measured "
            f"{each.measured_s * 1e3:.2f} ms, {each.error:+.0%}".replace("%", " %")
            for each in self.checks
        ]
        worst = max(abs(each.error) for each in self.checks)
        verdict = (
            "" if worst <= GOOD_ERROR else " That is too far off to trust the prediction much."
        )
        return f"Checked where it had not seen the answer: {'; '.join(parts)}.{verdict}"


def make_study(
    profiles: Sequence[Profile],
    *,
    name: str,
    machine: Machine,
    repeats: int = 1,
    mode: Mode | None = None,
    predict: Sequence[int] = (),
    networks: Sequence[Network] = (),
) -> Study:
    """Compare sizes with the first, which is one worker, and predict others where asked."""
    one = profiles[0]
    if any(profile.is_whole_job for profile in profiles):
        found: tuple[Mode, str] = "strong", "assumed; see --mode"
    else:
        found = detect_mode(list(profiles))
    chosen, why = (mode, "as told") if mode is not None else found
    results = tuple(
        attribute(
            one,
            profile,
            chosen,
            machine.crowding_of(profile, one),
            machine.crowding_with_others(profile, one),
        )
        for profile in profiles
    )
    job = None
    checks: list[Check] = []
    several = [profile for profile in profiles if profile.workers > 1]
    if several and not any(profile.is_whole_job for profile in profiles):
        job = fit(one, several[0], chosen, machine)
        checks = check(job, one, several[1:], machine)
    if predict and job is None:
        raise UsageError(
            "Nothing can be predicted from what was measured.",
            advice="Measure one worker and several, with a script that records its steps: one "
            "that uses paceline's DistributedDataParallel or Run.",
        )
    predictions = [
        job.predict(size, network) for network in networks for size in predict if job is not None
    ]
    return Study(
        name=name,
        machine=machine,
        threads=one.threads,
        repeats=repeats,
        mode=chosen,
        mode_why=why,
        profiles=tuple(profiles),
        results=results,
        suggestion=suggest(results, profiles, job, machine),
        predictions=tuple(predictions),
        checks=tuple(checks),
        fitted=(1, several[0].workers) if job is not None else (),
    )


def as_json(study: Study) -> dict[str, Any]:
    """The study as `scaling.json` has it; docs/scaling.md and docs/report.md list the keys."""
    return {
        "schema": SCHEMA,
        "name": study.name,
        "mode": study.mode,
        "mode_why": study.mode_why,
        "cores": study.machine.cores,
        "threads": study.threads,
        "repeats": study.repeats,
        "measured": "job" if study.is_whole_job else "step",
        "sizes": [_size(*pair) for pair in zip(study.results, study.profiles, strict=True)],
        "predicted": [
            {
                "workers": each.workers,
                "network": each.network,
                "step_s": each.step_s,
                "speedup": each.speedup,
                "efficiency": each.efficiency,
                "exposed_s": each.exposed_s,
            }
            for each in study.predictions
        ],
        "suggestion": None
        if study.suggestion is None
        else {
            "text": f"{study.suggestion.text} Predicted gain: {study.suggestion.gain:.0%}.".replace(
                "%", " %"
            ),
            "gain": study.suggestion.gain,
        },
        "check": {
            "text": study.check_text,
            "fitted": list(study.fitted),
            "sizes": [
                {
                    "workers": each.workers,
                    "measured_s": each.measured_s,
                    "predicted_s": each.predicted_s,
                    "error": each.error,
                }
                for each in study.checks
            ],
        },
    }


def _size(result: Result, profile: Profile) -> dict[str, Any]:
    return {
        "workers": result.workers,
        "step_s": result.step_s,
        "ideal_s": result.ideal_s,
        "speedup": result.speedup,
        "efficiency": result.efficiency,
        "lost": dict(result.lost_s),
        "crowding": result.crowding,
        "others_cores": profile.others_cores,
        "samples": profile.samples,
        "steps": profile.steps,
        "runs_s": list(profile.runs_s),
        "seconds": dict(profile.seconds),
        "buckets": [
            {"ready_s": bucket.ready_s, "bytes": bucket.nbytes} for bucket in profile.buckets
        ],
    }


def write(study: Study, folder: Path) -> Path:
    """Write `scaling.json` into a run folder, as a whole."""
    place = RunFolder(folder)
    place.create()
    temporary = place.path / f".scaling.json.{os.getpid()}"
    flags = os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(as_json(study), file, allow_nan=False, indent=1)
            file.write("\n")
        os.replace(temporary, place.scaling)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(
            f"{place.scaling} cannot be written: {error.strerror}.", advice="Name another folder."
        ) from error
    return place.scaling
