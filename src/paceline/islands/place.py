"""The island of a worker, and the address of the meeting place.

Islands are numbered from 0. A place is written `NUMBER/COUNT@ADDRESS`, where the address is
`host:port`, or the path of a socket on one machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from paceline import env
from paceline.errors import SettingError

ISLAND_VARIABLE = env.ISLAND_VARIABLE
_WRITTEN = re.compile(r"(\d{1,4})/(\d{1,4})@(/.+|.+:(\d{1,5}))")


@dataclass(frozen=True, slots=True)
class IslandPlace:
    """One island among several."""

    number: int
    count: int
    address: str

    def __str__(self) -> str:
        return f"{self.number}/{self.count}@{self.address}"

    @property
    def name(self) -> str:
        return f"island {self.number}"

    def folder(self, folder: str | os.PathLike[str]) -> str:
        """This island's folder, given that of the run; the first island's is the run's."""
        path = os.fspath(folder)
        return path if not self.number else os.path.join(path, f"island-{self.number}")

    def seed(self, seed: int) -> int:
        """The seed of random numbers in steps: different on each island, `seed` on the first."""
        # 2^64 divided by the golden ratio: far from any seed that a user would take next.
        return (seed + self.number * 0x9E3779B97F4A7C15) % 2**63 if self.number else seed


def find_place(at: str = "") -> IslandPlace | None:
    """The place in `at`, or else in the environment; None: all workers are one island."""
    source, text = ("at", at) if at else (ISLAND_VARIABLE, env.read(ISLAND_VARIABLE))
    if not text:
        return None
    match = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[1]) >= int(match[2]) or int(match[4] or 0) >= 2**16:
        raise SettingError(
            f"{source} is {text!r:.100}, which does not name an island.",
            advice="Write it as NUMBER/COUNT@HOST:PORT with numbers from 0: 0/2@node0:29500.",
        )
    return IslandPlace(int(match[1]), int(match[2]), match[3])
