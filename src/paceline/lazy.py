"""Packages that import their names on first use, so that commands without torch start quickly.

The interface of a package is the stub beside its `__init__`: a list of imports, which type checkers
and editors read directly, and which `attach` executes one by one. A module of the
package is imported on first use too, so that it is there whatever else has been imported.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

MOVED = {
    "paceline.comm": "paceline.group",
    "paceline.gradients": "paceline.ddp",
    "paceline.learn": "paceline.show.learn",
    "paceline.observe": "paceline.telemetry",
    "paceline.progress": "paceline.telemetry",
    "paceline.trackers": "paceline.telemetry",
}
"""Former import paths, and their replacements."""


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from its stub."""
    module = sys.modules[package]
    home_by_name = _read_stub(Path(str(module.__file__)).with_suffix(".pyi"))

    def load(name: str) -> Any:
        if name not in home_by_name:
            if not name.startswith("_") and find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(  # from name and obj Python finds the name that was meant
                f"module {package!r} has no attribute {name!r}", name=name, obj=module
            )
        home, original = home_by_name[name]
        # A stub may also import a module: `from paceline.telemetry import spans`.
        is_module = home == package
        found = importlib.import_module(f"{home}.{original}" if is_module else home)
        value = found if is_module else getattr(found, original)
        setattr(module, name, value)
        return value

    return load, lambda: sorted([*vars(module), *home_by_name]), sorted(home_by_name)


def _read_stub(stub: Path) -> dict[str, tuple[str, str]]:
    """Module and original name by exported name."""
    statements = ast.parse(stub.read_text()).body
    return {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }


class _MovedFinder(MetaPathFinder, Loader):
    """Imports a module that has moved by its old name too: one module object, two names."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        old = next((old for old in MOVED if name == old or name.startswith(f"{old}.")), None)
        return None if old is None else ModuleSpec(name, self, origin=MOVED[old] + name[len(old) :])

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        # The import system now sets the old name's spec on the module; `exec_module` undoes that.
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


sys.meta_path.append(_MovedFinder())
