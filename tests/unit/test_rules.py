"""Rules of the code base that a machine can check: see SECURITY.md and CONTRIBUTING.md.

Source is read as a syntax tree, so that words in docstrings and comments do not count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
FILES = sorted(SOURCE.rglob("*.py"))
OTHER_FILES = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py")])

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "os.system", "os.popen"}
RUNS_THE_USERS_SCRIPT = "launcher/worker.py"
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
# Several machines meet at an address. Where a machine knows its own only as loopback, nothing but
# every interface would let the others in.
LISTENS_TO_OTHER_MACHINES = {"launcher/nodes.py"}
EVERY_INTERFACE = {"0.0.0.0", "::", "[::]"}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def name_of(node: ast.expr) -> str:
    """`a.b.c` as text; other expressions as far as they have names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return ""


def calls_in(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Every call: what is called, and the keywords that are constants."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            constants = {
                keyword.arg: keyword.value.value
                for keyword in node.keywords
                if keyword.arg and isinstance(keyword.value, ast.Constant)
            }
            yield name_of(node.func), constants


def imports_in(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_scan_finds_the_source() -> None:
    assert {"distributed.py", "reducer.py", "codec.py"} <= {path.name for path in FILES}


@each_file
def test_nothing_reads_or_writes_pickle(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports_in(path)} & FORBIDDEN_MODULES
    for name, keywords in calls_in(path):
        assert keywords.get("weights_only") is not False, name
        assert name != "torch.load" or keywords.get("weights_only") is True
        # They carry pickle between ranks.
        assert not name.endswith(("_object", "_object_list")), name


@each_file
def test_nothing_evaluates_text_or_asks_a_shell(path: Path) -> None:
    is_runner = path.relative_to(SOURCE).as_posix() == RUNS_THE_USERS_SCRIPT
    allowed = {"exec", "compile"} if is_runner else set()
    for name, keywords in calls_in(path):
        assert name not in FORBIDDEN_CALLS - allowed, name
        assert not keywords.get("shell"), name


@each_file
def test_nothing_listens_on_every_interface_of_a_single_machine(path: Path) -> None:
    if path.relative_to(SOURCE).as_posix() in LISTENS_TO_OTHER_MACHINES:
        return
    texts = {node.value for node in nodes_of(path) if isinstance(node, ast.Constant)}
    assert not texts & EVERY_INTERFACE


@each_file
def test_temporary_folders_are_private(path: Path) -> None:
    for name, _ in calls_in(path):
        assert name not in {"tempfile.mktemp", "tempfile.gettempdir"}, "mkdtemp has mode 0700"


@pytest.mark.parametrize("path", [*FILES, *OTHER_FILES], ids=lambda path: path.name)
def test_every_module_says_what_it_is_about(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = said.partition("\n\n")[0]
    assert len(first) > 15
    assert first.endswith((".", ":", "?"))


def test_no_module_has_a_name_that_means_nothing_or_repeats_its_package() -> None:
    for path in FILES:
        parts = [*path.relative_to(SOURCE).parent.parts, path.stem]
        assert not VAGUE_NAMES & set(parts), path
        assert len(parts) == 1 or not parts[-1].startswith(parts[-2]), path


def test_importing_the_package_loads_neither_torch_nor_anything_but_the_standard_library() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import paceline, paceline.cli, paceline.errors, paceline.env\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names - {'paceline'}))"
    )
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_everything_imports_with_torch_and_nothing_else_installed() -> None:
    code = """
import importlib, importlib.metadata, pkgutil, re, sys
from importlib.machinery import PathFinder

def closure(name, found):
    found.add(re.sub("[-_.]+", "-", name).lower())
    for line in importlib.metadata.requires(name) or []:
        needed = re.match("[A-Za-z0-9._-]+", line)[0]
        if "extra ==" not in line and re.sub("[-_.]+", "-", needed).lower() not in found:
            try: closure(needed, found)
            except importlib.metadata.PackageNotFoundError: pass
    return found

allowed = closure("torch", set())
homes = importlib.metadata.packages_distributions()

class TorchAlone:
    def find_spec(self, name, path=None, target=None):
        owners = {re.sub("[-_.]+", "-", o).lower() for o in homes.get(name.partition(".")[0], [])}
        if owners and not owners & (allowed | {"paceline"}):
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = TorchAlone()
import paceline
for found in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if found.name != "paceline.__main__":
        importlib.import_module(found.name)
print("numpy" in sys.modules, "pytest" in sys.modules, "paceline.ddp" in sys.modules)
"""
    done = run_python(code)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_the_diagram_of_the_architecture_is_the_one_that_is_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [re.findall(r"\w+", row) for row in layers]
    picture = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    drawn = [re.split(r"\s{3,}", row)[0].split() for row in picture.strip().splitlines()]
    assert drawn == checked[::-1]
    there = {path.stem for path in SOURCE.glob("*.py")} | {p.name for p in SOURCE.glob("[a-z]*/")}
    assert {name for row in drawn for name in row} == there - {"__init__"}


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_root_has_what_a_stranger_looks_for_and_it_is_short() -> None:
    longest = {"README.md": 120, "ARCHITECTURE.md": 150}
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        lines = (ROOT / name).read_text().splitlines()
        assert 5 < len(lines) <= longest.get(name, 300), name
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        assert len(path.read_text().splitlines()) <= 60, path.name
