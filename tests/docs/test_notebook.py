"""The notebook runs from top to bottom, and contains no large output."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.docs.walk import MODEL, place_model

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_outputs_are_small_text() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} <= {"stream"}
    assert len(NOTEBOOK.read_bytes()) < 20_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.syspath_prepend(str(tmp_path / "examples"))  # as Jupyter does
    place_model(MODEL)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = StringIO()
    with redirect_stdout(printed):
        for number, code in enumerate(code_cells(), 1):
            exec(compile(code, f"cell {number}", "exec"), namespace)
    run = namespace["run"]
    assert run.step == run.total_steps > 0
    assert run.report.exists()
    assert (run.model_dir / "config.json").exists()
    first, last = (run.evaluations[step] for step in (0, run.step))
    assert first["loss"] == pytest.approx(0.5, abs=0.1)
    assert last["rewards/auc"] > first["rewards/auc"]  # even a random model learns length
    assert len(namespace["before"]) == len(namespace["after"]) == 40
    counts = re.search(r"thumbs up: (\d+) of 40 before, (\d+) of 40 after", printed.getvalue())
    assert counts is not None
    assert 0 < namespace["p"] <= 1
