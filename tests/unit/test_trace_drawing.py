"""The picture of a recorded step: at most 80 columns, with and without Unicode."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

import pytest
from counting import lines_executed
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import says

from paceline.files.documents import parse_json
from paceline.record import stages
from paceline.record.stages import (
    Answer,
    Check,
    Epoch,
    Layer,
    Model,
    Part,
    Sample,
    SamplePrediction,
    SampleStop,
    Stage,
    Stats,
    TensorFacts,
    Trace,
    TrainedEpochs,
    Weight,
    WeightStop,
)
from paceline.show.trace.card import draw_card
from paceline.show.trace.command import Printer
from paceline.show.trace.drawing import TextBox, connect, draw, paint, side_by_side, to_ascii

DATA = Path(__file__).parents[1] / "data"
DP = stages.read(DATA / "pipeline-dp.json")
DDP = stages.read(DATA / "pipeline-ddp.json")

each_trace = pytest.mark.parametrize("trace", [DP, DDP], ids=["dp", "ddp"])


def text_of(trace: Trace, **options: Any) -> str:
    return "\n".join(draw(trace, **options))


def lines_of(trace: Trace, plain: bool, width: int = 80) -> list[str]:
    lines = draw(trace, width=width)
    return [to_ascii(line) for line in lines] if plain else lines


@each_trace
@pytest.mark.parametrize("plain", [False, True])
def test_no_line_is_wider_than_80_columns(trace: Trace, plain: bool) -> None:
    assert max(map(len, lines_of(trace, plain))) <= 80


@each_trace
def test_plain_is_ascii_and_shows_the_same(trace: Trace) -> None:
    plain, fine = to_ascii(text_of(trace)), text_of(trace)
    assert plain.isascii()
    assert len(plain.splitlines()) == len(fine.splitlines())
    assert "ok same as one process on the whole batch" in plain


def test_the_shapes_of_the_issue_are_in_the_picture_of_data_parallel() -> None:
    shown = text_of(DP)
    places = [shown.index(words) for words in ("1,000 x 10", "100 x 10", "50 + 50", "50 x 10")]
    places += [shown.index("COPY THE MODEL"), shown.index("50 x 1 "), shown.index("100 x 1 ")]
    assert places == sorted(places)


def test_the_stages_of_the_issue_are_in_the_picture_of_distributed_data_parallel() -> None:
    shown = text_of(DDP)
    titles = ["SAMPLER", "BATCH", "FORWARD", "LOSS", "BACKWARD", "BUCKETS", "ALL-REDUCE", "UPDATE"]
    places = [shown.index(f"  {title}") for title in titles]
    assert places == sorted(places)


def test_the_sample_and_the_weight_are_marked_where_they_are() -> None:
    shown = text_of(DDP)
    assert re.search("● row 17 .*row 34 ", shown)
    assert shown.count("◆") > 8
    assert "averaged gradient" in shown


def test_a_step_that_is_not_the_same_says_so() -> None:
    check = Check(
        how="whole batch",
        text="NOT the same as one process on the whole batch: difference 0.2",
        is_same=False,
        difference=0.2,
        is_equal_on_all=False,
    )
    shown = text_of(replace(DDP, check=check))
    assert f"✗ {check.text[:8]}" in shown
    assert re.search("✗ .*2 workers' weights.* NOT EQUAL", shown)


def test_of_many_workers_the_first_the_last_and_the_samples_are_drawn() -> None:
    many = big_trace(workers=64, owner=37)
    shown = text_of(many)
    assert "worker 0 " in shown
    assert "worker 37 " in shown
    assert "worker 63 " in shown
    assert "worker 5 " not in shown
    assert says(shown, "and 61 other workers")
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("workers", [-1, 0, 10**12, 2**64 - 1])
def test_a_number_of_workers_that_cannot_be_right_is_drawn_at_once(workers: int) -> None:
    assert max(map(len, text_of(replace(DDP, workers=workers)).splitlines())) <= 80


def giant(change: Any) -> Trace:
    """What a reader gets of a file that is as large as one may be, and was changed."""
    document = json.loads(json.dumps(stages.to_json(DDP)))
    change(document)
    return stages.from_json(parse_json(json.dumps(document).encode(), "a file"))


LONG = "name " * 10_000
PART = {"title": "x", "worker": None, "tensors": []}


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(stages=[{"name": "a", "title": "b", "text": "c"}] * 10_000),
        lambda d: d["stages"][3].update(parts=[PART] * 10_000),
        lambda d: d["stages"][3].update(parts=[{**PART, "worker": 0}] * 10_000),
        lambda d: d["stages"][3].update(parts=[{**PART, "worker": 2**63}] * 9),
        lambda d: d["stages"][3].update(title=LONG, text=LONG, name=LONG, seconds=1e300),
        lambda d: d["stages"][3]["parts"][0].update(title=LONG, device=LONG, text=LONG),
        lambda d: d["stages"][3]["parts"][0]["tensors"][0].update(shape=[2**63] * 50_000),
        lambda d: d["stages"][3]["parts"][0]["tensors"][0].update(dtype=LONG, name=LONG),
        lambda d: d["model"].update(name=LONG, parameters=2**63),
        lambda d: d.update(times=LONG, workers=2**63, batch_rows=-(2**63)),
        lambda d: d["sample"].update(index=2**63, stops=d["sample"]["stops"] * 2_000),
        lambda d: d["weight"].update(index=[2**63] * 50_000),
        lambda d: d["weight"]["stops"][0].update(by_worker=[1e300] * 50_000),
        lambda d: d["training"].update(
            epochs=[{"epoch": 2**63, "loss": 1e300, "seconds": 1e300}] * 10_000
        ),
        lambda d: d["check"].update(text=LONG, reason="\x1b[2J" + LONG),
    ],
)
def test_giant_counts_and_texts_of_a_file_are_drawn_with_little_work_and_cut(change: Any) -> None:
    trace = giant(change)
    lines: list[str] = []
    assert lines_executed(lambda: lines.extend(draw(trace))) < 2_000_000
    assert len(lines) < 20_000
    assert max(map(len, lines)) <= 80
    assert all(map(str.isprintable, lines))


def test_three_boxes_side_by_side_cut_no_word_off() -> None:
    shown = text_of(big_trace(workers=3, owner=1))
    assert "385 averaged" in shown
    boxes = [line for line in shown.splitlines() if line.startswith("    │")]
    assert not [line for line in boxes if re.search(r"[a-z]\.\.\.", line)]


def test_many_buckets_are_summarised() -> None:
    shown = text_of(big_trace(workers=2, owner=0, buckets=40))
    assert "bucket 0 " in shown
    assert "... to bucket 39" in shown
    assert "bucket 20 " not in shown


def test_control_characters_and_wide_ones_in_a_file_do_not_reach_the_terminal() -> None:
    evil = replace(DP, model=Model(name="\x1b]0;x\x07日本\u0301\n", parameters=1, bytes=4))
    shown = draw(evil)
    assert not any("\x1b" in line or "\n" in line or "日" in line for line in shown)


def test_one_box_joins_to_a_row_of_others_and_back() -> None:
    assert connect(1, 2, 26) == "         ┌─────┴─────┐"
    assert connect(2, 1, 26) == "         └─────┬─────┘"
    assert connect(2, 2, 26) == "         │           │"
    assert connect(3, 1, 38) == "         └───────────┼───────────┘"


def test_boxes_of_one_row_are_equally_high_and_fed_from_above() -> None:
    boxes = [TextBox("a", ["one"]), TextBox("b", ["one", "two"], "5 ms")]
    assert side_by_side(boxes, 34, is_fed=True) == [
        "    ┌─ a ──▼─────┐  ┌─ b ── 5 ms ┐",
        "    │ one        │  │ one        │",
        "    │            │  │ two        │",
        "    └────────────┘  └────────────┘",
    ]


words = st.text(max_size=60)
numbers = st.floats(width=32)


@st.composite
def any_trace(make: Any) -> Trace:
    workers = make(st.integers(1, 9))
    name = make(words)
    facts = TensorFacts(
        name=make(words),
        shape=make(st.lists(st.integers(0, 10**9), max_size=5)),
        dtype=make(words),
        device=make(words),
        bytes=make(st.integers(0, 10**15)),
        stats=Stats(min=make(numbers), mean=make(numbers), max=make(numbers), zeros=0.5),
        first=make(st.none() | st.lists(numbers, max_size=6)),
    )
    each = [
        Part(title=make(words), worker=w, device=name, tensors=[facts] * 3, seconds=1.0, text=name)
        for w in range(workers)
    ]
    whole = [Part(title=name, tensors=[facts])]
    titles = ["data", "split", "forward", "buckets", "all-reduce", "gather"]
    stages = [
        Stage(
            name=n, title=make(words), text=make(words), parts=make(st.sampled_from([each, whole]))
        )
        for n in titles
    ]
    row = make(st.integers(0, 10**9))
    return Trace(
        engine=make(st.sampled_from(["DataParallel", "DistributedDataParallel"])),
        step=1,
        created=0.0,
        workers=workers,
        devices=[name] * workers,
        model=Model(name=name, parameters=1, bytes=1),
        batch_rows=1,
        has_values=True,
        stages=stages,
        sample=Sample(index=row, stops=[SampleStop(stage="forward", worker=0, row=row)]),
        weight=Weight(
            name=name,
            index=[1, 2],
            bucket=0,
            position=3,
            stops=[WeightStop(stage="forward", what="value", by_worker=[make(numbers)] * workers)],
        ),
        check=Check(how="whole batch", text=make(words), is_same=False, reason=make(words)),
        training=TrainedEpochs(
            epochs=[Epoch(epoch=1, loss=make(numbers), seconds=1.0, observation=make(words))]
        ),
        prediction=SamplePrediction(
            index=1,
            input=[facts],
            layers=[Layer(name=make(words), kind=name, output=facts)],
            answer=Answer(kind="value", text=make(words)),
        ),
    )


@settings(max_examples=60, deadline=None)
@given(any_trace(), st.booleans(), st.sampled_from([80, 79, 60, 40]))
def test_whatever_is_in_it_the_picture_is_not_wider_than_it_may_be(
    trace: Trace, plain: bool, width: int
) -> None:
    for line in lines_of(trace, plain, width):
        assert len(line) <= width
        assert line.isprintable()
        assert not plain or line.isascii()


def show(trace: Trace, stream: IO[str]) -> None:
    screen = Printer(stream)
    screen.show(draw(trace, width=screen.width))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colour_is_for_marks_and_titles_and_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe, quiet = Terminal(), io.StringIO(), Terminal()
    show(DDP, terminal)
    show(DDP, pipe)
    monkeypatch.setenv("NO_COLOR", "1")
    show(DDP, quiet)
    assert re.search(r"\x1b\[36m● row 17 .*row 34 ", terminal.getvalue())
    assert "\x1b[32m✓ same as one process" in terminal.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()) == quiet.getvalue()
    assert "\x1b" not in quiet.getvalue() + pipe.getvalue()


def test_a_mark_is_coloured_inside_its_box_and_the_box_is_not() -> None:
    line = paint("    │ ◆ value 0.5   │  │ nothing │")
    dim = "\x1b[2m│\x1b[0m"
    assert line == f"    {dim} \x1b[35m◆ value 0.5   \x1b[0m{dim}  {dim} nothing {dim}"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_is_used_as_wide_as_it_is(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    show(DDP, terminal)
    widest = max(map(len, terminal.getvalue().splitlines()))
    assert columns - 2 <= widest <= columns


def test_step_by_step_waits_for_enter_after_each_stage_until_nobody_presses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal("\n\n"))
    screen = Printer(terminal, waits=True)
    shown: list[str] = []
    monkeypatch.setattr(
        "builtins.input",
        lambda words: shown.append(terminal.getvalue()) or sys.stdin.readline() or stop(),
    )
    screen.show(draw(DDP))
    assert "INPUT DATA" not in shown[0]
    assert "INPUT DATA" in shown[1]
    assert "WORKERS MEET" not in shown[1]
    assert "WORKERS MEET" in shown[2]
    assert "UPDATE" not in shown[2]
    assert len(shown) == 3  # then the input has ended, and the rest is shown at once
    assert "UPDATE" in terminal.getvalue()


def stop() -> None:
    raise EOFError


@pytest.mark.parametrize(("encoding", "can"), [("utf-8", True), ("ascii", False), ("cp437", False)])
def test_a_terminal_that_cannot_show_boxes_is_noticed(encoding: str, can: bool) -> None:
    file = io.BytesIO()
    stream = io.TextIOWrapper(file, encoding=encoding)
    show(DDP, stream)
    stream.flush()
    assert ("┌" in file.getvalue().decode(encoding)) is can


def test_the_table_of_epochs_has_a_row_for_each_and_words() -> None:
    epochs = [
        Epoch(epoch=i, loss=1.0 / i, seconds=0.5, accuracy=0.5, observation="falling")
        for i in (1, 2, 3)
    ]
    training = TrainedEpochs(epochs=epochs, observation="It fell.")
    shown = text_of(replace(DDP, training=training, prediction=None)).splitlines()
    assert sum(line.endswith("  falling") for line in shown) == 3
    assert shown[-1].strip() == "It fell."


def test_a_prediction_ends_in_its_answer() -> None:
    facts = TensorFacts(name="x", shape=[1, 3], dtype="float32", device="cpu", bytes=12)
    prediction = SamplePrediction(
        index=4,
        input=[facts],
        layers=[Layer(name="0", kind="Linear", output=facts)],
        answer=Answer(kind="class", text="class 1, with a probability of 91.4%"),
    )
    shown = text_of(replace(DDP, prediction=prediction)).splitlines()
    assert [line.split() for line in shown if "0 Linear" in line] == [
        ["0", "Linear", "1", "x", "3", "-", "-", "-", "-"]
    ]
    assert shown[-1].strip() == "Answer: class 1, with a probability of 91.4%."


def big_trace(workers: int, owner: int, buckets: int = 1) -> Trace:
    def bucket(number: int) -> Part:
        facts = TensorFacts(
            name=f"bucket {number}", shape=[100], dtype="float32", device="cpu", bytes=400
        )
        return Part(title=f"bucket {number}", tensors=[facts], text="a to b")

    def spread(stage: Stage) -> Stage:
        if stage.name == "buckets":
            return replace(stage, parts=[bucket(number) for number in range(buckets)])
        if stage.parts[0].worker is None:
            return stage
        template = stage.parts[0]
        parts = [
            replace(template, worker=number, title=f"worker {number}") for number in range(workers)
        ]
        return replace(stage, parts=parts)

    assert DDP.sample is not None
    stops = [replace(s, worker=None if s.worker is None else owner) for s in DDP.sample.stops]
    return replace(
        DDP,
        workers=workers,
        devices=["cpu"] * workers,
        stages=[spread(stage) for stage in DDP.stages],
        sample=replace(DDP.sample, stops=stops),
        weight=None,
    )


@each_trace
@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_a_prediction_is_followed_through_every_device(trace: Trace, width: int) -> None:
    lines = draw(trace, width=width)
    assert max(map(len, lines)) <= width
    shown = re.split("same sample in a batch of 100", "\n".join(lines))[1]
    assert trace.prediction is not None
    assert trace.prediction.answer is not None
    places = [stop for stop in trace.prediction.stops if stop.stage != "data"]
    assert shown.count("● row 17") == len(places)
    assert ("┌─ gather" in shown) == (trace.engine == "DataParallel")


@each_trace
def test_a_card_shows_rows_gradients_their_average_and_the_check(trace: Trace) -> None:
    card = ElementTree.fromstring(draw_card(trace))
    assert (card.get("width"), card.get("height")) == ("1200", "630")
    words = [element.text or "" for element in card.iter("{http://www.w3.org/2000/svg}text")]
    assert {"100", "50", "50 x 10"} <= set(words)
    assert words.count("50") == 2
    assert trace.weight is not None
    assert trace.check is not None
    numbers = [n for s in trace.weight.stops if "gradient" in s.what for n in s.by_worker or []]
    assert {f"{number:.5f}" for number in numbers} <= set(words)
    assert trace.check.text[1:] in {word[1:] for word in words}
    for element in card.iter():
        assert 0 <= float(element.get("x", 0)) <= 1200
        assert 0 <= float(element.get("y", 0)) <= 630


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 64])
def test_a_card_has_lanes_for_a_few_workers_and_says_how_many_more(workers: int) -> None:
    card = draw_card(big_trace(workers, owner=0))
    assert card.count(">worker ") == min(4, workers)
    assert says(card, "and", workers - 4) == (workers > 4)


@pytest.mark.parametrize("engine", ["DataParallel", "<script>"])
def test_a_card_of_anybodys_file_is_a_picture_and_nothing_else(engine: Any) -> None:
    hostile = replace(
        DDP,
        engine=engine,
        workers=2**40,
        stages=[replace(stage, parts=stage.parts[:1]) for stage in DDP.stages],
        model=replace(DDP.model, name="</svg><script>alert(1)</script>" * 100),
        check=replace(DDP.check or Check(how="whole batch", text=""), text="<b>" * 900),
    )
    card = ElementTree.fromstring(draw_card(hostile))
    assert {element.tag.rpartition("}")[2] for element in card.iter()} <= {
        *("svg", "rect", "path", "text"),
    }
