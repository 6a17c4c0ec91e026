"""The table of feedback tools."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.errors import raises_error
from valence.data.importers import pull
from valence.data.importers.records import ReadOptions
from valence.data.importers.sources import PARTS, SOURCES, pull_votes, read_votes

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


USES = {
    "score-name": r"options\.score_names",
    "category": r"options\.labels",
    "include-machine": r"is_machine=",
    "unlabelled": r"includes_unlabelled|correction",
    **{part: rf"""paths\.get\("{part}"|in options\.paths|guess_parts\(""" for part in PARTS},
}
"""Option -> text in the readers that use it."""


@pytest.mark.parametrize("name", SOURCES)
def test_the_options_of_a_tool_are_those_that_its_reader_uses(name: str) -> None:
    module = import_module(f"valence.data.importers.{SOURCES[name].module}")
    text = Path(str(module.__file__)).read_text()
    uses = {option for option, pattern in USES.items() if re.search(pattern, text)}
    if "vote_on" in text:  # of traces.py
        uses |= {"prompt", "completion"}
    assert set(SOURCES[name].options.split()) == uses


@pytest.mark.parametrize(
    ("name", "options", "option", "user"),
    [
        ("open_webui", ReadOptions(paths={"prompt": "a"}), "--prompt", "label-studio"),
        ("open_webui", ReadOptions(score_names=("a",)), "--score-name", "langfuse"),
        ("langfuse", ReadOptions(paths={"left": "a"}), "--left", "argilla"),
        ("fastchat", ReadOptions(labels={"good": True}), "--category", "chainlit"),
        ("bedrock", ReadOptions(includes_machine=True), "--include-machine", "phoenix"),
    ],
)
def test_options_that_a_tool_does_not_use_are_refused(
    name: str, options: ReadOptions, option: str, user: str
) -> None:
    with raises_error("option-unused", where=option, fix=user):
        read_votes(name, ["absent.json"], options)


def test_options_are_checked_before_a_server_is_asked() -> None:
    with raises_error("option-unused", where="--prompt", fix="langfuse"):
        pull_votes("open_webui", "http://127.0.0.1:9", ReadOptions(paths={"prompt": "a"}))
