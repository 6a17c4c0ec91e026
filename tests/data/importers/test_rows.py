"""Building rows from votes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valence.data.importers.records import SKIP_REASONS, Vote
from valence.data.importers.rows import (
    MAX_TURN_PAIRS,
    MAX_TURN_TRIES,
    RowKind,
    latest_votes,
    make_rows,
)
from valence.data.load import InMemory, load
from valence.types import Kind, Message, Origin

PROMPT: tuple[Message, ...] = ({"role": "user", "content": "Hi"},)
ORIGIN = Origin("export.json", 1)


def assistant_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def vote(id: str = "v1", text: str = "Yo", **fields: Any) -> Vote:
    defaults = {
        "source": "tool",
        "rater": f"rater of {id}",
        "prompt": PROMPT,
        "completion": assistant_message(text),
        "origin": ORIGIN,
    }
    return Vote(id=id, **{**defaults, **fields})


def compared(id: str, winner: str, text: str = "A", other: str = "B", **fields: Any) -> Vote:
    return vote(id, text, other=assistant_message(other), winner=winner, **fields)


def rows_of(kind: RowKind, *votes: Vote) -> list[dict[str, Any]]:
    """The rows of a kind without ``prompt`` and ``info``. There must be no others."""
    result = make_rows(votes)
    assert [name for name, rows in result.rows.items() if rows] in ([kind], [])
    return [
        {name: value for name, value in row.items() if name not in ("prompt", "info")}
        for row in result.rows[kind]
    ]


# Which votes count


def test_the_latest_vote_of_a_rater_counts() -> None:
    votes = [
        vote("v1", label=True, updated_at=2.0, rater="r"),
        vote("v2", label=False, updated_at=3.0, rater="r"),
        vote("v3", label=True, updated_at=1.0, rater="r"),
    ]
    assert [latest_vote.id for latest_vote in latest_votes(votes)] == ["v2"]
    assert make_rows(votes).num_replaced == 2
    assert rows_of("thumbs", *votes) == [{"completion": "Yo", "label": False}]


def test_of_votes_with_one_time_the_later_one_counts() -> None:
    votes = [vote("v1", label=True, rater="r"), vote("v2", label=False, rater="r")]
    assert [latest_vote.id for latest_vote in latest_votes(votes)] == ["v2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rater": "another"},
        {"rater": "", "id": "another"},
        {"message": "another"},
        {"session": "another"},
        {"source": "another"},
        {"completion": assistant_message("another")},
        {"prompt": ({"role": "user", "content": "another"},)},
        {"other": assistant_message("B"), "winner": "this"},
    ],
)
def test_votes_that_differ_in_rater_or_completion_all_count(changes: dict[str, Any]) -> None:
    first = vote(label=True)
    assert len(latest_votes([first, replace(first, **changes)])) == 2


def test_a_vote_of_an_unknown_rater_is_replaced_by_its_later_version() -> None:
    votes = [vote(rater="", label=True), vote(rater="", label=False, updated_at=1.0)]
    assert rows_of("thumbs", *votes) == [{"completion": "Yo", "label": False}]


def test_the_sides_of_a_comparison_may_be_exchanged_in_a_later_vote() -> None:
    votes = [
        compared("v1", "this", rater="r", updated_at=1.0),
        compared("v2", "this", "B", "A", rater="r", updated_at=2.0),
    ]
    assert rows_of("pairs", *votes) == [{"chosen": "B", "rejected": "A"}]


# Thumbs and scores


@pytest.mark.parametrize(
    ("labels", "expected", "disputed"),
    [
        pytest.param([True], {"label": True}, 0, id="one"),
        pytest.param([True, True, True], {"label": True, "weight": 3.0}, 0, id="all"),
        pytest.param([False, True, False], {"label": False}, 1, id="majority-of-one"),
        pytest.param([False] * 3 + [True], {"label": False, "weight": 2.0}, 1, id="majority"),
    ],
)
def test_the_majority_of_several_raters_decides(
    labels: list[bool], expected: dict[str, Any], disputed: int
) -> None:
    votes = [vote(f"v{number}", label=label) for number, label in enumerate(labels)]
    assert rows_of("thumbs", *votes) == [{"completion": "Yo", **expected}]
    assert make_rows(votes).num_disputed == disputed


def test_raters_that_are_divided_give_no_row() -> None:
    votes = [vote("v1", label=True), vote("v2", label=False)]
    result = make_rows(votes)
    assert not any(result.rows.values())
    assert result.skipped == {"disagreement": 2}
    assert result.num_disputed == 0


def test_scores_of_several_raters_are_averaged() -> None:
    votes = [vote("v1", score=2.0), vote("v2", score=5.0)]
    assert rows_of("scores", *votes) == [{"completion": "Yo", "score": 3.5}]


def test_a_vote_with_label_and_score_gives_both_rows() -> None:
    result = make_rows([vote(label=True, score=4.0)])
    assert [row["label"] for row in result.rows["thumbs"]] == [True]
    assert [row["score"] for row in result.rows["scores"]] == [4.0]


# Comparisons


@pytest.mark.parametrize(
    ("winners", "expected"),
    [
        pytest.param(["this"], {"chosen": "A", "rejected": "B"}, id="this"),
        pytest.param(["other"], {"chosen": "B", "rejected": "A"}, id="other"),
        pytest.param(["tie"], {"chosen": "A", "rejected": "B", "soft": 0.5}, id="tie"),
        pytest.param(["this", "this"], {"chosen": "A", "rejected": "B"}, id="agreed"),
        pytest.param(
            ["this", "other", "other", "other"],
            {"chosen": "B", "rejected": "A", "soft": 0.75},
            id="share",
        ),
        pytest.param(["this", "tie"], {"chosen": "A", "rejected": "B", "soft": 0.75}, id="half"),
        pytest.param(["other", "both_bad"], {"chosen": "B", "rejected": "A"}, id="half-are-bad"),
    ],
)
def test_a_comparison_gives_a_pair(winners: list[str], expected: dict[str, Any]) -> None:
    votes = [compared(f"v{number}", winner) for number, winner in enumerate(winners)]
    assert rows_of("pairs", *votes) == [expected]


@pytest.mark.parametrize(("winners", "disputed"), [(["this", "other"], 1), (["tie", "tie"], 0)])
def test_disputed_comparisons_are_counted(winners: list[str], disputed: int) -> None:
    votes = [compared(f"v{number}", winner) for number, winner in enumerate(winners)]
    assert make_rows(votes).num_disputed == disputed


def test_exchanged_sides_of_two_raters_agree() -> None:
    votes = [compared("v1", "this"), compared("v2", "other", "B", "A")]
    assert rows_of("pairs", *votes) == [{"chosen": "A", "rejected": "B"}]


def test_messages_are_the_same_side_also_after_an_edit() -> None:
    ids = {"message": "m1", "other_message": "m2"}
    votes = [compared("v1", "this", **ids), compared("v2", "this", "A, edited", **ids)]
    assert rows_of("pairs", *votes) == [{"chosen": "A", "rejected": "B"}]


def test_two_bad_completions_are_two_thumbs_down() -> None:
    votes = [compared("v1", "both_bad"), compared("v2", "both_bad"), compared("v3", "this")]
    assert rows_of("thumbs", *votes) == [
        {"completion": "A", "label": False},
        {"completion": "B", "label": False},
    ]


def test_two_identical_completions_give_no_pair() -> None:
    result = make_rows([compared("v1", "this", "A", "A")])
    assert not any(result.rows.values())
    assert result.skipped == {"identical": 1}


# Siblings and corrections


def siblings(*labels: bool, **fields: Any) -> list[Vote]:
    return [
        vote(f"v{i}", f"answer {i}", label=label, message=f"m{i}", parent="p", **fields)
        for i, label in enumerate(labels)
    ]


def test_liked_and_disliked_siblings_give_a_pair() -> None:
    result = make_rows(siblings(True, False, False))
    assert len(result.rows["thumbs"]) == 3
    assert [(row["chosen"], row["rejected"]) for row in result.rows["pairs"]] == [
        ("answer 0", "answer 1"),
        ("answer 0", "answer 2"),
    ]
    assert result.rows["pairs"][0]["info"]["votes"] == ["v0", "v1"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"parent": "another"}, id="parent"),
        pytest.param({"parent": ""}, id="no-parent"),
        pytest.param({"session": "another"}, id="session"),
        pytest.param({"prompt": ({"role": "user", "content": "another"},)}, id="prompt"),
        pytest.param({"completion": assistant_message("answer 1")}, id="the-same-text"),
        pytest.param({"label": False}, id="label"),
    ],
)
def test_completions_that_are_no_siblings_give_no_pair(changes: dict[str, Any]) -> None:
    first, second = siblings(True, False)
    result = make_rows([replace(first, **changes), second])
    assert result.rows["pairs"] == []
    assert len(result.rows["thumbs"]) == 2


def test_the_pairs_of_a_turn_are_bounded_and_those_of_one_rater_come_first() -> None:
    votes = siblings(*[True, False] * 200)
    last = [replace(vote, rater="both") for vote in votes[-6:]]
    result = make_rows([*votes[:-6], *last])
    pairs = [row["info"]["votes"] for row in result.rows["pairs"]]
    assert len(pairs) == MAX_TURN_PAIRS
    names = {vote.id for vote in last}
    assert all(set(pair) <= names for pair in pairs[:9])
    assert result.num_pairs_left_out == 200 * 200 - MAX_TURN_PAIRS
    # the other pairs use each answer about equally often
    others = Counter(name for pair in pairs[9:] for name in pair)
    assert set(others.values()) == {1}


def test_not_all_pairs_of_the_same_text_are_looked_at() -> None:
    same = assistant_message("same")
    result = make_rows([replace(v, completion=same) for v in siblings(*[True, False] * 200)])
    assert result.rows["pairs"] == []
    assert result.num_pairs_left_out == 200 * 200 - MAX_TURN_TRIES


def test_a_sibling_on_which_raters_are_divided_gives_no_pair() -> None:
    first, second = siblings(True, False)
    votes = [first, second, replace(second, id="v9", rater="another", label=True)]
    assert make_rows(votes).rows["pairs"] == []


def test_a_correction_gives_a_demonstration_and_a_pair() -> None:
    result = make_rows([vote(label=False, correction="Hello")])
    assert [row["label"] for row in result.rows["thumbs"]] == [False]
    assert [row["completion"] for row in result.rows["demonstrations"]] == ["Hello"]
    (pair,) = result.rows["pairs"]
    assert (pair["chosen"], pair["rejected"]) == ("Hello", "Yo")


def test_a_correction_without_a_change_gives_no_pair() -> None:
    result = make_rows([vote(correction=" Yo\n")])
    assert result.rows["pairs"] == []
    assert len(result.rows["demonstrations"]) == 1


# What rows hold


def test_rows_name_their_source_and_no_person() -> None:
    first = vote(
        "v1",
        label=True,
        rater="ann@example.org",
        updated_at=1767323045.0,
        comment="clear",
        tags=("a", "b"),
        model="m",
        session="Ann's chat",
        info={"rating": 7},
    )
    second = replace(first, id="v2", rater="bob@example.org", comment="short", tags=("b",))
    (row,) = make_rows([first, second]).rows["thumbs"]
    assert row["info"] == {
        "rating": 7,
        "source": "tool",
        "votes": ["v1", "v2"],
        "raters": [first.rater_hash, second.rater_hash],
        "model": "m",
        "comment": ["clear", "short"],
        "tags": ["a", "b"],
        "updated_at": "2026-01-02T03:04:05+00:00",
        "feedback": {"comment": "clear\n\nshort", "reasons": "a, b"},
    }
    assert "example.org" not in str(row)
    assert "Ann" not in str(row)


def test_hashes_of_raters_depend_on_the_tool() -> None:
    first, second = vote(rater="ann"), vote(rater="ann", source="another")
    assert len(first.rater_hash) == 12
    assert int(first.rater_hash, 16) >= 0
    assert first.rater_hash == vote("v2", rater="ann").rater_hash != second.rater_hash
    assert vote(rater="").rater_hash == ""


def test_tools_and_tool_calls_are_kept_as_turns() -> None:
    tool = {"type": "function", "function": {"name": "clock"}}
    completion = {"role": "assistant", "content": "", "tool_calls": [{"id": "t"}]}
    (row,) = make_rows([vote(label=True, tools=(tool,), completion=completion)]).rows["thumbs"]
    assert row["tools"] == [tool]
    assert row["completion"] == [completion]


def test_every_reason_has_words() -> None:
    assert all(SKIP_REASONS.values())


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ("thumbs", "judgement"),
        ("scores", "scored"),
        ("pairs", "preference"),
        ("demonstrations", "demonstration"),
    ],
)
def test_rows_can_be_trained_on(rows: RowKind, kind: Kind) -> None:
    votes = [
        vote("v1", label=True, score=4.0, correction="Hello"),
        vote("v2", "No", label=False, tools=({"type": "function", "function": {"name": "f"}},)),
        vote(
            "v3",
            "No",
            label=False,
            completion={**assistant_message(""), "tool_calls": [{"id": "t"}]},
        ),
        compared("v4", "tie"),
        compared("v5", "both_bad", "C", "D"),
    ]
    result = make_rows(votes).rows[rows]
    loaded = load([InMemory(result)], kind)
    assert len(loaded.examples) == len(result) > 0
    assert [example.info["source"] for example in loaded.examples] == ["tool"] * len(result)


# The order of votes


@st.composite
def vote_lists(draw: st.DrawFn) -> list[Vote]:
    """Votes with distinct times of few raters on few completions."""
    times = draw(st.lists(st.integers(1, 10**9), max_size=12, unique=True))
    return [_draw_vote(draw, f"v{number}", float(time)) for number, time in enumerate(times)]


def _draw_vote(draw: st.DrawFn, id: str, time: float) -> Vote:
    text, other = draw(st.sampled_from([("A", "B"), ("B", "A"), ("A", "C"), ("C", "C")]))
    kind = draw(st.sampled_from(["label", "score", "compared", "correction"]))
    fields: dict[str, Any] = {
        "updated_at": time,
        "rater": draw(st.sampled_from(["", "ann", "bob", "cy"])),
        "message": text if draw(st.booleans()) else "",
        "parent": "p",
        "comment": draw(st.sampled_from(["", "x", "y"])),
    }
    if kind == "label":
        fields["label"] = draw(st.booleans())
    elif kind == "score":
        fields["score"] = float(draw(st.integers(1, 5)))
    elif kind == "correction":
        fields["correction"] = draw(st.sampled_from(["A", "D"]))
    else:
        winner = draw(st.sampled_from(["this", "other", "tie", "both_bad"]))
        fields |= {"other": assistant_message(other), "winner": winner, "message": ""}
    return vote(id, text, **fields)


@given(st.data())
def test_the_order_of_votes_with_distinct_times_does_not_matter(data: st.DataObject) -> None:
    votes = data.draw(vote_lists())
    shuffled: Sequence[Vote] = data.draw(st.permutations(votes))
    assert make_rows(shuffled) == make_rows(votes)


# Feedback as text


def test_the_parts_of_feedback_are_separate_paragraphs() -> None:
    judged = vote(
        label=False,
        comment="Too long. ",
        tags=("not_helpful", "Other", "bad-style"),
        topics=("cooking",),
        correction="Yes.",
        follow_up="Shorter, please",
    )
    result = make_rows([judged])
    (row,) = result.rows["thumbs"]
    assert row["feedback"] == "Too long.\n\nnot helpful, bad style\n\nYes.\n\nShorter, please"
    assert row["info"]["feedback"] == {
        "comment": "Too long.",
        "reasons": "not helpful, bad style",
        "correction": "Yes.",
        "follow_up": "Shorter, please",
    }
    assert row["info"]["tags"] == ["not_helpful", "Other", "bad-style", "cooking"]
    others = [*result.rows["pairs"], *result.rows["demonstrations"]]
    assert len(others) == 2
    assert not any("feedback" in row for row in others)


def test_rows_of_votes_without_words_have_no_feedback() -> None:
    votes = [vote(label=True, comment=" ", tags=("other",), topics=("cooking",))]
    (row,) = make_rows(votes).rows["thumbs"]
    assert "feedback" not in row
    assert "feedback" not in row["info"]


def test_the_words_of_all_votes_on_a_completion_are_its_feedback() -> None:
    """Also those of a minority, of a score, and of a message in the chat; each text once."""
    votes = [
        vote("v1", label=True, comment="short", follow_up="Thanks"),
        vote("v2", label=True, comment="short"),
        vote("v3", label=False, comment="wrong", tags=("inaccurate",)),
        vote("v4", score=2.0, comment="half right"),
        vote("v5", follow_up="Thanks"),
        vote("v6", comment="withdrawn"),
    ]
    rows = make_rows(votes, unlabelled=True).rows
    texts = [row["feedback"] for kind in rows for row in rows[kind]]
    assert texts == ["short\n\nwrong\n\nhalf right\n\ninaccurate\n\nThanks"] * 2
    assert not rows["unlabelled"]


def test_a_comment_on_two_bad_answers_is_feedback_on_both() -> None:
    rows = make_rows([compared("v1", "both_bad", comment="rude")]).rows["thumbs"]
    assert [row["feedback"] for row in rows] == ["rude", "rude"]


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        pytest.param([vote(follow_up="Thanks")], ["Thanks"], id="follow-up"),
        pytest.param([vote(correction="Yes")], ["Yes"], id="correction"),
        pytest.param([vote(correction="Yo")], [], id="correction-is-the-completion"),
        pytest.param([vote(comment="rude")], [], id="withdrawn"),
        pytest.param(
            [vote("v1", label=True), vote("v2", label=False, comment="rude")],
            ["rude"],
            id="divided-raters",
        ),
        pytest.param([vote(label=True, follow_up="Thanks")], [], id="label"),
        pytest.param([compared("v1", "this", comment="rude")], [], id="comparison"),
    ],
)
def test_completions_without_a_label_give_rows_on_request(
    votes: Sequence[Vote], expected: list[str]
) -> None:
    rows = make_rows(votes, unlabelled=True).rows["unlabelled"]
    assert [row["feedback"] for row in rows] == expected
    assert not any("label" in row for row in rows)
    assert not make_rows(votes).rows["unlabelled"]


def test_a_follow_up_does_not_replace_the_vote_of_its_writer() -> None:
    votes = [
        vote("v1", rater="ann", message="m", label=False, updated_at=1.0),
        vote("v2", rater="ann", message="m", follow_up="Shorter", updated_at=2.0),
    ]
    assert rows_of("thumbs", *votes) == [
        {"completion": "Yo", "label": False, "feedback": "Shorter"}
    ]
