"""`paceline learn`: every fact is covered, answers are right for any numbers, the page works.

What is expected is reckoned here by plain arithmetic, not taken from what the lessons say.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contrast import TOO_FAINT
from sentences import says

import paceline
from paceline.cli import main
from paceline.errors import UsageError
from paceline.show.learn import command, page, values
from paceline.show.learn.catalogue import QUESTIONS
from paceline.show.learn.lab import Lab
from paceline.show.learn.lessons import LESSONS, PROBLEMS
from paceline.show.learn.question import Answered
from paceline.show.learn.runs import LearnOptions
from paceline.show.learn.saved import ProgressFile
from paceline.show.learn.session import Session
from paceline.show.trace.command import Printer

pytestmark = pytest.mark.usefixtures("_half_of_torch")

# What the lessons cover, as docs/learn.md lists it.
FACTS = [*map(str, range(1, 17)), "pipeline", "multi-gpu", "epochs", "prediction", "islands"]
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d\.?\d*e-?\d+")
SLOW = {
    *("batch-shape", "first-part-shape", "kept-is-the-same", "epochs-that-help", "final-accuracy"),
    *("effective-batch",),
    *("device-of-a-prediction", "loss-of-a-larger-batch", "own-speedup", "largest-loss"),
    *("wait-for-a-slow-worker", "faster-in-python"),
}
"""Trainings of seconds, which do not become truer by repetition."""

OWN = """
import torch
from torch import nn
from torch.nn import functional as F

def make():
    x = torch.randn(60, 1, 8, 8)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 7))
    return net, (x, torch.randint(7, (60,))), F.cross_entropy

class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 3))
    def forward(self, x):
        return x * self.weight  # takes a whole batch of 16 and no part of it

def whole(): return Fixed(), (torch.randn(32, 3), torch.randn(32, 3)), F.mse_loss
"""


def answers(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["learn", "--answers", "--json", *flags]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    document["by_name"] = {each["name"]: each["answer"] for each in document["answers"]}
    return document


def dealt(rows: int, workers: int) -> list[int]:
    return [rows // workers + (rank < rows % workers) for rank in range(workers)]


def cut(rows: int, devices: int) -> list[int]:
    return [len(part) for part in torch.arange(rows).chunk(devices)]


def check(found: dict[str, Any], workers: int, batch: int) -> None:
    """What follows from the numbers alone, whatever the seed."""
    rows = -(-1000 // batch) * batch
    assert found["rows-by-worker"] == dealt(batch, workers)
    assert found["rows-by-device"] == cut(batch, workers)
    assert found["output-shape"] == [batch, 5]
    assert found["copies"] == len(cut(batch, workers))
    assert found["devices-with-rows"] == len(cut(workers - 1, workers))
    assert found["gathered-bytes"] == batch * 5 * 4
    assert found["bytes-through-one-device"] == [batch * 5 * 4, 0]
    assert found["bytes-by-device"] == 55 * 4
    assert found["sent-gradients"] == 55
    assert found["processes"] == [1, workers]
    assert found["places-of-gradients"] == [1, workers]
    assert found["ranks"] == list(range(workers))
    assert found["files-written"] == 1
    assert found["changed-lines"] == 1
    assert found["lines-by-hand"] == 0
    assert found["shares"] == dealt(rows, workers)
    assert found["evaluation-rows"] == dealt(batch, workers)
    assert found["repeated-rows"] == -batch % workers
    assert found["rows-without-sampler"] == max(1, batch // workers)
    assert (found["shared-rows"], found["rows-left-out"]) == (0, 0)
    for name in ("uneven-is-exact", "copies-stay-equal", "same-as-one-process", "copies-are-kept"):
        assert found[name] == "yes", name
    for name in ("torch-loads-it", "the-other-way", "equal-without-averaging"):
        assert found[name] == "no", name
    assert (found["rounds-of-a-training"], found["times-fewer-bytes"]) == (3, 60)
    assert (found["a-round-in-every-step"], found["rare-rounds"]) == ("yes", "no")
    assert found["where-islands-pay"] == "only on the slow one"
    assert found["another-model"] == "an error on every worker"
    assert found["name-in-the-file"] == "module.weight"
    assert found["loaded-by-ours"] == 2
    assert [line.partition(":")[0] for line in found["script-order"]] == [
        "meet", "place", "wrap", "deal", "train", "save",
    ]  # fmt: skip


COST_S: dict[str, float] = {}
"""By question, the time of all processors that finding its answer took."""


def processor_s() -> float:
    return sum(os.times()[:4])  # this process and those it has waited for


@pytest.fixture(scope="module")
def ran() -> tuple[Lab, list[Answered]]:
    """Every lesson, run once."""
    lab = command._load(Namespace(seed=0, workers=None, batch=None, model=None))
    answered = []
    for question in QUESTIONS:
        begin_s = processor_s()
        answered.append(question.answer(lab))
        COST_S[question.name] = processor_s() - begin_s
    return lab, answered


def test_every_fact_is_covered_and_the_pages_own_numbers_come_out(
    ran: tuple[Lab, list[Answered]],
) -> None:
    document = json.loads(json.dumps(command.as_document(*ran), allow_nan=False))
    document["by_name"] = {each["name"]: each["answer"] for each in document["answers"]}
    assert {fact for each in document["answers"] for fact in each["facts"]} == set(FACTS)
    assert {each["lesson"] for each in document["answers"]} == {each.name for each in LESSONS}
    found = document["by_name"]
    check(found, workers=3, batch=16)
    assert (found["rows-by-worker"], found["rows-by-device"]) == ([6, 5, 5], [6, 6, 4])
    assert found["effective-batch"] == "no"
    assert (found["batch-shape"], found["first-part-shape"]) == ([100, 10], [50, 10])
    assert (found["global-batch"], found["rows-each"]) == (128, 32)
    assert (found["kept-batch"], found["learning-rate"]) == ([8] * 4, 4)
    assert found["kept-is-the-same"] == "yes"
    assert found["ratio"] == pytest.approx(100 / 30)
    assert found["efficiency"] == pytest.approx(100 * 100 / 30 / 4)
    assert found["lost-share"] == pytest.approx(100 - 100 * 100 / 30 / 4)
    assert found["loss-of-a-larger-batch"] == "higher"
    assert found["epochs-that-help"] == 5
    accuracies = [epoch.accuracy or 0.0 for epoch in ran[0].training.epochs]
    assert accuracies == sorted(accuracies)
    assert 0.57 < accuracies[0] < 0.65
    assert 0.87 < accuracies[5] < 0.93
    assert found["final-accuracy"] == pytest.approx(100 * accuracies[5], abs=0.1)
    assert max(COST_S.values()) < 10, COST_S
    for each in document["answers"]:
        assert each["recorded"] or each["evidence"], each["name"]
        assert each["question"].rstrip(".").strip(), each["name"]
        assert each["code"], each["name"]
        assert each["why"], each["name"]
        assert "{" not in each["question"], each["name"]
        if each["choices"]:
            chosen = each["answer"] if each["kind"] == "order" else [each["answer"]]
            assert set(chosen) <= set(each["choices"])
    assert {name for problem in PROBLEMS for name in problem.questions} <= set(found)
    by_name = {each["name"]: each for each in document["answers"]}
    assert any("Missing key(s)" in line for line in by_name["torch-loads-it"]["evidence"])
    assert any("slow" in line for line in by_name["wait-for-a-slow-worker"]["evidence"])


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_every_question_and_its_evidence_fit_the_terminal(
    columns: int, ran: tuple[Lab, list[Answered]], tmp_path: Path
) -> None:
    stream = io.StringIO()

    class Terminal(Printer):
        width = columns

    screen = Terminal(stream)
    session = Session(
        ran[0], QUESTIONS, ProgressFile(tmp_path / "learn.json"), screen, lambda _: ""
    )
    for lesson in LESSONS:
        command._show_head(screen, lesson)
        session.lesson(lesson)
    lines = stream.getvalue().splitlines()
    assert columns - 5 < max(map(len, lines)) <= columns
    assert sum(line.startswith(("The answer is", "Measured: ")) for line in lines) == len(ran[1])


@pytest.mark.parametrize(("workers", "batch", "seed"), [(3, 16, 11), (4, 5, 2), (0, 0, 0)])
def test_answers_are_right_for_numbers_that_nobody_tried_before(
    workers: int, batch: int, seed: int
) -> None:
    if not workers:  # drawn anew each time
        rng = random.Random()
        workers, seed = rng.randint(2, 4), rng.randrange(2**32)
        batch = rng.randint(workers, 60)
    print(f"--workers {workers} --batch {batch} --seed {seed}")  # shown if anything fails
    lab = Lab(LearnOptions(workers=workers, batch=batch, seed=seed))
    answered = [q.answer(lab) for q in QUESTIONS if q.name not in SLOW]
    found = {each.name: each.answer for each in answered}
    check(found, workers, batch)
    assert found["global-batch"] == batch * workers
    assert found["kept-batch"] == dealt(batch, workers)
    assert found["learning-rate"] == workers
    asked = {each.name: each.question for each in answered}
    one, many = [int(n) for n in asked["ratio"].split() if n.isdecimal()][:2]
    assert found["ratio"] == pytest.approx(one / many)
    for name in ("summed-gradient", "averaged-gradient"):
        shown = [float(n) for n in NUMBER.findall(asked[name])]
        wanted = sum(shown) / (workers if name == "averaged-gradient" else 1)
        assert found[name] == pytest.approx(wanted, abs=0.01 * max(map(abs, shown)))


def test_the_code_that_is_shown_runs_and_prints_the_answer(
    ran: tuple[Lab, list[Answered]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the lab that has run already, so that nothing is run again."""
    monkeypatch.setattr("paceline.show.learn.make_lab", lambda seed: ran[0])
    for each in ran[1]:
        if each.name not in SLOW:
            exec(compile(each.code, each.name, "exec"), {"__name__": "__main__"})
            printed = capsys.readouterr().out.strip()
            value = {"yes": "True", "no": "False"}.get(str(each.answer), str(each.answer))
            assert printed == value, each.name


def test_another_seed_makes_other_right_answers() -> None:
    question = next(question for question in QUESTIONS if question.name == "own-rows")
    one, other, again = (question.answer(Lab(LearnOptions(seed=seed))).answer for seed in (1, 2, 1))
    assert one == again != other


def test_a_model_of_ones_own_is_asked_about_and_one_that_cannot_be_split_is_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    document = answers(capsys, "replicas", "--model", f"{path}:make", "--workers", "3")
    assert document["trouble"] == ""
    assert document["by_name"]["output-shape"] == [16, 7]
    asked = {each["name"]: each["question"] for each in document["answers"]}
    assert "(16, 1, 8, 8) goes through your Sequential" in asked["output-shape"]
    document = answers(capsys, "replicas", "--model", f"{path}:whole")
    assert "must match" in document["trouble"]
    assert document["by_name"]["output-shape"] == [16, 5]
    document = answers(capsys, "split", "--model", f"{path}:missing")
    assert "has no function 'missing'" in document["trouble"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "1"], "--workers is 1"),
        (["--workers", "9"], "--workers is 9"),
        (["--batch", "2", "--workers", "3"], "--batch is 2"),
        (["--seed", "-1"], "--seed is -1"),
        (["cards"], "do not go together"),
        (["smapler"], "Did you mean 'sampler'?"),
        (["0"], "There is no lesson '0'"),
        (["9" * 5000], "There is no lesson"),
    ],
)
def test_impossible_questions_are_usage_errors(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", "--answers", *flags]) == 2
    assert words in capsys.readouterr().err


def test_without_a_terminal_the_answers_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "split"]) == 2
    assert "paceline learn --answers" in capsys.readouterr().err
    assert main(["learn", "--json"]) == 2


def test_answers_as_text_have_the_code_and_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "7", "--answers", "--ascii"]) == 0
    shown = capsys.readouterr().out
    assert shown.isascii()
    for words in (
        "Saving and loading",
        "ok module.weight",
        "refusal = lab.saved.refusal",
        "| Runtime",
    ):
        assert words in shown


def test_a_lesson_in_a_notebook_is_rich_output_and_text_elsewhere() -> None:
    shown = paceline.show.learn.lesson("saving")
    assert [each.name for each in shown.answers][:2] == ["name-in-the-file", "torch-loads-it"]
    rich = shown._repr_html_()
    assert rich.count("<details>") == 4 + 2
    assert "<b>module.weight</b>" in rich
    assert "&quot;module.weight&quot;" in rich  # what was raised, as text
    assert "  \N{CHECK MARK} module.weight\n" in repr(shown)
    with pytest.raises(UsageError, match="no lesson 'sharks'"):
        paceline.show.learn.lesson("sharks")


def test_the_page_is_not_written_over_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.html"
    path.write_text("mine")
    assert main(["learn", "--html", str(path)]) == 2
    assert path.read_text() == "mine"
    assert main(["learn", "--html", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert says(capsys.readouterr().err, "no folder")


# The page in a real browser; without chromium or playwright these are skipped.


@pytest.fixture(scope="module")
def file(ran: tuple[Lab, list[Answered]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "lessons.html"
    page.write(path, *ran)
    page.check_place(path)  # another one may replace it
    return path


@pytest.fixture
def open_page(browser: Any, file: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page; in the end nothing was complained about or fetched."""
    contexts, complaints, requests = [], [], []

    def opened(width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("request", lambda request: requests.append(request.url))
        shown.goto(file.as_uri())
        assert shown.get_attribute("html", "data-ready") == "true"
        return shown

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} == {file.as_uri()}


def test_typed_answers_are_compared_in_the_page_as_on_a_terminal(
    open_page: Callable[..., Any], ran: tuple[Lab, list[Answered]]
) -> None:
    shown = open_page()

    def answer(name: str, text: str) -> str:
        shown.evaluate("name => { location.hash = '#q-' + name; }", name)
        form = shown.locator(f"#q-{name}")
        form.locator("input.typed").fill(text)
        form.locator("input.typed").press("Enter")
        said: str = form.locator("[role=status]").inner_text()
        return said

    for text in ("(16, 5)", "16x5", "[16,5]", "torch.Size([16, 5])", "16 × 5"):  # noqa: RUF001
        assert answer("output-shape", text).startswith("✓ Right: (16, 5)"), text
    assert answer("output-shape", "(16, 10)").startswith("✗ Not quite. The answer is (16, 5)")
    assert "should be a shape" in answer("batch-shape", "large")
    assert shown.locator(".tally").inner_text() == "1 of 68 questions answered, 1 right"
    assert answer("rows-by-worker", "6 + 5 + 5").startswith("✓")
    assert shown.locator("#q-rows-by-worker .marked").count() == 3
    assert answer("ratio", "10/3").startswith("✓")
    assert answer("efficiency", "83 %").startswith("✓")
    # Whatever is right on a terminal is right here, and a near miss is not.
    typed = [[each.as_json(), _as_typed(each)] for each in ran[1]]
    verdicts = shown.evaluate(
        "typed => typed.map(([q, text]) => isSame(q, readValue(q, text)))", typed
    )
    assert [
        each.name for each, is_right in zip(ran[1], verdicts, strict=True) if not is_right
    ] == []
    wrong = "typed => typed.map(([q]) => { const v = readValue(q, '12345.678');"
    assert not any(shown.evaluate(wrong + " return v !== null && isSame(q, v); })", typed))


def _as_typed(each: Answered) -> str:
    if each.kind == "order":
        return " ".join(values.LETTERS[each.choices.index(step)] for step in each.answer)
    return each.shown


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_the_page_fits_is_easy_to_read_and_works_by_keyboard(
    width: int, scheme: str, open_page: Callable[..., Any]
) -> None:
    shown = open_page(width, scheme)
    shown.evaluate("document.querySelectorAll('.show, .points').forEach((each) => each.click())")
    asked = 68 + sum(len(problem.questions) for problem in PROBLEMS)
    assert shown.locator(".question .verdict").count() == asked
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate(TOO_FAINT) == []
    shown.locator("#theme").click()
    assert shown.evaluate(TOO_FAINT) == []
    # A card is turned and changed by keyboard alone.
    shown.locator(".card").focus()
    front = shown.locator(".card-front").inner_text()
    assert shown.locator(".card-back").inner_text() == "Turn it over"
    shown.keyboard.press("Space")
    assert shown.locator(".card-back").inner_text() != "Turn it over"
    assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    shown.keyboard.press("ArrowRight")
    assert shown.locator("#cards .place").inner_text() == "Card 2 of 68"
    assert shown.locator(".card-front").inner_text() != front
    # A problem is opened and solved, and does not change what the lessons count.
    shown.reload()
    shown.locator(".problem summary").first.focus()
    shown.keyboard.press("Enter")
    shown.keyboard.press("Tab")
    shown.keyboard.type("16x5")
    shown.keyboard.press("Enter")
    assert shown.locator(".standing").first.inner_text() == "✓ solved"
    assert shown.locator(".tally").inner_text() == "0 of 68 questions answered, 0 right"
    shown.locator("#split .back").click()  # before the first question is the last screen
    shown.locator(".points").first.click()
    # So are the stages of a step, and the points of an open question.
    shown.locator("#pipeline .stepper").focus()
    shown.keyboard.press("ArrowDown")
    assert shown.locator("#pipeline .place").inner_text() == "Stage 2 of 12"
    box = shown.locator(".explain input").first
    box.focus()
    shown.keyboard.press("Space")
    assert box.is_checked()
    unnamed = shown.evaluate(
        """() => [...document.querySelectorAll('input, button, section, [role="region"]')]
            .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length
                || e.ariaLabelledByElements?.length))
            .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
