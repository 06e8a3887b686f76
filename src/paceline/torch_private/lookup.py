"""Finding a private name, or saying which torch would have it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import MissingLibraryError

OLDEST, NEWEST = "2.11", "2.15"
"""The versions of torch that the tests run with."""


@contextmanager
def named_if_missing() -> Iterator[None]:
    """Put around imports of private names: one that is missing is named, with the versions."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise MissingLibraryError(
            f"torch {torch.__version__} lacks a name that Paceline needs: {error}.",
            advice=f"Install torch {OLDEST} to {NEWEST}, or a newer Paceline.",
        ) from error


def find(path: str) -> Any:
    """What torch keeps under this path; an error that names it where there is no such thing."""
    with named_if_missing():
        return pkgutil.resolve_name(path)
