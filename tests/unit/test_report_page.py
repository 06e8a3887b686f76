"""The report as a file: complete, locked, well formed, and never in the way of other files."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import SCALING, synthetic_run, synthetic_trace

from paceline.cli import main
from paceline.errors import UsageError
from paceline.files.run_folder import RunFolder
from paceline.show import report
from paceline.show.report import page as page_module
from paceline.show.report.collect import collect
from paceline.show.report.document import build

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<!--"
VOID = {"meta", "link", "br"}
ASSETS = Path(page_module.__file__).parent / "assets"


class Checker(HTMLParser):
    """Finds elements that are not closed in order, and collects what a browser would act on."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.identities: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.blocks: dict[str, list[str]] = {"script": [], "style": []}
        self.problems: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag if "json" not in (found.get("type") or "") else "script data")
        self.identities += [value for key, value in attrs if key == "id" and value]
        self.addresses += [v for k, v in attrs if k in {"src", "href", "action", "data"} and v]
        self.handlers += [key for key, _ in attrs if key.startswith("on") or key == "style"]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.blocks:
            self.blocks[self.open[-1]].append(data)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop().split()[0] != tag:
            self.problems.append(tag)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return synthetic_run(
        tmp_path_factory.mktemp("runs") / "digits",
        steps=60,
        name=HOSTILE,
        messages=[HOSTILE],
        timeline_steps=15,
        trace=synthetic_trace(),
        scaling=SCALING,
    )


@pytest.fixture(scope="module")
def page(folder: RunFolder) -> str:
    return report.write(folder.path).read_text()


def test_the_page_is_well_formed_and_its_names_are_unique(page: str) -> None:
    checker = Checker(page)
    assert (checker.problems, checker.open) == ([], [])
    assert len(set(checker.identities)) == len(checker.identities)


def test_nothing_on_the_page_is_loaded_from_anywhere(page: str) -> None:
    checker = Checker(page)
    assert all(each.startswith(("#", "data:image/svg+xml,")) for each in checker.addresses)
    style = checker.blocks["style"][0]
    assert re.findall(r"url\(([^)]*)\)", style) == ["#hatch"]
    assert "@import" not in style
    assert "sourceMappingURL" not in page


def test_the_policy_allows_this_style_and_this_script_and_nothing_else(page: str) -> None:
    checker = Checker(page)
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.replace("&#x27;", "'").split(";"))
    assert rules.pop("default-src") == "'none'"
    for name in ("style", "script"):
        (content,) = checker.blocks[name]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(f"{name}-src") == f"'sha256-{digest}'"
    assert rules.pop("require-trusted-types-for") == "'script'", "no string becomes markup"
    assert rules.pop("trusted-types") == "'none'"
    assert rules == {"img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    assert checker.handlers == [], "the policy would not let inline styles and handlers work"


def test_the_policy_stands_before_anything_that_could_act(page: str) -> None:
    assert page.index("Content-Security-Policy") < page.index("<link") < page.index("<style")


def test_markup_in_names_and_messages_is_text(page: str) -> None:
    assert HOSTILE not in page
    assert "<img" not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in page


@given(st.recursive(st.text(max_size=30), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_the_document_cannot_be_ended_from_inside_and_holds_what_it_was_given(
    value: object,
) -> None:
    inside = page_module.embedded(value)
    assert "<" not in inside
    assert json.loads(inside) == value


def test_the_page_holds_the_whole_document_and_without_script_its_sentences(
    page: str, folder: RunFolder
) -> None:
    content = page.partition('id="data">')[2].partition("</script>")[0]
    expected = json.loads(page_module.embedded(build(collect(folder.path))))
    assert json.loads(content) | {"made": 0} == expected | {"made": 0}
    without_script = page.partition("<noscript>")[2].partition("</noscript>")[0]
    for sentence in (*expected["sentences"], "samples per second: 2,667"):
        assert html.escape(sentence) in without_script


def test_the_scripts_put_text_in_as_text_only_and_only_the_live_one_asks_for_anything() -> None:
    script = "".join(path.read_text() for path in ASSETS.glob("*.js"))
    live = (ASSETS.parents[1] / "watch" / "assets" / "live.js").read_text()
    for way in ("innerHTML", "HTML(", "document.write", "eval(", "dangerously"):
        assert way not in script + live
    assert "fetch" not in script
    assert "fetch" in live


def test_vendored_files_are_as_their_packages_have_them_and_carry_their_licences(
    page: str,
) -> None:
    manifest = json.loads((ASSETS / "vendor" / "manifest.json").read_text())
    listed = {"manifest.json"}
    for package in manifest["packages"]:
        assert package["notice"] in page
        assert any(name.endswith(".LICENSE") for name in package["files"])
        for name, facts in package["files"].items():
            listed.add(name)
            content = (ASSETS / "vendor" / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == facts["sha256"], name
    assert {path.name for path in (ASSETS / "vendor").iterdir()} == listed


def test_the_file_is_private_and_no_temporary_is_left(folder: RunFolder, tmp_path: Path) -> None:
    path = report.write(folder.path, tmp_path / "page.html")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("place", [".", "/"])
def test_a_folder_is_not_replaced(place: str, folder: RunFolder) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        report.write(folder.path, place, force=True)


def test_an_older_report_is_replaced_and_another_file_is_not(
    folder: RunFolder, tmp_path: Path
) -> None:
    path = tmp_path / "notes.html"
    path.write_text("my notes")
    with pytest.raises(UsageError, match="not a report"):
        report.write(folder.path, path)
    assert path.read_text() == "my notes"
    report.write(folder.path, path, force=True)
    assert report.write(folder.path, path) == path


def test_a_link_is_not_written_through(folder: RunFolder, tmp_path: Path) -> None:
    target = tmp_path / "target.html"
    report.write(folder.path, target)
    before = target.read_text()
    link = tmp_path / "link.html"
    link.symlink_to(target)
    with pytest.raises(UsageError, match="not a report"):
        report.write(folder.path, link)
    report.write(folder.path, link, force=True)
    assert not link.is_symlink()
    assert target.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/run"], ["no run folder 'no/such/run'", "run.json and events/"]),
        (["RUN", "-o", "."], ["not a report", "Name another file"]),
        (["RUN", "-o", "no/such/place.html"], ["No such file or directory", "Name another file"]),
        (["RUN/..", "-o", "x.html"], ["has no run", "digits"]),
        (["RUN", "--fore"], ["Did you mean '--force'?"]),
    ],
)
def test_mistakes_on_the_command_line_are_explained(
    arguments: list[str], words: list[str], folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *(each.replace("RUN", str(folder.path)) for each in arguments)]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_the_command_says_where_the_page_is(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert main(["report", str(folder.path), "-o", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path} (")


def test_writing_a_report_loads_neither_torch_nor_anything_beyond_the_standard_library(
    folder: RunFolder, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import paceline.show.report\n"
        "paceline.show.report.write(sys.argv[1], sys.argv[2])\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names - {'paceline'}))"
    )
    command = [sys.executable, "-c", code, str(folder.path), str(tmp_path / "x.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stderr
