"""`python -m tests.matrix`: runs the cases that are not in the file of results yet; a table.

    python -m tests.matrix                       all cases of seed 0
    python -m tests.matrix --seed 7 --count 12   a part of another array
    python -m tests.matrix --case 1db2551f       one case again, whatever its result was
    python -m tests.matrix --set hosts=2 --set "fault=kill: forward"
                                                 one that has the first level of all other factors
What a case printed that does not hold is in a file named as the case, beside the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from tests.matrix.covering import Row, cover
from tests.matrix.factors import FACTORS, is_possible, name_of
from tests.matrix.judge import expected, find_problems


def main() -> int:
    """Run cases; 1 if one of them does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="only so many of the seed's cases")
    parser.add_argument("--case", help="only this one, by its name")
    parser.add_argument("--set", action="append", metavar="FACTOR=LEVEL", help="a level of a case")
    parser.add_argument("--results", type=Path, default=Path("build/matrix.jsonl"))
    parser.add_argument("--again", action="store_true", help="those that do not hold, once more")
    args = parser.parse_args()
    if args.set:
        given = dict(each.split("=", 1) for each in args.set)
        cases = [{name: given.get(name, levels[0]) for name, levels in FACTORS.items()}]
        args.case = name_of(cases[0])
    else:
        cases = list(islice(cover(FACTORS, is_possible, args.seed), args.count))
        cases = [case for case in cases if args.case in (None, name_of(case))]
    result_by_name = read_results(args.results)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases, start=1):
        before = result_by_name.get(name_of(case))
        if before and not args.case and not (args.again and before["problems"]):
            continue
        result = run_case(case, args.results.parent)
        result_by_name[name_of(case)] = result
        with open(args.results, "a") as file:
            file.write(json.dumps(result) + "\n")
        held = "does not hold" if result["problems"] else "holds"
        head = f"{number}/{len(cases)} {result['name']} {case['fault']}: {held}"
        print("\n".join([f"{head}, {result['seconds']} s", *result["problems"]]), flush=True)
    results = [result_by_name[name_of(case)] for case in cases if name_of(case) in result_by_name]
    print(table(results))
    return int(any(result["problems"] for result in results))


def run_case(case: Row, folder: Path) -> dict[str, Any]:
    start_s, name = time.monotonic(), name_of(case)
    problems, output = find_problems(case)
    seconds = round(time.monotonic() - start_s, 1)
    if problems:
        (folder / f"{name}.log").write_text(output)
    return {"name": name, "case": case, "problems": problems, "seconds": seconds}


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The newest result of every case, by name."""
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {result["name"]: result for result in results}


def table(results: list[dict[str, Any]]) -> str:
    """Per fault, how many cases there are, what should become of the run, and how many hold."""
    cases, held, ends = Counter[str](), Counter[str](), dict[str, set[str]]()
    for result in results:
        fault = result["case"]["fault"]
        cases[fault] += 1
        held[fault] += not result["problems"]
        ends.setdefault(fault, set()).add(expected(result["case"]))
    lines = ["| fault | the run | cases | hold |", "|---|---|--:|--:|"]
    for fault in FACTORS["fault"]:
        if cases[fault]:
            end = ", ".join(sorted(ends[fault], reverse=True))
            lines.append(f"| {fault} | {end} | {cases[fault]} | {held[fault]} |")
    lines.append(f"| all | | {cases.total()} | {held.total()} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
