"""Feedback and chats of Open WebUI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import REAL, only_vote, read_all, write_json
from tests.errors import raises_error
from valence.data.importers.open_webui import read
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.rows import import_votes, make_rows
from valence.types import Origin

PROMPT = "u: How long does rice boil?"
THINKING = '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> hm\n</details>\n'
TOOL_CALL = '<details type="tool_calls" name="a" arguments="&quot;&gt;">\n<summary/>\n</details>\n'


def message(id: str, parent: str | None, role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"id": id, "parentId": parent, "role": role, "content": content, **extra}


def messages(*extra: dict[str, Any], **rated: Any) -> list[dict[str, Any]]:
    """A question m1, its answer m2, and further messages."""
    answer = message("m2", "m1", "assistant", "12 minutes", model="llama", done=True) | rated
    return [message("m1", None, "user", "How long does rice boil?"), answer, *extra]


SIBLING = message("m3", "m1", "assistant", "An hour", model="qwen", done=True)
THIRD = message("m5", "m1", "assistant", "A day", model="phi", done=True)
LATER = message("m4", "m2", "user", "Thanks")


def chat(turns: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    history = {"currentId": "m2", "messages": {turn["id"]: turn for turn in turns}}
    return {"id": "c1", "user_id": "u1", "title": "Rice", "chat": {"history": history, **body}}


def feedback(
    turns: list[dict[str, Any]] | None,
    rating: Any = 1,
    *,
    id: str = "f1",
    rated: str = "m2",
    time: int = 1764000100,
    arena: bool = False,
    **data: Any,
) -> dict[str, Any]:
    return {
        "id": id,
        "user_id": "u1",
        "version": 0,
        "type": "rating",
        "created_at": 1764000000,
        "updated_at": time,
        "data": {"rating": rating, "model_id": "llama", **data},
        "meta": {"arena": arena, "chat_id": "c1", "message_id": rated},
        "snapshot": None if turns is None else {"chat": chat(turns)},
    }


def test_all_fields_of_feedback_are_in_the_vote(tmp_path: Path) -> None:
    row = feedback(
        messages(LATER),
        -1,
        reason="too_verbose",
        comment="shorter",
        tags=["cooking"],
        details={"rating": 3},
    )
    path = write_json(tmp_path / "feedback.json", [row])
    assert only_vote(read, path) == Vote(
        source="open_webui",
        id="f1",
        updated_at=1764000100.0,
        rater="u1",
        prompt=({"role": "user", "content": "How long does rice boil?"},),
        completion={"role": "assistant", "content": "12 minutes"},
        message="m2",
        parent="m1",
        label=False,
        comment="shorter",
        tags=("too_verbose",),
        topics=("cooking",),
        follow_up="Thanks",
        model="llama",
        session="c1",
        info={"rating": 3},
        origin=Origin(path, 1),
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(feedback(messages(), "1"), (PROMPT, "12 minutes", True), id="rating-is-text"),
        pytest.param(feedback(messages(), "-1"), (PROMPT, "12 minutes", False), id="down-is-text"),
        pytest.param(feedback(messages(), 0), "no_vote", id="draw-without-siblings"),
        pytest.param(feedback(messages(), None), "no_vote", id="no-rating"),
        pytest.param(feedback(messages(), 7), "no_vote", id="other-rating"),
        pytest.param(feedback(None), "no_conversation", id="no-snapshot"),
        pytest.param(feedback([messages()[1] | {"parentId": None}]), "no_prompt", id="greeting"),
        pytest.param(feedback(messages(), rated="m9"), "message_missing", id="message-missing"),
        pytest.param(feedback(messages()[1:]), "no_conversation", id="parent-missing"),
        pytest.param(feedback(messages(), rated="m1"), "not_assistant", id="user-message"),
        pytest.param(feedback(messages(done=False)), "unfinished", id="unfinished"),
        pytest.param(feedback(messages(error={"content": "x"})), "failed", id="failed"),
        pytest.param(feedback(messages(content=" ")), "empty", id="empty"),
        pytest.param(feedback(messages(content=THINKING)), "empty", id="reasoning-alone"),
        pytest.param(
            feedback([messages()[0] | {"files": [{"type": "image"}]}, messages()[1]]),
            "image",
            id="image",
        ),
        pytest.param(
            feedback(messages(content=f"{THINKING}12 minutes")),
            (PROMPT, "12 minutes", True),
            id="blocks-of-the-interface",
        ),
        pytest.param(
            feedback(messages(content=f"{THINKING}{TOOL_CALL}12 minutes")), "context", id="tool"
        ),
        pytest.param(
            feedback(messages(sources=[{"document": ["Rice boils"]}])), "context", id="sources"
        ),
        pytest.param(
            feedback([messages()[0] | {"sources": []}, messages()[1]]),
            (PROMPT, "12 minutes", True),
            id="no-sources",
        ),
        pytest.param(
            feedback(messages(content="<think>\nhm\n</think>\n\n12 minutes")),
            (PROMPT, "12 minutes", True),
            id="think-block",
        ),
        pytest.param(
            feedback(messages(content="Write <think> and </think>.")),
            (PROMPT, "Write <think> and </think>.", True),
            id="think-tags-within-a-sentence",
        ),
        pytest.param(
            feedback(messages(SIBLING)), (PROMPT, "12 minutes", True), id="regenerated-not-compared"
        ),
    ],
)
def test_one_feedback(tmp_path: Path, row: dict[str, Any], expected: object) -> None:
    assert read_all(read, write_json(tmp_path / "feedback.json", [row])) == [expected]


def test_reasoning_is_kept_on_request(tmp_path: Path) -> None:
    path = write_json(tmp_path / "f.json", [feedback(messages(content=f"{THINKING}12 minutes"))])
    vote = only_vote(read, path, options=ReadOptions(keeps_reasoning=True))
    assert vote.completion["content"] == f"{THINKING}12 minutes"


def text(*texts: str) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": item} for item in texts]}


def called(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "look_up", "arguments": "{}"}


def result(name: str, content: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": content}]
    return {"type": "function_call_output", "call_id": name, "output": parts}


THOUGHT = {
    "type": "reasoning",
    "summary": None,
    "content": [{"type": "output_text", "text": "hm"}],
}
CALLED = f"{PROMPT} | a: I look"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param([THOUGHT, text("12 minutes")], (PROMPT, "12 minutes", True), id="reasoning"),
        pytest.param([text("12", "minutes")], (PROMPT, "12\nminutes", True), id="two-parts"),
        pytest.param([text("12"), text("minutes")], (PROMPT, "12\nminutes", True), id="two-texts"),
        pytest.param(
            [text("I look"), called("c1"), result("c1", "12"), THOUGHT, text("12 minutes")],
            (f"{CALLED} | t: 12", "12 minutes", True),
            id="tool",
        ),
        pytest.param(
            [
                *(text("I look"), called("c1"), called("c2")),
                *(result("c2", "b"), result("c1", "a"), text("12 minutes")),
            ],
            (f"{CALLED} | t: a | t: b", "12 minutes", True),
            id="two-tools-at-once",
        ),
        pytest.param(
            [
                *(text("I look"), called("c1"), result("c1", "a")),
                *(called("c2"), result("c2", "b"), text("12 minutes")),
            ],
            (f"{CALLED} | t: a | a:  | t: b", "12 minutes", True),
            id="tool-after-tool",
        ),
        pytest.param(
            [text("12 minutes"), called("c1")], (PROMPT, "12 minutes", True), id="no-result"
        ),
        pytest.param(
            [result("c1", "a"), text("12 minutes")], (PROMPT, "12 minutes", True), id="no-call"
        ),
        pytest.param([called("c1"), result("c1", "12")], "empty", id="no-text-after-tool"),
        pytest.param([THOUGHT], "empty", id="thought-alone"),
        pytest.param([], (PROMPT, "content", True), id="no-output"),
        pytest.param(
            [{"type": "open_webui:code_interpreter", "code": "1"}, text("12 minutes")],
            (PROMPT, "content", True),
            id="unknown-part",
        ),
    ],
)
def test_an_answer_in_parts(tmp_path: Path, output: list[Any], expected: object) -> None:
    row = feedback(messages(content="content", output=output))
    assert read_all(read, write_json(tmp_path / "f.json", [row])) == [expected]


def test_calls_of_tools_are_in_the_prompt(tmp_path: Path) -> None:
    output = [text("I look"), called("c1"), result("c1", "12"), text("12 minutes")]
    turns = messages(LATER, output=output)
    turns.append(message("m6", "m4", "assistant", "You are welcome", done=True))
    path = write_json(tmp_path / "f.json", [feedback(turns, rated="m6")])
    vote = only_vote(read, path)
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    assert vote.prompt[1:] == (
        {"role": "assistant", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "c1"},
        {"role": "assistant", "content": "12 minutes"},
        {"role": "user", "content": "Thanks"},
    )
    imported = import_votes([vote])
    assert (len(imported.rows["thumbs"]), imported.skipped) == (1, {})


def test_reasoning_in_parts_is_kept_on_request(tmp_path: Path) -> None:
    row = feedback(messages(output=[THOUGHT, text("12 minutes")]))
    path = write_json(tmp_path / "f.json", [row])
    vote = only_vote(read, path, options=ReadOptions(keeps_reasoning=True))
    assert vote.completion == {
        "role": "assistant",
        "content": "12 minutes",
        "reasoning_content": "hm",
    }


def test_answers_after_different_calls_of_tools_are_not_compared(tmp_path: Path) -> None:
    output = [called("c1"), result("c1", "12"), text("12 minutes")]
    rows = [
        feedback(messages(SIBLING, output=output), arena=True),
        feedback(messages(SIBLING | {"output": output}), arena=True, id="f2"),
    ]
    paths = [write_json(tmp_path / f"{row['id']}.json", [row]) for row in rows]
    assert [read_all(read, path)[0][1:] for path in paths] == [("12 minutes", True)] * 2
    assert [len(read_all(read, path)) for path in paths] == [1, 1]


UP = (PROMPT, "12 minutes", True)
DOWN = (PROMPT, "12 minutes", False)
THIS = (PROMPT, "12 minutes", ("this", "An hour"))
OTHER = (PROMPT, "12 minutes", ("other", "An hour"))
REGENERATED = SIBLING | {"model": "llama"}
"""Another answer of the same model."""


@pytest.mark.parametrize(
    ("rating", "extra", "expected"),
    [
        pytest.param(1, [SIBLING], [UP, THIS], id="up"),
        pytest.param(
            1,
            [SIBLING, THIRD],
            [UP, THIS, (PROMPT, "12 minutes", ("this", "A day"))],
            id="up-of-three",
        ),
        pytest.param(-1, [SIBLING], [DOWN, OTHER], id="down"),
        pytest.param(-1, [SIBLING, THIRD], [DOWN], id="down-of-three"),
        pytest.param(1, [REGENERATED], [UP, THIS], id="regenerated-up"),
        pytest.param(-1, [REGENERATED], [DOWN], id="regenerated-down"),
        pytest.param(
            -1, [REGENERATED | {"modelIdx": 1}], [DOWN, OTHER], id="down-of-one-model-twice"
        ),
        pytest.param(0, [SIBLING], [(PROMPT, "12 minutes", ("tie", "An hour"))], id="draw"),
        pytest.param(1, [], [UP], id="sibling-not-in-snapshot"),
        pytest.param(1, [SIBLING | {"done": False}], [UP], id="sibling-unfinished"),
    ],
)
@pytest.mark.parametrize("way", ["arena", "siblings"])
def test_a_rating_among_several_answers_is_also_a_comparison(
    tmp_path: Path, way: str, rating: int, extra: list[dict[str, Any]], expected: list[Any]
) -> None:
    row = feedback(messages(*extra), rating, arena=way == "arena")
    if way == "siblings":
        row["data"]["sibling_model_ids"] = ["qwen"]
    assert read_all(read, write_json(tmp_path / "f.json", [row])) == expected


@pytest.mark.parametrize(
    ("first", "second", "labels", "pairs"),
    [
        pytest.param(-1, -1, [False, False], [], id="both-down"),
        pytest.param(1, 1, [True, True], [], id="both-up"),
        pytest.param(1, -1, [True, False], [("12 minutes", None)], id="one-up"),
        pytest.param(0, -1, [False], [("12 minutes", None)], id="draw-and-down"),
        pytest.param(0, 1, [True], [("An hour", None)], id="draw-and-up"),
        pytest.param(0, 0, [], [("An hour", 0.5)], id="both-draw"),
        pytest.param(None, 1, [True], [("An hour", None)], id="one-without-rating"),
    ],
)
def test_thumbs_on_both_answers(
    tmp_path: Path, first: Any, second: int, labels: list[bool], pairs: list[Any]
) -> None:
    turns = messages(SIBLING)
    rows = [
        feedback(turns, first, arena=True),
        feedback(turns, second, id="f2", rated="m3", arena=True, time=1764000200),
    ]
    outcome = import_votes(read([write_json(tmp_path / "f.json", rows)], ReadOptions()))
    assert [row["label"] for row in outcome.rows["thumbs"]] == labels
    assert [(row["chosen"], row.get("soft")) for row in outcome.rows["pairs"]] == pairs


def test_regenerated_answers_with_opposite_thumbs_give_a_pair(tmp_path: Path) -> None:
    turns = messages(SIBLING)
    rows = [feedback(turns, 1), feedback(turns, -1, id="f2", rated="m3")]
    votes = list(read([write_json(tmp_path / "f.json", rows)], ReadOptions()))
    (pair,) = make_rows([vote for vote in votes if isinstance(vote, Vote)]).rows["pairs"]
    assert (pair["chosen"], pair["rejected"]) == ("12 minutes", "An hour")


def test_the_prompt_is_the_branch_of_the_rated_message(tmp_path: Path) -> None:
    turns = messages(SIBLING, LATER, message("m6", "m4", "assistant", "You are welcome", done=True))
    path = write_json(tmp_path / "f.json", [feedback(turns, rated="m6")])
    prompt = f"{PROMPT} | a: 12 minutes | u: Thanks"
    assert read_all(read, path) == [(prompt, "You are welcome", True)]


def test_the_system_prompt_of_the_chat_comes_first(tmp_path: Path) -> None:
    row = feedback(messages())
    row["snapshot"] = {"chat": chat(messages(), params={"system": "Be brief."})}
    (outcome,) = read_all(read, write_json(tmp_path / "f.json", [row]))
    assert outcome == (f"s: Be brief. | {PROMPT}", "12 minutes", True)


RATED = {"annotation": {"rating": -1, "reason": "being_lazy", "comment": "more"}}


def test_annotations_of_exported_chats_are_votes(tmp_path: Path) -> None:
    turns = messages(timestamp=1764000000, **RATED)
    vote = only_vote(read, write_json(tmp_path / "chats.json", [chat(turns)]))
    assert (vote.id, vote.rater, vote.updated_at) == ("c1/m2", "u1", 1764000000.0)
    assert (vote.label, vote.tags, vote.comment) == (False, ("being_lazy",), "more")
    assert (vote.message, vote.parent, vote.model) == ("m2", "m1", "llama")


def test_chats_before_the_tree_are_lists(tmp_path: Path) -> None:
    record = {"id": "c1", "user_id": "u1", "chat": {"messages": messages(**RATED)}}
    path = write_json(tmp_path / "chats.json", [record])
    assert read_all(read, path) == [(PROMPT, "12 minutes", False)]


def test_messages_of_old_versions_do_not_say_that_they_are_done(tmp_path: Path) -> None:
    turns = [{n: v for n, v in turn.items() if n != "done"} for turn in messages()]
    path = write_json(tmp_path / "f.json", [feedback(turns)])
    assert read_all(read, path) == [(PROMPT, "12 minutes", True)]


def test_an_annotation_without_a_rating_is_no_vote(tmp_path: Path) -> None:
    path = write_json(tmp_path / "chats.json", [chat(messages(annotation={"rating": None}))])
    assert read_all(read, path) == ["no_vote"]


def test_feedback_without_snapshot_is_joined_with_chats(tmp_path: Path) -> None:
    ratings = write_json(tmp_path / "feedback.json", [feedback(None)])
    chats = write_json(tmp_path / "chats.json", [chat(messages(**RATED))])
    expected = [(PROMPT, "12 minutes", True)]
    # the annotation is about the same message, and older
    assert read_all(read, ratings, chats) == expected
    assert read_all(read, chats, ratings) == expected


FEEDBACK = REAL / "open_webui_0.12.4.json"
CHATS = REAL / "open_webui_0.12.4_chats.json"
RICE = "u: How long does rice boil?"
PASTA = f"{RICE} | a: Reply 2 of tiny-a. | u: And pasta?"
FRANCE = "u: What is the capital of France?"
SPAIN = "u: What is the capital of Spain?"
ITALY = "u: What is the capital of Italy?"
SUM = "u: Please think: two plus two? | a: Reply 48 of tiny-a. | u: Please think: and three?"
CLOCK = (
    '{"current_timestamp":1795581440,"current_iso":"2026-11-25T04:37:20.641040+00:00",'
    '"user_local_iso":"2026-11-25T04:37:20.641040+00:00","user_timezone":"UTC"}'
)
TIME = f"u: What time is it? | a: I look at the clock. | t: {CLOCK}"


def test_the_feedback_that_open_webui_wrote() -> None:
    """Votes that were given in a browser, the newest one first."""
    assert read_all(read, str(FEEDBACK)) == [
        (f"{TIME} | a: Reply 78 of tiny-a. | u: Sure?", "Reply 82 of tiny-a.", True),
        (TIME, "Reply 78 of tiny-a.", False),
        ("u: What is the capital of Kenya?", "Nairobi.", True),
        ("s: Be brief. | u: What is the capital of Norway?", "Reply 67 of tiny-a.", True),
        (SUM, "Reply 51 of tiny-a.", True),
        (ITALY, "Reply 42 of tiny-b.", False),
        (ITALY, "Reply 38 of tiny-b.", True),
        (SPAIN, "Reply 31 of tiny-a.", True),
        (SPAIN, "Reply 31 of tiny-a.", ("this", "Reply 32 of tiny-b.")),
        ("u: What is the capital of Chile?", "Reply 25 of tiny-a.", False),
        (FRANCE, "Reply 16 of tiny-a.", True),
        (FRANCE, "Reply 12 of tiny-a.", False),
        (PASTA, "Reply 6 of tiny-a.", False),
        (RICE, "Reply 2 of tiny-a.", False),
    ]
    votes = [vote for vote in read([str(FEEDBACK)], ReadOptions()) if isinstance(vote, Vote)]
    assert [(vote.tags, vote.topics, vote.comment) for vote in votes[-2:]] == [
        (("too_verbose",), ("Cooking",), ""),
        ((), ("Cooking",), "right"),
    ]
    assert [(vote.model, vote.other_model) for vote in votes[6:9]] == [
        ("tiny-b", ""),
        ("tiny-a", ""),
        ("tiny-a", "tiny-b"),
    ]
    assert [vote.updated_at - 1795581236 for vote in votes[-2:]] == [0.0, 5.0]


def test_the_rows_of_the_feedback_that_open_webui_wrote() -> None:
    imported = import_votes(read([str(FEEDBACK)], ReadOptions()))
    assert [(row["completion"], row["label"]) for row in imported.rows["thumbs"]] == [
        ("Reply 6 of tiny-a.", False),
        ("Reply 2 of tiny-a.", False),
        ("Reply 12 of tiny-a.", False),
        ("Reply 16 of tiny-a.", True),
        ("Reply 25 of tiny-a.", False),
        ("Reply 31 of tiny-a.", True),
        ("Reply 38 of tiny-b.", True),
        ("Reply 42 of tiny-b.", False),
        ("Reply 51 of tiny-a.", True),
        ("Reply 67 of tiny-a.", True),
        ("Nairobi.", True),
        ("Reply 78 of tiny-a.", False),
        ("Reply 82 of tiny-a.", True),
    ]
    assert [(row["chosen"], row["rejected"]) for row in imported.rows["pairs"]] == [
        ("Reply 31 of tiny-a.", "Reply 32 of tiny-b."),
        ("Reply 16 of tiny-a.", "Reply 12 of tiny-a."),
        ("Reply 38 of tiny-b.", "Reply 42 of tiny-b."),
    ]
    assert (imported.skipped, imported.num_replaced, imported.num_disputed) == ({}, 0, 0)
    raters = [row["info"]["raters"] for row in imported.rows["thumbs"]]
    assert (raters.count(raters[0]), raters.count(raters[-1])) == (6, 7)


def test_the_chats_that_open_webui_wrote(tmp_path: Path) -> None:
    expected = [
        (FRANCE, "Reply 12 of tiny-a.", False),
        (FRANCE, "Reply 16 of tiny-a.", True),
        (RICE, "Reply 2 of tiny-a.", False),
        (PASTA, "Reply 6 of tiny-a.", False),
    ]
    assert read_all(read, str(CHATS)) == expected
    rows = [row | {"snapshot": None} for row in json.loads(FEEDBACK.read_text(encoding="utf-8"))]
    joined = read_all(read, write_json(tmp_path / "f.json", rows), str(CHATS))
    assert [item for item in joined if item != "no_conversation"] == [
        expected[1],
        expected[0],
        expected[3],
        expected[2],
    ]


def test_files_of_other_tools_are_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows.json", [{"prompt": "a", "completion": "b"}])
    with raises_error("import-not-an-export", where=path):
        read_all(read, path)


EDITED: dict[str, Any] = {"originalContent": "12 minutes", "content": "10 minutes"}
OUTPUT = {"type": "message", "content": [{"type": "output_text", "text": "12 minutes"}]}
ON_ORIGINAL = ("12 minutes", False, None)
CORRECTION = ("12 minutes", None, "10 minutes")


def outcome(record: Vote | Skipped) -> tuple[Any, ...]:
    assert isinstance(record, Vote)
    return record.completion["content"], record.label, record.correction


@pytest.mark.parametrize("output", [[], [OUTPUT]])
@pytest.mark.parametrize(
    ("rating", "is_edited_in_snapshot", "expected"),
    [
        (-1, False, [ON_ORIGINAL, CORRECTION]),
        (1, False, [("12 minutes", True, None), CORRECTION]),
        (1, True, [("10 minutes", True, None), CORRECTION]),
        (-1, True, [("10 minutes", False, None), CORRECTION]),
        (-1, None, [ON_ORIGINAL, CORRECTION]),
        (1, None, [CORRECTION]),
    ],
)
def test_a_vote_belongs_to_the_text_that_was_rated_and_an_edit_is_a_correction(
    tmp_path: Path,
    rating: int,
    is_edited_in_snapshot: bool | None,
    expected: list[Any],
    output: list[Any],
) -> None:
    """Without a snapshot, thumbs up may be about either text."""
    edited = messages(**EDITED, output=output)
    snapshots = {True: edited, False: messages(output=output), None: None}
    row = feedback(snapshots[is_edited_in_snapshot], rating)
    paths = [
        write_json(tmp_path / "feedback.json", [row]),
        write_json(tmp_path / "chats.json", [chat(edited)]),
    ]
    assert [outcome(record) for record in list(read(paths, ReadOptions()))] == expected


def test_a_rated_answer_of_a_chat_may_be_edited(tmp_path: Path) -> None:
    turns = messages(**EDITED, annotation={"rating": -1})
    path = write_json(tmp_path / "chats.json", [chat(turns)])
    assert [outcome(record) for record in list(read([path], ReadOptions()))] == [
        ON_ORIGINAL,
        CORRECTION,
    ]


@pytest.mark.parametrize("has_feedback", [True, False])
def test_a_saved_copy_of_a_rated_answer_counts_once(tmp_path: Path, has_feedback: bool) -> None:
    rated: dict[str, Any] = {"annotation": {"rating": 1}, "feedbackId": "f1", "timestamp": 10}
    copy = messages(**rated)[1] | {"id": "m7", "content": "10 minutes", "timestamp": 20}
    turns = [*messages(**rated), copy]
    paths = [write_json(tmp_path / "chats.json", [chat([turns[0], copy, turns[1]])])]
    if has_feedback:
        paths.append(write_json(tmp_path / "feedback.json", [feedback(turns, arena=True)]))
    (vote,) = list(read(paths, ReadOptions()))
    assert isinstance(vote, Vote)
    assert (vote.message, *outcome(vote)) == ("m2", "12 minutes", True, None)


UNLABELLED = ReadOptions(includes_unlabelled=True)
SHORTER = message("m8", "m3", "user", "Shorter", timestamp=10)
"""A message after the regenerated answer."""


def words(record: Vote | Skipped) -> tuple[Any, ...]:
    """The completion, its label, and what the user wrote."""
    assert isinstance(record, Vote)
    assert record.has_verdict or record.is_follow_up
    text = record.follow_up if record.correction is None else ("edit", record.correction)
    return record.completion["content"], record.label, text


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param(messages(LATER), "Thanks", id="next-message"),
        pytest.param(messages(), "", id="last-message"),
        pytest.param(messages(SIBLING, SHORTER), "", id="after-the-regenerated-answer"),
        pytest.param(messages(SIBLING, LATER, SHORTER), "Thanks", id="both-branches-continued"),
        pytest.param(
            messages(
                LATER | {"timestamp": 20}, message("m9", "m2", "user", "No, Basmati", timestamp=30)
            ),
            "No, Basmati",
            id="edited-message",
        ),
        pytest.param(
            messages(
                LATER | {"timestamp": 20}, message("m9", "m2", "user", "No, Basmati", timestamp=10)
            ),
            "Thanks",
            id="order-of-times",
        ),
        pytest.param(messages(LATER | {"content": " \n"}), "", id="blank"),
        pytest.param(
            messages(LATER | {"content": "", "files": [{"type": "image"}]}), "", id="image-alone"
        ),
        pytest.param(
            messages(LATER | {"files": [{"type": "image"}]}), "Thanks", id="text-and-image"
        ),
        pytest.param(messages(message("m4", "m2", "system", "x")), "", id="system"),
    ],
)
def test_the_follow_up_is_the_users_next_message_in_the_branch(
    tmp_path: Path, turns: list[dict[str, Any]], expected: str
) -> None:
    path = write_json(tmp_path / "f.json", [feedback(turns)])
    assert only_vote(read, path).follow_up == expected


def test_the_follow_up_may_be_newer_than_the_vote(tmp_path: Path) -> None:
    """A snapshot is of the time of the vote; the exported chat goes on."""
    ratings = write_json(tmp_path / "f.json", [feedback(messages())])
    chats = write_json(tmp_path / "chats.json", [chat(messages(LATER))])
    assert only_vote(read, ratings, chats).follow_up == "Thanks"
    snapshots = [
        feedback(messages()),
        feedback(messages(LATER), rated="m9", id="f2", time=1764000200),
    ]
    votes = list(read([write_json(tmp_path / "f2.json", snapshots)], ReadOptions()))
    assert [vote.follow_up for vote in votes if isinstance(vote, Vote)] == ["Thanks"]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param(messages(LATER), [("12 minutes", None, "Thanks")], id="one"),
        pytest.param(
            messages(SIBLING, SHORTER), [("An hour", None, "Shorter")], id="regenerated-answer"
        ),
        pytest.param(
            messages(LATER, **RATED),
            [("12 minutes", False, "Thanks")],
            id="rated",
        ),
        pytest.param(
            messages(LATER, annotation={"tags": ["Cooking"]}),
            ["no_vote", ("12 minutes", None, "Thanks")],
            id="annotation-without-a-rating",
        ),
        pytest.param(messages(), [], id="none"),
        pytest.param(
            messages(LATER, **EDITED), [("12 minutes", None, ("edit", "10 minutes"))], id="edited"
        ),
        pytest.param(messages(LATER, error={"content": "x"}), ["failed"], id="failed"),
        pytest.param(messages(LATER, done=False), ["unfinished"], id="unfinished"),
    ],
)
def test_answers_without_a_vote_are_read_on_request(
    tmp_path: Path, turns: list[dict[str, Any]], expected: list[Any]
) -> None:
    path = write_json(tmp_path / "chats.json", [chat(turns)])
    records = list(read([path], UNLABELLED))
    assert [r.reason if isinstance(r, Skipped) else words(r) for r in records] == expected
    labelled = [r for r in read([path], ReadOptions()) if isinstance(r, Vote)]
    assert labelled == [r for r in records if isinstance(r, Vote) and r.label is not None]


def test_an_answer_is_read_once_from_several_snapshots_and_the_chat(tmp_path: Path) -> None:
    turns = messages(LATER, message("m6", "m4", "assistant", "You are welcome", done=True))
    rows = [feedback(turns, rated="m6", id=f"f{n}", time=1764000100 + n) for n in range(2)]
    paths = [write_json(tmp_path / "f.json", rows), write_json(tmp_path / "c.json", [chat(turns)])]
    records = [words(record) for record in read(paths, UNLABELLED)]
    assert records.count(("12 minutes", None, "Thanks")) == 1
    assert len(records) == 3


@pytest.mark.parametrize(
    ("is_edited_in_snapshot", "expected"), [(True, "Thanks"), (False, ""), (None, "")]
)
def test_a_follow_up_belongs_to_the_text_that_the_user_read(
    tmp_path: Path, is_edited_in_snapshot: bool | None, expected: str
) -> None:
    edited = messages(LATER, **EDITED)
    snapshots = {True: edited, False: messages(LATER), None: None}
    paths = [
        write_json(tmp_path / "f.json", [feedback(snapshots[is_edited_in_snapshot], -1)]),
        write_json(tmp_path / "chats.json", [chat(edited)]),
    ]
    label, correction = read(paths, ReadOptions())
    assert isinstance(label, Vote)
    assert isinstance(correction, Vote)
    assert (label.follow_up, correction.follow_up) == (expected, "")


def test_the_feedback_that_open_webui_wrote_as_text() -> None:
    """Tags of Open WebUI are topics of the chat, which a model wrote."""
    imported = import_votes(read([str(FEEDBACK)], ReadOptions()))
    texts = [
        (row["completion"], row["feedback"]) for row in imported.rows["thumbs"] if "feedback" in row
    ]
    assert texts == [
        ("Reply 6 of tiny-a.", "too verbose\n\nThanks"),
        ("Reply 2 of tiny-a.", "right\n\nAnd pasta?"),
        ("Reply 78 of tiny-a.", "Sure?"),
    ]
