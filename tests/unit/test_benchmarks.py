"""The benchmarks' own arithmetic: what is made of the times, and who takes part."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks import __main__ as command_line
from benchmarks import allreduce, contestants, gpu_overlap, launching, memory, page, startup, step
from benchmarks.contestants import (
    BUILD,
    FLOOR,
    FLOORS,
    KEPT_FLOOR,
    choose_tuned,
    present,
    tuned_options,
)
from benchmarks.models import MODELS
from benchmarks.spread import Spread, best_of, ratio, rotated, rows_of, slowest, spread
from benchmarks.tables import markdown, read_names

positive = st.floats(1e-6, 1e6)


@given(st.lists(positive, min_size=1, max_size=30), positive)
def test_quartiles_surround_the_median_and_follow_the_unit(
    values: list[float], factor: float
) -> None:
    one, other = spread(values), spread([value * factor for value in values])
    assert min(values) <= one.low <= one.median <= one.high <= max(values)
    for mine, theirs in zip((one.low, one.median, one.high), _numbers(other), strict=True):
        assert math.isclose(mine * factor, theirs, rel_tol=1e-9)


def _numbers(of: Spread) -> tuple[float, float, float]:
    return of.low, of.median, of.high


def test_nothing_measured_is_an_error_and_one_number_has_no_spread() -> None:
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_ratios_are_taken_in_pairs_so_that_a_slow_moment_cancels_out() -> None:
    theirs = [1.0, 10.0, 2.0]
    assert ratio([0.5, 5.0, 1.0], theirs) == Spread(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="longer"):
        ratio([1.0], theirs)


def test_a_step_ends_with_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


@given(st.integers(1, 9))
def test_every_contestant_has_every_place_in_the_order_once(count: int) -> None:
    names = [str(number) for number in range(count)]
    orders = [rotated(names, number) for number in range(count)]
    for place in range(count):
        assert sorted(order[place] for order in orders) == names


def test_rows_compare_with_the_floor_and_with_the_best_rival() -> None:
    seconds = {
        "floor": [1.0, 1.0, 1.0],
        "ours": [1.1, 1.1, 1.1],
        "torch a": [3.0, 3.0, 3.0],
        "torch b": [2.2, 2.0, 2.2],
    }
    assert best_of(seconds, "torch") == "torch b"
    floor, ours, a, b = rows_of(seconds, floors=["floor"], rival="torch")
    assert (floor["ms"], floor["/ floor"]) == (1000.0, 1.0)
    assert (ours["/ best torch"], ours["/ floor"]) == (0.5, 1.1)
    assert ours["its quartiles"] == "0.50 to 0.53"
    assert a["contestant"] == "torch a"
    assert b["contestant"] == "torch b (best torch)"
    assert b["/ best torch"] == 1.0


def test_rows_do_without_a_rival_or_a_floor_that_was_not_measured() -> None:
    (row,) = rows_of({"floor": [1.0]}, floors=["floor", "stricter"], rival="torch")
    assert [column for column in row if column.startswith("/")] == ["/ floor"]


def test_every_row_is_compared_with_both_floors() -> None:
    seconds = {"floor": [4.0, 4.0], "stricter": [2.0, 2.0], "ours": [3.0, 3.0]}
    rows = rows_of(seconds, floors=["floor", "stricter"], rival="torch")
    assert [row["/ floor"] for row in rows] == [1.0, 0.5, 0.75]
    assert [row["/ stricter"] for row in rows] == [2.0, 1.0, 1.5]


def test_training_is_the_same_when_it_ends_within_rounding_of_the_way_it_went() -> None:
    begin, end = [[1.0, 2.0], [0.0]], [[1.1, 2.0], [0.0]]
    assert step.deviation(end, end, begin) == 0.0
    assert step.deviation([[1.1 + 1e-7, 2.0], [0.0]], end, begin) < 1e-4
    assert step.deviation([[1.0, 2.0], [0.0]], end, begin) == pytest.approx(1.0, rel=1e-3)
    assert step.deviation([[1.1, 2.0], [1e-3]], end, begin) > 1.0, "a gradient of zero stays zero"


def test_a_table_is_markdown_with_every_column_that_any_row_has() -> None:
    lines = markdown([{"name": "a", "ms": 1.5}, {"name": "bb", "note": "x"}])
    assert lines == [
        "| name | ms  | note |",
        "| ---- | --: | ---- |",
        "| a    | 1.5 |      |",
        "| bb   |     | x    |",
    ]


def test_tuned_options_are_those_that_this_torch_has_in_four_bucket_sizes() -> None:
    known = set(inspect.signature(TorchDDP).parameters)
    options = tuned_options()
    assert all(set(each) <= known for each in options.values())
    assert {each["bucket_cap_mb"] for each in options.values()} == {1, 5, 25, 100}
    for each in options.values():
        assert each["gradient_as_bucket_view"]
        assert each.get("static_graph") or each.get("batched_grad_copy")
    has_batched = any(each.get("batched_grad_copy") for each in options.values())
    assert has_batched == ("batched_grad_copy" in known)


def test_the_screening_keeps_the_fastest() -> None:
    assert choose_tuned({"a": 3.0, "b": 1.0, "c": 2.0}, 2) == ["b", "c"]
    assert choose_tuned({}, 3) == []


def test_who_cannot_take_part_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda _name: None)
    names, absent = present()
    assert names[:2] == [FLOOR, "paceline"]
    assert KEPT_FLOOR not in names
    assert "torch default" in names
    assert not set(names) & set(tuned_options())
    assert "Accelerate" not in names
    assert [line for line in absent if "paceline[bench]" in line] == [
        "Accelerate: left out, not installed (pip install 'paceline[bench]')",
        "Lightning Fabric: left out, not installed (pip install 'paceline[bench]')",
    ]


def test_the_stricter_floor_is_left_out_where_malloc_is_not_ours_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    names, absent = present(FLOORS)
    assert KEPT_FLOOR not in names
    assert absent[0].startswith(f"{KEPT_FLOOR}: left out, as malloc is not glibc's or")


def test_the_floor_trains_without_anything_around_it() -> None:
    module = nn.Linear(2, 1)
    trainer = BUILD[FLOOR](module)
    assert trainer.module is module
    before = module.weight.detach().clone()
    trainer.step(lambda m: m(module.weight.detach()).sum())
    assert not before.equal(module.weight)


def test_models_are_as_large_as_their_names_say() -> None:
    with torch.device("meta"):  # sizes without memory
        params = {name: list(model.build().parameters()) for name, model in MODELS.items()}
    for name in params:
        said = re.search(r"-([\d.]+)M$", name)
        if said:
            count = sum(param.numel() for param in params[name])
            digit = 0.1 if "." in said[1] else 1.0
            assert count / 1e6 == pytest.approx(float(said[1]), abs=0.6 * digit)
    assert len(params["small-600"]) == 600
    assert len(params["deep-200x64"]) == 400


def test_an_unknown_model_is_answered_with_the_closest() -> None:
    assert read_names("all", MODELS) == list(MODELS)
    assert read_names("gpt-17M,conv-0.1M", MODELS) == ["gpt-17M", "conv-0.1M"]
    with pytest.raises(SystemExit, match="Did you mean 'gpt-17M'"):
        read_names("gpt17", MODELS)


def test_memory_counts_shared_pages_once_in_multiples_of_the_gradients() -> None:
    mib = 2**20
    floor = [{"peak": 100 * mib, "share": 50 * mib, "gradients": 10 * mib}] * 2
    ours = [{"peak": 120 * mib, "share": 55 * mib, "gradients": 10 * mib}] * 2
    bare, row = memory.rows_of({FLOOR: floor, "paceline": ours})
    assert bare["over bare / gradients"] == 0.0
    assert row["over bare / gradients"] == 2.0
    assert row["all ranks MiB, shared once"] == 110.0
    assert row["over bare / all gradients"] == 0.5


def test_sums_are_shown_in_microseconds_and_gigabytes_a_second() -> None:
    rank = {"4096": {"Gloo": [2e-4] * 3, "shared memory": [2e-5, 4e-5, 2e-5]}}
    (row,) = allreduce.rows_of([rank, rank], [4096])
    assert row["bucket"] == "4 KiB"
    assert (row["Gloo, us"], row["shared memory, us"]) == (200.0, 20.0)
    assert row["shared memory, GB/s"] == 0.2
    assert row["shared memory / Gloo"] == 0.1


def test_a_start_is_the_sum_of_its_parts() -> None:
    rows = startup.rows_of(
        {"torch default": [[0.1, 0.2, 0.3]] * 3, "paceline": [[0.1, 0.1, 0.1]] * 3}
    )
    assert rows[1] == {
        "contestant": "paceline",
        "group, ms": 100.0,
        "wrap, ms": 100.0,
        "first step, ms": 100.0,
        "in all, ms": 300.0,
        "quartiles": "300 to 300",
        "/ torch default": 0.5,
    }


def test_several_workers_are_compared_with_one_round_by_round() -> None:
    seconds = {(name, workers): [2.0, 4.0] for name in launching.CONTESTANTS for workers in (1, 8)}
    seconds["paceline run", 8] = [3.0, 6.0]
    row = launching.rows_of(seconds, 8)[0]
    assert row == {
        "contestant": "paceline run",
        "1 worker, s": 3.0,
        "8 workers, s": 4.5,
        "8 / 1": 1.5,
    }


def test_what_is_not_beyond_the_bare_model_was_hidden() -> None:
    times = {gpu_overlap.BARE: [10.0, 10.0], "paceline": [12.0, 12.0], "torch": [20.0, 20.0]}
    sums = {gpu_overlap.BARE: (0.0, 0.0), "paceline": (8.0, 5.0), "torch": (10.0, 4.0)}
    bare, ours, torchs = gpu_overlap.rows_of(times, sums)
    assert (ours["exposed, ms"], ours["hidden"]) == (2.0, "75 %")
    assert torchs["hidden"] == "0 %"
    assert bare["hidden"] == ""


def test_a_page_is_filled_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    record = {
        "command": "python -m benchmarks x",
        "date": "2026-01-01",
        "hardware": "a machine",
        "versions": "some",
        "results": {
            "flat": [{"a": 1}],
            "deep": {
                "rows": [{"a": 2}],
                "ranks": 2,
                "threads": 1,
                "rounds": 7,
                "steps": 3,
                "transport": "magic",
            },
        },
    }
    (tmp_path / "x.json").write_text(json.dumps(record))
    text = "before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n<!-- begin y -->\n<!-- end y -->"
    once = page.filled(text, tmp_path)
    assert "old" not in once
    assert once.startswith("before\n<!-- begin x -->\n`python -m benchmarks x` · 2026-01-01")
    assert "| 1 |" in once
    assert "**deep** · 2 ranks with 1 thread each · 7 rounds of 3 steps · Paceline by magic" in once
    assert "after\n<!-- begin y -->\nNot measured yet.\n<!-- end y -->" in once
    assert page.filled(once, tmp_path) == once


def test_the_page_shows_every_result_that_the_commands_produce_and_is_up_to_date() -> None:
    text = page.PAGE.read_text()
    for name in [*command_line.CPU_RESULTS, *command_line.GPU_RESULTS]:
        assert f"<!-- begin {name} -->" in text
    assert page.filled(text, page.RESULTS) == text, "run: python -m benchmarks page"


def test_every_planned_command_is_one_that_the_parser_takes() -> None:
    parser = command_line.make_parser()
    for command in [*command_line.CPU_RESULTS.values(), *command_line.GPU_RESULTS.values()]:
        args = parser.parse_args(command.split())
        assert isinstance(args, argparse.Namespace)
        assert args.what in command_line.MEASUREMENTS
