"""The section "scaling": how much faster more workers are, and where the rest went.

Measured points are joined by a solid line. Whatever was computed and not measured is dashed and
says so. Keys that are missing leave their part of the page out.
"""

from __future__ import annotations

from typing import Any

from paceline.report.markup import (
    Html,
)


def section(study: dict[str, Any]) -> Html | None:
    return None
