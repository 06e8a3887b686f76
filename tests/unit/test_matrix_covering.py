"""Every two levels meet in a case of the matrix, unless they exclude each other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import islice, product

import pytest

from tests.matrix.covering import all_pairs, complete, cover
from tests.matrix.factors import FACTORS, is_possible, name_of, plan

SMALL = {"a": ("1", "2", "3"), "b": ("1", "2"), "c": ("1", "2", "3", "4"), "d": ("1", "2")}


def fits(row: Mapping[str, str]) -> bool:
    """Chained: a=3 needs b=2, and b=2 excludes c=4, so a=3 and c=4 meet nowhere."""
    return not (
        (row.get("a"), row.get("b")) == ("3", "1") or (row.get("b"), row.get("c")) == ("2", "4")
    )


@pytest.mark.parametrize("seed", range(5))
def test_exactly_the_pairs_of_all_possible_rows_meet(seed: int) -> None:
    everything = (dict(zip(SMALL, levels, strict=True)) for levels in product(*SMALL.values()))
    possible = [row for row in everything if fits(row)]
    rows = list(cover(SMALL, fits, seed))
    assert all(row in possible for row in rows)
    assert len(rows) < len(possible) / 2

    def met(these: list[dict[str, str]]) -> set[frozenset[tuple[str, str]]]:
        return {pair for pair in all_pairs(SMALL) if any(pair <= set(r.items()) for r in these)}

    assert met(rows) == met(possible)
    assert frozenset({("a", "3"), ("c", "4")}) not in met(rows)


def test_a_seed_repeats_its_rows_and_another_has_others() -> None:
    first, again, other = (list(cover(SMALL, fits, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_every_option_meets_every_fault() -> None:
    rows = list(cover(FACTORS, is_possible, 0))
    assert all(map(is_possible, rows))
    assert len({name_of(row) for row in rows}) == len(rows)
    met = {pair for row in rows for pair in map(frozenset, _pairs(row))}
    for pair in all_pairs(FACTORS):
        if pair not in met:
            assert complete(dict(pair), FACTORS, is_possible, random.Random(0), {}) is None, pair


def test_the_first_rows_do_not_depend_on_how_many_are_taken() -> None:
    assert (
        list(islice(cover(FACTORS, is_possible, 7), 3))
        == list(islice(cover(FACTORS, is_possible, 7), 5))[:3]
    )


def test_every_fault_can_be_planned() -> None:
    case = {name: levels[0] for name, levels in FACTORS.items()}
    for fault in FACTORS["fault"]:
        assert len(plan({**case, "fault": fault}, 16).planned) == {
            "none": 0,
            "kill, then": 2,
            "kill all": 2,
        }.get(fault.partition(": ")[0], 1)


def _pairs(row: Mapping[str, str]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    items = list(row.items())
    return [(one, other) for i, one in enumerate(items) for other in items[i + 1 :]]
