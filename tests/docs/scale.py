"""``python -m tests.docs.scale`` writes the tables into docs/scale.md."""

from __future__ import annotations

from benchmarks.scale_model import tables
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"


def page() -> str:
    """The page as it should be now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    assert after, f"{PAGE} has lost its marks"
    return f"{before}{BEGIN}\n{tables.text()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
