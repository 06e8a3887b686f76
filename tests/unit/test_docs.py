"""The pages say what is true: commands exist, messages are raised, numbers are measured."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import page as benchmarks_page
from paceline import errors
from paceline.checkpoint.command import VERBS, declare
from paceline.cli import COMMANDS, Parser
from scripts import pictures
from scripts.site_parts import Message, as_lines, messages, modules, other_names, reference
from tests.docs_code import PAGES, ROOT, blocks

COMMAND_LINES = sorted(
    {
        line.partition(" #")[0].strip()
        for page in PAGES
        for block in blocks(page)
        if block.language == "" and not block.not_run
        for line in block.code.splitlines()
        if re.match(r"paceline [a-z]+( |$)", line)
    }
)


def test_there_are_commands_on_the_pages() -> None:
    assert {line.split()[1] for line in COMMAND_LINES} >= {"run", "ckpt", "trace", "scale", "demo"}


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_on_a_page_is_understood(line: str) -> None:
    _, name, *arguments = shlex.split(line.replace("...", ""))
    assert name in COMMANDS
    parser = Parser(prog=name)
    if name == "ckpt" and arguments[0] in VERBS:
        declare(arguments.pop(0), parser)
    else:
        import_module(f"paceline.{COMMANDS[name].module}").add_arguments(parser)
    parser.parse_args(arguments)


QUOTES = [
    (section.partition("\n")[0].split()[0], " ".join(quote.split()))
    for section in re.split(
        r"^### ", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.M
    )
    for quote in re.findall(r"^> (.*)", section, re.M)
]


def test_a_quoted_message_is_raised_somewhere_with_its_class() -> None:
    raised = {(each.error, each.what) for each in messages()}
    assert [quote for quote in QUOTES if quote not in raised] == []
    assert len(QUOTES) > 20


def test_the_words_of_all_messages_are_those_that_were_agreed_on() -> None:
    """The one test of their words: look at what `make messages` changes, and commit it."""
    kept = (ROOT / "tests" / "data" / "messages.txt").read_text()
    assert as_lines(messages()).splitlines() == kept.splitlines()


def test_the_list_of_modules_is_what_they_say_of_themselves() -> None:
    assert (ROOT / "docs" / "modules.md").read_text() == modules(), "run: make modules"


def test_every_class_of_errors_is_explained() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PacelineError)
    }
    assert {error for error, _ in QUOTES} == classes - {"PacelineError"}


def test_messages_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "raise UsageError(f'{x} is ' + 'not a number.', advice='Pass one.')\n"
        "raise PeerError('Rank is gone.', where, f'Look at {y}.')\nraise UsageError(text)\n"
    )
    expected = [("PeerError", "Rank is gone.", "Look at ….")]
    expected.append(("UsageError", "… is not a number.", "Pass one."))
    assert messages(tmp_path) == [Message(*each) for each in expected]


def test_a_public_name_that_nobody_has_grouped_is_in_the_reference_too() -> None:
    text = reference()
    assert "::: paceline.run.Run\n" in text
    assert "paceline.run.Run" not in other_names(text)
    assert other_names(text.replace("::: paceline.run.Run\n", "")).startswith(
        "::: paceline.run.Run"
    )


def test_claims_are_what_was_measured_and_their_tests_exist() -> None:
    text = benchmarks_page.CLAIMS.read_text()
    assert benchmarks_page.claimed(text, benchmarks_page.RESULTS) == text, (
        "run: python -m benchmarks page"
    )
    results = set(re.findall(r"\| ([\w-]+) · .* · .* · .* \|$", text, re.M))
    assert results == set(re.findall(r"^\| \[([\w-]+)\]", text, re.M)) | {"result"}
    for path in re.findall(r"`((?:tests|examples)/\S+\.py)`", text):
        assert (ROOT / path).exists(), path


def test_pictures_are_drawn_from_what_was_recorded_and_measured() -> None:
    for name, svg in pictures.drawn().items():
        assert (pictures.PICTURES / name).read_text() == svg, "run: python scripts/pictures.py"


def test_the_readme_has_numbers_of_the_claims_and_lines_of_programs_that_are_run() -> None:
    text = (ROOT / "README.md").read_text()
    assert max(map(len, text.splitlines())) <= 100
    claims = {
        float(n) for n in re.findall(r"\| (-?[\d.]+) \| \S+ · ", benchmarks_page.CLAIMS.read_text())
    }
    told = text.partition("## Speed")[2].partition("## What")[0]
    told_numbers = [float(n) for n in re.findall(r"\d\.\d+", told)]
    assert told_numbers
    for number in told_numbers:
        assert any(abs(number - claim) < 0.006 for claim in claims), number
    (diff,) = (b for b in blocks(ROOT / "README.md") if b.language == "diff")
    (whole,) = (b for b in blocks(ROOT / "docs" / "from-ddp.md") if b.language == "diff")
    assert set(diff.code.splitlines()) <= set(whole.code.splitlines())
