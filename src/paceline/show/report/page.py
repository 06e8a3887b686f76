"""`paceline report`: one HTML file with the document and the script that draws it.

Its content security policy allows only this style and this script, by their hashes, and no other
source: text that was mistaken for markup could neither run nor fetch anything. The script inserts
text as text only, which the policy enforces (trusted types).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from paceline import __version__
from paceline.errors import UsageError, WireError
from paceline.files import RunFolder, open_plain, plain_json, write_output
from paceline.show.report import document
from paceline.show.report.collect import collect
from paceline.telemetry import bytes_text

HEAD_BYTES = 1000
LIBRARIES = ("preact.js", "hooks.js", "htm.js", "uPlot.js")
PANELS = ("pieces.js", "chart.js", "pipeline.js", "timeline.js", "panels.js", "page.js")
SCRIPTS = (*(f"vendor/{name}" for name in LIBRARIES), *PANELS)
STYLES = ("vendor/uPlot.css", "page.css")


def render(shown: document.Json) -> str:
    """The page that shows a document."""
    facts = [f"{label}: {value} {note}" for label, value, note in shown["tiles"]]
    style, script = ("\n".join(map(asset, names)) for names in (STYLES, SCRIPTS))
    return assemble("report", shown["name"], shown, [*shown["sentences"], *facts], style, script)


def assemble(
    what: str, name: str, shown: object, facts: Sequence[str], style: str, script: str
) -> str:
    """One file with a document and its script; `facts` are for browsers without scripts."""
    script = f"/*\n{_notices()}\n*/\n{script}"
    return asset("page.html").format(
        generator=f"paceline {what} {__version__}",
        what=what,
        head=asset("head.html"),
        definitions=asset("definitions.svg"),
        style_hash=_hash(style),
        script_hash=_hash(script),
        name=escape(name),
        style=style,
        script=script,
        facts="".join(f"<li>{escape(each)}</li>" for each in facts),
        data=embedded(shown),
    )


def embedded(value: object) -> str:
    """JSON inside a script element, in which no string can end that element."""
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", compact_json(value))


def compact_json(value: object) -> str:
    return json.dumps(plain_json(value), separators=(",", ":"), allow_nan=False)


def asset(name: str, package: str = __package__) -> str:
    """A file of a page, by its name in the `assets` of a package."""
    content = resources.files(package).joinpath("assets", *name.split("/")).read_text("utf-8")
    return re.sub(r"(?m)^//# sourceMappingURL=.*$", "", content)


def _notices() -> str:
    """The licence notices of third-party code, which must be in every page."""
    packages = json.loads(asset("vendor/manifest.json"))["packages"]
    return "\n".join(f"{each['package']}: {each['notice']}" for each in packages)


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def write(
    run_folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
) -> Path:
    """Write the report of a run, by default to `report.html` in its folder; returns the path.

    The file is replaced atomically: an older report always, any other file only with `force`.
    """
    data = collect(Path(run_folder))
    path = Path(out) if out is not None else RunFolder(run_folder).report
    if not force and not is_replaceable(path, "report"):
        raise UsageError(
            f"{path} exists and is not a report, so it is left as it is.",
            advice="Name another file with -o, or add --force to replace it.",
        )
    write_output(path, [render(document.build(data))])
    return path


class RunView:
    """A run in a notebook: the report of its folder at the time the cell is shown.

        paceline.RunView("runs/digits")

    A `Run` with a folder, and the result of `paceline.launch`, are shown this way too.
    """

    def __init__(self, run_folder: str | os.PathLike[str]) -> None:
        self.folder = Path(run_folder)

    def __repr__(self) -> str:
        return f"RunView({str(self.folder)!r})"

    def _repr_html_(self) -> str | None:
        """None where there is nothing to show yet: then the notebook shows `repr()`."""
        try:
            shown = render(document.build(collect(self.folder)))
        except UsageError:
            return None
        return (
            '<iframe style="width: 100%; height: 45em; border: 0" title="Report" '
            f'srcdoc="{escape(shown)}"></iframe>'
        )


def is_replaceable(path: Path, what: str) -> bool:
    """Whether a file may be replaced: it does not exist, is empty, or is such a page."""
    try:
        with open_plain(path) as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return True
    except (WireError, OSError):
        return False
    return not head or f'content="paceline {what} '.encode() in head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="the run folder, with run.json and events/ in it")
    add("-o", "--output", metavar="FILE", help="where to write it (default: RUN/report.html)")
    add("--force", action="store_true", help="replace FILE even if it is not a report")


def main(args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    announce(write(args.run, args.output, force=args.force))
    return 0


def announce(path: Path) -> None:
    size = bytes_text(os.path.getsize(path))
    print(f"{path} ({size}): open it in a browser; it needs no network.")
