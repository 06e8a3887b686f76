"""A covering array: few rows in which every two levels of two factors meet, if they can at all.

Greedy and seeded: a row begins with a pair that has not met yet, and each factor after it gets the
level with which most pairs meet anew. A pure function, so a seed alone repeats every row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
Factors = Mapping[str, Sequence[str]]
Possible = Callable[[Mapping[str, str]], bool]
"""Whether a row may be, also one in which some factors are still missing."""
Pair = frozenset[tuple[str, str]]

TRIES = 2
"""Of so many rows the one with the most new pairs is taken."""


def cover(factors: Factors, is_possible: Possible, seed: int) -> Iterator[Row]:
    """Rows in which every pair of levels meets that meets in any possible row, the most first."""
    chance = random.Random(seed)
    missing = dict.fromkeys(all_pairs(factors))
    while missing:
        best: Row = {}
        for start in chance.sample(list(missing), min(TRIES, len(missing))):
            row = complete(dict(sorted(start)), factors, is_possible, chance, missing)
            if row is None:
                del missing[start]
            elif len(met(row, missing)) > len(met(best, missing)):
                best = row
        for pair in met(best, missing):
            del missing[pair]
        if best:
            yield {name: best[name] for name in factors}


def all_pairs(factors: Factors) -> list[Pair]:
    """Every two levels of two factors."""
    return [
        frozenset([(one, a), (other, b)])
        for one, other in combinations(factors, 2)
        for a, b in product(factors[one], factors[other])
    ]


def met(row: Mapping[str, str], missing: Mapping[Pair, None]) -> list[Pair]:
    """Which of the missing pairs meet in a row."""
    pairs = (frozenset(pair) for pair in combinations(row.items(), 2))
    return [pair for pair in pairs if pair in missing]


def complete(
    row: Row,
    factors: Factors,
    is_possible: Possible,
    chance: random.Random,
    missing: Mapping[Pair, None],
) -> Row | None:
    """The row with levels for all factors; None where there are none that are possible."""
    if not is_possible(row):
        return None
    left = [name for name in factors if name not in row]
    if not left:
        return row
    if any(not any(is_possible({**row, n: each}) for each in factors[n]) for n in left):
        return None  # sooner than after all levels of all others
    name = chance.choice(left)

    def gain(level: str) -> int:
        return sum(frozenset([(name, level), each]) in missing for each in row.items())

    levels = chance.sample(list(factors[name]), len(factors[name]))
    for level in sorted(levels, key=gain, reverse=True):
        found = complete({**row, name: level}, factors, is_possible, chance, missing)
        if found is not None:
            return found
    return None
