"""What takes long to import and every training imports: told without importing torch."""

from __future__ import annotations

HEAVY_MODULES = ("torch._dynamo", "torch.distributed")
"""Building the first optimizer imports the compiler, which takes longer than most tests."""
