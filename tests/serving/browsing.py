"""A service at an address, and its page in a real browser."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from valence.apps.serve.http_server import open_socket

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 60.0
"""Seconds that a busy machine may take."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Site:
    """A web application at an address, which can be stopped and started again."""

    app: Any
    port: int = 0

    def start(self) -> None:
        import uvicorn

        place = open_socket("127.0.0.1", self.port, has_tokens=True)
        self.port = place.getsockname()[1]
        config = uvicorn.Config(self.app, log_config=None, timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[place]))
        )
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def link(self, token: str) -> str:
        return f"http://127.0.0.1:{self.port}/#token={token}"


@contextmanager
def opened(
    browser: Browser,
    site: Site,
    *,
    width: int = 1280,
    failing: bool = False,
    token: str = "token-of-anna",
    **options: Any,
) -> Iterator[Page]:
    """The page, opened with its link; what fails meanwhile fails the test, unless ``failing``."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    failed: list[str] = []
    if not failing:
        page.on("console", lambda message: failed.append(message.text))
        page.on(
            "requestfailed",
            lambda request: (
                # a stream that was read to its end counts as aborted half of the time
                failed.append(request.url) if not request.url.endswith("/api/answer") else None
            ),
        )
    page.on("pageerror", lambda error: failed.append(str(error)))
    actual = (f"http://127.0.0.1:{site.port}/", "data:")
    page.on(
        "request",
        lambda request: (
            failed.append(request.url)
            if not request.url.startswith(actual) or "token-of" in request.url
            else None
        ),
    )
    page.goto(site.link(token))
    yield page
    context.close()
    assert failed == []


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. (The page's policy forbids the browser to evaluate it.)"""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_status(page: Page, text: str) -> None:
    until(lambda: text in (page.text_content("#status") or ""))
