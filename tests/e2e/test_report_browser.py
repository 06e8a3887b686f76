"""The report in a real browser: it acts, stays silent, leaves nothing out, and loads nothing.

One chromium serves all tests; each has a page of its own. Without chromium or playwright they are
skipped: `apt-get install chromium` and `pip install playwright` provide them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contrast import TOO_FAINT
from synthetic_run import GENERATIONS, SCALING, synthetic_run, synthetic_trace

from paceline.files.run_folder import EventWriter, RunFolder
from paceline.show import report
from paceline.show.report.page import render

HOSTILE = "<img src=x onerror=window.harmed=1></script><script>window.harmed=1</script>"

COLOURED = """() => [...document.querySelectorAll(".chart canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    const channels = data.slice(i, i + 3);
    if (Math.max(...channels) - Math.min(...channels) > 60) return true;
  }
  return false;
})"""

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = synthetic_run(
        tmp_path_factory.mktemp("runs") / "digits",
        steps=120,
        name=HOSTILE,
        messages=[HOSTILE, "second line"],
        timeline_steps=20,
        trace=synthetic_trace(),
        scaling=SCALING,
    )
    with EventWriter(folder, 0) as events:
        for event in GENERATIONS:
            events.write("generation", **event)
    return report.write(folder.path)


@pytest.fixture
def open_page(browser: Any, file: Path) -> Iterator[Open]:
    """Opens the report, or another file; in the end nothing was complained about or fetched."""
    contexts, complaints, requests = [], [], []

    def opened(path: Path = file, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.partition(":")[0] for url in requests} <= {"file", "data"}
    assert len([url for url in requests if url.startswith("file")]) == len(contexts)


def test_the_page_starts_and_everything_on_it_can_be_used_without_a_complaint(
    open_page: Open,
) -> None:
    page = open_page()
    assert page.get_attribute("html", "data-ready") == "true"
    for button in page.locator("button:visible:enabled:not(.fold)").all():
        button.click()
    for chart in page.locator(".chart").all():
        chart.hover()
    page.locator(".canvas-place").hover()
    page.mouse.down()
    page.mouse.move(300, 300)
    page.mouse.up()
    titles = page.locator("section > h2").all_inner_texts()
    links = page.locator(".side a").all()
    assert [link.inner_text() for link in links] == ["Overview", *titles[: len(links) - 1]]
    for link in links:
        link.click()


def test_a_section_folds_stays_so_and_is_opened_by_a_link_to_it(open_page: Open) -> None:
    page = open_page()
    page.locator("#workers .fold").click()
    assert page.locator("#workers table").count() == 0
    assert page.locator("#workers .fold").get_attribute("aria-expanded") == "false"
    assert page.evaluate("localStorage.getItem('paceline folded workers')") == "yes"
    page.locator('.side a[href="#workers"]').click()
    page.locator("#workers table").wait_for()


def test_charts_share_crosshair_zoom_and_smoothing_and_each_is_saved_as_csv(
    open_page: Open,
) -> None:
    page = open_page()
    charts = page.locator("#learning .chart")
    charts.first.scroll_into_view_if_needed()
    box = charts.first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tips = page.locator("#learning .tip:visible")
    assert tips.count() == charts.count()
    steps = [int(tip.removeprefix("step ").split(":")[0]) for tip in tips.all_inner_texts()]
    assert max(steps) - min(steps) <= 2
    charts.first.focus()
    page.keyboard.press("+")
    assert page.locator("#learning .unzoom").count() == charts.count()
    page.locator("#learning .unzoom").last.click()
    assert page.locator("#learning .unzoom").count() == 0
    page.locator(".slider input").fill("0")
    assert page.locator(".slider output").inner_text() == "off"
    with page.expect_download() as download:
        page.locator("#learning .csv").first.click()
    head, first, *_ = download.value.path().read_text().splitlines()
    assert head.startswith("step,training,training lowest,training highest,held-out data")
    assert first.startswith("1,")


def test_arrow_keys_step_through_the_pipeline(open_page: Open) -> None:
    page = open_page()
    stepper = page.locator(".stepper")
    stepper.focus()
    place, current = page.locator(".place"), page.locator(".stage.now h3")
    assert place.inner_text() == "Stage 1 of 9"
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert place.inner_text() == "Stage 4 of 9"
    assert current.inner_text().startswith("4Forward")
    page.keyboard.press("ArrowUp")
    assert current.inner_text().startswith("3Batch")
    page.keyboard.press("End")
    assert page.locator("button.next").is_disabled()
    page.keyboard.press("Home")
    assert page.locator("button.back").is_disabled()
    assert page.locator(".details:visible").count() == 1


def test_boxes_are_joined_column_by_column_or_all_to_all(open_page: Open) -> None:
    page = open_page()
    # One dataset, then two workers, each with buckets of its own; the all-reduce joins them.
    stages = page.locator(".stage").all()
    assert [stage.locator(".box").count() for stage in stages] == [1, *[2] * 8]
    assert [stage.locator(".joins g").count() for stage in stages] == [0, *[2] * 6, 4, 2]
    assert [stage.locator(".rest path").count() for stage in stages] == [1, *[2] * 7, 0]


def test_buttons_step_and_show_all_stages(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="Next").click()
    assert page.locator(".stage.now h3").inner_text().startswith("2Sampler")
    page.get_by_role("button", name="Show all stages").click()
    assert page.locator(".details:visible").count() == 9


def test_a_curve_says_its_values_by_keyboard(open_page: Open) -> None:
    page = open_page()
    chart = page.locator(".chart").first
    chart.focus()
    page.keyboard.press("Home")
    tip = page.locator(".tip:visible")
    assert tip.inner_text().startswith("step 1: training 2.")
    # Measured at one moment: the page may still be scrolling to what has the focus.
    right, below = page.evaluate(
        """() => {
            const [chart, tip] = [".chart", ".tip:not([hidden])"].map(
                (each) => document.querySelector(each).getBoundingClientRect());
            return [tip.x + tip.width / 2 - chart.x, tip.y - chart.y];
        }"""
    )
    assert 0 <= right < 200
    assert -40 < below < 100
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("step 2: ")
    page.keyboard.press("Escape")
    assert tip.count() == 0


def test_the_timeline_zooms_and_moves_by_keyboard_and_says_what_is_under_the_pointer(
    open_page: Open,
) -> None:
    page = open_page()

    def said() -> str:
        shown: str = page.locator(".readout").inner_text()
        return shown.replace("\N{NO-BREAK SPACE}", " ")

    page.locator(".canvas-place").focus()
    page.keyboard.press("0")
    assert said() == "Shown: 0 to 436 ms of 436 ms."
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert said() == "Shown: 166 ms to 427 ms of 436 ms."
    page.keyboard.press("0")
    page.locator(".canvas-place").hover(position={"x": 130, "y": 30})
    assert said().startswith("Worker 0: backward, 14.7 ms")


def test_without_javascript_the_page_says_so_and_gives_the_key_numbers(open_page: Open) -> None:
    page = open_page(java_script_enabled=False)
    shown = page.inner_text("body")
    for words in ("JavaScript is off", "held the others up", "samples per second: 2,667"):
        assert words in shown


def test_markup_in_names_and_messages_is_shown_as_text_and_does_nothing(open_page: Open) -> None:
    page = open_page()
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator(".messages .text").first.inner_text() == HOSTILE
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_can_be_changed_and_are_easy_to_read(
    scheme: Any, open_page: Open
) -> None:
    page = open_page(color_scheme=scheme)

    def darkness() -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return max(int(part) for part in colour[4:-1].split(",")) < 128

    assert darkness() == (scheme == "dark")
    assert page.evaluate(TOO_FAINT) == []
    page.locator("#theme").click()
    assert darkness() == (scheme == "light")
    assert page.evaluate(TOO_FAINT) == []


@pytest.mark.parametrize("width", [360, 400, 800])
def test_a_narrow_window_needs_no_scrolling_sideways(width: int, open_page: Open) -> None:
    page = open_page(viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_has_the_focus_is_outlined_and_the_keyboard_reaches_everything(
    open_page: Open,
) -> None:
    page = open_page()
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => {
                const e = document.activeElement;
                return [e.id || e.classList[0] || e.textContent, getComputedStyle(e).outlineStyle];
            }"""
        )
        if page.evaluate("document.activeElement === document.body"):
            break
        reached.add(found[0])
        assert found[1] != "none", found
    assert {"skip", "theme", "chart", "stepper", "next", "canvas-place"} <= reached


def test_paper_shows_all_stages_in_light_colours(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator(".details:visible").count() == 9
    assert page.locator(".canvas-place canvas").is_visible()
    assert page.locator("button:visible:not(.fold)").count() == 0
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert max(int(part) for part in ink[4:-1].split(",")) < 100


def test_every_picture_has_words_and_every_name_refers_to_something(open_page: Open) -> None:
    page = open_page()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('[role="img"], [role="region"], [role="group"], '
            + '[role="application"], button, section')]
            .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.ariaLabelledByElements))
            .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map((e) => Number(e.tagName[1]))"
    )
    assert levels.count(1) == 1


def test_a_peak_is_cut_off_and_said_and_flat_or_single_curves_are_drawn(
    open_page: Open, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "odd")
    folder.create()
    with EventWriter(folder, 0) as writer:
        for step in range(1, 51):
            loss = 1000.0 if step == 31 else 1 - step / 100
            curves = {"loss": [loss, 1], "flat": [5.0, 1], "zero": [0.0, 1], "tiny": [1e-308, 1]}
            single = {"single": [-3.0, 1]} if step == 9 else {}
            writer.write("step", step=step, samples=1, seconds=1.0, metrics={**curves, **single})
    page = open_page(report.write(folder.path))
    assert page.locator(".chart canvas").count() == 6
    shown = page.locator(".chart-box").first.inner_text()
    assert "A peak of 1,000 near step 31 is cut off" in shown
    assert "NaN" not in page.inner_text("main")
    # Something is drawn in the colour of curves, however flat or single.
    assert page.evaluate(COLOURED) == [True] * 6


def test_a_panel_that_cannot_be_drawn_leaves_the_others(
    open_page: Open, file: Path, tmp_path: Path
) -> None:
    document = json.loads(file.read_text().partition('id="data">')[2].partition("</script>")[0])
    path = tmp_path / "report.html"
    path.write_text(render({**document, "workers": {"ranks": 3}}))
    page = open_page(path)
    assert "This cannot be drawn" in page.locator("#workers").inner_text()
    assert page.locator("section").count() == 9


def test_ten_thousand_steps_on_four_workers_are_a_small_and_light_page(
    open_page: Open, tmp_path: Path
) -> None:
    folder = synthetic_run(tmp_path / "long", steps=10_000, epochs=100, timeline_steps=200)
    path = report.write(folder.path)
    assert path.stat().st_size < 5_000_000
    page = open_page(path)
    assert page.get_attribute("html", "data-ready") == "true"
    # What a browser has to lay out: with few elements there is nothing that could make it stutter.
    assert page.evaluate("document.querySelectorAll('*').length") < 9000


def test_deaths_and_replacements_are_drawn_and_listed(open_page: Open) -> None:
    section = open_page().locator("#generations")
    assert "1 worker died during the run" in section.locator(".verdict").inner_text()
    assert section.locator(".chart canvas").count() == 1
    rows = section.locator("tbody tr").all_inner_texts()
    assert "worker 1 was killed by signal 9" in rows[0]
    assert "worker 1 joined" in rows[1]


def test_in_a_notebook_a_run_is_a_page_of_its_own_whose_links_stay_inside(
    open_page: Open, file: Path, tmp_path: Path
) -> None:
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html>{report.RunView(file.parent)._repr_html_()}")
    outer = open_page(cell)
    inner = outer.frame_locator("iframe")
    inner.get_by_role("link", name="Work and waiting by worker").click()
    inner.locator("#workers").wait_for()
    outer.wait_for_function(
        "() => frames[0].document.querySelector('#workers').getBoundingClientRect().top < 200"
    )
    assert outer.frames[1].url == "about:srcdoc"
