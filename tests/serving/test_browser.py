"""The page in a real browser: rate, correct, comment and compare, and nothing of a text runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving.browsing import Browser, Page, Site, browser, opened, until, wait_for_status
from tests.serving.kit import Served, open_trainer, rows, trainer
from valence.apps.serve.chat import Answer, ChatModel, FinishedTurn

__all__ = ["browser"]

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror='window.ran = 1'><script>window.ran = 1</script>\u202e & \x00"
WIDE = "W" * 60


class HostileModel(ChatModel):
    """Answers with markup."""

    async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[str | Answer, None]:
        async for part in super().stream(*arguments, **options):
            if isinstance(part, Answer):
                yield HOSTILE + WIDE
                yield replace(part, completion=replace(part.completion, text=HOSTILE + WIDE))


@dataclass(kw_only=True)
class FeedbackSite(Site):
    served: Served


@contextmanager
def site_in(folder: Path, **options: Any) -> Iterator[FeedbackSite]:
    served = Served(folder, **options)
    site = FeedbackSite(served.app, served=served)
    site.start()
    try:
        yield site
    finally:
        site.stop()
        served.close()


def wait_for_answer(page: Page, number: int = 1) -> None:
    def is_answered() -> bool:
        assert page.is_hidden("#error"), page.text_content("#error-text")
        return page.locator(".answer .actions, .pair > .actions").count() >= number

    until(is_answered)


def test_rate_correct_and_comment_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site) as page:
        wait_for_status(page, "anna · 0 votes")
        assert page.url == f"http://127.0.0.1:{site.port}/"  # without the token
        page.keyboard.type("hello")
        page.keyboard.press("Enter")
        wait_for_answer(page)
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowDown")
        wait_for_status(page, "1 vote")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("c")
        page.keyboard.type("too short")
        page.keyboard.press("Control+Enter")
        page.keyboard.press("e")
        assert page.locator(".edit textarea").input_value().strip() != ""
        page.locator(".edit textarea").fill("A better answer")
        page.keyboard.press("Control+Enter")
        until(lambda: site.served.rows("demonstrations"))
        (row,) = site.served.rows()
        assert (row["label"], row["info"]["comment"]) == (True, "too short")
        assert [row["chosen"] for row in site.served.rows("pairs")] == ["A better answer"]
        pressed = page.locator("[aria-pressed=true]").all_text_contents()
        assert pressed == ["Rate", "👍 Good", "Correct", "Comment"]
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowUp")  # withdraws the thumb
        until(lambda: site.served.rows() == [])
        page.keyboard.press("i")
        page.keyboard.type("and now?")
        page.keyboard.press("Enter")
        wait_for_answer(page, 2)
        assert [turn["role"] for turn in last_prompt(site)] == ["user", "assistant", "user"]


def last_prompt(site: FeedbackSite) -> list[dict[str, Any]]:
    """The conversation before the last answer."""
    return rows(site.served.out.with_suffix(".answers.jsonl"))[-1]["prompt"]


def test_compare_and_go_on_with_the_better_answer(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site) as page:
        page.click("#mode-compare")
        page.fill("#input", "hello")
        page.keyboard.press("Enter")
        wait_for_answer(page)
        page.fill("#input", "go on")
        page.click("#send")
        assert page.text_content("#error-text")
        page.keyboard.press("Escape")
        page.locator("#input").evaluate("node => node.blur()")
        page.keyboard.press("2")
        wait_for_status(page, "1 vote")
        assert page.text_content("#error-text") == ""
        page.click("#send")
        wait_for_answer(page, 2)
        (pair,) = site.served.rows("pairs")
        assert last_prompt(site)[1]["content"] == pair["chosen"]
        page.locator("#input").evaluate("node => node.blur()")
        page.keyboard.press("0")
        wait_for_status(page, "2 votes")
        page.keyboard.press("x")
        until(lambda: [row["label"] for row in site.served.rows()] == [False, False])


class LabelledModel(ChatModel):
    """Answers with a unique text, by which the test tells models apart."""

    async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[str | Answer, None]:
        text = f"answer of {'one' if self.name == SECRET_NAMES[0] else 'two'}"
        async for part in super().stream(*arguments, **options):
            if isinstance(part, Answer):
                yield text
                yield replace(part, completion=replace(part.completion, text=text))


SECRET_NAMES = ("first-secret", "second-secret <b>")


def test_two_models_are_compared_without_their_names(browser: Browser, tmp_path: Path) -> None:
    one, two = (LabelledModel(open_trainer(), name) for name in SECRET_NAMES)
    tokens = {"token-of-anna": "anna", "token-of-owner": ""}
    with site_in(tmp_path, model=one, rival=two, tokens=tokens) as site:
        with opened(browser, site) as page:
            wait_for_status(page, "0 votes")
            assert page.text_content("#model") == "Which answer is better?"
            assert page.is_hidden("#modes")
            assert page.is_hidden("#results-button")
            for number in range(1, 4):
                page.click("#new")
                page.fill("#input", f"hello {number}")
                page.keyboard.press("Enter")
                wait_for_answer(page)
                assert "secret" not in page.content()
                texts = page.locator(".answer .message").all_text_contents()
                side = texts.index("answer of two") + 1
                page.locator("#input").evaluate("node => node.blur()")
                page.keyboard.press(str(side))
                wait_for_status(page, f"{number} vote")
                until(lambda: "secret" in page.content())
                titles = page.locator(".answer h2").all_text_contents()
                assert titles[side - 1] == f"Answer {side}: {SECRET_NAMES[1]}"
                assert titles[2 - side] == f"Answer {3 - side}: {SECRET_NAMES[0]}"
                assert page.locator(".actions.compare button:enabled").count() == 0
                page.keyboard.press(str(3 - side))  # the verdict is final
            pairs = site.served.rows("pairs")
            assert {pair["chosen"] for pair in pairs} == {"answer of two"}
            assert {pair["info"]["chosen_model"] for pair in pairs} == {SECRET_NAMES[1]}
            assert site.served.store.num_votes == 3
        with opened(browser, site, token="token-of-owner") as page:
            page.click("#results-button")
            until(lambda: page.locator("#results dd").count() == 4)
            names = page.locator("#results dt").all_text_contents()
            counts = page.locator("#results dd").all_text_contents()
            assert dict(zip(names, counts, strict=True)) == {
                f"{SECRET_NAMES[0]} won": "0",
                f"{SECRET_NAMES[1]} won": "3",
                "Equally good": "0",
                "Both bad": "0",
            }
            assert page.locator("#results b").count() == 0
            page.fill("#input", "hello")
            page.keyboard.press("Enter")
            wait_for_answer(page)
            page.locator(".actions.compare button", has_text="Equally good").click()
            until(lambda: page.locator("#results dd").all_text_contents()[2:] == ["1", "0"])


def test_prompts_one_after_the_other(browser: Browser, tmp_path: Path) -> None:
    prompts = [{"prompt": f"question {number}"} for number in (1, 2)]
    with site_in(tmp_path, prompts=prompts) as site, opened(browser, site) as page:
        wait_for_answer(page)
        wait_for_status(page, "prompt 1 of 2")
        page.reload()
        wait_for_answer(page)
        wait_for_status(page, "prompt 1 of 2")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("n")  # at once, before the vote is confirmed
        wait_for_status(page, "prompt 2 of 2 · 1 vote")
        wait_for_answer(page)
        assert page.locator(".user").all_text_contents() == ["question 2"]
        page.keyboard.press("n")
        wait_for_status(page, "all 2 prompts done")
        assert page.is_hidden("#next")
        page.reload()
        wait_for_status(page, "all 2 prompts done")  # the second one was skipped


def test_markup_is_shown_as_text_and_a_telephone_needs_no_scrolling(
    browser: Browser, tmp_path: Path
) -> None:
    model = HostileModel(trainer(), HOSTILE)
    options: dict[str, Any] = {
        "prompts": [{"prompt": HOSTILE + WIDE}],
        "tokens": {"token-of-anna": HOSTILE},
        "model": model,
    }
    phone = {"width": 390, "has_touch": True, "is_mobile": True}
    with site_in(tmp_path, **options) as site, opened(browser, site, **phone) as page:
        wait_for_answer(page)
        shown = HOSTILE.replace("\x00", "")
        assert shown in (page.text_content(".user") or "").replace("\x00", "")
        assert shown in (page.text_content(".answer .message") or "").replace("\x00", "")
        assert "<img" in (page.text_content("#status") or "")
        page.click("#new")
        page.click("#mode-compare")
        page.fill("#input", HOSTILE)
        page.click("#send")
        wait_for_answer(page)
        page.click("text=2 is better")
        wait_for_status(page, "1 vote")
        assert page.evaluate("window.ran") is None
        assert page.locator("main img, main script").count() == 0
        for node in ("document.documentElement", "document.body"):
            assert page.evaluate(f"{node}.scrollWidth") <= 390


CALLS = (
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {
                "type": "function",
                "id": "call00000",
                "function": {"name": "look_up", "arguments": {"text": HOSTILE, "number": 2**60}},
            }
        ],
    },
    {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": HOSTILE},
)
LAST = {"role": "assistant", "content": "It is there."}


class CallingModel(ChatModel):
    """Calls a tool before it answers. Its template prints no calls, so the prompt has none."""

    def encode(self, messages: Any, *arguments: Any, **options: Any) -> Any:
        prompt = super().encode(messages[:1], *arguments, **options)
        return replace(prompt, messages=tuple(messages))

    async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
        async for part in super().stream(*arguments, **options):
            if isinstance(part, Answer):
                yield "I look. <call>"
                yield FinishedTurn(CALLS)
                yield LAST["content"][:5]
                yield LAST["content"][5:]
                yield FinishedTurn((LAST,))
                yield replace(part, turns=(*CALLS, LAST))


def test_calls_of_tools_are_shown_between_the_turns(browser: Browser, tmp_path: Path) -> None:
    model = CallingModel(trainer(), "calling")
    with site_in(tmp_path, model=model) as site, opened(browser, site) as page:
        page.fill("#input", "hello")
        page.keyboard.press("Enter")
        wait_for_answer(page)
        assert page.locator(".answer .message").all_text_contents() == ["I look.", "It is there."]
        tool = page.locator(".answer details.tool")
        assert tool.count() == 1
        assert not tool.locator("pre").first.is_visible()
        assert "look_up" in (tool.locator("summary").text_content() or "")
        tool.locator("summary").click()
        arguments, result = tool.locator("pre").all_text_contents()
        assert "<script>" in arguments
        assert str(2**60) in arguments
        assert result.replace("\x00", "") == HOSTILE.replace("\x00", "")
        assert page.evaluate("window.ran") is None
        page.click("text=👍 Good")
        wait_for_status(page, "1 vote")
        assert [row["completion"] for row in site.served.rows()] == [[*CALLS, LAST]]
        page.fill("#input", "and now?")
        page.keyboard.press("Enter")
        wait_for_answer(page, 2)
        assert last_prompt(site)[1:4] == [*CALLS, LAST]
        page.click("#mode-compare")
        page.fill("#input", "again")
        page.keyboard.press("Enter")
        wait_for_answer(page, 3)
        page.click("text=2 is better")
        wait_for_status(page, "2 votes")


def test_a_restart_of_the_server_while_the_page_is_open(browser: Browser, tmp_path: Path) -> None:
    with site_in(tmp_path) as site, opened(browser, site, failing=True) as page:
        page.fill("#input", "hello")
        page.keyboard.press("Enter")
        wait_for_answer(page)
        site.stop()
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowUp")
        until(lambda: page.is_visible("#retry"))
        assert page.text_content("#error-text")
        assert page.locator(".answer [aria-pressed=true]").count() == 0
        page.fill("#input", "and now?")
        page.keyboard.press("Enter")
        until(lambda: page.locator(".user").count() == 2 and page.is_visible("#retry"))
        site.start()
        page.click("#retry")
        wait_for_answer(page, 2)
        assert page.is_hidden("#error")
        page.locator("text=👍 Good").first.click()
        wait_for_status(page, "1 vote")
        assert [turn["role"] for turn in last_prompt(site)] == ["user", "assistant", "user"]


def test_a_link_that_is_no_longer_valid_is_explained(browser: Browser, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokens": {"another": "anna"}}
    with site_in(tmp_path, **options) as site, opened(browser, site, failing=True) as page:
        until(lambda: "valence collect" in (page.text_content("#error") or ""))


def test_answers_that_are_empty_or_cut_off_say_so(browser: Browser, tmp_path: Path) -> None:
    class EmptyModel(ChatModel):
        async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
            async for part in super().stream(*arguments, **options):
                if isinstance(part, Answer):
                    yield replace(part, completion=replace(part.completion, text=""))

    model = EmptyModel(trainer(), "empty")
    with site_in(tmp_path, model=model) as site, opened(browser, site) as page:
        page.fill("#input", "hello")
        page.keyboard.press("Enter")
        wait_for_answer(page)
        assert page.locator(".note").all_text_contents()[0] == "The answer is empty."
        page.click("text=👎 Bad")
        wait_for_status(page, "1 vote")
        assert [row["label"] for row in site.served.rows()] == [False]
