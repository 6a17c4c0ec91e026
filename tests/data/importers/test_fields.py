"""Cells, times, paths and labels, as tools write them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest

from valence.data.importers.fields import (
    decode_json,
    is_json,
    label_of,
    thumb_label,
    timestamp,
    undo_csv_protection,
    value_at,
    word_label,
)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ('[1, "a"]', [1, "a"]),
        (' {"a": null}', {"a": None}),
        ("[1", "[1"),
        ("[1] and more", "[1] and more"),
        ("7", "7"),
        (7, 7),
    ],
)
def test_json_in_cells(cell: object, expected: object) -> None:
    assert decode_json(cell) == expected


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("'=1+1", "=1+1"),
        ("'-1", "-1"),
        ("'@x", "@x"),
        ("'a,=b", "a,=b"),
        ("'a\nb,-c", "a\nb,-c"),
        ("'quoted'", "'quoted'"),
        ("'", "'"),
        ("=1", "=1"),
        ("''=1", "''=1"),
    ],
)
def test_the_protection_of_csv_cells_is_undone(cell: str, expected: str) -> None:
    assert undo_csv_protection(cell) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.b", 1), ("a", {"b": 1}), ("c.d", 2), ("e.f", 3), ("a.x", None), ("a.b.c", None)],
)
def test_dotted_paths(path: str, expected: object) -> None:
    assert value_at({"a": {"b": 1}, "c.d": 2, "e": '{"f": 3}'}, path) == expected


def test_paths_lead_through_cells_and_lists() -> None:
    row = {"input": '{"turns": [{"text": "Hi"}]}', "a.b": 1}
    assert value_at(row, "input.turns.0.text") == "Hi"
    assert value_at(row, "input.turns.-1.text") == "Hi"
    assert value_at(row, "a.b") == 1
    assert value_at(row, "input.turns.3.text") is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1764000000, 1764000000.0),
        (1764000000123, 1764000000.123),
        (1764000000123456, 1764000000.123456),
        ("1764000000", 1764000000.0),
        ("2025-11-24T16:00:00Z", 1764000000.0),
        ("2025-11-24T17:00:00+01:00", 1764000000.0),
        ("2025-11-24 16:00:00.500000", 1764000000.5),
        (datetime(2025, 11, 24, 16, tzinfo=UTC), 1764000000.0),
        (datetime(2025, 11, 24, 17, tzinfo=timezone(timedelta(hours=1))), 1764000000.0),
        (datetime(2025, 11, 24, 16), 1764000000.0),
        (None, 0.0),
        ("yesterday", 0.0),
        ({}, 0.0),
    ],
)
def test_times(value: object, expected: float) -> None:
    assert timestamp(value) == pytest.approx(expected, abs=1e-6)


INSTANT = datetime(2026, 5, 1, 12, 0, 0, 500_000, UTC)


@pytest.mark.parametrize(
    "value",
    [
        "2026-05-01T12:00:00.500Z",
        "2026-05-01T14:00:00.500+02:00",
        "2026-05-01 12:00:00.500",
        INSTANT,
        INSTANT.replace(tzinfo=None),
        INSTANT.timestamp(),
        INSTANT.timestamp() * 1e3,
        str(int(INSTANT.timestamp() * 1e3)),
        INSTANT.timestamp() * 1e6,
        int(INSTANT.timestamp() * 10) * 10**8,
    ],
)
def test_timestamps(value: object) -> None:
    assert timestamp(value) == INSTANT.timestamp()


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of a process cannot be set")
def test_times_without_a_zone_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert timestamp("2026-05-01 12:00:00.500") == INSTANT.timestamp()
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("value", [None, "", "yesterday", True, [], {}])
def test_invalid_timestamps(value: object) -> None:
    assert timestamp(value) == 0.0


def test_unit_of_a_timestamp() -> None:
    assert timestamp(5000, "ms") == 5.0


@pytest.mark.parametrize(
    ("value", "label"),
    [(True, True), ("False", False), (" GOOD ", True), (5, True), ("5.0", True), (2.5, False)],
)
def test_labels_by_their_meanings(value: object, label: bool) -> None:
    assert label_of(value, {"Good": True, "5": True, "2.5": False}) is label


@pytest.mark.parametrize("value", [None, "thumbs up", 1, 0, ""])
def test_values_without_a_meaning(value: object) -> None:
    assert label_of(value, {}) is None


def test_words_of_all_tools() -> None:
    assert word_label("thumbs up", {}) is True
    assert word_label("thumbs up", {"thumbs up": False}) is False
    assert word_label(1, {}) is None


@pytest.mark.parametrize("cell", ['{"a": 1, "a": 2}', "[NaN]", '["\\ud83d"]'])
def test_json_with_a_fault_is_not_decoded(cell: str) -> None:
    assert decode_json(cell) == cell
    assert is_json(cell)
    assert not is_json(f"{cell} and more")


@pytest.mark.parametrize("value", [-1, -1.7e12, 1e300, float("nan"), "1960-01-01", "inf"])
def test_times_that_no_vote_can_have(value: object) -> None:
    assert timestamp(value) == 0.0


@pytest.mark.parametrize(("value", "label"), [(1, True), ("1", True), (0, False), (-1.0, False)])
def test_thumb_labels_accept_numbers_and_word_labels_do_not(value: object, label: bool) -> None:
    assert thumb_label(value, {}) is label
    assert word_label(value, {}) is None
    assert thumb_label(value, {"1": not label, "0": not label, "-1": not label}) is not label


@pytest.mark.parametrize("value", [2, "4.5", "maybe", None])
def test_values_that_are_thumbs_in_no_tool(value: object) -> None:
    assert thumb_label(value, {}) is None
