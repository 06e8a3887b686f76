"""Public tools to test distributed code: ranks as threads, ranks as processes, planned faults."""

from __future__ import annotations

from paceline.testing.processes import run_processes as run_processes
from paceline.testing.ranks import run_ranks as run_ranks

__all__ = ["run_processes", "run_ranks"]
