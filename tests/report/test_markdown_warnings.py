"""What a run's page warns of, ``report --md`` warns of too."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from valence.report.comparison_markdown import run_markdown
from valence.report.page import write_page
from valence.report.rundata import read_run
from valence.report.signs import signs


def plain(text: str) -> str:
    """Letters and digits alone: the two documents quote other characters in their own ways."""
    return re.sub(r"[^a-z0-9]", "", html.unescape(text).lower())


def test_markdown_has_the_warnings_of_the_page(run_dir: Path) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for record in records[len(records) // 2 :]:
        record["kl"] = 400.0 + record["step"]
        record["reward/mean"] = 1.0
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    facts = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    facts["warnings"] = ["step 12: the loss jumped"]
    (run_dir / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    run = read_run(run_dir)
    assert signs(run)
    assert run.audited
    page = plain(write_page(run_dir).read_text(encoding="utf-8"))
    document = run_markdown(run)
    wanted = [each for sign in signs(run) for each in (sign.said, sign.do)]
    for text in (*wanted, *run.audited, *run.problems, "step 12: the loss jumped"):
        assert plain(text) in page
        assert plain(text) in plain(document)
    first = document.index(signs(run)[0].said.split("(")[0][:20].replace("_", "\\_"))
    assert first < document.index("trained")  # above everything else
