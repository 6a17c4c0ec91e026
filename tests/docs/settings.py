"""``python -m tests.docs.settings`` writes docs/settings.md from the schema."""

from __future__ import annotations

from collections.abc import Sequence

from tests.docs.blocks import ROOT
from valence.config.describe import SettingRow, settings_table

PAGE = ROOT / "docs" / "settings.md"
HEAD = """\
# Settings

Every setting of a recipe. Those of its `loss` section are its method's, and in [losses.md](losses.md). `N` stands for an index in
a list. A list may be given as its only item, and a file of rows, a reward or a tracker by its name alone
(`data: {train: rows.jsonl}`). Paths are relative to the folder in which the command runs, and `~` is the home folder; files of
rows are also looked for beside the recipe. On the command line: `valence train RECIPE train.seed=1`.
Made by `python -m tests.docs.settings`.
"""


def page() -> str:
    """The page as it should be now."""
    return f"{HEAD}\n{table([row for row in settings_table() if row.name != 'loss'])}"


def table(rows: Sequence[SettingRow]) -> str:
    """A table of settings."""
    lines = ["| setting | takes | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{row.name}` | {_cell(row.type)} | `{row.default}` | {_cell(row.meaning)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
