"""One chromium for all tests of pages; without chromium or playwright they are skipped.

`apt-get install chromium` and `pip install playwright` provide them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

# CI is root in a container: no sandbox works there, and shared memory is small.
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()
