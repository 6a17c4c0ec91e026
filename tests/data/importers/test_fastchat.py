"""Logs of FastChat, and battles of Chatbot Arena."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import only_vote, read_all, write_json, write_jsonl
from tests.errors import raises_error
from valence.data.importers.fastchat import read
from valence.data.importers.records import ReadOptions, Vote
from valence.data.importers.rows import make_rows

PROMPT = "u: Capital of France?"


def state(*texts: Any, **extra: Any) -> dict[str, Any]:
    roles = ["USER", "ASSISTANT"]
    messages = [[roles[i % 2], text] for i, text in enumerate(texts)]
    return {
        "template_name": "x",
        "system_message": "",
        "roles": roles,
        "messages": messages,
        "offset": 0,
        "conv_id": "v1",
        "model_name": "vicuna",
        **extra,
    }


def single(kind: str = "upvote", *texts: Any, **extra: Any) -> dict[str, Any]:
    texts = texts or ("Capital of France?", "Paris")
    return {
        "tstamp": 1764000000.1234,
        "type": kind,
        "model": "vicuna",
        "state": state(*texts, **extra),
        "ip": "192.0.2.1",
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(single(), [(PROMPT, "Paris", True)], id="up"),
        pytest.param(single("downvote"), [(PROMPT, "Paris", False)], id="down"),
        pytest.param(single("flag"), ["no_vote"], id="flag"),
        pytest.param(single("chat"), [], id="chat-is-no-vote"),
        pytest.param(single("upvote", "Hi", None), ["unfinished"], id="null"),
        pytest.param(single("upvote", "Hi", "Ye▌"), ["unfinished"], id="cursor"),
        pytest.param(single("upvote", "Hi"), ["not_assistant"], id="user"),
        pytest.param(single("upvote", "Hi", ""), ["empty"], id="empty"),
        pytest.param(
            single("upvote", "Hi", "**NETWORK ERROR DUE TO HIGH TRAFFIC. PLEASE REGENERATE.**"),
            ["failed"],
            id="server-error",
        ),
        pytest.param(
            single("upvote", "Hi", "**RATE LIMIT OF THIS MODEL.**"),
            ["failed"],
            id="rate",
        ),
        pytest.param(
            single("upvote", "Hi", "Out of memory\n\n(error_code: 50002)"), ["failed"], id="code"
        ),
        pytest.param(single("upvote", ["Who?", ["b64"]], "A cat"), ["image"], id="image"),
        pytest.param(
            single("upvote", ["Who?", []], "A cat"), [("u: Who?", "A cat", True)], id="no-image"
        ),
        pytest.param(single(has_csam_image=True), ["image"], id="unlawful-image"),
        pytest.param(
            single(system_message="Be brief."),
            [(f"s: Be brief. | {PROMPT}", "Paris", True)],
            id="system",
        ),
        pytest.param(single(messages=[["USER"]]), ["shape_unknown"], id="damaged"),
        pytest.param(single(messages=[]), ["no_conversation"], id="no-messages"),
    ],
)
def test_one_logged_vote(tmp_path: Path, row: dict[str, Any], expected: list[Any]) -> None:
    assert read_all(read, write_jsonl(tmp_path / "conv.jsonl", [row])) == expected


def test_addresses_are_not_read(tmp_path: Path) -> None:
    vote = only_vote(read, write_jsonl(tmp_path / "conv.jsonl", [single()]))
    assert "192.0.2.1" not in repr(vote)
    assert (vote.rater, vote.session, vote.model) == ("", "v1", "vicuna")
    assert vote.updated_at == 1764000000.1234


def test_a_later_vote_on_the_same_turn_replaces_the_first(tmp_path: Path) -> None:
    rows = [single(), single("downvote") | {"tstamp": 1764000009.0}]
    path = write_jsonl(tmp_path / "conv.jsonl", rows)
    votes = [vote for vote in read([path], ReadOptions()) if isinstance(vote, Vote)]
    result = make_rows(votes)
    assert [row["label"] for row in result.rows["thumbs"]] == [False]
    assert (result.num_replaced, result.rows["pairs"]) == (1, [])


def test_regenerated_answers_with_opposite_thumbs_give_a_pair(tmp_path: Path) -> None:
    rows = [single("downvote"), single("upvote", "Capital of France?", "Paris!")]
    path = write_jsonl(tmp_path / "conv.jsonl", rows)
    votes = [vote for vote in read([path], ReadOptions()) if isinstance(vote, Vote)]
    (pair,) = make_rows(votes).rows["pairs"]
    assert (pair["chosen"], pair["rejected"]) == ("Paris!", "Paris")


def logged_battle(kind: str, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return {
        "tstamp": 1764000000.0,
        "type": kind,
        "models": ["", ""],
        "states": [left, right],
        "ip": "192.0.2.1",
    }


LEFT = state("Hi", "Yes?", model_name="a", conv_id="v1")
RIGHT = state("Hi", "Yo", model_name="b", conv_id="v2")


@pytest.mark.parametrize(
    ("kind", "winner"),
    [
        ("leftvote", "this"),
        ("rightvote", "other"),
        ("tievote", "tie"),
        ("bothbad_vote", "both_bad"),
    ],
)
def test_logged_battles(tmp_path: Path, kind: str, winner: str) -> None:
    path = write_jsonl(tmp_path / "conv.jsonl", [logged_battle(kind, LEFT, RIGHT)])
    vote = only_vote(read, path)
    assert (vote.winner, vote.completion["content"]) == (winner, "Yes?")
    assert vote.other == {"role": "assistant", "content": "Yo"}
    # anonymous battles name the models in the states alone
    assert (vote.model, vote.other_model, vote.session) == ("a", "b", "v1/v2")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(
            logged_battle("leftvote", state("Hi", "A", "Go", "B"), state("Hi", "C", "Go", "D")),
            "multi_turn",
            id="several-turns",
        ),
        pytest.param(
            logged_battle("leftvote", LEFT, state("Hi", None)), "unfinished", id="one-unfinished"
        ),
        pytest.param(
            logged_battle("leftvote", LEFT, RIGHT) | {"states": [LEFT]}, "shape_unknown", id="one"
        ),
    ],
)
def test_unusable_battles(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    assert read_all(read, write_jsonl(tmp_path / "conv.jsonl", [row])) == [expected]


def turns(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


def part(text: str, **extra: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "image": None, "mimeType": None} | extra]


def battle(winner: str, left: Any, right: Any, **extra: Any) -> dict[str, Any]:
    return {
        "question_id": "q1",
        "model_a": "a",
        "model_b": "b",
        "winner": winner,
        "judge": "arena_user_1",
        "conversation_a": left,
        "conversation_b": right,
        "tstamp": 1764000000.0,
        **extra,
    }


HI = turns("Hi", "Yes?")
YO = turns("Hi", "Yo")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(battle("model_a", HI, YO), ("u: Hi", "Yes?", ("this", "Yo")), id="a"),
        pytest.param(battle("model_b", HI, YO), ("u: Hi", "Yes?", ("other", "Yo")), id="b"),
        pytest.param(battle("tie", HI, YO), ("u: Hi", "Yes?", ("tie", "Yo")), id="tie"),
        pytest.param(
            battle("tie (bothbad)", HI, YO), ("u: Hi", "Yes?", ("both_bad", "Yo")), id="both-bad"
        ),
        pytest.param(
            battle("both_bad", turns(part("Hi"), part("Yes?")), turns(part("Hi"), part("Yo"))),
            ("u: Hi", "Yes?", ("both_bad", "Yo")),
            id="140k-parts",
        ),
        pytest.param(
            battle(
                "model_a",
                turns(part("", type="image", image="x"), part("A cat")),
                turns(part("", type="image", image="x"), part("A dog")),
            ),
            "image",
            id="140k-image",
        ),
        pytest.param(battle("?", HI, YO), "no_vote", id="no-winner"),
        pytest.param(
            battle("model_a", turns("Hi", "A", "Go", "B"), turns("Hi", "C", "Go", "D")),
            "multi_turn",
            id="several-turns",
        ),
        pytest.param(
            battle("model_a", turns("Hi", "A", "Go", "B"), turns("Hi", "A", "Go", "D")),
            ("u: Hi | a: A | u: Go", "B", ("this", "D")),
            id="same-until-the-last-turn",
        ),
        pytest.param(battle("model_a", HI, turns("Hi", "")), "empty", id="empty"),
        pytest.param(battle("model_a", HI, turns("Hi")), "not_assistant", id="no-answer"),
        pytest.param(battle("model_a", HI, []), "no_conversation", id="no-conversation"),
    ],
)
def test_one_battle(tmp_path: Path, row: dict[str, Any], expected: object) -> None:
    assert read_all(read, write_json(tmp_path / "battles.json", [row])) == [expected]


def test_all_fields_of_a_battle_are_in_the_vote(tmp_path: Path) -> None:
    row = battle("model_a", HI, YO, evaluation_session_id="s1")
    vote = only_vote(read, write_json(tmp_path / "battles.json", [row]))
    assert (vote.id, vote.rater, vote.session) == ("q1", "arena_user_1", "s1")
    assert (vote.model, vote.other_model, vote.updated_at) == ("a", "b", 1764000000.0)


def kaggle(a: Any = 1, b: Any = 0, tie: Any = 0, **columns: Any) -> dict[str, Any]:
    cells = {"prompt": ["Hi"], "response_a": ["Yes?"], "response_b": ["Yo"]} | columns
    return {
        "id": 30192,
        "model_a": "a",
        "model_b": "b",
        **{name: json.dumps(cell) for name, cell in cells.items()},
        "winner_model_a": a,
        "winner_model_b": b,
        "winner_tie": tie,
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(kaggle(), ("u: Hi", "Yes?", ("this", "Yo")), id="a"),
        pytest.param(kaggle("0", "1", "0"), ("u: Hi", "Yes?", ("other", "Yo")), id="text"),
        pytest.param(kaggle(0, 0, 1), ("u: Hi", "Yes?", ("tie", "Yo")), id="tie"),
        pytest.param(kaggle(0), "no_vote", id="no-winner"),
        pytest.param(kaggle(response_b=[None]), "empty", id="null"),
        pytest.param(kaggle(prompt=["Hi", "Go"]), "unfinished", id="response-missing"),
        pytest.param(
            kaggle(prompt=["Hi", "Go"], response_a=["A", "B"], response_b=["C", "D"]),
            "multi_turn",
            id="several-turns",
        ),
        pytest.param(
            kaggle() | {"response_b": '["half a pair: \\ud83d"]'}, "shape_unknown", id="surrogate"
        ),
        pytest.param(kaggle() | {"response_b": "no JSON"}, "shape_unknown", id="no-json"),
    ],
)
def test_one_row_of_kaggle(tmp_path: Path, row: dict[str, Any], expected: object) -> None:
    assert read_all(read, write_json(tmp_path / "train.json", [row])) == [expected]


def test_the_csv_of_kaggle(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, kaggle())
        writer.writeheader()
        writer.writerow(kaggle(0, 1, prompt=["Hi, \n=1"], response_a=["é\u2028"]))
    vote = only_vote(read, str(path))
    assert (vote.id, vote.winner, vote.model) == ("30192", "other", "a")
    assert vote.prompt[0]["content"] == "Hi, \n=1"
    assert vote.completion["content"] == "é\u2028"


def test_other_files_are_refused(tmp_path: Path) -> None:
    with raises_error("import-not-an-export"):
        read_all(read, write_json(tmp_path / "rows.json", [{"prompt": "x"}]))
