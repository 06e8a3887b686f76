"""The live page in a real browser, beside a real training: started, slowed, killed, finished.

One training of two workers serves the whole file: the tests are its moments, in order. Without
chromium or playwright they are skipped.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from contrast import TOO_FAINT
from synthetic_run import synthetic_run

pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'paceline[watch]'")
TIMEOUT_MS = 60_000
HOSTILE = "<img src=x onerror=window.harmed=1>"
SCRIPT = f"""
import os, pathlib, time, torch, paceline
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

here = pathlib.Path(__file__).parent
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
x = torch.randn(1440, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :3].argmax(1))
held_out = TensorDataset(*data[:240])
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), data, global_batch=24,
                   epochs=6, folder=here / "digits",
                   options=paceline.RunOptions(progress="quiet", clip_norm=9.0, best_metric="loss"))
run.message({HOSTILE!r})
for step in run:
    if step.number == 1 and os.environ["RANK"] == "0":
        print("begins", flush=True)
    with step:
        for x, y in step.batches():
            if os.environ["RANK"] == "1" and (here / "slow").exists():
                time.sleep(0.02)
            step.backward(cross_entropy(run.model(x), y))
    if not (here / "hurry").exists():
        time.sleep(0.02 if step.number < 240 else 0.3)
    if step.ends_epoch:
        run.evaluate(lambda b: {{"loss": cross_entropy(run.model(b[0]), b[1])}}, held_out)
"""


AGAIN = """
import pathlib, sys, uvicorn
from paceline.show.watch.follow import Watched
from paceline.show.watch.server import make_app

folder, token, port = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
uvicorn.run(make_app(Watched([folder]), token, port), port=port, log_level="error")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The server, which also shows a run with a hostile name, and beside it the training."""
    (folder / "train.py").write_text(SCRIPT)
    other = synthetic_run(folder / "other", steps=60, ranks=2, slow_rank=1).path.rename(
        folder / HOSTILE
    )
    training = start(folder, "run", "--workers", 2, "train.py")
    assert training.stdout is not None
    assert "begins" in training.stdout.readline()
    server = start(folder, "watch", "--no-open", "digits", other)
    yield server
    (folder / "hurry").touch()
    end(training)
    end(server)


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    return []


@pytest.fixture(scope="module")
def page(browser: Any, server: subprocess.Popen[str], complaints: list[str]) -> Any:
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    assert server.stdout is not None
    page.goto(server.stdout.readline().split()[-1])
    return page


def tile(page: Any, label: str) -> Any:
    return page.locator("#overview .tiles div", has=page.get_by_text(label, exact=True))


def step_of(page: Any) -> int:
    return int(tile(page, "step").locator("dd").inner_text().split("\n")[0].replace(",", ""))


def test_a_training_that_runs_is_shown_as_it_goes(page: Any) -> None:
    page.wait_for_selector(".badge.running")
    page.wait_for_selector("#now .now-rows li:nth-child(3)")
    assert "2 of 2" in tile(page, "workers alive").inner_text()
    assert "of 360" in tile(page, "step").inner_text()
    workers = page.locator("#now .bar-label").all_inner_texts()
    assert workers == ["worker 0", "worker 1"]
    phases = "".join(f'[aria-label*="{phase}: "]' for phase in ("data", "forward", "backward"))
    sums = "".join(
        f"#now .bar{phases}[aria-label*='{phase}: '], " for phase in ("wait", "transfer")
    )
    page.locator(sums.removesuffix(", ")).nth(1).wait_for()
    assert page.locator("#now .memory").first.inner_text().endswith("MB")
    page.wait_for_selector("#learning .chart canvas")
    titles = page.locator("#learning figcaption strong").all_inner_texts()
    assert titles[:1] == ["Loss"]
    assert {"Gradient norm", "Learning rate", "Samples per second"} <= set(titles)
    assert page.locator("#waits .chart canvas").count() == 2


def test_news_are_put_into_the_plots_and_rows_that_are_there(page: Any) -> None:
    page.evaluate(
        """() => window.old = [...document.querySelectorAll(
            "#waits canvas, #learning figure + figure canvas, #now .now-rows li, .tiles div")]"""
    )
    before = step_of(page)
    page.wait_for_function(
        "(n) => Number(document.querySelector('.tiles div:nth-child(2) dd').firstChild"
        ".textContent.replace(',', '')) > n",
        arg=before + 20,
    )
    assert page.evaluate("old.length > 10 && old.every((each) => each.isConnected)")


def test_curves_are_zoomed_and_read_by_keyboard_while_they_grow(page: Any) -> None:
    page.locator("#learning .chart").first.focus()
    page.keyboard.press("Home")
    tip = page.locator("#learning .tip:visible").first
    assert tip.inner_text().startswith("step 1: ")
    page.keyboard.press("+")
    page.locator("#learning .unzoom").first.wait_for()
    page.get_by_role("button", name="Log", exact=True).click()
    page.get_by_role("button", name="Linear", exact=True).click()
    page.locator("#learning .chart").first.focus()
    page.keyboard.press("0")
    page.locator("#learning .unzoom").first.wait_for(state="detached")


def test_the_next_step_is_recorded_on_demand(page: Any) -> None:
    assert page.locator("#batch .stage").count() == 0
    page.locator(".record").click()
    page.locator("#batch .stepper").wait_for()
    assert page.locator("#batch .stage").count() == 9
    page.locator("#batch .stepper").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#batch .place").inner_text() == "Stage 2 of 9"


def test_a_worker_waits_for_one_that_is_slow_and_the_page_says_how_long(
    page: Any, folder: Path
) -> None:
    (folder / "slow").touch()
    row = page.locator("#now .now-rows li", has=page.get_by_text("worker 0", exact=True))
    waited = re.compile(r"worker 1, (1\d|2\d|3\d)(\.\d)?\sms")
    row.locator(".waits", has_text=waited).wait_for()
    page.locator("#waits .chart").first.focus()
    page.keyboard.press("End")
    tip = page.locator("#waits .tip:visible")
    tip.filter(has_text=re.compile(r"waited [1-9]\d")).first.wait_for()
    page.keyboard.press("Escape")
    (folder / "slow").unlink()


def test_a_killed_worker_and_its_replacement_are_told(page: Any) -> None:
    row = page.locator("#now .now-rows li").last
    dead = int((row.get_attribute("title") or "").removeprefix("process "))
    os.kill(dead, signal.SIGKILL)
    told = page.locator("#generations tbody tr")
    told.filter(has_text="worker 1 was killed by signal 9").wait_for()
    told.filter(has_text="worker 1 joined").wait_for()
    assert page.locator("#generations .chart canvas").count() == 1
    page.wait_for_function(
        "(dead) => ![...document.querySelectorAll('#now li')].some((e) => e.title.endsWith(dead))",
        arg=str(dead),
    )
    assert "2 of 2" in tile(page, "workers alive").inner_text()


def test_a_finished_run_is_a_report(page: Any, folder: Path) -> None:
    (folder / "hurry").touch()
    page.wait_for_selector(".badge.finished")
    page.locator(".story", has_text="It finished: 360 steps in 6 epochs").wait_for()
    rows = page.locator("#checkpoints tbody tr")
    for mark in ("best", "newest"):
        rows.filter(has_text=mark).wait_for()
    assert "paceline run --workers 2 train.py" in page.locator("#checkpoints").inner_text()
    assert page.locator("#learning table tbody tr").count() == 6
    assert page.locator(".record").is_disabled()


def test_what_is_hostile_stays_text(page: Any) -> None:
    assert HOSTILE in page.locator("#messages .text").all_inner_texts()
    assert HOSTILE in page.locator("#runs .choice").all_inner_texts()
    page.locator("#runs .chart canvas").first.wait_for()
    rows = page.locator("#runs table").first.locator("tbody tr")
    page.locator("#runs input[type=search]").fill("global_batch=24")
    assert rows.all_inner_texts()[0].startswith("digits")
    assert rows.count() == 1
    page.locator("#runs input[type=search]").fill("")
    page.locator("#runs select").select_option("global_batch")
    assert [text.split("\t")[0].strip() for text in rows.all_inner_texts()] == [
        "global_batch 24",
        "digits",
        "global_batch 128",
        HOSTILE,
    ]
    page.locator("#runs select").select_option("")
    page.locator("#runs .sort", has_text="run").click()
    assert rows.all_inner_texts()[0].startswith("<img")
    assert "global batch" in page.locator("#runs table").last.inner_text()
    assert page.evaluate("[window.harmed, document.images.length]") == [None, 0]


def test_another_run_is_shown_and_the_slow_worker_in_it_is_named(page: Any) -> None:
    first = page.url
    page.get_by_role("link", name="show", exact=True).click()
    page.locator("#waits .verdict.bad", has_text="Worker 1 held the others up").wait_for()
    assert page.locator("h1").inner_text() == "other"
    page.goto(first)
    page.locator("#learning .chart canvas").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_every_width_and_colour_can_be_read(page: Any, width: int, scheme: Any) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(TOO_FAINT) == []


def test_the_keyboard_reaches_everything(page: Any) -> None:
    page.set_viewport_size({"width": 1400, "height": 900})
    page.locator(".skip").focus()
    reached = {"skip"}
    for _ in range(160):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
                const e = document.activeElement;
                return [e.id || e.className || e.type || "", getComputedStyle(e).outlineStyle];
            }"""
        )
        if page.evaluate("document.activeElement === document.body"):
            break
        reached |= set(name.split())
        assert outline != "none", name
    assert {"theme", "save", "chart", "messages", "checkbox", "fold", "csv"} <= reached


def test_the_page_saved_is_the_report_without_what_is_live(
    page: Any, browser: Any, tmp_path: Path
) -> None:
    with page.expect_download() as download:
        page.locator(".save").click()
    path = tmp_path / "report.html"
    download.value.save_as(path)
    assert path.stat().st_size < 400_000
    said, asked = list[str](), list[str]()
    saved = browser.new_context().new_page()
    saved.on("console", lambda message: said.append(message.text))
    saved.on("request", lambda request: asked.append(request.url))
    saved.goto(path.as_uri())
    saved.wait_for_selector("html[data-ready]")
    for name in ("learning", "workers", "generations", "checkpoints", "details"):
        assert saved.locator(f"#{name}").count() == 1, name
    assert saved.locator("#now, #waits, #runs, .save, .record").count() == 0
    assert said == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}


def test_a_server_that_is_gone_is_told_until_it_is_back_and_nothing_else_was_complained_about(
    page: Any, folder: Path, server: subprocess.Popen[str], complaints: list[str]
) -> None:
    assert complaints == []
    end(server)
    gone = page.locator("#overview .verdict.bad", has_text="does not answer")
    gone.wait_for()
    assert page.locator("#learning .chart canvas").count() > 3
    address = urlsplit(page.url)
    token = parse_qs(address.query)["token"][0]
    command = [sys.executable, "-c", AGAIN, "digits", "x" * 43, str(address.port)]
    with subprocess.Popen(command, cwd=folder) as again:
        page.locator("#overview .verdict.bad", has_text="has another token").wait_for()
        again.kill()
    command[-2] = token
    with subprocess.Popen(command, cwd=folder) as again:
        page.locator("#overview .verdict.bad").wait_for(state="detached")
        again.kill()
