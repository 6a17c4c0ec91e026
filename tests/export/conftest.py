"""Fixtures of the tests of exports."""

from __future__ import annotations

import shutil

import pytest

from valence.apps.export import llama_cpp
from valence.rollouts.servers import PYTHON


@pytest.fixture(autouse=True)
def no_vllm_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports start vLLM only in tests that set this variable."""
    monkeypatch.delenv(PYTHON, raising=False)


@pytest.fixture
def no_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where llama.cpp is not installed: contents are compared without it."""
    monkeypatch.delenv(llama_cpp.SETTING, raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
