"""JSON that nobody vouches for: whatever is beyond the limits is a typed error, at once."""

from __future__ import annotations

import functools
import io
import json
import tracemalloc
from dataclasses import dataclass

import pytest
from counting import lines_executed

from paceline.errors import CheckpointError, WireError
from paceline.files.documents import JsonLimits, parse_json, read_json, read_value


@dataclass(frozen=True)
class Job:
    workers: int
    rate: float = 0.0
    title: str = ""


@pytest.mark.parametrize(
    "text",
    [
        "9" * 400,
        '{"step": ' + "9" * 21 + "}",
        "-" + "9" * 5000,
        "1e400",
        "9" * 400 + ".0",
        "NaN",
        "[-Infinity]",
        "[" * 65 + "]" * 65,
        "[" * 10**6,
        '{"a": ' * 10**5,
        '{"a": 1, "a": 2}',
        '{"' + "n" * 1001 + '": 1}',
        '["' + "t" * (2**20 + 1) + '"]',
        '"\\ud800"',
        '{"\\udfff": 1}',
        "[" + "0," * 2**20 + "0]",
        "",
        "{} {}",
        "\ufeff{}",
        "\x00",
    ],
)
def test_what_is_beyond_the_limits_is_a_typed_error_that_names_its_origin(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"^notes\.json is not valid JSON") as found:
        parse_json(text.encode(), "notes.json", CheckpointError)
    assert len(str(found.value)) < 300


def test_bytes_that_are_not_text_are_a_typed_error() -> None:
    with pytest.raises(WireError):
        parse_json(b'"\xff"', "It")


def test_numbers_of_64_bits_and_texts_of_any_script_come_back() -> None:
    value = {"n": [2**64 - 1, -(2**63), 1e308, 5e-324], "t": ["héllo", "\U0001f600", "日本"]}
    assert parse_json(json.dumps(value).encode(), "It") == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(), "It") == value


def test_a_reader_may_allow_more() -> None:
    wide = JsonLimits(depth=500, digits=4300, surrogates=True)
    assert parse_json(b"9" * 400, "It", limits=wide) == int("9" * 400)
    assert parse_json(b'"\\ud800"', "It", limits=wide) == "\ud800"
    assert parse_json(b"[" * 300 + b"]" * 300, "It", limits=wide)


def test_a_file_is_not_read_beyond_its_limit() -> None:
    assert read_json(io.BytesIO(b"[1]"), 3, "It") == [1]
    endless = io.BytesIO(b" " * 10**6)
    with pytest.raises(WireError, match="larger than"):
        read_json(endless, 1000, "It")
    assert endless.tell() == 1001


def test_reading_takes_work_in_proportion_to_the_number_of_names() -> None:
    lines = []
    for count in (1_000, 4_000):
        rows = {f"layers.{i}.weight": {"rows": i, "norm": i / 7} for i in range(count)}
        text = json.dumps(rows).encode()
        lines.append(lines_executed(functools.partial(parse_json, text, "It")))
        assert len(parse_json(text, "It")) == count
    assert lines[1] < 4.5 * lines[0]


def test_a_list_of_empty_lists_does_not_multiply_memory() -> None:
    text = b"[" + b"[]," * 5_000_000 + b"[]]"
    tracemalloc.start()
    with pytest.raises(WireError, match="more than 1,048,576 values"):
        parse_json(text, "It")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"workers": "2"},
        {"workers": True},
        {"workers": 2.0},
        {"workers": 2, "rate": "fast"},
        {"workers": 2, "title": None},
        {"workers": 10**19 * 2},
    ],
)
def test_a_document_that_is_not_of_its_type_is_a_typed_error(document: object) -> None:
    with pytest.raises(WireError, match="job"):
        read_value(Job, document, "job")


def test_names_that_a_type_does_not_have_are_ignored() -> None:
    assert read_value(Job, {"workers": 2, "rate": 3, "mood": "x"}, "job") == Job(2, 3.0)
