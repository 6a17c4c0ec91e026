"""Common parts of the tests of reading data: the source of a recipe, and files for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valence.data import audit_text
from valence.data.audit import Audit
from valence.data.load import Loaded, load


@dataclass(frozen=True)
class Source:
    path: str
    split: str | None = None
    subset: str | None = None
    format: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    limit: int | None = None


def shown_findings(result: Audit) -> set[str]:
    """The names of the findings that the screen of an audit lists, each with its count (of rows)
    and its advice.
    """
    # the advice stands on a line of its own
    text = re.sub(r"\n {4,}", " ", audit_text.render(result))
    sentences = audit_text.audited(result)["said"]
    names: set[str] = set()
    for name, finding in result.findings.items():
        sentence = sentences[name].removeprefix(f"{finding.count:,} ")
        template, fix = (audit_text.WARNINGS | audit_text.REMARKS)[name]
        assert sentence.endswith(f". {fix}")
        sentence = f"{sentence.removesuffix(f'. {fix}')} {fix}"
        count = f"{finding.count:,}" if "{rows}" in template else "-"
        if re.search(rf"^ +{count}  {re.escape(sentence)}$", text, re.MULTILINE):
            names.add(name)
    return names


def write(path: Path, *rows: Any) -> str:
    """A jsonl file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load_rows(
    folder: Path,
    kind: Any,
    *rows: Any,
    convert: str | None = None,
    threshold: float | None = None,
    on_bad_row: Any = "stop",
    **source: Any,
) -> Loaded:
    """Load rows from one jsonl file."""
    path = write(folder / "rows.jsonl", *rows)
    return load(
        [Source(path, **source)], kind, convert=convert, threshold=threshold, on_bad_row=on_bad_row
    )


JUDGED = {"prompt": "Say hi.", "completion": "Hi!", "label": True}
USER = {"role": "user", "content": "Say hi."}
ASSISTANT = {"role": "assistant", "content": "Hi!"}
