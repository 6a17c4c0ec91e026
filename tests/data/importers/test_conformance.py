"""What the importers of all feedback tools do alike."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT
from tests.data.importers import (
    test_argilla,
    test_bedrock,
    test_chainlit,
    test_fastchat,
    test_label_studio,
    test_librechat,
    test_open_webui,
    test_openai,
)
from tests.data.importers.conformance_exports import EXPORTS, summary_of
from tests.data.importers.votes import REAL, write_jsonl
from tests.errors import raises_error
from valence.data.importers import gradio, pull
from valence.data.importers.records import SKIP_REASONS, Reader, ReadOptions, SkipReason, Vote
from valence.data.importers.sources import (
    PARTS,
    SOURCES,
    command_name,
    pull_votes,
    read_votes,
    source_of,
)
from valence.errors import UserError

every_tool = pytest.mark.parametrize("name", SOURCES)


def reader_of(name: str) -> Reader:
    return import_module(f"valence.data.importers.{SOURCES[name].module}").read


# The table of tools


def test_every_tool_has_an_export_here() -> None:
    assert EXPORTS.keys() == SOURCES.keys()


@every_tool
def test_every_tool_has_a_reader(name: str) -> None:
    module = import_module(f"valence.data.importers.{SOURCES[name].module}")
    assert callable(module.read)
    assert name == module.SOURCE


def test_tools_with_a_server_can_be_pulled() -> None:
    assert set(pull.SERVERS) == {name for name, source in SOURCES.items() if source.is_pullable}


def test_the_page_of_imports_names_every_tool() -> None:
    page = (ROOT / "docs/feedback/import.md").read_text(encoding="utf-8")
    table = page.partition("## Tools")[2].partition("\n\n| Option")[0]
    named = re.findall(r"^\| [^|]+ \| `([\w-]+)` \|", table, re.MULTILINE)
    assert named == [command_name(source) for source in SOURCES]


# Options


USES = {
    "score-name": r"options\.score_names",
    "category": r"options\.labels",
    "include-machine": r"is_machine=",
    "unlabelled": r"includes_unlabelled|correction",
    **{part: rf"""paths\.get\("{part}"|in options\.paths|guess_parts\(""" for part in PARTS},
}
"""Option -> text in the readers that use it."""


@every_tool
def test_the_options_of_a_tool_are_those_that_its_reader_uses(name: str) -> None:
    module = import_module(f"valence.data.importers.{SOURCES[name].module}")
    text = Path(str(module.__file__)).read_text()
    uses = {option for option, pattern in USES.items() if re.search(pattern, text)}
    if "vote_on" in text:  # of traces.py
        uses |= {"prompt", "completion"}
    assert set(SOURCES[name].options.split()) == uses


SET: dict[str, ReadOptions] = {
    "score-name": ReadOptions(score_names=("a",)),
    "category": ReadOptions(labels={"good": True}),
    "include-machine": ReadOptions(includes_machine=True),
    "unlabelled": ReadOptions(includes_unlabelled=True),
    **{part: ReadOptions(paths={part: "a"}) for part in PARTS},
}
"""Option -> options with nothing but it."""


@every_tool
def test_options_that_a_tool_does_not_use_are_refused(name: str) -> None:
    unused = SET.keys() - set(source_of(name).options.split())
    assert unused
    for option in sorted(unused):
        users = [tool for tool, source in SOURCES.items() if option in source.options.split()]
        fix = command_name(users[0])
        with raises_error("option-unused", where=f"--{option}", fix=fix):
            read_votes(name, ["absent.json"], SET[option])


def test_options_are_checked_before_a_server_is_asked() -> None:
    with raises_error("option-unused", where="--prompt", fix="langfuse"):
        pull_votes("open_webui", "http://127.0.0.1:9", ReadOptions(paths={"prompt": "a"}))


# Exports


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The files of each tool's export."""
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in EXPORTS.items()}


@every_tool
def test_an_export_gives_the_same_votes_each_time(exports: dict[str, list[str]], name: str) -> None:
    first, second = (list(read_votes(name, exports[name])) for _ in range(2))
    assert first == second
    votes = [item for item in first if isinstance(item, Vote)]
    assert votes
    for vote in votes:
        assert vote.origin.path in exports[name]
        check_texts(vote)


OF_OPTIONS: set[SkipReason] = {"other_model", "before_since"}
"""Reasons of filters, which no export has by itself."""


def test_the_exports_have_every_reason_to_skip_a_record() -> None:
    reasons = {reason for source in EXPORTS for reason in summary_of(source).skipped}
    assert reasons == SKIP_REASONS.keys() - OF_OPTIONS


READ_BY_BOTH = {("chats", "chat_ui")}
"""(tool, tool of the export): conversations are read by either."""


@every_tool
def test_the_export_of_another_tool_gives_no_votes(
    exports: dict[str, list[str]], name: str
) -> None:
    """A tool that the columns show is suggested."""
    for other, files in exports.items():
        if other == name or (name, other) in READ_BY_BOTH:
            continue
        items, error = attempt_to_read(name, files)
        assert not [item for item in items if isinstance(item, Vote)]
        if error and error.code == "import-not-an-export" and SOURCES[other].columns:
            assert str(error.where).startswith(tuple(files))
            assert "flat" in files[0] or f"did you mean {command_name(other)}?" in str(error.fix)


def attempt_to_read(name: str, files: list[str]) -> tuple[list[Any], UserError | None]:
    """What a tool's reader yields, and the error that ends it, if one does."""
    items: list[Any] = []
    try:
        items.extend(read_votes(name, files))
    except UserError as error:
        return items, error
    return items, None


@every_tool
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path, name: str) -> None:
    missing = str(tmp_path / "missing.json")
    with raises_error("file-not-found", where=missing):
        list(read_votes(name, [missing]))
    (tmp_path / "damaged.json").write_text('[{"id": ', encoding="utf-8")
    with pytest.raises(UserError) as raised:
        list(read_votes(name, [str(tmp_path / "damaged.json")]))
    assert str(tmp_path / "damaged.json") in str(raised.value.where)


# Damaged records: readers skip or refuse them, and never fail otherwise.


JUNK: list[Any] = [
    None,
    True,
    7,
    -1.5,
    "",
    "x",
    "[1",
    "[NaN]",
    [],
    [1],
    [None],
    {},
    {"x": 1},
    [{"x": None}],
]
OPTIONS = ReadOptions(paths={"label": "feedback"}, includes_machine=True)


def damaged(value: Any) -> Iterator[Any]:
    """Copies in which one part is junk, or is missing."""
    if isinstance(value, dict | list):
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        for place in places:
            rest = copy.deepcopy(value)
            del rest[place]
            yield rest
            for part in [*damaged(value[place]), *JUNK]:
                yield (
                    {**value, place: part}
                    if isinstance(value, dict)
                    else [*value[:place], part, *value[place + 1 :]]
                )


def check_texts(vote: Vote) -> None:
    """A vote's values have their types, and its prompt ends where an answer begins."""
    assert vote.prompt[-1]["role"] in ("user", "tool")
    for message in (*vote.prompt, vote.completion, vote.other or vote.completion):
        assert isinstance(message["content"], str)
    texts = [vote.id, vote.rater, vote.message, vote.model, vote.comment, *vote.tags]
    assert all(isinstance(text, str) for text in texts)


def check(reader: Reader, *paths: str) -> None:
    try:
        items = list(reader(list(paths), OPTIONS))
    except UserError:
        return
    for item in items:
        if isinstance(item, Vote):
            check_texts(item)


def real(name: str) -> list[dict[str, Any]]:
    return json.loads((REAL / name).read_text(encoding="utf-8"))


SHAPES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "open_webui": (
        "open_webui",
        [
            test_open_webui.feedback(
                test_open_webui.messages(test_open_webui.SIBLING), arena=True, details={"rating": 3}
            )
        ],
    ),
    "open_webui_chat": (
        "open_webui",
        [test_open_webui.chat(test_open_webui.messages(**test_open_webui.RATED), params={})],
    ),
    "openai": ("openai", [test_openai.preference()]),
    "openai_stored": ("openai", [test_openai.stored()]),
    "openai_listing": (
        "openai",
        [
            {**test_openai.stored(), "messages": None},
            {"object": "list", "data": [{"id": "chatcmpl-1-0", "role": "user", "content": "Hi"}]},
        ],
    ),
    "label_studio": (
        "label_studio",
        real("label_studio.json"),
    ),
    "label_studio_flat": (
        "label_studio",
        real("label_studio_min.json"),
    ),
    "label_studio_choice": (
        "label_studio",
        [test_label_studio.task(test_label_studio.SINGLE, test_label_studio.annotation())],
    ),
    "argilla": ("argilla", [test_argilla.structured(test_argilla.FIELDS, quality="good")]),
    "argilla_ranking": (
        "argilla",
        [
            test_argilla.structured(
                test_argilla.TWO,
                preference=[{"value": "generation-0", "rank": 2}, "generation-1"],
                generation_0_rating=3,
            )
        ],
    ),
    "argilla_flat": (
        "argilla",
        real("argilla_flat.json"),
    ),
    "librechat": (
        "librechat",
        [
            test_librechat.QUESTION,
            test_librechat.rated(**test_librechat.parts(test_librechat.TEXT)),
        ],
    ),
    "fastchat": ("fastchat", [test_fastchat.single()]),
    "fastchat_battle": (
        "fastchat",
        [test_fastchat.logged_battle("leftvote", test_fastchat.LEFT, test_fastchat.RIGHT)],
    ),
    "arena": ("fastchat", [test_fastchat.battle("model_a", test_fastchat.HI, test_fastchat.YO)]),
    "kaggle": ("fastchat", [test_fastchat.kaggle()]),
    "bedrock": ("bedrock", [test_bedrock.dpo(test_bedrock.GOOD, test_bedrock.BAD)]),
    "bedrock_evaluation": (
        "bedrock",
        [
            test_bedrock.evaluated(
                {
                    "thumbsUpDown": [test_bedrock.entry(True)],
                    "comparisonRank": [test_bedrock.entry(test_bedrock.ranks(1, 2), None)],
                }
            )
        ],
    ),
    "chat_ui": (
        "chat_ui",
        [
            {
                "messages": [
                    {"from": "user", "content": "Hi"},
                    {"from": "assistant", "content": "Yo", "score": 1},
                ]
            }
        ],
    ),
}
"""Records of each kind that a tool exports in one file, with the name of the tool."""


@pytest.mark.parametrize("shape", SHAPES)
def test_damaged_records(tmp_path: Path, shape: str) -> None:
    name, rows = SHAPES[shape]
    reader = reader_of(name)
    path = tmp_path / "export.jsonl"
    for number in range(len(rows)):
        for row in damaged(rows[number]):
            write_jsonl(path, [*rows[:number], row, *rows[number + 1 :]])
            check(reader, str(path))


@pytest.mark.parametrize("name", ["langfuse", "langsmith", "phoenix", "helicone", "chats"])
def test_damaged_records_of_logs(exports: dict[str, list[str]], tmp_path: Path, name: str) -> None:
    """The first records of each file; the others are as they were."""
    files = exports[name]
    for i, file in enumerate(files):
        rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        path = tmp_path / "damaged.jsonl"
        for row in damaged(rows[0]):
            write_jsonl(path, [row, *rows[1:3]])
            check(reader_of(name), *files[:i], str(path), *files[i + 1 :])


def test_damaged_conversations_of_gradio(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    conversation = json.loads(json.dumps([*damaged(_gradio_chat())]))
    for item in conversation:
        path.write_text(
            "conversation,index,value,flag,timestamp\n"
            + ",".join(['"' + json.dumps(item).replace('"', '""') + '"', "1", "Like", "now"])
            + "\n",
            encoding="utf-8",
        )
        check(gradio.read, str(path))


def _gradio_chat() -> list[dict[str, Any]]:
    part = {"type": "text", "text": "Hi"}
    return [
        {"role": "user", "metadata": None, "content": [part]},
        {"role": "assistant", "metadata": {"title": "x"}, "content": [part]},
    ]


@pytest.mark.parametrize("table", ["feedbacks", "steps", "threads"])
def test_damaged_tables_of_chainlit(tmp_path: Path, table: str) -> None:
    rows = test_chainlit.tables(test_chainlit.feedback("run1"))
    for name, columns in rows.items():
        write_jsonl(tmp_path / f"{name}.jsonl", columns)
    paths = [str(tmp_path / f"{name}.jsonl") for name in rows]
    for columns in damaged(rows[table]):
        write_jsonl(tmp_path / f"{table}.jsonl", columns)
        check(reader_of("chainlit"), *paths)
