"""Add files outside docs/ to the site, and adjust the links to them.

The README is the first page. In the repository every link leads to a file; in the site that file
has another path. A folder has none there, so its name stays as plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DATA = ("benchmarks/results/*.json", "examples/**/*.*", "tests/data/*")


def on_files(files: Any, config: Any) -> Any:
    """Add the files that are not below docs/."""
    named = {"index.md": ROOT / "README.md"} | {name: ROOT / name for name in PAGES}
    named |= {str(p.relative_to(ROOT)): p for pattern in DATA for p in ROOT.glob(pattern)}
    for name, path in named.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert links of the repository to links of the site."""
    name = page.file.src_uri
    home = ROOT / ("." if name == "index.md" or name in PAGES else "docs")

    def moved(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        found = (home / Path(name).parent / path).resolve()
        if "://" in target or not path or not found.is_relative_to(ROOT):
            return match[0]
        if found.is_dir():
            return text
        below = found.relative_to(ROOT)
        below = below.relative_to("docs") if below.parts[0] == "docs" else below
        up = "../" * (len(Path(name).parts) - 1)
        return f"[{text}]({up}{below}{'#' if anchor else ''}{anchor})"

    markdown = re.sub(r'(src|srcset)="docs/', r'\1="', markdown)
    return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)", moved, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Correct the theme's HTML."""
    return _mended(output, "../" * (len(Path(page.file.src_uri).parts) - 1))


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for templates that are not pages, such as 404."""
    return _mended(output_content, "")


def _mended(html: str, up: str) -> str:
    """Load no script from other hosts, and label parts of the page for screen readers."""
    html = html.replace("https://unpkg.com/iframe-worker/shim", f"{up}vendor/iframe-worker.js")
    html = html.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    html = re.sub(r"<thead>\s*<tr>(\s*<th[^>]*></th>)*\s*</tr>\s*</thead>", "", html)
    return re.sub(r"<th( [^>]*)?></th>", "<td></td>", html)  # an empty corner cell is not a header
