"""The exports of all tools have every reason for which an import skips a record."""

from __future__ import annotations

import re

from tests.arch.source import ROOT
from tests.data.importers.skipped import EXPORTS, summary_of
from valence.data.importers.records import SKIP_REASONS, SkipReason
from valence.data.importers.sources import SOURCES, command_name

OF_OPTIONS: set[SkipReason] = {"other_model", "before_since"}
"""Reasons of filters, which no export has by itself."""


def test_the_exports_have_every_reason() -> None:
    assert EXPORTS.keys() == SOURCES.keys()
    reasons = {reason for source in EXPORTS for reason in summary_of(source).skipped}
    assert reasons == SKIP_REASONS.keys() - OF_OPTIONS


def test_the_page_of_imports_names_every_tool() -> None:
    page = (ROOT / "docs/feedback/import.md").read_text(encoding="utf-8")
    table = page.partition("## Tools")[2].partition("\n\n| Option")[0]
    named = re.findall(r"^\| [^|]+ \| `([\w-]+)` \|", table, re.MULTILINE)
    assert named == [command_name(source) for source in SOURCES]
