"""The counts of votes that are imported and skipped, as the page has them."""

from __future__ import annotations

from tests.docs.imports import EXPORTS, PAGE, page, summary_of
from valence.data.importers.records import SKIP_REASONS, SkipReason
from valence.data.importers.sources import SOURCES

OF_OPTIONS: set[SkipReason] = {"other_model", "before_since"}
"""Reasons of filters, which no export has by itself."""


def test_the_page_has_the_counts_of_every_tool() -> None:
    assert EXPORTS.keys() == SOURCES.keys()
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m tests.docs.imports"


def test_the_exports_have_every_reason() -> None:
    reasons = {reason for source in EXPORTS for reason in summary_of(source).skipped}
    assert reasons == SKIP_REASONS.keys() - OF_OPTIONS
