"""`paceline scale`: runs the same job on 1, 2, 4 workers, and finds where speed-up is lost.

measure --> Study: compared, predicted, suggested --> lines of text, scaling.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from paceline import env
from paceline.errors import SettingError, UsageError, check_whole
from paceline.files import RunFolder, write_output
from paceline.launcher import check_program, count_cores
from paceline.show.scaling.attribution import (
    MEANINGS,
    PARTS,
    Mode,
    SizeResult,
    attribute,
    detect_mode,
)
from paceline.show.scaling.islands import forecast_by_network
from paceline.show.scaling.measure import Profile, measure
from paceline.show.scaling.prediction import NETWORKS, Network, PredictionCheck, fit_job, suggest
from paceline.telemetry import Phase, count_text, list_text, percentages, share_text, table_lines

SCHEMA = 1
WIDTH = 80
GOOD_ERROR = 0.15
RESTLESS = 0.2
_MOST_WORKERS = 10**6

NAME_BY_PHASE = {phase: str(phase) for phase in Phase} | {
    Phase.WAIT: "waiting",
    Phase.TRANSFER: "communication",
}
"""Phases by their names in scaling.json."""
HEADINGS = {part: part for part in PARTS} | {"communication": "exchange", "optimizer": "update"}


Study = dict[str, Any]
"""The document `scaling.json`: measurements, comparison, predictions, suggestion.

docs/scaling.md and docs/report.md list the keys. Terminal and report draw the same values.
"""


def make_study(
    profiles: Sequence[Profile],
    *,
    name: str,
    cores: int,
    repeats: int = 1,
    mode: Mode | None = None,
    predict: Sequence[int] = (),
    networks: Sequence[Network] = (),
) -> Study:
    """Compare sizes with the first, which is one worker, and predict others where asked."""
    one, several = profiles[0], profiles[1:]
    chosen, why = (mode, "as given by --mode") if mode is not None else detect_mode(profiles)
    results = [attribute(one, profile, chosen, cores) for profile in profiles]
    job = fit_job(one, several[0], chosen, cores) if several else None
    fitted = [1, several[0].workers] if several else []
    checks = [job.check(profile) for profile in several[1:]] if job else []
    pairs = [(size, network) for network in networks for size in predict]
    predicted = [(job.predict(*pair), pair[1]) for pair in pairs] if job else []
    suggestion = suggest(results, profiles[-1])
    return {
        "schema": SCHEMA,
        "name": name,
        "mode": chosen,
        "mode_why": why,
        "cores": cores,
        "threads": one.threads,
        "repeats": repeats,
        "sizes": [_size(*pair) for pair in zip(results, profiles, strict=True)],
        "predicted": [asdict(each) for each, _ in predicted],
        "islands": forecast_by_network(job, predicted) if job else [],
        "suggestion": suggestion
        and {
            "text": f"{suggestion.text} Predicted gain: {share_text(suggestion.gain)}.",
            "gain": suggestion.gain,
        },
        "check": {
            "text": _check_text(fitted, checks),
            "fitted": fitted,
            "sizes": [asdict(each) for each in checks],
        },
    }


def _size(result: SizeResult, profile: Profile) -> dict[str, Any]:
    return asdict(result) | {
        "samples": profile.samples,
        "steps": profile.steps,
        "runs_s": list(profile.runs_s),
        "seconds": {name: profile.seconds[phase] for phase, name in NAME_BY_PHASE.items()},
        "slow": str(profile.slow or ""),
        "buckets": [{"ready_s": ready_s, "bytes": nbytes} for ready_s, nbytes in profile.buckets],
    }


def _check_text(fitted: Sequence[int], checks: Sequence[PredictionCheck]) -> str:
    """The error of predictions against measurements, in a sentence or two."""
    if not fitted:
        return ""
    if not checks:
        return f"The prediction was fitted to {list_text(fitted)} workers, and not checked."
    parts = [
        f"{each.workers} workers: predicted {each.predicted_s * 1e3:.2f} ms, measured "
        f"{each.measured_s * 1e3:.2f} ms, {each.error * 100:+.0f} %"
        for each in checks
    ]
    is_good = max(abs(each.error) for each in checks) <= GOOD_ERROR
    verdict = "" if is_good else " Errors this large make the prediction unreliable."
    return f"Checked against sizes that it was not fitted to: {'; '.join(parts)}.{verdict}"


def write(study: Study, folder: Path) -> Path:
    """Write `scaling.json` into a run folder, atomically."""
    place = RunFolder(folder)
    place.create_for_output()
    write_output(place.scaling, [as_text(study)])
    return place.scaling


def as_text(study: Study) -> str:
    return json.dumps(study, allow_nan=False, indent=1) + "\n"


def lines(study: Study) -> Iterator[str]:
    """The study as ASCII text, 80 columns wide."""
    lost = [size for size in study["sizes"] if any(size["lost"].values())]
    suggestion = study["suggestion"]
    sections: list[Iterable[str]] = [
        _header(study),
        _sizes(study["sizes"]),
        _losses(lost) if lost else (),
        _wrapped(f"Try: {suggestion['text']}") if suggestion else (),
        _predictions(study["predicted"]) if study["predicted"] else (),
        _wrapped(study["check"]["text"]),
        [line for each in study["islands"] for line in _wrapped(each["text"])],
    ]
    written = [section for each in sections if (section := list(each))]
    for number, section in enumerate(written):
        yield from ["", *section] if number else section


def _header(study: Study) -> Iterator[str]:
    cores = study["cores"]
    yield from _wrapped(
        f"{study['name']}: {count_text(study['threads'], 'thread')} for each worker, {cores} "
        f"cores; a usual step of {count_text(study['repeats'], 'run')} each."
    )
    yield from _wrapped(f"{study['mode'].capitalize()} scaling ({study['mode_why']}).")


def _sizes(sizes: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [["workers", "step ms", "speed-up", "efficiency", "lost", "runs apart", ""]]
    apart = {size["workers"]: max(size["runs_s"]) / min(size["runs_s"]) - 1 for size in sizes}
    for size in sizes:
        lost = sum(size["lost"].values()) / size["step_s"]
        rows.append(
            [
                str(size["workers"]),
                f"{size['step_s'] * 1e3:.2f}",
                f"{size['speedup']:.2f}x",
                share_text(size["efficiency"]),
                share_text(lost) if size["workers"] > 1 else "",
                share_text(apart[size["workers"]]) if len(size["runs_s"]) > 1 else "",
                f"{size['crowding']:.1f} per core" if size["crowding"] > 1 else "",
            ]
        )
    yield from table_lines(rows, ">>>>>><")
    if any(share > RESTLESS for share in apart.values()):
        yield from _wrapped(
            "Some runs differ much; the faster half counts. Repeat this on an idle machine."
        )


def _losses(sizes: Sequence[dict[str, Any]]) -> Iterator[str]:
    shares = [percentages(size["lost"]) for size in sizes]
    shown = [part for part in PARTS if part == "other" or any(s["lost"][part] for s in sizes)]
    yield "Where the time is lost, in percent of it:"
    rows = [["workers", "lost ms", *(HEADINGS[part] for part in shown), "sum"]]
    for size, share in zip(sizes, shares, strict=True):
        lost_ms = f"{sum(size['lost'].values()) * 1e3:.2f}"
        parts = [str(share[part]) for part in shown]
        rows.append([str(size["workers"]), lost_ms, *parts, str(sum(share.values()))])
    yield from table_lines(rows, ">")
    for part in shown:
        if any(share[part] >= 5 for share in shares):
            yield f"  {HEADINGS[part]}: {MEANINGS[part]}"
    for size in sizes:
        if size["slow"]:
            yield from _wrapped(f"With {size['workers']} workers: {size['slow']}")


def _predictions(predicted: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "Predicted, not measured, with a core or device for each worker:"
    rows = [["workers", "network", "step ms", "speed-up", "efficiency", "exposed ms"]]
    for each in predicted:
        step, exposed = f"{each['step_s'] * 1e3:.2f}", f"{each['exposed_s'] * 1e3:.2f}"
        gained = [f"{each['speedup']:.2f}x", share_text(each["efficiency"])]
        rows.append([str(each["workers"]), each["network"][:12], step, *gained, exposed])
    yield from table_lines(rows, "><>")
    idle = {each["workers"]: each["without_rows"] for each in predicted if each["without_rows"]}
    for workers, count in idle.items():
        yield from _wrapped(
            f"The batch has {workers - count:,} samples: of {workers:,} workers, {count:,} would "
            "have no rows."
        )


def _wrapped(text: str) -> Sequence[str]:
    safe = text.encode("ascii", "backslashreplace").decode("ascii")
    return wrap(safe, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the same training script on several numbers of workers, and show how much faster it "
        "is, where the rest of the speed-up is lost, and what to try. In the script's arguments "
        "{workers} stands for the number of workers, {folder} for an empty folder."
    )
    parser.epilog = (
        "exit codes: 0 measured; 1 a worker failed, or --fail-under; 2 the command line is wrong"
    )
    add = parser.add_argument
    add("--workers", default="1,2", metavar="N,N", help="the sizes to measure (default: 1,2)")
    add("--repeats", type=int, default=2, metavar="N", help="runs of each size (default: 2)")
    help = "end a run after this many steps (default: 200)"
    add("--steps", type=int, default=200, metavar="N", help=help)
    help = (
        "threads of each worker, the same at all sizes (default: OMP_NUM_THREADS, or the cores "
        "divided by the most workers)"
    )
    add("--threads", type=int, metavar="N", help=help)
    help = (
        "whether more workers share one batch or have one each (default: by the samples of a step)"
    )
    add("--mode", choices=("strong", "weak"), help=help)
    add("--predict", default="", metavar="N,N", help="sizes to predict, such as 8,64,1024")
    help = f"networks to predict for: {', '.join(NETWORKS)} (default: 100g)"
    add("--network", default="100g", metavar="NAMES", help=help)
    help = "another network: the latency of a message"
    add("--latency-us", type=float, metavar="US", help=help)
    add("--bandwidth-gbps", type=float, metavar="GBPS", help="and its gigabits per second")
    help = "exit with 1 if the efficiency of the most workers is below this, such as 0.8"
    add("--fail-under", type=float, metavar="SHARE", help=help)
    help = "write scaling.json into this run folder, for `paceline report`"
    add("--folder", type=Path, metavar="RUN", help=help)
    add("--json", action="store_true", help="print JSON instead of text")
    add("--as-torch", action="store_true", help="give the script our classes for torch's")
    add("-m", "--module", action="store_true", help="the script is a module")
    help = (
        "time a step with DataParallel and with DistributedDataParallel instead; in place of a "
        "script give FILE:FUNCTION, which returns (model, (inputs, targets), loss_fn), or nothing"
    )
    add("--engines", action="store_true", help=help)
    help = "the script; the flags above may also follow it directly"
    add("script", nargs="?", help=help)
    add("script_args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    parser.flags_may_follow = True  # type: ignore[attr-defined]


def main(args: argparse.Namespace) -> int:
    """Measure, compare, print; returns 1 if --fail-under requires it."""
    sizes = sorted({1, *read_sizes("--workers", args.workers)})
    predict = sorted(set(read_sizes("--predict", args.predict))) if args.predict else []
    if predict and len(sizes) == 1:
        raise UsageError(
            "Nothing can be predicted from a single worker.",
            advice="Measure several workers too, as in --workers 1,2.",
        )
    networks = read_networks(args.network, args.latency_us, args.bandwidth_gbps)
    for name in ("repeats", "steps", "threads"):
        check_whole(f"--{name}", getattr(args, name), or_none=True)
    if args.fail_under is not None and not 0 < args.fail_under < math.inf:
        raise SettingError(f"--fail-under is {args.fail_under}.", advice="Use a share such as 0.8.")
    if args.engines:
        return compare_engines(args.script, sizes[-1], args.steps, args.json)
    if args.script is None:
        raise UsageError("Name the script to measure.", advice="See `paceline scale --help`.")
    check_program(args.script, "module" if args.module else "script")
    cores = count_cores()
    threads = choose_threads(args.threads, cores, sizes[-1])
    flags = [f"--threads={threads}"] if threads else []
    flags += ["--as-torch"] * args.as_torch + ["--module"] * args.module
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # end the job as well
    script = [*flags, args.script, *args.script_args]
    runs = f"on {', '.join(map(str, sizes))} workers, {count_text(args.repeats, 'run')} each"
    _log(f"measuring {os.path.basename(args.script)} {runs} ...")
    study = make_study(
        measure(script, sizes, args.repeats, args.steps, _log),
        name=os.path.basename(args.script),
        cores=cores,
        repeats=args.repeats,
        mode=args.mode,
        predict=predict,
        networks=networks,
    )
    if args.json:
        print(as_text(study), end="")
    else:
        print("\n".join(lines(study)))
    if args.folder is not None:
        path = write(study, args.folder)
        _log(f"wrote {path}; `paceline report {args.folder}` draws it")
    last = study["sizes"][-1]
    if args.fail_under is None or last["efficiency"] >= args.fail_under:
        return 0
    _log(
        f"{last['workers']} workers reach {last['efficiency']:.2f} of the ideal, which is below "
        f"--fail-under {args.fail_under:g}"
    )
    return 1


def compare_engines(target: str | None, workers: int, steps: int, as_json: bool) -> int:
    """Print the time of a step with each engine."""
    from paceline.show.scaling import engines  # imports torch, which nothing else here needs

    _log(f"timing {count_text(steps, 'step')} of each engine on {workers} workers ...")
    step_s = engines.compare_engines(target, workers, steps)
    print(json.dumps({"step_s": step_s}) if as_json else "\n".join(engines.lines(step_s)))
    return 0


def choose_threads(wanted: int | None, cores: int, most_workers: int) -> int | None:
    """Threads for each worker, the same at every size, so that workers are comparable."""
    if wanted is not None or env.read("OMP_NUM_THREADS"):
        return wanted
    return max(1, cores // most_workers)


def read_sizes(name: str, text: str) -> list[int]:
    """`1,2,4` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    is_good = all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts)
    if not is_good or not all(0 < int(part) <= _MOST_WORKERS for part in parts):
        raise SettingError(
            f"{name} is {text!r:.100}.", advice="Write numbers of workers with commas, as in 1,2,4."
        )
    return [int(part) for part in parts]


def read_networks(
    names: str, latency_us: float | None, bandwidth_gbps: float | None
) -> list[Network]:
    """The networks with these names, or the one given by two numbers."""
    if latency_us is not None and bandwidth_gbps is not None:
        if not 0 <= latency_us < math.inf or not 0 < bandwidth_gbps < math.inf:
            raise SettingError(
                f"A latency of {latency_us} us with {bandwidth_gbps} Gb/s is impossible.",
                advice="Use numbers from 0 up, and a bandwidth above 0.",
            )
        return [Network(f"{bandwidth_gbps:g} Gb/s", latency_us / 1e6, bandwidth_gbps * 1e9 / 8)]
    if latency_us is not None or bandwidth_gbps is not None:
        raise SettingError(
            "A network needs both a latency and a bandwidth.",
            advice="Pass --latency-us and --bandwidth-gbps together.",
        )
    chosen = [name.strip().lower() for name in names.split(",")]
    unknown = [name for name in chosen if name not in NETWORKS]
    if unknown:
        raise SettingError(
            f"There is no network {unknown[0]!r}.",
            advice=f"Use {', '.join(NETWORKS)}, or --latency-us and --bandwidth-gbps.",
        )
    return [NETWORKS[name] for name in dict.fromkeys(chosen)]


def _log(text: str) -> None:
    print(f"paceline scale: {text}", file=sys.stderr, flush=True)
