"""The site is built without a warning, all of its links lead somewhere, and it fetches nothing from
elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'valence-align[docs]'")
pytestmark = pytest.mark.site


class Parts(HTMLParser):
    """What a page links, what it loads by itself, and the places that can be linked in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links, self.loads, self.places = list[str](), list[str](), set[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.places |= {of["id"]} if "id" in of else set()
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        if tag == "link" and of.get("rel") not in ("prev", "next", "canonical"):
            self.loads.append(of.get("href", ""))
        if "src" in of:
            self.loads.append(of["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    messages = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        messages, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, [
        line for line in done.stderr.splitlines() if not line.startswith("INFO")
    ]
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parts]:
    return {page: Parts(page) for page in site.rglob("*.html") if page.name != "404.html"}


def test_every_page_is_there(site: Path, pages: dict[Path, Parts]) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    results = {page.relative_to(site).with_suffix("") for page in pages}
    assert {
        path.with_suffix("").parent / ("index" if path.stem == "README" else path.stem)
        for path in sources
    } <= results


def test_links_lead_somewhere(site: Path, pages: dict[Path, Parts]) -> None:
    wrong = list[str]()
    for page, parts in pages.items():
        for link in parts.links:
            to = urlsplit(link)
            if to.scheme in ("http", "https"):
                continue
            path = (page.parent / unquote(to.path)).resolve() if to.path else page
            path = path / "index.html" if path.is_dir() else path
            known = path.is_file() and (
                not to.fragment or path not in pages or unquote(to.fragment) in pages[path].places
            )
            if not known and link not in ("", "#", "javascript:void(0)"):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Parts]) -> None:
    assert {
        load for parts in pages.values() for load in parts.loads if urlsplit(load).netloc
    } == set()
    for sheet in site.rglob("*.css"):
        assert (
            re.findall(
                r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")
            )
            == []
        ), sheet.name


def test_links_out_of_the_docs_are_pages_with_that_file(site: Path) -> None:
    page = (site / "scale.html").read_text(encoding="utf-8")
    assert 'href="repository/examples/slurm/nodes.sbatch.html"' in page
    shown = (site / "repository/examples/slurm/nodes.sbatch.html").read_text(encoding="utf-8")
    assert "scontrol" in shown
    assert "requeue" in shown


def test_the_search_knows_losses_and_functions(site: Path) -> None:
    places = {
        load["location"]
        for load in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert {"losses/thumbs.html#kto", "api/train.html#valence.api.train", "settings.html"} <= places


def test_there_is_no_link_that_edits(site: Path) -> None:
    assert "action: edit" not in (site / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Any:
    """The Chromium of the system."""
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if program is None:
        pytest.skip("no chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def test_the_search_works_without_a_server(site: Path, browser: Any) -> None:
    requests, errors = list[str](), list[str]()
    page = browser.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "index.html").as_uri(), wait_until="load")
    page.click("label[for=__search]:visible, input[name=query]:visible")
    page.keyboard.type("reference point")
    page.wait_for_selector(".md-search-result__item", timeout=120_000)
    link = page.query_selector(".md-search-result__link").get_attribute("href")
    page.close()
    assert link.startswith("file:")
    assert [url for url in requests if not url.startswith((site.as_uri(), "data:", "blob:"))] == []
    assert errors == []


@pytest.mark.parametrize("width", [1280, 400])
def test_names_of_settings_are_not_broken(width: int, site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((site / "settings.html").as_uri(), wait_until="load")
    names = (
        "[...document.querySelectorAll('article li > code:first-child')]"
        ".filter(e => !e.textContent.includes(' '))"
    )
    assert page.evaluate(f"{names}.length") > 50
    broken = page.evaluate(
        f"{names}.filter(e => e.getClientRects().length > 1).map(e => e.textContent)"
    )
    page.close()
    assert broken == []


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_a_browser_asks_no_other_host_for_anything(site: Path, browser: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}/"
    requests, message = list[str](), list[str]()
    try:
        page = browser.new_page(color_scheme="dark")
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: message.append(str(error)))
        page.goto(f"{here}api/losses.html", wait_until="networkidle")
        assert message == []
        page.wait_for_function("document.body.getAttribute('data-md-color-scheme') === 'slate'")
        page.goto(f"{here}index.html", wait_until="networkidle")
        page.click("label[for=__search]:visible, input[name=query]:visible")
        page.keyboard.type("reference point")  # the search looks when a key is released
        page.wait_for_selector(".md-search-result__item", timeout=120_000)
        page.close()
    finally:
        server.shutdown()
    assert len(requests) > 5
    assert [url for url in requests if not url.startswith((here, "data:", "blob:"))] == []
    assert message == []
