"""Take screenshots of the live page, the report and the lessons, from real runs.

    python scripts/screenshots.py --out build/screenshots [--axe axe.min.js] [--site build/site]
    python scripts/screenshots.py --docs          also update docs/pictures, which takes a minute

Three workers train with averaged weights; one worker is slow for a while and one is killed, and the
live page is captured in the middle. A second run ends with an error, a third hangs. Each page is
captured at 1440, 1100 and 390 pixels, light and dark. With axe-core, every finding is an error.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTHS = (1440, 1100, 390)
SCHEMES = ("light", "dark")
TRAINING = """
import os, pathlib, sys, time, torch, paceline
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

here, name, fault = pathlib.Path(__file__).parent, sys.argv[1], sys.argv[2]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
x = torch.randn(1190, 16, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :4].argmax(1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
progress = "auto" if name == "terminal" else "quiet"
islands = paceline.Islands(every=10, bits=16, outer="sgd") if name == "islands" else None
options = paceline.RunOptions(progress=progress, ema=None if islands else 0.98, clip_norm=9.0,
                             best_metric="accuracy", timeline=True, islands=islands)
run = paceline.Run(net, optimizer, data, global_batch=48, epochs=16,
                   folder=here / "runs" / name, options=options)
is_slow_one = os.environ.get("RANK") == "1"

def score(batch):
    out = run.model(batch[0])
    right = (out.argmax(1) == batch[1]).float().mean()
    return {"loss": cross_entropy(out, batch[1]), "accuracy": right}

for step in run:
    with step:
        for x, y in step.batches():
            if fault == "error" and step.number == 70:  # on any worker
                raise ValueError(f"sample 417 has a label that no class has: {int(y[0]) + 9}")
            if fault == "hang" and step.number == 60 and is_slow_one:
                time.sleep(600)
            if is_slow_one and 120 <= step.number < 210:
                time.sleep(0.012)
            out = run.model(x)
            run.log("accuracy", (out.argmax(1) == y).float().mean(), len(y))
            step.backward(cross_entropy(out, y))
    time.sleep(0.004)
    if step.number in (100, 300):
        print(f"half way through, at step {step.number}", flush=True)
    if step.ends_epoch:
        run.evaluate(score, TensorDataset(*data[:240]))
        if not islands:
            run.evaluate(score, TensorDataset(*data[:240]), ema=True)
    while step.number == 250 and not (here / "continue").exists():
        time.sleep(0.05)
"""


@contextmanager
def started(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A paceline command, which is ended at exit if it still runs."""
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    with open(folder / "output.txt", "a") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=output, text=True
        )
    try:
        yield process
    finally:
        # Not SIGINT, which background processes of a shell ignore. The first signal asks for an
        # orderly end, to which a hanging worker does not react; the second one ends it.
        for patience_s in (5, 60):
            if process.poll() is None:
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=patience_s)
                break


class Camera:
    """Takes screenshots of pages, and collects their accessibility violations."""

    def __init__(self, browser: Any, out: Path, axe: str, docs: Path | None) -> None:
        self._browser, self._out, self._axe = browser, out, axe
        self.docs = docs
        self.findings: list[str] = []

    def open(self, address: str, sign: str = "html[data-ready]") -> Any:
        # axe-core is added as a script, which the page's own policy rightly refuses.
        context = self._browser.new_context(bypass_csp=True)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: self.findings.append(f"{address}: {error}"))
        page.goto(address)
        page.wait_for_selector(sign)
        return page

    def keep(self, page: Any, name: str, part: str = "", height: int = 820) -> None:
        """A screenshot for a page of docs/: a section, or the top of a page."""
        if not self.docs:
            return
        page.set_viewport_size({"width": 1100, "height": height})
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(300)
        what, style = page.locator(part).first if part else page, ".top { display: none }"
        what.screenshot(path=self.docs / f"{name}.png", style=style if part else None)

    def take(self, page: Any, name: str) -> None:
        for width in WIDTHS:
            for scheme in SCHEMES:
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                page.wait_for_timeout(300)  # until the curves have their new width
                page.screenshot(path=self._out / f"{name}-{width}-{scheme}.png", full_page=True)
                if page.evaluate("document.documentElement.scrollWidth") > width:
                    self.findings.append(f"{name}: wider than {width} pixels")
                self.check(page, f"{name}, {width}, {scheme}")

    def check(self, page: Any, where: str) -> None:
        if not self._axe:
            return
        if not page.evaluate("typeof axe === 'object'"):
            page.evaluate(self._axe)
        for found in page.evaluate("axe.run()")["violations"]:
            places = "; ".join(str(node["target"]) for node in found["nodes"][:3])
            self.findings.append(f"{where}: {found['id']}: {found['help']} ({places})")


def wait_until(is_so: Any, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("The training did not come so far.")
        time.sleep(0.1)


def step_of(page: Any) -> int:
    said = page.locator("#overview .tiles div", has=page.get_by_text("step", exact=True))
    digits = said.locator("dd").inner_text().split("\n")[0].replace(",", "")
    return int(digits) if digits.isdigit() else 0


def take_all(folder: Path, camera: Camera) -> None:
    (folder / "train.py").write_text(TRAINING)
    (folder / "runs").mkdir()
    run = ("run", "--workers", 3)
    with (
        started(folder, "watch", "--no-open", "runs") as server,
        started(folder, *run, "--trace-step", 12, "train.py", "digits", "none") as job,
    ):
        assert server.stdout is not None
        page = camera.open(server.stdout.readline().split()[-1])
        page.wait_for_selector("#overview .tiles")
        wait_until(lambda: step_of(page) >= 200)
        page.locator("#now .now-rows li").nth(2).wait_for()
        process = page.locator("#now .now-rows li").nth(2).get_attribute("title") or ""
        os.kill(int(process.removeprefix("process ")), signal.SIGKILL)
        wait_until(lambda: step_of(page) >= 249)  # step 250 is reported when the next one begins
        camera.keep(page, "watch", height=980)
        camera.take(page, "live")
        (folder / "continue").touch()
        job.wait(timeout=300)
        page.wait_for_selector(".badge.finished")
        camera.take(page, "ended")
        take_islands(folder, camera, page)
        with started(folder, *run, "train.py", "broken", "error") as broken:
            broken.wait(timeout=300)
        with started(folder, *run, "train.py", "hanging", "hang"):
            page.locator("tr", has_text="hanging").get_by_role("link", name="show").click()
            page.wait_for_selector(".badge.late")
            camera.take(page, "hanging")
            camera.keep(page, "runs", "#runs")
    if camera.docs:
        scale = ("scale", "--workers", "1,2", "--steps", 60, "--folder", "runs/digits")
        call(folder, *scale, "train.py", "scaled", "none")
    for name in ("digits", "broken", "islands"):
        call(folder, "report", f"runs/{name}")
        report = camera.open((folder / "runs" / name / "report.html").as_uri())
        camera.take(report, f"report-{name}")
        if name != "islands":
            camera.keep(report, {"digits": "report", "broken": "failed"}[name], height=700)
        if name == "digits":
            camera.keep(report, "timeline", "#timeline")
            camera.keep(report, "scaling", "#scaling")
    call(folder, "learn", "--html", "lessons.html")
    lessons = camera.open((folder / "lessons.html").as_uri())
    camera.take(lessons, "lessons")
    camera.keep(lessons, "learn")
    if camera.docs:
        (camera.docs / "terminal.svg").write_text(draw_terminal(folder))


def take_islands(folder: Path, camera: Camera, page: Any) -> None:
    """Two islands, of which one is killed completely and comes back."""
    (folder / "continue").unlink()
    command = ("run", "--workers", 4, "--island", 2, "train.py", "islands", "none")
    events = folder / "runs" / "islands" / "island-1" / "events"
    with started(folder, *command) as job:
        page.locator("#runs a[href$='run=islands']").click()
        wait_until(lambda: step_of(page) >= 150)
        for path in events.glob("rank*.jsonl"):
            os.kill(json.loads(path.read_text().splitlines()[0])["pid"], signal.SIGKILL)
        wait_until(lambda: step_of(page) >= 249)
        camera.take(page, "islands")
        (folder / "continue").touch()
        job.wait(timeout=300)
        page.wait_for_selector(".badge.finished")


def call(folder: Path, *arguments: object) -> None:
    """Run a paceline command to its end, which must be a success."""
    with started(folder, *arguments) as command:
        command.communicate(timeout=300)
        if command.returncode:
            raise RuntimeError((folder / "output.txt").read_text()[-2000:])


def draw_terminal(folder: Path) -> str:
    """A terminal in the middle of a training, a moment after a worker was killed."""
    from rich.console import Console
    from rich.text import Text

    tmux = ("tmux", "-L", f"paceline-{os.getpid()}")
    (folder / "continue").unlink(missing_ok=True)  # the script waits in the middle for this file
    command = f"{sys.executable} -m paceline run --workers 3 train.py terminal none"
    size = ("-x", "100", "-y", "16")
    subprocess.run([*tmux, "new-session", "-d", *size, command], cwd=folder, check=True)

    def shown() -> str:
        pane = [*tmux, "capture-pane", "-e", "-p"]
        return subprocess.run(pane, capture_output=True, text=True, check=True).stdout

    try:
        start = folder / "runs" / "terminal" / "events" / "rank1.jsonl"
        wait_until(lambda: start.exists() and start.read_text().count("\n") > 60)
        os.kill(json.loads(start.read_text().splitlines()[0])["pid"], signal.SIGKILL)
        wait_until(lambda: "train again" in shown() and re.search(r"epoch 1[01]/16", shown()))
        text = shown()
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(text.rstrip("\n")))
    svg = console.export_svg(title="paceline run --workers 3 train.py")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # no web fonts


def take_site(site: Path, camera: Camera) -> None:
    """The documentation, opened from a folder: screenshots of some pages, checks of all."""
    for path in sorted(site.glob("*.html")):
        if path.stem == "404":  # only a server shows it, and its links need one
            continue
        page = camera.open(path.resolve().as_uri(), "article")
        if path.stem in ("index", "watch", "first_workers"):
            camera.take(page, f"site-{path.stem}")
        else:
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                camera.check(page, f"{path.name}, {scheme}")
        page.context.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/screenshots"))
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core; without it, no check")
    parser.add_argument("--site", type=Path, help="folder of the built site, to be captured too")
    parser.add_argument("--docs", action="store_true", help="update docs/pictures as well")
    args = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("No pictures: playwright is not installed.")
        return 0
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("No pictures: there is no chromium.")
        return 0
    is_checked = args.axe is not None and args.axe.is_file()
    if not is_checked:
        print("No accessibility check: there is no axe-core.")
    shutil.rmtree(args.out, ignore_errors=True)
    folder = args.out.resolve() / "training"
    folder.mkdir(parents=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        axe, docs = args.axe.read_text() if is_checked else "", PICTURES if args.docs else None
        camera = Camera(browser, args.out, axe, docs)
        take_all(folder, camera)
        if args.site is not None and args.site.is_dir():
            take_site(args.site, camera)
        browser.close()
    for finding in camera.findings:
        print(finding)
    pictures = len(list(args.out.glob("*.png")))
    print(f"{pictures} pictures in {args.out}, {len(camera.findings)} findings")
    return 1 if camera.findings else 0


if __name__ == "__main__":
    sys.exit(main())
