"""The page and the Markdown of several runs: content, escaped text, and overwriting."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.errors import raises_error
from tests.reports.comparing import a_run, online_evaluation, read, thumbs
from valence.reports.comparable_runs import ComparedRun
from valence.reports.comparison import BEST, comparison_markdown, comparison_page, tables, write_out
from valence.reports.page import report_markdown
from valence.reports.run_record import RunRecord

HOSTILE = (
    "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'> | **b** "
    "\x1b[2J \ud800"
)


class Page(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.text, self._inside = "", ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


# The page and the Markdown


def poisoned(folder: Path) -> list[ComparedRun]:
    for name in ("x", "y"):
        result = thumbs(20, {"a": 1.0 if name == "x" else 0.0, "b": 0.5}, **{HOSTILE: 1.0})
        for row in result["rows"]:
            row |= {"origin": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE + name}
        run = a_run(
            folder / HOSTILE.replace("/", "").replace("\ud800", "") / name,
            thumbs(0, None, **{HOSTILE: 2.0}),
            result,
            versions={HOSTILE: HOSTILE + name},
        )
        (run / "config.yaml").write_text(json.dumps({"method": HOSTILE, HOSTILE: HOSTILE + name}))
        with (run / "metrics.jsonl").open("a") as log:
            log.writelines(json.dumps({"step": step, HOSTILE: step}) + "\n" for step in (10, 20))
    return read(folder)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    runs = poisoned(tmp_path)
    source = comparison_page(runs)
    source.encode("utf-8")
    page = Page(source)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert page.handlers == []
    assert page.text.count("<img src=x onerror=") > 5
    assert "\x1b" not in source
    out = comparison_markdown(runs)
    out.encode("utf-8")
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(out)
    assert "<script" not in shown
    assert "<img" not in shown
    assert "\x1b" not in shown


def test_the_page_needs_no_network_and_has_tables_charts_and_rows(
    two: list[ComparedRun],
) -> None:
    source = comparison_page(two)
    page = Page(source)
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    for part in tables(two):
        assert part.title in page.text
        assert all("".join(row) in page.text for row in part.rows)
    assert source.count('class="chart"') > 3
    assert "train.seed01" in page.text
    assert "held_out.jsonl:1: first 0 %, second 100 %" in page.text


@pytest.mark.usefixtures("no_plotly")
def test_without_plotly_the_page_explains_how_to_get_curves(two: list[ComparedRun]) -> None:
    source = comparison_page(two)
    assert 'class="chart"' not in source
    page = Page(source)
    assert "pip install plotly" in page.text
    assert "train.seed01" in page.text


def test_the_markdown_has_the_same_tables(two: list[ComparedRun]) -> None:
    out = comparison_markdown(two)
    for line in (
        "| train.seed | 0 | 1 |",
        f"| rewards/auc | 0.7 | {BEST} 0.8 |",
        "| held\\_out.jsonl:1 | Ask a | 0 % | 100 % | completion: Yes. |".replace("\\_", "_"),
    ):
        assert line in out.splitlines()


def test_a_run_in_markdown_for_a_pull_request(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "first",
        thumbs(0),
        thumbs(20),
        command="valence train x.yaml",
        warnings=["loss <jumped>"],
    )
    out = report_markdown(RunRecord.read(run))
    [sentence] = [line for line in out.splitlines() if line.startswith("**kto**")]
    assert all(fact in sentence for fact in ("16", "org/tiny-chat", "rows.jsonl", "20", "1m05s"))
    [header] = [line for line in out.splitlines() if line.count("|") == 5 and "step" in line]
    assert [int(step) for step in re.findall(r"step (\d+)", header)] == [0, 20]
    assert "| rewards/auc | 0.5 | 0.7 | +0.2 |" in out
    assert "- loss &lt;jumped&gt;" in out
    assert "```sh\nvalence train x.yaml\n```" in out
    assert out.splitlines()[-1] == "valence 0.1.0, torch 2.13"
    assert "done" not in out


def test_an_audit_of_another_program_in_markdown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    before = report_markdown(RunRecord.read(run)).splitlines()
    (run / "audit.json").write_text('{"train": {"findings": ["none"]}}')
    [messages] = [
        line
        for line in report_markdown(RunRecord.read(run)).splitlines()
        if line.startswith("- ") and line not in before
    ]
    assert "train" in messages
    assert "audit.json" in messages


def test_a_run_of_which_little_is_there_in_markdown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "first", status="interrupted")
    out = report_markdown(RunRecord.read(run))
    assert "interrupted" in out
    assert "held-out rows |" not in out
    (tmp_path / "empty").mkdir()
    assert "config.yaml" in report_markdown(RunRecord.read(tmp_path / "empty"))


def test_only_files_of_the_command_are_overwritten(tmp_path: Path, two: list[ComparedRun]) -> None:
    page = tmp_path / "comparison.html"
    write_out(page, comparison_page(two))
    write_out(page, comparison_markdown(two))
    write_out(page, "anything")
    with raises_error("path-exists", where=str(page), fix="--out"):
        write_out(page, comparison_page(two))
    assert page.read_text() == "anything"
    with raises_error("file-not-writable", where=str(tmp_path / "nowhere/page.html")):
        write_out(tmp_path / "nowhere/page.html", "")
    with raises_error("path-exists", where=str(tmp_path)):
        write_out(tmp_path, "")


def test_paths_that_are_not_files_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has no end, and a pipe may have no beginning."""
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    with raises_error("path-exists", where="/dev/zero"):
        write_out(Path("/dev/zero"), "")


# In a browser


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("plotly", reason="plotly is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as play:
        result = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        yield result
        result.close()


@pytest.mark.slow
def test_the_page_works_in_a_browser(tmp_path: Path, browser: Any) -> None:
    online_runs = [
        a_run(
            tmp_path / f"own{i}",
            online_evaluation(0, 0.1, 0.0),
            online_evaluation(20, 0.4 + i, 1.0),
        )
        for i in range(2)
    ]
    path = tmp_path / "comparison.html"
    path.write_text(
        comparison_page([*poisoned(tmp_path / "poisoned"), *read(*online_runs)]), encoding="utf-8"
    )
    for width in (390, 1200):
        page = browser.new_page(viewport={"width": width, "height": 800})
        failed: list[str] = []
        page.on(
            "console",
            lambda message: (
                failed.append(message.text)  # noqa: B023
                if message.type in ("error", "warning")
                else None
            ),
        )
        page.on("pageerror", lambda error: failed.append(str(error)))  # noqa: B023
        page.goto(path.as_uri())
        charts = page.locator(".chart")
        for i in range(charts.count()):
            charts.nth(i).scroll_into_view_if_needed()
            charts.nth(i).locator(".main-svg").first.wait_for()
        assert failed == []
        assert charts.count() > 4
        assert page.evaluate("window.ran") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
