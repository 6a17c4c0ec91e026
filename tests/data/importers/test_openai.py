"""Preference rows and stored completions of OpenAI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import only_vote, read_all, write_json, write_jsonl
from tests.errors import raises_error
from valence.data.importers.openai import read
from valence.data.importers.records import ReadOptions, Skipped, Vote

TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALL = {"id": "t1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
PROMPT = "u: Two plus two?"


def answer(content: Any, **extra: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content, **extra}]


def preference(preferred: Any = None, rejected: Any = None, messages: Any = None) -> dict[str, Any]:
    return {
        "input": {
            "messages": messages or [{"role": "user", "content": "Two plus two?"}],
            "tools": [],
            "parallel_tool_calls": True,
        },
        "preferred_output": answer("4") if preferred is None else preferred,
        "non_preferred_output": answer("5") if rejected is None else rejected,
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(preference(), (PROMPT, "4", ("this", "5")), id="pair"),
        pytest.param(
            preference(
                messages=[
                    {"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "Two plus two?"}]},
                ]
            ),
            (f"s: Be brief. | {PROMPT}", "4", ("this", "5")),
            id="developer-and-parts",
        ),
        pytest.param(
            preference(
                messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
            ),
            "image",
            id="image",
        ),
        pytest.param(preference(preferred=answer("")), "empty", id="empty"),
        pytest.param(preference(rejected=[]), "empty", id="no-output"),
        pytest.param(preference(preferred=answer("4") * 2), "multi_turn", id="two-turns"),
        pytest.param(
            preference(preferred=[{"role": "user", "content": "4"}]), "not_assistant", id="user"
        ),
        pytest.param(
            preference(preferred=answer("<think>\n2+2\n</think>\n4")),
            (PROMPT, "4", ("this", "5")),
            id="reasoning",
        ),
        pytest.param(
            preference(messages=[{"role": "critic", "content": "x"}]), "shape_unknown", id="role"
        ),
    ],
)
def test_one_preference_row(tmp_path: Path, row: dict[str, Any], expected: object) -> None:
    assert read_all(read, write_jsonl(tmp_path / "rows.jsonl", [row])) == [expected]


def test_tool_calls_and_tools_are_kept(tmp_path: Path) -> None:
    row = preference(preferred=answer(None, tool_calls=[CALL]))
    row["input"]["tools"] = [TOOL]
    vote = only_vote(read, write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert vote.completion == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert vote.tools == (TOOL,)


def test_the_id_of_a_preference_depends_only_on_its_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [preference(), preference(), preference([])])
    first, second, _ = read([path], ReadOptions())
    assert isinstance(first, Vote)
    assert isinstance(second, Vote)
    assert first.key == second.key


def stored(value: Any = "up", *, name: str = "chatcmpl-1", **extra: Any) -> dict[str, Any]:
    return {
        "id": name,
        "object": "chat.completion",
        "created": 1764000000,
        "model": "gpt-x",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}
        ],
        "metadata": {} if value is None else {"feedback": value},
        "messages": [{"role": "user", "content": "Two plus two?"}],
        **extra,
    }


def choice(reason: str = "stop", **message: Any) -> list[dict[str, Any]]:
    return [{"finish_reason": reason, "message": {"role": "assistant", **message}}]


FEEDBACK = ReadOptions(paths={"label": "feedback"})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(stored("up"), (PROMPT, "4", True), id="up"),
        pytest.param(stored("-1"), (PROMPT, "4", False), id="down"),
        pytest.param(stored("4"), (PROMPT, "4", 4.0), id="score"),
        pytest.param(stored(None), "no_vote", id="no-feedback"),
        pytest.param(stored("maybe"), "no_vote", id="other-word"),
        pytest.param(stored(messages=None), "no_conversation", id="no-messages"),
        pytest.param(stored(choices=choice("length", content="4")), "unfinished", id="length"),
        pytest.param(stored(choices=choice("content_filter", content="")), "failed", id="filter"),
        pytest.param(stored(choices=choice(content="")), "empty", id="empty"),
        pytest.param(stored(choices=choice(content=None)), "empty", id="null"),
        pytest.param(stored(choices=choice(content="4") * 2), "shape_unknown", id="two-choices"),
        pytest.param(
            stored(choices=choice(content=None, refusal="I can't.")),
            (PROMPT, "I can't.", True),
            id="refusal",
        ),
    ],
)
def test_one_stored_completion(tmp_path: Path, row: dict[str, Any], expected: object) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    assert read_all(read, path, options=FEEDBACK) == [expected]


def test_all_fields_of_a_stored_completion_are_in_the_vote(tmp_path: Path) -> None:
    vote = only_vote(read, write_jsonl(tmp_path / "r.jsonl", [stored()]), options=FEEDBACK)
    assert (vote.id, vote.message, vote.model) == ("chatcmpl-1", "chatcmpl-1", "gpt-x")
    assert (vote.updated_at, vote.rater, vote.label) == (1764000000.0, "", True)


def test_numbers_are_scores_unless_all_are_thumbs(tmp_path: Path) -> None:
    rows = [stored("1"), stored("5", name="chatcmpl-2")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert read_all(read, path, options=FEEDBACK) == [(PROMPT, "4", 1.0), (PROMPT, "4", 5.0)]


def test_categories_have_the_meaning_of_the_users_mapping(tmp_path: Path) -> None:
    options = ReadOptions(paths={"label": "metadata.feedback"}, labels={"2": True, "1": False})
    path = write_jsonl(tmp_path / "rows.jsonl", [stored("2"), stored("1", name="chatcmpl-2")])
    assert read_all(read, path, options=options) == [(PROMPT, "4", True), (PROMPT, "4", False)]


def test_prompts_are_joined_from_listings_of_messages(tmp_path: Path) -> None:
    completions = write_json(
        tmp_path / "completions.json", {"object": "list", "data": [stored(messages=None)]}
    )
    listing = {
        "object": "list",
        "data": [{"id": "chatcmpl-1-0", "role": "user", "content": "Two plus two?"}],
    }
    messages = write_json(tmp_path / "messages.json", listing)
    assert read_all(read, completions, messages, options=FEEDBACK) == [(PROMPT, "4", True)]


def test_the_key_of_the_feedback_must_be_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [stored()])
    with raises_error("import-path-missing", where=f"{path}:1", fix="feedback"):
        read_all(read, path)


def test_a_broken_line_is_skipped(tmp_path: Path) -> None:
    path = Path(write_jsonl(tmp_path / "rows.jsonl", [preference()]))
    path.write_text(path.read_text(encoding="utf-8") + "{\n", encoding="utf-8")
    first, second = read([str(path)], ReadOptions())
    assert isinstance(first, Vote)
    assert isinstance(second, Skipped)
    assert (second.reason, second.origin.line) == ("shape_unknown", 2)
