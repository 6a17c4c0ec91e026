"""Format numbers, times and audit results for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

UNSAFE = (range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A), range(0xD800, 0xE000))
"""Code points of controls, of characters that change the direction of the text after them, and of
surrogates.
"""
REPLACEMENTS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
REPLACEMENTS |= {code: 0xFFFD for codes in UNSAFE for code in codes}

Table = tuple[str, Sequence[str], list[list[Any]]]
"""Title, header, rows."""


def visible(text: str) -> str:
    """Replace control characters except newline and tab by their pictures, and lone surrogates and
    direction overrides by U+FFFD, so that the text cannot steer a terminal or break UTF-8.
    """
    return text.translate(REPLACEMENTS)


def number(value: float | int) -> str:
    """A number at about four digits: ``1,234``, ``0.6931``, ``1.23e-05``."""
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if not math.isfinite(value) or size == 0:
        return f"{value:g}"
    if size < 1e-3 or size >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def text(value: object) -> str:
    """Format any value: numbers as ``number`` does, a dash for an absent or empty value, a flat
    list or mapping with commas, a nested one as JSON.
    """
    if value is None or value in ({}, [], ()):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, (list, tuple)) and not any(map(_is_container, value)):
        return ", ".join(text(item) for item in value)
    if isinstance(value, Mapping) and not any(map(_is_container, value.values())):
        return ", ".join(f"{text(key)} {text(item)}" for key, item in value.items())
    return visible(exact(value))


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def exact(value: object) -> str:
    """A value as a recipe has it, not rounded: 5 for 5.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def duration(seconds: float) -> str:
    """Seconds as ``0.4s``, ``12s``, ``3m12s``, ``2h03m`` or ``1d02h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    rounded = round(seconds)
    for size, unit, smaller, small_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if rounded >= size:
            return f"{rounded // size}{unit}{rounded % size // smaller:02d}{small_unit}"
    return f"{rounded}s"


def rate(per_second: float, unit: str = "tok") -> str:
    """A rate as ``1,234 tok/s``, or of less than one item per second as ``8.6 s each``."""
    if unit == "it" and 0 < per_second < 1:
        return f"{1 / per_second:.3g} s each"
    return f"{per_second:,.0f} {unit}/s" if per_second >= 100 else f"{per_second:.3g} {unit}/s"


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Inner mappings as dotted names: ``{"train": {"seed": 0}}`` becomes ``{"train.seed": 0}``."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        flat |= flatten(item, f"{name}.") if isinstance(item, Mapping) and item else {name: item}
    return flat


def compare(
    before: Mapping[str, object], after: Mapping[str, object]
) -> list[tuple[str, str, str, str]]:
    """Rows (metric, before, after, change) of two evaluations; a dash where one lacks a metric."""
    rows: list[tuple[str, str, str, str]] = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        change = ""
        if isinstance(old, (int, float)) and isinstance(new, (int, float)):
            change = f"{'+' if new > old else ''}{number(new - old)}"
        rows.append((visible(name), text(old), text(new), change))
    return rows


def as_tables(value: Mapping[str, Any], title: str = "") -> list[Table]:
    """A mapping of any shape as tables: first its plain values, then each inner mapping or list of
    mappings as a separate table.
    """
    plain = [[key.replace("_", " "), item] for key, item in value.items() if not _has_rows(item)]
    tables: list[Table] = [(title, ("", ""), plain)] if plain else []
    for key, item in value.items():
        words = key.replace("_", " ")
        name = f"{title}: {words}" if title else words
        if not _has_rows(item):
            continue
        if isinstance(item, Mapping) and not all(_is_row(inner) for inner in item.values()):
            tables += as_tables(item, name)
            continue
        records = (
            [{"": k, **inner} for k, inner in item.items()] if isinstance(item, Mapping) else item
        )
        header = list(dict.fromkeys(column for record in records for column in record))
        tables.append(
            (name, header, [[record.get(column, "") for column in header] for record in records])
        )
    return tables


def _has_rows(value: object) -> bool:
    is_records = isinstance(value, (list, tuple)) and all(
        isinstance(item, Mapping) for item in value
    )
    return bool(value) and (isinstance(value, Mapping) or is_records)


def _is_row(value: object) -> bool:
    return isinstance(value, Mapping) and not any(_has_rows(item) for item in value.values())


def audit_tables(audit: Mapping[str, Any]) -> list[Table]:
    """The audit of one list of rows as tables, its findings as sentences; without the
    distributions, which charts show.
    """
    sentences = audit.get("said", {})
    entries = {key: value for key, value in audit.items() if key not in ("distributions", "said")}
    if findings := entries.get("findings"):
        entries["findings"] = {
            sentences.get(name, name.replace("_", " ")): finding
            for name, finding in findings.items()
        }
    return as_tables(entries)


def audit_warnings(audit: Mapping[str, Any]) -> list[str]:
    """One line for each kind of unused rows and each finding in the audit of one list of rows."""
    sentences = audit.get("said", {})
    warnings = [(_unused_rows(unused), unused["rows"]) for unused in audit.get("unused", ())]
    for name, finding in audit.get("findings", {}).items():
        count = f" ({number(finding['count'])})" if finding["rows"] else ""
        sentence = sentences.get(name)
        warnings.append(
            (sentence, ()) if sentence else (name.replace("_", " ") + count, finding["rows"])
        )
    return [
        f"{warning}; such as {', '.join(rows)}" if rows else warning for warning, rows in warnings
    ]


def _unused_rows(unused: Mapping[str, Any]) -> str:
    kind = "" if unused["kind"] == "bad" else str(unused["kind"]).replace("_", " ") + "; "
    if unused["count"] == 1:
        return f"1 row was not used ({kind}{unused['reason']})"
    return f"{number(unused['count'])} rows were not used ({kind}the first: {unused['reason']})"
