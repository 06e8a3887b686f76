"""A study of scaling as lines of text: 80 columns, plain letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from paceline.explain.scaling.attribution import PARTS, percentages

if TYPE_CHECKING:
    from paceline.explain.scaling.profile import Profile
    from paceline.explain.scaling.study import Study

WIDTH = 80
RESTLESS = 0.2
HEADINGS = {"communication": "exchange", "optimizer": "update"}
MEANINGS = {
    "sharing": "workers share cores or a device",
    "communication": "the exchange of gradients that backward does not hide",
    "waiting": "waiting for the slowest worker",
    "data": "fetching samples",
    "optimizer": "the update, which every worker repeats",
    "compute": "forward and backward take longer for each sample than on one worker",
    "other": "everything else, such as the loss and logging",
}


def lines(study: Study) -> Iterator[str]:
    """All of it."""
    yield from _header(study)
    yield ""
    yield from _sizes(study)
    if study.is_whole_job:
        return
    if any(result.lost > 0 for result in study.results):
        yield ""
        yield from _losses(study)
    if study.suggestion is not None:
        yield ""
        gain = f"Predicted gain: {study.suggestion.gain:.0%}.".replace("%", " %")
        yield from _wrapped(f"Try: {study.suggestion.text} {gain}")
    if study.predictions:
        yield ""
        yield from _predictions(study)
    if study.check_text:
        yield ""
        yield from _wrapped(study.check_text)


def _header(study: Study) -> Iterator[str]:
    threads = f"{study.threads} thread{'s' if study.threads > 1 else ''} for each worker"
    yield from _wrapped(
        f"{study.name}: {threads}, {study.machine.cores} cores; a usual step of "
        f"{study.repeats} run{'s' if study.repeats > 1 else ''} each."
    )
    yield from _wrapped(f"{study.mode.capitalize()} scaling ({study.mode_why}).")
    if study.others_cores > 0.1 * study.machine.cores:
        yield from _wrapped(
            f"Other programs used {study.others_cores:.1f} of the {study.machine.cores} cores "
            "meanwhile: these numbers are those of a busy machine."
        )
    if study.is_whole_job:
        yield from _wrapped(
            "The workers recorded no steps, so these are times of the whole job, its start "
            "included. Where time is lost can be told for scripts that train with paceline's "
            "DistributedDataParallel or Run; --as-torch does so for torch's class."
        )


def _sizes(study: Study) -> Iterator[str]:
    yield "workers    step ms   speed-up  efficiency    lost  runs apart"
    for result, profile in zip(study.results, study.profiles, strict=True):
        lost = f"{result.lost:.0%}".replace("%", " %") if result.workers > 1 else ""
        efficiency = f"{result.efficiency:.0%}".replace("%", " %")
        apart = f"{_apart(profile):.0%}".replace("%", " %") if len(profile.runs_s) > 1 else ""
        note = f"  {_crowded(result.crowding)}" if result.crowding > 1 else ""
        row = (
            f"{result.workers:>7}{result.step_s * 1e3:>11.2f}{result.speedup:>10.2f}x"
            f"{efficiency:>12}{lost:>8}{apart:>12}{note}"
        )
        yield row.rstrip()
    restless = [each for each in study.profiles if _apart(each) > RESTLESS]
    if restless:
        sizes = " and ".join(str(each.workers) for each in restless)
        yield from _wrapped(
            f"The runs of {sizes} worker{'s' if sizes != '1' else ''} are far apart; the faster "
            "half counts. Repeat this on a quiet machine."
        )


def _apart(profile: Profile) -> float:
    return max(profile.runs_s) / min(profile.runs_s) - 1


def _crowded(crowding: float) -> str:
    return f"{crowding:.1f} per core"


def _losses(study: Study) -> Iterator[str]:
    lost = [result for result in study.results if result.lost > 0]
    shown = [part for part in PARTS if part == "other" or any(r.lost_s[part] for r in lost)]
    yield "Where the lost time went, in percent of it:"
    widths = {part: len(HEADINGS.get(part, part)) + 2 for part in shown}
    heads = "".join(f"{HEADINGS.get(part, part):>{widths[part]}}" for part in shown)
    yield f"workers{'lost ms':>9}{heads}{'sum':>5}"
    for result in lost:
        shares = percentages(result.lost_s)
        cells = "".join(f"{shares[part]:>{widths[part]}}" for part in shown)
        total = sum(result.lost_s.values())
        yield f"{result.workers:>7}{total * 1e3:>9.2f}{cells}{sum(shares.values()):>5}"
    for part in shown:
        if any(percentages(result.lost_s)[part] >= 5 for result in lost):
            yield f"  {HEADINGS.get(part, part)}: {MEANINGS[part]}"


def _predictions(study: Study) -> Iterator[str]:
    yield "Predicted, not measured; every worker has a core or device of its own:"
    yield "workers  network          step ms    speed-up  efficiency  exposed ms"
    for each in study.predictions:
        efficiency = f"{each.efficiency:.0%}".replace("%", " %")
        yield (
            f"{each.workers:>7}  {each.network[:12]:<12}{each.step_s * 1e3:>12.2f}"
            f"{each.speedup:>11.2f}x{efficiency:>12}{each.exposed_s * 1e3:>12.2f}"
        )


def _wrapped(text: str) -> Sequence[str]:
    safe = text.encode("ascii", "backslashreplace").decode("ascii")
    together = safe.replace(" %", "\0%")  # a number and its unit stay on one line
    lines = wrap(together, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]
