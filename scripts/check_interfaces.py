"""Check that packages import only names from each other's interface, the stub of `__init__`.

    python scripts/check_interfaces.py    prints each violation, and exits with 1 if there is one

`lint-imports` checks the order of the packages; this script checks that every name a package
imports from another is listed in the other's `__init__.pyi`, that no listed name is also the name
of a module, and that there are no relative imports.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parents[1] / "src" / "paceline"


def find_offences(home: Path = HOME) -> Iterator[str]:
    """One line for each import that bypasses an interface, and each name that hides a module."""
    packages = {stub.parent.name: read_names(stub) for stub in home.glob("*/__init__.pyi")}
    for package, names in packages.items():
        for name in sorted(names):
            if (home / package / f"{name}.py").exists() and names[name] != f"paceline.{package}":
                yield f"{package}/__init__.pyi: {name} is also the name of a module."
    for path in sorted(home.rglob("*.py")):
        own = path.relative_to(home).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(home.parent)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                yield f"{where}: a relative import; write paceline.… out."
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from _check(where, node.module, [a.name for a in node.names], own, packages)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield from _check(where, alias.name, [], own, packages)


def read_names(stub: Path) -> dict[str, str]:
    """The names that a package offers, with the module of each."""
    imports = [
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    return {
        alias.asname or alias.name: node.module or "" for node in imports for alias in node.names
    }


def _check(
    where: str, module: str, names: list[str], own: str, packages: dict[str, dict[str, str]]
) -> Iterator[str]:
    root, package, *inside = [*module.split("."), ""][: 3 if "." in module else 2]
    if root != "paceline" or package in (own, "") or package not in packages:
        return
    if any(inside):
        yield f"{where}: {module} is inside paceline.{package}; import from the package."
    for name in names if not any(inside) else []:
        if name not in packages[package]:
            yield f"{where}: paceline.{package} does not offer {name}."


if __name__ == "__main__":
    found = list(find_offences())
    print(*found, sep="\n")
    sys.exit(1 if found else 0)
