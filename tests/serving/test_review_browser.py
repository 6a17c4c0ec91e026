"""The review page in a real browser: decide by keyboard and by touch, and nothing of a row runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serving.browsing import Browser, Site, browser, opened, until, wait_for_status
from tests.serving.reviewing import ServedReview, choices, thumbs

__all__ = ["browser"]

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror='window.ran = 1'><script>window.ran = 1</script>\u202e & \x01"
WIDE = "W" * 200


@dataclass(kw_only=True)
class ReviewSite(Site):
    served: ServedReview

    @property
    def choices(self) -> list[Any]:
        return choices(self.served.review)


@contextmanager
def site_in(folder: Path, *arguments: Any, **options: Any) -> Iterator[ReviewSite]:
    served = ServedReview(folder, *arguments, **options)
    site = ReviewSite(served.app, served=served)
    site.start()
    try:
        yield site
    finally:
        site.stop()
        served.close()


def test_decide_and_undo_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site) as page:
        wait_for_status(page, "anna · 0 of 5 decided")
        assert page.url == f"http://127.0.0.1:{site.port}/"  # without the token
        assert page.locator(".card").count() == 3
        assert "opposite label" in (page.locator(".reasons").first.text_content() or "")
        assert "r1" in (page.locator(".about").first.text_content() or "")
        page.keyboard.press("f")
        wait_for_status(page, "1 of 5 decided · 1 flipped")
        until(lambda: "current" in (page.locator(".card").nth(1).get_attribute("class") or ""))
        page.keyboard.press("ArrowDown")
        page.keyboard.press("d")
        wait_for_status(page, "2 of 5 decided")
        page.keyboard.press("k")
        until(lambda: page.text_content("#place") == "case 2 of 2")
        assert site.choices == ["flip", "keep", "drop", None, None]
        page.keyboard.press("u")
        until(lambda: page.text_content("#place") == "case 1 of 2")
        assert site.choices == ["flip", None, "drop", None, None]
        page.reload()
        wait_for_status(page, "2 of 5 decided")
        page.keyboard.press("u")
        wait_for_status(page, "1 of 5 decided")
        page.keyboard.press("ArrowRight")
        until(lambda: page.text_content("#place") == "case 2 of 2")
        page.keyboard.press("ArrowLeft")
        until(lambda: page.text_content("#place") == "case 1 of 2")
        assert site.choices == ["flip", None, None, None, None]


def test_a_key_that_is_held_down_decides_once(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site) as page:
        wait_for_status(page, "0 of 5 decided")
        for _ in range(5):
            page.keyboard.down("k")
        wait_for_status(page, "1 of 5 decided")
        page.wait_for_timeout(300)
        page.keyboard.up("k")
        assert site.choices == ["keep", None, None, None, None]


def test_the_end_and_the_way_back(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site) as page:
        for number in range(5):
            wait_for_status(page, f"{number} of 5 decided")
            until(lambda: page.is_enabled("#keep"))
            page.click("#keep")
        until(lambda: page.locator(".finished").count() == 1)
        assert "reviewed.jsonl" in (page.text_content(".finished") or "")
        assert page.is_disabled("#keep")
        page.keyboard.press("ArrowLeft")
        until(lambda: page.text_content("#place") == "case 2 of 2")
        page.click("#drop")
        until(lambda: site.choices[3] == "drop")


def test_two_tabs_do_not_overwrite_each_other_unseen(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site) as one, \
            opened(browser, site, failing=True, token="token-of-ben") as other:  # fmt: skip
        wait_for_status(other, "ben · 0 of 5 decided")
        one.keyboard.press("f")
        wait_for_status(one, "1 of 5 decided")
        other.keyboard.press("d")
        until(lambda: bool(other.text_content("#last")))
        assert "flipped to down by anna" in (other.locator(".verdict").first.text_content() or "")
        assert site.choices[0] == "flip"
        other.keyboard.press("d")
        until(lambda: site.choices[0] == "drop")


def test_scores_and_pairs(browser: Browser, tmp_path: Path) -> None:
    scores = [{"prompt": "q", "completion": "a", "score": score} for score in (1, 5)]
    with site_in(tmp_path, scores) as site, opened(browser, site) as page:
        until(lambda: page.locator(".badge").count() == 2)
        assert page.locator(".badge").all_text_contents() == ["score 1", "score 5"]
        page.keyboard.press("f")
        page.keyboard.type("2.5")
        page.keyboard.press("Enter")
        wait_for_status(page, "1 of 2 decided · 1 scored")
        assert [row["score"] for row in site.served.rows()] == [2.5, 5]
        page.keyboard.press("f")
        page.keyboard.press("Escape")
        assert page.is_hidden("#score-form")
        page.keyboard.press("k")
        until(lambda: site.choices == ["score", "keep"])
    pairs = [{"prompt": "q", "chosen": a, "rejected": b} for a, b in (("x", "y"), ("y", "x"))]
    (tmp_path / "pairs").mkdir()
    with site_in(tmp_path / "pairs", pairs) as site, opened(browser, site) as page:
        until(lambda: page.locator(".side").count() == 4)
        page.keyboard.press("f")
        wait_for_status(page, "1 of 2 decided")
        assert [row["chosen"] for row in site.served.rows()] == ["y", "y"]
        titles = page.locator(".card").first.locator(".side h3").all_text_contents()
        assert titles == ["chosen", "rejected (preferred)"]


def test_markup_is_shown_as_text_and_a_telephone_needs_no_scrolling_sideways(
    browser: Browser, tmp_path: Path
) -> None:
    info = {"rater": HOSTILE, "comment": HOSTILE + WIDE, "tags": [HOSTILE]}
    chat = [{"role": "user", "content": HOSTILE + WIDE}]
    rows = [
        {"prompt": chat, "completion": HOSTILE + WIDE, "label": up, "info": info}
        for up in (True, False)
    ]
    phone = {"width": 390, "has_touch": True, "is_mobile": True}
    with site_in(tmp_path, rows) as site, opened(browser, site, **phone) as page:
        until(lambda: page.locator(".card").count() == 2)
        shown = page.locator(".side p").first.text_content() or ""
        assert shown == HOSTILE.replace("\u202e", "U+202E").replace("\x01", "U+0001") + WIDE
        assert "<img" in (page.locator(".about").first.text_content() or "")
        page.tap("#flip")
        wait_for_status(page, "1 of 2 decided")
        page.locator(".card").first.tap()
        page.tap("#drop")
        wait_for_status(page, "1 dropped")
        assert page.evaluate("window.ran") is None
        assert page.locator("main img, main script").count() == 0
        for node in ("document.documentElement", "document.body", "document.querySelector('main')"):
            assert page.evaluate(f"{node}.scrollWidth") <= 390
        box = page.locator("#choices").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800  # in view, whatever the length of the rows


def test_a_restart_of_the_server_while_the_page_is_open(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site, failing=True) as page:
        wait_for_status(page, "0 of 5 decided")
        site.stop()
        page.keyboard.press("f")
        until(lambda: page.is_visible("#retry"))
        assert "was not saved" in (page.text_content("#error") or "")
        site.start()
        page.click("#retry")
        wait_for_status(page, "1 of 5 decided")
        assert page.is_hidden("#error")
        assert site.choices[0] == "flip"


def test_a_wrong_link_is_explained(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path, thumbs()) as site, \
            opened(browser, site, failing=True, token="wrong") as page:  # fmt: skip
        until(lambda: "valence audit" in (page.text_content("#error") or ""))
        assert page.locator(".card").count() == 0
