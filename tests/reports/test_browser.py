"""The report in a real browser, opened from the disk: no errors, everything is reachable, and no
text of the data is executed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.reports.synthetic import write_run
from valence.reports.page import write_page

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("plotly", reason="plotly is not installed")
from playwright.sync_api import Browser, Error, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)

QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 90.0
"""Seconds that a machine with much else to do may take; an idle one takes one or two for a page."""

HOSTILE = (
    "</pre></script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'> "
    "\u202e \x00 <b>"
)
LONG = "Lorem" * 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        result = play.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield result
        result.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of some runs; that of thumbs is hostile wherever data comes through, and has words
    without an end.
    """
    folder = tmp_path_factory.mktemp("pages")
    runs = {kind: write_run(folder / kind, kind) for kind in ("thumbs", "pairs")}
    poison(runs["thumbs"])
    runs["running"] = write_run(folder / "running", "own", status="running")
    return {kind: write_page(run) for kind, run in runs.items()}


def poison(run: Path) -> None:
    for name in ("eval/step-60.json", "eval/train.json"):
        result = json.loads((run / name).read_text())
        for row in result["rows"]:
            row |= {
                "prompt": HOSTILE + LONG,
                "completion": LONG + HOSTILE,
                "origin": HOSTILE,
                "source": HOSTILE,
            }
        (run / name).write_text(json.dumps(result))
    facts = json.loads((run / "run.json").read_text())
    changed = [{"setting": LONG, "value": HOSTILE, "origin": HOSTILE}]
    (run / "run.json").write_text(
        json.dumps(
            facts | {"notes": [HOSTILE, LONG], "command": HOSTILE + LONG, "changed": changed}
        )
    )
    with (run / "metrics.jsonl").open("a") as log:
        log.writelines(
            json.dumps({"step": step, HOSTILE: step, "seconds/" + HOSTILE: 1.0}) + "\n"
            for step in (59, 60)
        )
    (run / "samples.json").write_text(
        json.dumps([{"prompt": HOSTILE, "before": LONG, "after": HOSTILE}])
    )
    audit = json.loads((run / "audit.json").read_text())
    audit["train"]["distributions"][HOSTILE] = {
        "edges": [0, 1, 2],
        "counts": {HOSTILE: [1, 2], LONG: [3, 4]},
    }
    (run / "audit.json").write_text(json.dumps(audit))


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, clock: bool = False, **options: Any
) -> Iterator[Page]:
    """The page, opened; what failed meanwhile fails the test. clock: the test moves it on."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    failed: list[str] = []
    page.on(
        "console",
        lambda message: (
            failed.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on(
        "request",
        lambda request: (
            failed.append(request.url)
            if not request.url.startswith(("file:", "data:", "blob:"))
            else None
        ),
    )
    page.on("requestfailed", lambda request: failed.append(request.url))
    if clock:
        page.clock.install()
    page.goto(path.as_uri())
    yield page
    context.close()
    assert failed == []


def until(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Waits for it.

    (The page's policy forbids the evaluated strings by which the browser would wait itself.)
    """
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def draw_all(page: Page) -> None:
    """Opens what is folded, and goes past every chart, each of which is drawn when it comes near.
    The browser needs two frames to see that one is near."""
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    page.evaluate(
        "async () => { for (const each of document.querySelectorAll('.chart')) { "
        "each.scrollIntoView();"
        "for (let i = 0; i < 2; i++) await new Promise(done => requestAnimationFrame(done)); } }"
    )
    until(
        lambda: page.evaluate(
            "[...document.querySelectorAll('.chart')].every(each => "
            "each.querySelector('.main-svg'))"
        )
    )


def rgb(message: str) -> tuple[float, ...]:
    """Of a computed colour, 0 to 255."""
    return tuple(float(part) for part in message[message.index("(") + 1 : -1].split(",")[:3])


@pytest.mark.slow
def test_hostile_text_neither_runs_nor_fails_nor_widens_the_page_on_a_telephone(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with opened(browser, pages["thumbs"], width=390, has_touch=True, is_mobile=True) as page:
        draw_all(page)
        assert page.locator(".chart").count() > 15
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.body.scrollWidth") <= 390
        assert page.evaluate("window.ran") is None
        assert page.locator("[onerror]").count() == 0
        assert page.locator("body > script").count() == 3
        assert "</pre></script><script>window.ran" in str(
            page.locator(".row .ask").first.text_content()
        )


def test_a_script_that_got_past_the_escaping_would_not_run(
    browser: Browser, tmp_path: Path, pages: dict[str, Path]
) -> None:
    leaky = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    path = tmp_path / "leaky.html"
    page_source = pages["pairs"].read_text(encoding="utf-8")
    path.write_text(page_source.replace("</main>", f"{leaky}</main>"), encoding="utf-8")
    context = browser.new_context()
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("typeof figures") == "object"  # the page's own did
    assert page.evaluate("window.ran") is None
    context.close()


@pytest.mark.slow
def test_contents_rows_legends_and_colours(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["pairs"], color_scheme="dark") as page:
        chart = page.locator("figure", has_text="Rewards by class").locator(".chart")
        chart.scroll_into_view_if_needed()  # charts are drawn when they come near
        look_at_colours(page, dark=True)
        page.emulate_media(color_scheme="light")
        look_at_colours(page, dark=False)

        # A click in a legend hides a line with its band.
        chart.scroll_into_view_if_needed()
        chart.locator(".legendtoggle").first.wait_for(state="attached")
        shown = "each => each.data.filter(trace => trace.visible !== 'legendonly').length"
        assert chart.evaluate(shown) == 6
        chart.locator(".traces", has_text="chosen, held out").locator(".legendtoggle").click()
        until(lambda: chart.evaluate(shown) == 4)

        # The contents lead to their sections and stay in sight.
        links = page.locator("nav a")
        assert links.count() >= 8
        links.filter(has_text="Training rows").click()
        until(
            lambda: page.evaluate(
                "Math.abs(document.querySelector(':target').getBoundingClientRect().top) < 120"
            )
        )
        assert page.locator(":target h2").text_content() == "Training rows"
        assert page.evaluate("document.querySelector('nav').getBoundingClientRect().top") == 0

        # A row opens to its whole text.
        row = page.locator(":target .row").first
        assert not row.locator("pre").first.is_visible()
        row.locator("summary").click()
        assert row.locator("pre").count() == 3
        assert row.locator("pre").first.is_visible()


def look_at_colours(page: Page, *, dark: bool) -> None:
    """Of the page, and of the words of its charts, which follow."""
    ground, words = (
        rgb(page.evaluate(f"getComputedStyle(document.body).{name}"))
        for name in ("backgroundColor", "color")
    )
    assert (sum(ground) < 150, sum(words) > 600) == (dark, dark)
    label = page.locator(".chart .xtick text").first
    label.wait_for(state="attached")
    until(lambda: rgb(label.evaluate("each => getComputedStyle(each).fill")) == words)


@pytest.mark.slow
def test_the_page_of_a_running_run_reloads_at_the_same_position(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with opened(browser, pages["running"], clock=True) as page:
        assert page.locator("#reload").is_checked()
        fold = "details[data-key='held out Worst']"
        page.evaluate(
            f'document.querySelector("{fold}").open = true; scrollTo(0, 900); window.old = 1'
        )
        page.clock.run_for(30_500)
        as_before = (
            f'window.old === undefined && scrollY === 900 && document.querySelector("{fold}").open'
        )
        until(lambda: settled(page, as_before))
        page.locator("#reload").uncheck()
        page.evaluate("window.old = 1")
        page.clock.run_for(60_500)
        assert settled(page, "window.old === 1")


def settled(page: Page, condition: str) -> bool:
    """Whether the condition is true on a page that may be reloading."""
    try:
        return bool(page.evaluate(condition))
    except Error:
        return False
