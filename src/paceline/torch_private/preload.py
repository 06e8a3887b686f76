"""The slow imports that every training needs, listed without importing torch."""

from __future__ import annotations

HEAVY_MODULES = ("torch._dynamo", "torch.distributed")
"""The first optimizer imports the compiler, which takes longer than most tests."""
