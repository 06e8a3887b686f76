"""Batches in pieces, and the table of `paceline fit`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.cli import main
from paceline.errors import UsageError
from paceline.run.fit import Fields, take_rows
from paceline.show.fit import combine, lines_of

X = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, X[1:3]),
        ((X, X[:, 0]), (X[1:3], X[1:3, 0])),
        ({"x": X, "names": ["a", "b", "c", "d"]}, {"x": X[1:3], "names": ["b", "c"]}),
        ([X, None, True], [X[1:3], None, True]),
        ((list(torch.ones(5, 2, 2))[:4], X), (list(torch.ones(2, 2, 2)), X[1:3])),
    ],
)
def test_a_piece_has_its_rows_of_every_tensor(batch: Any, expected: Any) -> None:
    torch.testing.assert_close(_flat(take_rows(batch, 4, 1, 3, Fields())), _flat(expected))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in _flat(item)]
    return [value if isinstance(value, torch.Tensor) else torch.tensor(hash(value) % 97)]


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ((X, 120), "120"),
        ((X, torch.tensor(120)), r"\[1\]"),
        ((X, X.T), r"\(3, 4\)"),
        ((X, object()), "object"),
        ((X, [torch.ones(4)] * 4), r"\[1\]"),
    ],
)
def test_what_has_no_row_per_sample_is_refused_by_name(batch: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        take_rows(batch, 4, 1, 3, Fields())


def test_fields_are_told_from_samples_once_their_numbers_differ() -> None:
    batch, fields = [X[:2], X[:2]], Fields()
    with pytest.raises(UsageError, match="batch"):
        take_rows(batch, 2, 0, 1, fields)
    take_rows([X, X], 4, 0, 1, fields)
    assert torch.equal(take_rows(batch, 2, 0, 1, fields)[1], X[:1])
    by_torch = Fields()
    by_torch.has_all = True
    assert torch.equal(take_rows(batch, 2, 0, 1, by_torch)[1], X[:1])


def test_the_table_has_the_worker_with_most_memory_and_chooses_the_fastest() -> None:
    def worker(memory: int | None, speed: float) -> dict[str, Any]:
        sizes = [
            {"piece": 8, "fits": False, "memory": None, "samples_per_s": None},
            {"piece": 4, "fits": True, "memory": memory, "samples_per_s": speed},
            {"piece": 2, "fits": True, "memory": 2**20, "samples_per_s": 99.0},
            {"piece": 1, "fits": True, "memory": 2**20, "samples_per_s": 50.0},
        ]
        return {"rows": 8, "device": "cpu", "why": "", "sizes": sizes}

    table = combine([worker(2**21, 100.0), worker(2**22, 110.0)])
    assert table["choice"] == 2  # as good as the fastest, with less memory
    lines = list(lines_of(table))
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["8", "-", "-"],
        ["4", "4", "MiB"],
        ["2", "1", "MiB"],
        ["1", "1", "MiB"],
    ]
    assert "fit=2" in lines[-1]
    unknown = combine([worker(None, 200.0)])
    assert unknown["choice"] == 4
    assert "unknown" in list(lines_of(unknown))[2]


@pytest.mark.parametrize("workers", ["0", "-1"])
def test_a_number_of_workers_that_cannot_measure_is_refused(
    workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--workers", workers, "train.py"]) == 2
    assert f"--workers is {workers}" in capsys.readouterr().err
