"""Looking up a private name of torch, with an error that names supported versions."""

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
    """Around imports of private names: the error names a missing one, and supported versions."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise MissingLibraryError(
            f"torch {torch.__version__} lacks a name that Paceline needs: {error}.",
            advice=f"Install torch {OLDEST} to {NEWEST}, or a newer Paceline.",
        ) from error


def find(path: str) -> Any:
    """The object at this dotted path in torch; MissingLibraryError where there is none."""
    with named_if_missing():
        return pkgutil.resolve_name(path)
