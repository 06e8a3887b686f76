"""A part of the matrix of options and faults, another one for every seed.

`PACELINE_MATRIX_SEED=commit` takes the commit and the day for one, as CI does; `make matrix` runs
all of it. What fails here is repeated by the command that is printed.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from hashlib import sha256
from itertools import islice

import pytest

from tests.matrix.covering import Row, cover
from tests.matrix.factors import FACTORS, is_possible, name_of
from tests.matrix.judge import find_problems

COUNT = 12


@functools.cache
def seed() -> int:
    if (given := os.environ["PACELINE_MATRIX_SEED"]) != "commit":
        return int(given)
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    text = asked.stdout.strip() + time.strftime("%Y-%m-%d", time.gmtime())
    return int(sha256(text.encode()).hexdigest()[:6], 16)


@functools.cache
def cases() -> list[Row]:
    return list(islice(cover(FACTORS, is_possible, seed()), COUNT))


@pytest.mark.skipif("PACELINE_MATRIX_SEED" not in os.environ, reason="needs a seed")
@pytest.mark.parametrize("number", range(COUNT))
def test_a_run_ends_as_if_nothing_had_happened_or_says_why_not(number: int) -> None:
    case = cases()[number]
    print(f"python -m tests.matrix --seed {seed()} --case {name_of(case)}:", case)
    problems, output = find_problems(case)
    print(output)
    assert not problems, "\n".join(problems)
