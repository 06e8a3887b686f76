"""What a Chrome trace must be for Perfetto to show all of it: the rules, as a list of violations.

After the Trace Event Format, and after what Perfetto's importer drops: events without their keys,
times below zero, and spans of one thread that overlap without lying inside each other. Older
importers cut times off at whole nanoseconds, newer ones round them; spans must nest either way.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

KEYS_BY_KIND = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "i": {"name", "cat", "ts", "s", "pid", "tid"},
    "M": {"name", "pid", "args"},
}
SCOPES = ("t", "p", "g")


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a file in either form; only in the array form may the end be missing."""
    text = path.read_text(encoding="utf-8")
    if text.startswith("{"):
        document = json.loads(text, parse_constant=_refuse)
        assert isinstance(document["traceEvents"], list)
        return list(document["traceEvents"])
    if not text.rstrip().endswith("]"):
        text = text[: text.rindex("}") + 1] + "]"
    return list(json.loads(text, parse_constant=_refuse))


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def violations(events: list[dict[str, Any]]) -> list[str]:
    """Every rule that is broken, in words."""
    found = []
    for number, event in enumerate(events):
        kind = event.get("ph")
        missing = KEYS_BY_KIND.get(str(kind), {"a known ph"}) - set(event)
        if missing:
            found.append(f"event {number} ({kind}) lacks {sorted(missing)}: {event}")
            continue
        found += [f"event {number}: {said}: {event}" for said in _wrong_values(event)]
    if not found:
        found += _wrong_names(events)
        for to_ns in (math.floor, round):
            found += _overlaps(events, to_ns)
    return found


def _wrong_values(event: dict[str, Any]) -> list[str]:
    wrong = []
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value < 2**53 / 1000:
            wrong.append(f"{key} is {value!r}")
    for key in ("pid", "tid"):
        value = event.get(key, 0)
        if type(value) is not int or not 0 <= value < 2**31:
            wrong.append(f"{key} is {value!r}")
    if not isinstance(event["name"], str) or not event["name"]:
        wrong.append("name is no text")
    if not isinstance(event.get("args", {}), dict):
        wrong.append("args is no object")
    if event["ph"] == "i" and event["s"] not in SCOPES:
        wrong.append(f"scope is {event['s']!r}")
    return wrong


def _wrong_names(events: list[dict[str, Any]]) -> list[str]:
    """Processes and threads that nobody named, or that have two names."""
    used, names = set[Any](), defaultdict[Any, set[str]](set)
    for event in events:
        if event["ph"] != "M":
            used |= {("process_name", event["pid"], 0)}
            used |= {("thread_name", event["pid"], event["tid"])}
        elif event["name"] in ("process_name", "thread_name"):
            thread = event.get("tid") if event["name"] == "thread_name" else 0
            names[event["name"], event["pid"], thread].add(event["args"]["name"])
    nameless = [f"{who} has no name" for who in sorted(used - set(names))]
    return nameless + [f"{who} is called {said}" for who, said in names.items() if len(said) > 1]


def _overlaps(events: list[dict[str, Any]], to_ns: Any) -> list[str]:
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = to_ns(event["ts"] * 1000)
            span = (begin, -to_ns(event["dur"] * 1000), event["name"])
            by_thread[event["pid"], event["tid"]].append(span)
    found = []
    for thread, spans in by_thread.items():
        open_until: list[tuple[int, str]] = []
        for begin, minus_length, name in sorted(spans):
            end = begin - minus_length
            while open_until and open_until[-1][0] <= begin:
                open_until.pop()
            if open_until and end > open_until[-1][0]:
                found.append(
                    f"{name} at {begin} ns of {thread} begins inside {open_until[-1][1]} and ends "
                    f"{end - open_until[-1][0]} ns after it"
                )
                continue
            open_until.append((end, name))
    return found
