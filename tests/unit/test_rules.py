"""Rules of the code base that a machine can check: see SECURITY.md and CONTRIBUTING.md.

Source is read as a syntax tree, so that words in docstrings and comments do not count.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
FILES = sorted(SOURCE.rglob("*.py"))
OTHER_FILES = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py")])

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "os.system", "os.popen"}
RUNS_THE_USERS_SCRIPT = "launcher/worker.py"
PRIVATE_TO_TORCH = re.compile(
    r"^(torch|dist)\.(\w+\.)*_[A-Za-z]\w*|distributed_c10d|queue_callback"
    r"|\._(backward_hooks|post_accumulate_grad_hooks|get_backend|register_backend|is_param)\b"
)
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
# Several machines meet at an address. Where a machine knows its own only as loopback, nothing but
# every interface would let the others in.
LISTENS_TO_OTHER_MACHINES = {"launcher/nodes.py", "launcher/islands.py"}
EVERY_INTERFACE = {"0.0.0.0", "::", "[::]"}


class Found(NamedTuple):
    """What the rules are about, of one file."""

    path: str
    """Relative to the package."""
    docstring: str
    imports: set[str]
    calls: list[tuple[str, dict[str, object]]]
    """What is called, and the keywords that are constants."""
    texts: set[str]


def name_of(node: ast.expr) -> str:
    """`a.b.c` as text; other expressions as far as they have names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return ""


def found_in(path: Path) -> Found:
    tree = ast.parse(path.read_text())
    name = os.path.relpath(path, SOURCE)
    found = Found(name, ast.get_docstring(tree) or "", set(), [], set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            constants = {
                keyword.arg: keyword.value.value
                for keyword in node.keywords
                if keyword.arg and isinstance(keyword.value, ast.Constant)
            }
            found.calls.append((name_of(node.func), constants))
        elif isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imports.update({node.module, *(f"{node.module}.{a.name}" for a in node.names)})
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.texts.add(node.value)
    return found


@pytest.fixture(scope="module")
def source() -> list[Found]:
    """Read once: parsing takes longer than all the rules."""
    return [found_in(path) for path in FILES]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_scan_finds_the_source() -> None:
    assert {"distributed.py", "reducer.py", "codec.py"} <= {path.name for path in FILES}


def test_nothing_reads_or_writes_pickle(source: list[Found]) -> None:
    for found in source:
        assert not {name.split(".")[0] for name in found.imports} & FORBIDDEN_MODULES, found.path
        for name, keywords in found.calls:
            where = f"{name} in {found.path}"
            assert keywords.get("weights_only") is not False, where
            assert name != "torch.load" or keywords.get("weights_only") is True, where
            # They carry pickle between ranks.
            assert not name.endswith(("_object", "_object_list")), where


def test_nothing_evaluates_text_or_asks_a_shell(source: list[Found]) -> None:
    for found in source:
        allowed = {"exec", "compile"} if found.path == RUNS_THE_USERS_SCRIPT else set()
        for name, keywords in found.calls:
            assert name not in FORBIDDEN_CALLS - allowed, f"{name} in {found.path}"
            assert not keywords.get("shell"), f"{name} in {found.path}"


def test_nothing_listens_on_every_interface_of_a_single_machine(source: list[Found]) -> None:
    listening = {found.path for found in source if found.texts & EVERY_INTERFACE}
    assert listening <= LISTENS_TO_OTHER_MACHINES


def test_private_names_of_torch_are_used_in_torch_private_only() -> None:
    for path in FILES:
        if path.parent.name == "torch_private":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found = [name for name in names if PRIVATE_TO_TORCH.search(name)]
            assert not found, f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}: {found}"


def test_a_class_name_has_one_meaning() -> None:
    path_by_name: dict[str, Path] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                first = path_by_name.setdefault(node.name, path)
                assert first == path, f"{node.name} in {first} and in {path}"


def test_temporary_folders_are_private(source: list[Found]) -> None:
    for found in source:
        names = {name for name, _ in found.calls}
        open_to_all = names & {"tempfile.mktemp", "tempfile.gettempdir"}
        assert not open_to_all, f"{found.path}: mkdtemp has mode 0700"


def test_every_module_says_what_it_is_about(source: list[Found]) -> None:
    for found in [*source, *map(found_in, OTHER_FILES)]:
        first = found.docstring.partition("\n\n")[0]
        assert len(first) > 15, found.path
        assert first.endswith((".", ":", "?")), found.path


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


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
        try: importlib.import_module(found.name)
        except paceline.errors.MissingLibraryError as error:
            assert f"pip install 'paceline[{found.name.partition('.')[2]}]'" in str(error)
print("numpy" in sys.modules, "pytest" in sys.modules, "paceline.ddp" in sys.modules)
"""
    done = run_python(code)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_the_diagram_of_the_architecture_is_the_one_that_is_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [re.findall(r"\w+", row) for row in layers]
    picture = (ROOT / "ARCHITECTURE.md").read_text().split("```")[3]
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
    longest = {"README.md": 90, "ARCHITECTURE.md": 100}
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        lines = (ROOT / name).read_text().splitlines()
        assert 5 < len(lines) <= longest.get(name, 300), name
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        assert len(path.read_text().splitlines()) <= 60, path.name
