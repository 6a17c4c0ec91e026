"""The table of feedback tools."""

from __future__ import annotations

from importlib import import_module

import pytest

from valence.data.importers import pull
from valence.data.importers.sources import SOURCES


@pytest.mark.parametrize("name", SOURCES)
def test_every_tool_has_a_reader(name: str) -> None:
    module = import_module(f"valence.data.importers.{SOURCES[name].module}")
    assert callable(module.read)
    assert name == module.SOURCE


def test_tools_with_a_server_can_be_pulled() -> None:
    assert set(pull.SERVERS) == {name for name, source in SOURCES.items() if source.is_pullable}
