"""Damaged exports: readers skip or refuse them, and never fail otherwise."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
from tests.data.importers.votes import REAL, write_jsonl
from valence.data.importers import (
    argilla,
    bedrock,
    chainlit,
    chat_ui,
    fastchat,
    gradio,
    label_studio,
    librechat,
    open_webui,
    openai,
)
from valence.data.importers.records import Reader, ReadOptions, Vote
from valence.errors import UserError

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


def real(name: str) -> list[dict[str, Any]]:
    return json.loads((REAL / name).read_text(encoding="utf-8"))


EXPORTS: dict[str, tuple[Reader, list[dict[str, Any]]]] = {
    "open_webui": (
        open_webui.read,
        [
            test_open_webui.feedback(
                test_open_webui.messages(test_open_webui.SIBLING), arena=True, details={"rating": 3}
            )
        ],
    ),
    "open_webui_chat": (
        open_webui.read,
        [test_open_webui.chat(test_open_webui.messages(**test_open_webui.RATED), params={})],
    ),
    "openai": (openai.read, [test_openai.preference()]),
    "openai_stored": (openai.read, [test_openai.stored()]),
    "openai_listing": (
        openai.read,
        [
            {**test_openai.stored(), "messages": None},
            {"object": "list", "data": [{"id": "chatcmpl-1-0", "role": "user", "content": "Hi"}]},
        ],
    ),
    "label_studio": (
        label_studio.read,
        real("label_studio.json"),
    ),
    "label_studio_flat": (
        label_studio.read,
        real("label_studio_min.json"),
    ),
    "label_studio_choice": (
        label_studio.read,
        [test_label_studio.task(test_label_studio.SINGLE, test_label_studio.annotation())],
    ),
    "argilla": (argilla.read, [test_argilla.structured(test_argilla.FIELDS, quality="good")]),
    "argilla_ranking": (
        argilla.read,
        [
            test_argilla.structured(
                test_argilla.TWO,
                preference=[{"value": "generation-0", "rank": 2}, "generation-1"],
                generation_0_rating=3,
            )
        ],
    ),
    "argilla_flat": (
        argilla.read,
        real("argilla_flat.json"),
    ),
    "librechat": (
        librechat.read,
        [
            test_librechat.QUESTION,
            test_librechat.rated(**test_librechat.parts(test_librechat.TEXT)),
        ],
    ),
    "fastchat": (fastchat.read, [test_fastchat.single()]),
    "fastchat_battle": (
        fastchat.read,
        [test_fastchat.logged_battle("leftvote", test_fastchat.LEFT, test_fastchat.RIGHT)],
    ),
    "arena": (fastchat.read, [test_fastchat.battle("model_a", test_fastchat.HI, test_fastchat.YO)]),
    "kaggle": (fastchat.read, [test_fastchat.kaggle()]),
    "bedrock": (bedrock.read, [test_bedrock.dpo(test_bedrock.GOOD, test_bedrock.BAD)]),
    "bedrock_evaluation": (
        bedrock.read,
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
        chat_ui.read,
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


def check(reader: Reader, *paths: str) -> None:
    try:
        items = list(reader(list(paths), OPTIONS))
    except UserError:
        return
    for item in items:
        if isinstance(item, Vote):
            assert item.prompt[-1]["role"] in ("user", "tool")
            for message in (*item.prompt, item.completion, item.other or item.completion):
                assert isinstance(message["content"], str)
            texts = [item.id, item.rater, item.message, item.model, item.comment, *item.tags]
            assert all(isinstance(text, str) for text in texts)


@pytest.mark.parametrize("name", EXPORTS)
def test_damaged_rows(tmp_path: Path, name: str) -> None:
    reader, rows = EXPORTS[name]
    path = tmp_path / "export.jsonl"
    for number in range(len(rows)):
        for row in damaged(rows[number]):
            write_jsonl(path, [*rows[:number], row, *rows[number + 1 :]])
            check(reader, str(path))


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
        check(chainlit.read, *paths)
