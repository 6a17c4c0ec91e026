"""Fixtures that several files of this folder use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports.comparing import a_run, config, read, thumbs
from tests.reports.hostile import hostile_run
from valence.reports.comparable_runs import ComparedRun
from valence.reports.rendering import plotly_js


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run with hostile text wherever data may come through."""
    return hostile_run(tmp_path / "first")


@pytest.fixture
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where plotly is not installed."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    plotly_js.cache_clear()
    yield
    plotly_js.cache_clear()


@pytest.fixture
def two(tmp_path: Path) -> list[ComparedRun]:
    """Two runs that differ in their seed alone; the second is better."""
    first = a_run(tmp_path / "first", thumbs(0), thumbs(20))
    other = thumbs(
        20,
        {"a": 0.9, "b": 0.2, "c": 0.3},
        **{"rewards/auc": 0.8, "loss": 0.2, "rewards/margins": 0.4, "grad": 2.0},
    )
    return read(first, a_run(tmp_path / "second", thumbs(0), other, settings=config(seed=1)))
