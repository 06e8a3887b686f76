"""The wheel and the sdist: what is in them, and that they work where there is torch alone."""

from __future__ import annotations

import email
import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import paceline
from tests.docs_code import ROOT, blocks

MAX_WHEEL_BYTES = 2**20


def build(source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=100)
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def wheel_of(folder: Path) -> Path:
    (path,) = folder.glob("*.whl")
    return path


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_wheel_is_small_typed_and_only_the_package(dist: Path) -> None:
    wheel = wheel_of(dist)
    names = names_in(wheel)
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    assert {name.split("/")[0] for name in names} == {
        "paceline",
        f"paceline-{paceline.__version__}.dist-info",
    }
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("paceline/")} == source
    assert "paceline/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_needs_torch_and_rich_and_offers_each_extra(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        said = email.message_from_bytes(archive.read(name))
    needed = [each for each in said.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(re.split(r"[<>=! ]", each)[0] for each in needed) == ["rich", "torch"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(said.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])


def test_a_wheel_built_from_the_sdist_is_the_same(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert names_in(wheel_of(build(source, tmp_path / "again"))) == names_in(wheel_of(dist))


def link_torch_alone(folder: Path) -> None:
    """Link torch, rich and what they need into a folder, and nothing else."""
    waiting, found = ["torch", "rich"], set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        distribution = metadata.distribution(name)
        for file in distribution.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
        for need in distribution.requires or []:
            dependency = re.split(r"[<>=!~ ;\[]", need)[0].lower()
            if "extra ==" not in need and _is_installed(dependency):
                waiting.append(dependency)


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_it_trains_on_two_workers_where_there_is_torch_alone(dist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    link_torch_alone(site)
    with zipfile.ZipFile(wheel_of(dist)) as archive:
        archive.extractall(site)
    script = next(b.code for b in blocks(ROOT / "README.md") if b.script == "train.py")
    (tmp_path / "train.py").write_text(script)
    python = str(tmp_path / "env" / "bin" / "python")

    def run(*arguments: str) -> str:
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert run("-m", "paceline", "--version").strip() == f"paceline {paceline.__version__}"
    assert run("-c", "import paceline, sys; print('torch' in sys.modules)").strip() == "False"
    assert "finished on 2 workers" in run("-m", "paceline", "run", "--workers", "2", "train.py")
