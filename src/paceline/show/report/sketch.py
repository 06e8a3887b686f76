"""Some lines of a long event file in place of all, so that a page can open at once.

Reading a step takes some 30 µs, so 100,000 steps of 8 workers take half a minute. A sketch has
steps at even distances, each for all that are left out before it, and of what is no step the newest
of each kind, found without reading every line. Its cost has a limit, however long the file is.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from pathlib import Path

from paceline.files import EventTail, open_plain
from paceline.show.report.run_data import EVENTS_LIMIT, KEPT_KINDS

STEPS = 1200
"""So many steps of all ranks together are in a sketch."""
PLACE_BYTES = 4096
"""Read at each place, for the first whole line in it."""
LEAST_TAIL_BYTES, MOST_TAIL_BYTES, TAILS_BYTES = 2**12, 2**15, 2**20
"""Of a rank's end, so much is read as a whole; of all ranks' ends together."""
SCANNED_BYTES = 2**28
"""So many are searched for what is no step: of the rank that writes for all, and of all others
together."""
STABLE = 16
"""Where no worker was replaced, the others have so many times less to say."""
_NO_STEP = re.compile(rb'\n(\{"kind":"(start|' + "|".join(KEPT_KINDS).encode() + rb')"[^\n]*)')


def find_tail(path: Path, size: int, ranks: int) -> int:
    """Where the first whole line begins in the part of a file that is read as a whole."""
    tail = max(LEAST_TAIL_BYTES, min(MOST_TAIL_BYTES, TAILS_BYTES // ranks))
    if size <= 2 * tail:
        return 0
    with open_plain(path) as file:
        file.seek(size - tail)
        return size - tail + len(file.readline(tail))


def choose_lines(
    path: Path, begin: int, end: int, *, steps: int, scanned_bytes: int
) -> list[bytes]:
    """Some lines of a part of a file, in its order: the first one, `steps` others, and no steps.

    What is no step is looked for in the last `scanned_bytes` of the part.
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
        for found in _NO_STEP.finditer(b"\n" + piece[: end - at]):
            newest[found[2]].append((at + found.start(), found[1]))
        if scan.position >= end:
            break
    for lines in newest.values():
        chosen.update(lines)
    return [line for _, line in sorted(chosen.items())]
