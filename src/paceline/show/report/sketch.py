"""A sample of a long event file's lines, so that a page can open at once.

Reading a step takes some 30 µs, so 100,000 steps of 8 workers take half a minute. A sketch has
steps at even distances, each standing for those left out before it, and the newest events of each
other kind, found without parsing every line. Its cost is limited, however long the file is.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from pathlib import Path

from paceline.files import EventTail, open_plain
from paceline.show.report.run_data import EVENTS_LIMIT, KEPT_KINDS

STEPS = 1200
"""How many steps of all ranks together a sketch has."""
PLACE_BYTES = 4096
"""How much is read at each place, to find a whole line."""
LEAST_TAIL_BYTES, MOST_TAIL_BYTES, TAILS_BYTES = 2**12, 2**15, 2**20
"""How much of each file's end is read completely; and of all ranks' files together."""
SCANNED_BYTES = 2**28
"""How much is searched for events other than steps: of the rank that writes for all, and of all
others together."""
STABLE = 16
"""Without replaced workers, this fraction of the search is enough for the other ranks."""
SKETCHED = (
    "The run is long: only a sample of its steps, evenly spread, and all of the last were read. "
    "Curves, means and sums are estimates from these"
)
_OTHER_EVENT = re.compile(rb'\n(\{"kind":"(start|' + "|".join(KEPT_KINDS).encode() + rb')"[^\n]*)')


def find_tail(path: Path, size: int, ranks: int) -> int:
    """The start of the first whole line in the part of a file that is read completely."""
    tail = max(LEAST_TAIL_BYTES, min(MOST_TAIL_BYTES, TAILS_BYTES // ranks))
    if size <= 2 * tail:
        return 0
    with open_plain(path) as file:
        file.seek(size - tail)
        return size - tail + len(file.readline(tail))


def choose_lines(
    path: Path, begin: int, end: int, *, steps: int, scanned_bytes: int
) -> list[bytes]:
    """Some lines of a part of a file, in order: the first one, `steps` others, and other events.

    Events other than steps are searched for in the last `scanned_bytes` of the part.
    """
    chosen = dict[int, bytes]()
    with open_plain(path) as file:
        for place in range(begin, end, max(PLACE_BYTES, (end - begin) // max(1, steps))):
            file.seek(place)
            piece = file.read(min(PLACE_BYTES, end - place))
            at = piece.find(b"\n") + 1 if place > begin else 0
            line, newline, _ = piece[at:].partition(b"\n")
            if newline:
                chosen[place + at] = line
    newest: dict[bytes, deque[tuple[int, bytes]]] = defaultdict(lambda: deque(maxlen=EVENTS_LIMIT))
    scan = EventTail(path)
    scan.position = max(begin, end - scanned_bytes)
    for piece in scan.pieces():
        at = scan.position - len(piece)
        for found in _OTHER_EVENT.finditer(b"\n" + piece[: end - at]):
            newest[found[2]].append((at + found.start(), found[1]))
        if scan.position >= end:
            break
    for lines in newest.values():
        chosen.update(lines)
    return [line for _, line in sorted(chosen.items())]
