"""Fixtures of the tests of exports."""

from __future__ import annotations

import pytest

from valence.rollouts.servers import PYTHON


@pytest.fixture(autouse=True)
def no_vllm_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports start vLLM only in tests that set this variable."""
    monkeypatch.delenv(PYTHON, raising=False)
