"""`valence docs CODE`: the texts of errors come from the calls that create them."""

from __future__ import annotations

import re

import pytest

from tests.command import command
from tests.docs.blocks import ROOT
from valence.cli.error_codes import error_texts


def test_a_code_is_explained_by_its_messages_and_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("docs", "nproc-invalid") == 0
    assert capsys.readouterr().out.split("\n\n")[0].split("\n  to fix it: ") == [
        "--nproc must be at least 1",
        "set it to a number of processes, or remove it to use one process",
    ]


def test_variables_of_a_text_are_in_capitals_and_an_exact_code_comes_before_a_pattern() -> None:
    assert error_texts("setting-unknown")[0].message == "there is no such setting"
    assert all("SUBJECT" not in text.message for text in error_texts("setting-unknown"))
    [text] = error_texts("label-zero-ambiguous")
    assert text.message.startswith("COLUMN is 0 here and -1 at MINUS")
    assert error_texts("no-such-code") == error_texts("kto") == []


def test_every_code_in_the_pages_is_explained() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    [listed] = re.findall(r"`code`, such as `([a-z-]+)`\. `valence docs CODE`", pages)
    assert all(error_texts(code) for code in (listed, "label-zero-ambiguous"))


def test_all_codes_of_the_package_are_found() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "valence").rglob("*.py"))
    codes = {
        code
        for source in sources
        for code in re.findall(r'UserError\([^()]*\bcode="([^"{]+)"', source)
    }
    assert len(codes) > 200
    assert [code for code in codes if not error_texts(code)] == []
