"""The table of feedback tools."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.errors import raises_error
from valence.data.importers import pull
from valence.data.importers.sources import SOURCES, read_votes

REAL = Path(__file__).parent / "real"


@pytest.mark.parametrize("name", SOURCES)
def test_every_tool_has_a_reader(name: str) -> None:
    module = import_module(f"valence.data.importers.{SOURCES[name].module}")
    assert callable(module.read)
    assert name == module.SOURCE


def test_tools_with_a_server_can_be_pulled() -> None:
    assert set(pull.SERVERS) == {name for name, source in SOURCES.items() if source.is_pullable}


@pytest.mark.parametrize(
    ("name", "file", "tool"),
    [
        ("librechat", "open_webui_0.12.4.json", "open-webui"),
        ("argilla", "label_studio.json", "label-studio"),
        ("open_webui", "chainlit_feedbacks.json", "chainlit"),
        ("fastchat", "argilla.json", "argilla"),
    ],
)
def test_the_tool_of_another_export_is_suggested(name: str, file: str, tool: str) -> None:
    with raises_error("import-not-an-export", where=file, fix=f"did you mean {tool}?"):
        list(read_votes(name, [str(REAL / file)]))
