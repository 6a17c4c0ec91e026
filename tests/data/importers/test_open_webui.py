"""Feedback and chats of Open WebUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import only_vote, read_all, write_json
from tests.errors import raises_error
from valence.data.importers.open_webui import read
from valence.data.importers.records import ReadOptions, Vote
from valence.data.importers.rows import make_rows
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


def test_everything_that_feedback_says_is_in_the_vote(tmp_path: Path) -> None:
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
        tags=("too_verbose", "cooking"),
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
            feedback(messages(content=f"{THINKING}{TOOL_CALL}12 minutes")),
            (PROMPT, "12 minutes", True),
            id="blocks-of-the-interface",
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


THIS = (PROMPT, "12 minutes", ("this", "An hour"))
OTHER = (PROMPT, "12 minutes", ("other", "An hour"))


@pytest.mark.parametrize(
    ("rating", "extra", "expected"),
    [
        pytest.param(1, [SIBLING], [THIS], id="up"),
        pytest.param(
            1, [SIBLING, THIRD], [THIS, (PROMPT, "12 minutes", ("this", "A day"))], id="up-of-three"
        ),
        pytest.param(-1, [SIBLING], [OTHER], id="down"),
        pytest.param(-1, [SIBLING, THIRD], [(PROMPT, "12 minutes", False)], id="down-of-three"),
        pytest.param(0, [SIBLING], [(PROMPT, "12 minutes", ("tie", "An hour"))], id="draw"),
        pytest.param(1, [], [(PROMPT, "12 minutes", True)], id="sibling-not-in-snapshot"),
        pytest.param(
            1, [SIBLING | {"done": False}], [(PROMPT, "12 minutes", True)], id="sibling-unfinished"
        ),
    ],
)
@pytest.mark.parametrize("way", ["arena", "siblings"])
def test_a_rating_among_several_answers_is_a_comparison(
    tmp_path: Path, way: str, rating: int, extra: list[dict[str, Any]], expected: list[Any]
) -> None:
    row = feedback(messages(*extra), rating, arena=way == "arena")
    if way == "siblings":
        row["data"]["sibling_model_ids"] = ["qwen"]
    assert read_all(read, write_json(tmp_path / "f.json", [row])) == expected


@pytest.mark.parametrize(
    ("first", "second", "winners"),
    [
        pytest.param(-1, -1, ["both_bad", "both_bad"], id="both-down"),
        pytest.param(1, 1, ["tie", "tie"], id="both-up"),
        pytest.param(1, -1, ["this", "other"], id="one-up"),
    ],
)
def test_ratings_of_both_answers_decide_together(
    tmp_path: Path, first: int, second: int, winners: list[str]
) -> None:
    turns = messages(SIBLING)
    rows = [
        feedback(turns, first, arena=True),
        feedback(turns, second, id="f2", rated="m3", arena=True, time=1764000200),
    ]
    votes = list(read([write_json(tmp_path / "f.json", rows)], ReadOptions()))
    assert [vote.winner for vote in votes if isinstance(vote, Vote)] == winners
    made = make_rows([vote for vote in votes if isinstance(vote, Vote)])
    assert made.num_replaced == 1
    assert [row["label"] for row in made.rows["thumbs"]] == [False] * (2 if first == -1 else 0)
    soft = [row.get("soft") for row in made.rows["pairs"]]
    assert soft == {"both_bad": [], "tie": [0.5], "this": [None]}[winners[0]]


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
    (found,) = read_all(read, write_json(tmp_path / "f.json", [row]))
    assert found == (f"s: Be brief. | {PROMPT}", "12 minutes", True)


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


def test_files_of_other_tools_are_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows.json", [{"prompt": "a", "completion": "b"}])
    with raises_error("import-not-an-export", where=path):
        read_all(read, path)
