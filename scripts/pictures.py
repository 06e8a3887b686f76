"""Draw the pictures of the README and of docs/, light and dark, from recordings and results.

    python scripts/pictures.py            from docs/pictures/kill.json and benchmarks/results
    python scripts/pictures.py --record   after a new `paceline demo --kill`

A test draws them again and compares, so that every picture shows measured values.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.files import RunFolder, read_events
from paceline.show.demo.survival import KILLED_WORKER, MESSAGES, KillOutcome
from paceline.show.trace.card import MONO, SANS

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
RECORD = PICTURES / "kill.json"
STEPS = ROOT / "benchmarks" / "results" / "step-2-ranks.json"
WIDTH, LEFT, RIGHT = 860, 108, 836
PLAYED_S, SHOWN_S = 9.0, 12.0
"""The recorded seconds are stretched to the first number; then the last image stays."""
MODELS = {
    "mlp-8.4M": "MLP, 8.4M weights",
    "gpt-17M": "GPT, 17M",
    "embedding-11M": "20,000 embeddings",
    "deep-200x64": "200 narrow layers",
    "conv-0.1M": "small conv net",
    "small-600": "600 tiny tensors",
}


@dataclass(frozen=True, slots=True)
class Look:
    """The colours of the report's page, light or dark."""

    page: str
    ink: str
    muted: str
    rule: str
    good: str
    bad: str
    workers: tuple[str, str, str]


LOOKS = {
    "light": Look(
        "#ffffff", "#1a2028", "#55606c", "#d9dfe6", "#1b6e2c", "#a3271f",
        ("#2a72c9", "#c2611a", "#2f7a35"),
    ),
    "dark": Look(
        "#12161b", "#e9edf1", "#a4b0bc", "#333d48", "#7fd48c", "#ff9a90",
        ("#5fa4f0", "#ee9350", "#74c76e"),
    ),
}  # fmt: skip


def drawn() -> dict[str, str]:
    """Every picture, by file name."""
    record, results = json.loads(RECORD.read_text()), json.loads(STEPS.read_text())["results"]
    pictures = {}
    for light, look in LOOKS.items():
        pictures[f"kill-{light}.svg"] = draw_kill(record, look)
        pictures[f"speed-{light}.svg"] = draw_speed(results, look)
    return pictures


def record_kill() -> dict[str, Any]:
    """Run `paceline demo --kill`: what each worker did when, the output, and the result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "demo", "--kill", "--json", "--folder", folder]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(said)
        names = KillOutcome.__dataclass_fields__
        outcome = KillOutcome(**{name: found[name] for name in names})
        events = list(read_events(RunFolder(outcome.folder)))
    steps = [event for event in events if event["kind"] == "step"]
    begin = min(event["t"] - event["seconds"] for event in steps)
    sums: dict[int, list[float]] = {}
    for event in steps:
        total = sums.setdefault(event["step"], [0.0, 0.0])
        total[:] = (a + b for a, b in zip(total, event["metrics"]["loss"], strict=True))
    return {
        "workers": outcome.workers,
        "blocks": [
            [
                e["rank"],
                round(e["t"] - e["seconds"] - begin, 3),
                round(e["t"] - begin, 3),
                e["samples"],
            ]
            for e in steps
        ],
        "changes": [round(e["t"] - begin, 3) for e in events if e["kind"] == "generation"],
        "losses": [
            [round(max(e["t"] for e in steps if e["step"] == step) - begin, 3), round(a / b, 4)]
            for step, (a, b) in sorted(sums.items())
        ],
        "said": [line.removeprefix(MESSAGES) for line in outcome.messages],
        "promises": [words for words, has_passed in outcome.checks() if has_passed],
    }


def draw_kill(record: dict[str, Any], look: Look) -> str:
    """The recorded training as an animation: time runs to the right, a block is a worker's step."""
    end: float = max(stop for _, _, stop, _ in record["blocks"])

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / end

    parts = [_text(24, 34, "$ paceline demo --kill", look.ink, 16, mono=True)]
    slower = end / PLAYED_S
    parts.append(
        _text(RIGHT, 34, f"recorded, played at {slower:.1f} times its speed", look.muted, 13, "end")
    )
    tops = [62 + 52 * worker for worker in range(record["workers"])]
    for worker, top in enumerate(tops):
        mine = [block[1:] for block in record["blocks"] if block[0] == worker]
        path = "".join(
            f"M{x(start):.1f} {top + 40}v-{rows * 0.8:.0f}H{x(stop) - 1:.1f}V{top + 40}z"
            for start, stop, rows in mine
        )
        parts.append(_text(24, top + 32, f"worker {worker}", look.workers[worker], 15))
        parts.append(f'<path d="{path}" fill="{look.workers[worker]}"/>')
    blocks = [block for block in record["blocks"] if block[0] == KILLED_WORKER]
    killed, back = max(((a[2], b[1]) for a, b in pairwise(blocks)), key=lambda g: g[1] - g[0])
    top = tops[KILLED_WORKER]
    wide = x(back) - x(killed)
    parts.append(
        f'<rect x="{x(killed):.1f}" y="{top + 12}" width="{wide:.1f}" height="28" '
        f'fill="{look.muted}" fill-opacity=".25" stroke="{look.bad}" stroke-dasharray="3 3"/>'
    )
    parts.append(
        _text(x(killed) + wide / 2, top + 31, "kill -9", look.bad, 13, "middle", mono=True)
    )
    above = tops[0] - 4
    parts.append(_text(x((killed + back) / 2), above, "50 rows each", look.muted, 12, "middle"))
    parts.append(_text(x(0.02), above, "34 + 33 + 33 rows", look.muted, 12))
    highest = max(loss for _, loss in record["losses"])
    points = " ".join(f"{x(t):.1f},{274 - 46 * v / highest:.1f}" for t, v in record["losses"])
    parts.append(_text(24, 262, "loss", look.muted, 15))
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="{look.ink}" stroke-width="2.5"/>'
    )
    at = LEFT - 2
    cover = f'<g class="cover"><rect x="{at}" y="44" width="{RIGHT - LEFT + 40}" height="236" '
    cover += f'fill="{look.page}"/><path d="M{at} 56V276" stroke="{look.rule}" '
    parts.append(cover + 'stroke-width="2"/></g>')
    lost, again = record["changes"][:2]
    lines = [(record["said"][i], t, look.ink) for i, t in ((-3, killed), (-2, lost), (-1, again))]
    lines += [("✓ " + words, end, look.good) for words in record["promises"]]
    styles = []
    for number, (words, seconds, colour) in enumerate(lines):
        percent = 100 * seconds / end * PLAYED_S / SHOWN_S
        text = _text(24, 312 + 23 * number, words, colour, 14.5, mono=number < 3)
        parts.append(f'<g class="line{number}">{text}</g>')
        styles.append(
            f"@keyframes line{number}{{0%,{percent:.1f}%{{opacity:0}}"
            f"{percent + 0.5:.1f}%,100%{{opacity:1}}}}"
            f".line{number}{{animation:line{number} {SHOWN_S:g}s infinite}}"
        )
    ends = f"{100 * PLAYED_S / SHOWN_S:g}%,100%"
    styles.append(
        f"@keyframes play{{0%{{transform:none}}{ends}{{transform:translateX({WIDTH}px)}}}}"
        f".cover{{transform:translateX({WIDTH}px);animation:play {SHOWN_S:g}s linear infinite}}"
        "@media(prefers-reduced-motion){*{animation:none!important}}"
    )
    said = "Three workers train; one is killed, the others continue, it returns: the same result."
    return _svg(312 + 23 * len(lines), look, said, [f"<style>{''.join(styles)}</style>", *parts])


def draw_speed(results: dict[str, Any], look: Look) -> str:
    """The time of a step relative to torch's DDP at its best: two bars for each model."""
    scale = (RIGHT - 60 - 190) / 1.5
    title = "Time of a training step, 2 processes on 2 CPU cores: shorter is better"
    parts = [_text(24, 34, title, look.ink, 16)]
    one, bottom = 190 + scale, 66 + 44 * len(MODELS)
    parts.append(
        f'<path d="M{one:.1f} 54V{bottom}" stroke="{look.bad}" stroke-width="1.5" '
        'stroke-dasharray="5 4"/>'
    )
    for number, (model, name) in enumerate(MODELS.items()):
        rows = {row["contestant"].partition(" (")[0]: row for row in results[model]["rows"]}
        y = 62 + 44 * number
        parts.append(_text(178, y + 20, name, look.ink, 14, "end"))
        for line, contestant in enumerate(("paceline", "torch default")):
            ratio = rows[contestant]["/ best torch"]
            colour = look.muted if line else look.workers[0]
            parts.append(
                f'<rect x="190" y="{y + 15 * line}" width="{ratio * scale:.1f}" height="13" '
                f'rx="2" fill="{colour}" fill-opacity="{0.55 if line else 1}"/>'
            )
            end = 190 + ratio * scale + 6
            parts.append(
                f'<g stroke="{look.page}" stroke-width="4" paint-order="stroke">'
                + _text(end, y + 11 + 15 * line, f"{ratio:.2f}", look.ink, 12)
                + "</g>"
            )
    legend = (
        (24, look.workers[0], "Paceline"),
        (130, look.muted, "torch's DDP, default settings"),
        (330, look.bad, "1 = torch's DDP at its best, of twelve settings tried in the same run"),
    )
    for at, colour, words in legend:
        parts.append(
            f'<rect x="{at}" y="{bottom + 14}" width="12" height="12" fill="{colour}" '
            f'fill-opacity="{0.55 if colour == look.muted else 1}"/>'
        )
        parts.append(_text(at + 18, bottom + 25, words, look.muted, 13))
    return _svg(bottom + 42, look, title, parts)


def _text(
    x: float,
    y: float,
    words: str,
    colour: str,
    size: float,
    anchor: str = "start",
    *,
    mono: bool = False,
) -> str:
    family = f' font-family="{MONO}"' if mono else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"{place}{family}>'
        f"{escape(words, quote=False)}</text>"
    )


def _svg(height: float, look: Look, said: str, parts: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" role="img" font-family="{SANS}">',
            f"<title>{escape(said)}</title>",
            f'<rect width="{WIDTH}" height="{height:g}" rx="10" fill="{look.page}"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps(record_kill(), ensure_ascii=False) + "\n")
    for name, svg in drawn().items():
        (PICTURES / name).write_text(svg)
