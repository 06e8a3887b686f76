"""`paceline scale`: the same job on 1, 2, 4 workers, and where the speed-up went."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

from paceline import env
from paceline.errors import SettingError
from paceline.explain.scaling import words
from paceline.explain.scaling.attribution import Machine
from paceline.explain.scaling.measure import Script, measure
from paceline.explain.scaling.simulation import NETWORKS, Network
from paceline.explain.scaling.study import Study, as_json, make_study, write
from paceline.launcher import count_cores
from paceline.launcher.flags import LaunchOptions
from paceline.launcher.run import check_program

_MOST_WORKERS = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline scale`."""
    parser.description = (
        "Run the same training script on several numbers of workers, and say how much faster it "
        "is, where the rest of the speed-up went, and what to try. In the script's own arguments "
        "{workers} stands for the number of workers, {folder} for an empty folder."
    )
    parser.epilog = (
        "exit codes: 0 measured; 1 a worker failed, or --fail-under; 2 the command line is wrong"
    )
    parser.add_argument(
        "--workers", default="1,2", metavar="N,N", help="the sizes to measure (default: 1,2)"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, metavar="N", help="runs of each size (default: 2)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        metavar="N",
        help="end a run after so many steps (default: 200)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each worker, the same at all sizes (default: OMP_NUM_THREADS, or the "
        "cores divided by the most workers)",
    )
    parser.add_argument(
        "--mode",
        choices=("strong", "weak"),
        help="whether more workers share one batch or bring their own; found out if not given",
    )
    parser.add_argument(
        "--predict", default="", metavar="N,N", help="sizes to predict, such as 8,64,1024"
    )
    parser.add_argument(
        "--network",
        default="100g",
        metavar="NAMES",
        help=f"networks to predict for: {', '.join(NETWORKS)} (default: 100g)",
    )
    parser.add_argument(
        "--latency-us", type=float, metavar="US", help="a network of your own: one message's delay"
    )
    parser.add_argument(
        "--bandwidth-gbps", type=float, metavar="GBPS", help="and its gigabits per second"
    )
    parser.add_argument(
        "--fail-under",
        type=float,
        metavar="SHARE",
        help="exit with 1 if the efficiency of the most workers is below this, such as 0.8",
    )
    parser.add_argument(
        "--folder", type=Path, metavar="RUN", help="write scaling.json here, for `paceline report`"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--as-torch", action="store_true", help="give the script our classes for torch's"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module")
    parser.add_argument(
        "script", help="the script; the flags above may also stand directly behind it"
    )
    parser.add_argument(
        "script_args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments"
    )
    parser.set_defaults(parser=parser)


def main(args: argparse.Namespace) -> int:
    """Measure, compare, print; 1 if --fail-under says so."""
    args = take_flags_behind(args)
    sizes = sorted({1, *read_sizes("--workers", args.workers)})
    predict = sorted(set(read_sizes("--predict", args.predict))) if args.predict else []
    networks = read_networks(args.network, args.latency_us, args.bandwidth_gbps)
    for name, value in (("--repeats", args.repeats), ("--steps", args.steps)):
        if value < 1:
            raise SettingError(f"{name} is {value}.", advice="Use a whole number from 1 up.")
    if args.fail_under is not None and not 0 < args.fail_under < math.inf:
        raise SettingError(f"--fail-under is {args.fail_under}.", advice="Use a share such as 0.8.")
    cores = count_cores()
    script = Script(
        program=args.script,
        arguments=tuple(args.script_args),
        is_module=args.module,
        as_torch=args.as_torch,
        threads=choose_threads(args.threads, cores, sizes[-1]),
        steps=args.steps,
    )
    check_program(LaunchOptions(program=script.program, module=script.is_module))
    profiles = measure(script, sizes, args.repeats, _tell)
    study = make_study(
        profiles,
        name=os.path.basename(args.script),
        machine=Machine(cores=cores),
        repeats=args.repeats,
        mode=args.mode,
        predict=predict,
        networks=networks if predict else (),
    )
    if args.json:
        print(json.dumps(as_json(study), indent=1, allow_nan=False))
    else:
        print("\n".join(words.lines(study)))
    if args.folder is not None:
        path = write(study, args.folder)
        _tell(f"wrote {path}; `paceline report {args.folder}` draws it")
    return _verdict(study, args.fail_under)


def take_flags_behind(args: argparse.Namespace) -> argparse.Namespace:
    """Read `scale train.py --workers 1,2 --epochs 3` as it is meant.

    Without flags of ours before the script, those directly behind it are ours, up to `--` or the
    first thing that is none of them. With some, all behind the script is the script's.
    """
    parser: argparse.ArgumentParser = args.parser
    flags = {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if action.dest != "help"
    }
    if any(getattr(args, each.dest) != each.default for each in flags.values()):
        return args
    behind, ours = list(args.script_args), list[str]()
    while behind and (action := flags.get(behind[0].partition("=")[0])) is not None:
        has_value = action.nargs != 0 and "=" not in behind[0]
        ours += behind[: 1 + has_value]
        del behind[: 1 + has_value]
    if behind[:1] == ["--"]:
        del behind[0]
    return parser.parse_args([*ours, "--", args.script, *behind]) if ours else args


def read_sizes(name: str, text: str) -> list[int]:
    """`1,2,4` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(
        part.isascii() and part.isdigit() and 0 < int(part) <= _MOST_WORKERS for part in parts
    ):
        raise SettingError(
            f"{name} is {text!r}.", advice="Write numbers of workers with commas, as in 1,2,4."
        )
    return [int(part) for part in parts]


def read_networks(
    names: str, latency_us: float | None, bandwidth_gbps: float | None
) -> list[Network]:
    """The networks named, or the one described by two numbers."""
    if (latency_us is None) != (bandwidth_gbps is None):
        raise SettingError(
            "A network of your own has both a latency and a bandwidth.",
            advice="Pass --latency-us and --bandwidth-gbps together.",
        )
    if latency_us is not None and bandwidth_gbps is not None:
        if not 0 <= latency_us < math.inf or not 0 < bandwidth_gbps < math.inf:
            raise SettingError(
                f"A latency of {latency_us} us with {bandwidth_gbps} Gb/s is impossible.",
                advice="Use numbers from 0 up, and a bandwidth above 0.",
            )
        name = f"{bandwidth_gbps:g} Gb/s"
        return [Network(name, latency_us / 1e6, bandwidth_gbps * 1e9 / 8)]
    chosen = [name.strip().lower() for name in names.split(",")]
    unknown = [name for name in chosen if name not in NETWORKS]
    if unknown:
        raise SettingError(
            f"There is no network {unknown[0]!r}.",
            advice=f"Use {', '.join(NETWORKS)}, or --latency-us and --bandwidth-gbps.",
        )
    return [NETWORKS[name] for name in dict.fromkeys(chosen)]


def choose_threads(wanted: int | None, cores: int, most_workers: int) -> int | None:
    """Threads for each worker, so that a worker is the same thing at every size."""
    if wanted is not None:
        if wanted < 1:
            raise SettingError(f"--threads is {wanted}.", advice="Use a whole number from 1 up.")
        return wanted
    return None if env.has_threads() else max(1, cores // most_workers)


def _verdict(study: Study, fail_under: float | None) -> int:
    last = study.results[-1]
    if fail_under is None or last.efficiency >= fail_under:
        return 0
    _tell(
        f"{last.workers} workers reach {last.efficiency:.2f} of the ideal, which is below "
        f"--fail-under {fail_under:g}"
    )
    return 1


def _tell(text: str) -> None:
    print(f"paceline scale: {text}", file=sys.stderr, flush=True)
