"""Reviews of suspicious rows: cases, decisions on disk, reviewed rows, and the web application."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.command import command, command_error, place
from tests.disk import full_disk
from tests.errors import check_error, raises_error
from tests.jobs.chat_log import chat_log, entry, write_export
from tests.programs import Program
from tests.serving import reviewing
from tests.serving.reviewing import (
    NUM_PAIRS,
    SUN,
    ServedReview,
    audited,
    choice_of,
    choices,
    thumbs,
)
from valence.apps.feedback.audit_labels import RowAudit, audit_rows
from valence.apps.feedback.import_rows import import_feedback
from valence.apps.feedback.review_labels import (
    CASE_ROWS,
    Choice,
    LabelReview,
    find_suspicions,
    make_cases,
)
from valence.apps.serve.app import HEADERS
from valence.data.importers.rows import RowKind
from valence.data.load import DataFile, load
from valence.options import ImportOptions
from valence.storage import part_path
from valence.types import Judgement, Kind, Preference

__all__ = ["chat_log", "place"]

Serve = Callable[..., ServedReview]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    services = list[ServedReview]()

    def serve(*arguments: Any, **options: Any) -> ServedReview:
        services.append(ServedReview(tmp_path, *arguments, **options))
        return services[-1]

    yield serve
    for served in services:
        served.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Suspicious rows and cases


def test_rows_that_contradict_or_nearly_repeat_each_other_are_one_case(tmp_path: Path) -> None:
    result = audited(tmp_path / "rows.jsonl", thumbs())
    suspicions = find_suspicions(result)
    assert {index: [item.reason for item in outcome] for index, outcome in suspicions.items()} == {
        0: ["contradiction", "near_duplicate"],
        1: ["contradiction"],
        2: ["near_duplicate"],
        4: ["contradiction"],
        5: ["contradiction"],
    }
    assert make_cases(result, suspicions) == [(0, 1, 2), (4, 5)]
    assert f"{tmp_path / 'rows.jsonl'}:2" in suspicions[0][0].text


def test_rows_that_the_model_contradicts_come_most_suspicious_first(tmp_path: Path) -> None:
    result = audited(tmp_path / "rows.jsonl", thumbs())
    predicted: RowAudit = replace(result, probabilities={0: 0.4, 1: 0.3, 3: 0.2, 5: 0.9})
    suspicions = find_suspicions(predicted)
    assert [suspicion.reason for suspicion in suspicions[3]] == ["model"]
    assert "model" not in [suspicion.reason for suspicion in suspicions[5]]
    assert make_cases(predicted, suspicions) == [(1, 0, 2), (5, 4), (3,)]


def test_large_groups_are_several_cases_with_both_labels(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "same", "label": i % 4 == 0} for i in range(100)]
    result = audited(tmp_path / "rows.jsonl", rows)
    cases = make_cases(result, find_suspicions(result))
    assert sorted(index for case in cases for index in case) == list(range(100))
    assert max(map(len, cases)) <= CASE_ROWS
    assert all(len({rows[index]["label"] for index in case}) == 2 for case in cases)


@pytest.mark.usefixtures("chat_log")
def test_raters_who_disagree_are_shown(place: Path) -> None:
    votes = [entry(n, n != 2, message="m1", question="q", answer="a") for n in (1, 2, 3)]
    import_feedback(
        "chat_log",
        [write_export(Path("log.jsonl"), *votes)],
        ImportOptions(out=Path("feedback.jsonl")),
    )
    review = LabelReview(audited(Path("feedback.jsonl")), Path("reviewed.jsonl"))
    (reason,) = review.suspicions[0]
    assert (reason.reason, "2 up, 1 down" in reason.text) == ("raters", True)
    raters = review.card(0)["raters"]
    assert sorted(rater["verdict"] for rater in raters) == ["down", "up", "up"]
    assert len({rater["name"] for rater in raters}) == 3
    review.close()


# Decisions


def test_reviewed_rows_say_who_decided_what_and_others_stay_as_they_are(serve: Serve) -> None:
    served = serve()
    before = served.out.parent.joinpath("rows.jsonl").read_bytes()
    assert served.rows() == thumbs()
    assert served.decide(0, "flip").status_code == 200
    assert served.decide(1, "keep", token="token-of-ben").status_code == 200
    assert served.decide(4, "drop").status_code == 200
    rows = served.rows()
    assert rows[2:] == [thumbs()[2], thumbs()[3], thumbs()[5]]
    flipped, remaining = rows[:2]
    assert (flipped["label"], remaining["label"]) == (False, False)
    review = flipped["info"].pop("review")
    assert flipped["info"] == thumbs()[0]["info"]
    assert time.time() - 60 < _seconds(review.pop("at")) < time.time() + 60
    assert review == {"decision": "flip", "by": "anna", "was": True}
    assert remaining["info"]["review"]["by"] == "ben"
    assert served.review.progress() == {
        "rows": 5, "keep": 1, "flip": 1, "drop": 1, "score": 0, "left": 2,
    }  # fmt: skip
    assert served.out.parent.joinpath("rows.jsonl").read_bytes() == before


def _seconds(date: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(date).timestamp()


def test_undo_goes_back_through_a_raters_decisions_also_after_a_restart(serve: Serve) -> None:
    served = serve()
    served.decide(0, "flip")
    served.decide(1, "drop", token="token-of-ben")
    served.decide(0, "keep", version=1)
    served.decide(2, "drop")
    assert choices(served.review) == ["keep", "drop", "drop", None, None]
    assert served.post("/api/undo").json()["row"] == 2
    assert choices(served.review) == ["keep", "drop", None, None, None]
    served.close()
    served = serve()
    assert choices(served.review) == ["keep", "drop", None, None, None]
    answer = served.post("/api/undo").json()
    assert (answer["row"], answer["number"]) == (0, 0)
    assert choices(served.review) == ["flip", "drop", None, None, None]
    served.post("/api/undo")
    assert choices(served.review) == [None, "drop", None, None, None]
    assert served.post("/api/undo").status_code == 404
    served.post("/api/undo", token="token-of-ben")
    assert served.rows() == thumbs()


def test_a_decision_of_somebody_else_is_not_overwritten_unseen(serve: Serve) -> None:
    served = serve()
    assert served.decide(0, "flip").status_code == 200
    assert served.decide(0, "drop", token="token-of-ben").status_code == 409
    served.post("/api/undo")
    assert served.decide(0, "drop", version=1, token="token-of-ben").status_code == 409
    assert served.decide(0, "drop", version=2, token="token-of-ben").status_code == 200


def test_cases_follow_until_all_is_decided(serve: Serve) -> None:
    served = serve()
    first = served.post("/api/case").json()
    assert (first["number"], [card["row"] for card in first["cards"]]) == (0, [0, 1, 2])
    assert served.post("/api/case", {"after": 0}).json()["number"] == 1
    for row in (0, 1, 2):
        served.decide(row, "keep")
    assert served.post("/api/case").json()["number"] == 1
    for row in (4, 5):
        served.decide(row, "keep")
    last = served.post("/api/case", {"after": 1}).json()
    assert (last["number"], last["cards"], last["progress"]["left"]) == (None, [], 0)
    assert served.post("/api/case", {"number": 1}).json()["cards"][0]["row"] == 4
    assert served.post("/api/case", {"number": 2}).status_code == 404


def test_a_card_has_all_that_a_rater_needs(serve: Serve) -> None:
    card = serve().post("/api/case").json()["cards"][0]
    assert card["prompt"] == [{"role": "", "text": "q"}]
    assert card["sides"] == [{"name": "completion", "messages": [{"role": "", "text": SUN}]}]
    assert (card["label"], card["opposite"], card["comment"]) == ("up", "down", "ok")
    assert card["raters"] == [{"name": "r1", "verdict": ""}]


# Rows of all kinds


def pair(chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "q", "chosen": chosen, "rejected": rejected, **more}


MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
FORMATS: dict[str, tuple[Kind, list[dict[str, Any]]]] = {
    "bool": (
        "judgement", [{"prompt": "q", "completion": "a", "label": up} for up in (True, False)]
    ),
    "minus one": (
        "judgement", [{"prompt": "q", "completion": "a", "label": up} for up in (1, -1)]
    ),
    "words": (
        "judgement",
        [{"prompt": "q", "completion": "a", "label": up} for up in ("good", "bad")],
    ),
    "rating": (
        "judgement",
        [{"prompt": "q", "completion": "a", "rating": up} for up in ("thumbs_up", "thumbs_down")],
    ),
    "messages": ("judgement", [{"messages": MESSAGES, "label": up} for up in (True, False)]),
    "sharegpt": (
        "judgement", [{"conversations": SHAREGPT, "kto_tag": up} for up in (True, False)]
    ),
    "alpaca": (
        "judgement",
        [{"instruction": "q", "output": "a", "kto_tag": up} for up in (True, False)],
    ),
    "ids": (
        "judgement",
        [{"prompt_ids": [1], "completion_ids": [2], "label": up} for up in (True, False)],
    ),
    "pairs": (
        "preference",
        [pair("a", "b", margin=2.0, chosen_model="x", rejected_model="y"), pair("b", "a")],
    ),
    "soft pairs": ("preference", [pair("a", "b", soft=0.2), pair("a", "b", soft=0.9)]),
    "pairs of conversations": (
        "preference",
        [
            {"chosen": MESSAGES, "rejected": [MESSAGES[0], {**MESSAGES[1], "content": "b"}]},
            {"rejected": MESSAGES, "chosen": [MESSAGES[0], {**MESSAGES[1], "content": "b"}]},
        ],
    ),
    "pairs of ids": (
        "preference",
        [
            pair("a", "b", prompt_ids=[1], chosen_ids=[2], rejected_ids=[3]),
            pair("b", "a", prompt_ids=[1], chosen_ids=[3], rejected_ids=[2]),
        ],
    ),
    "outputs": (
        "preference",
        [{"prompt": "q", "output_A": "a", "output_B": "b", "label": first} for first in (1, 0)],
    ),
    "winners": (
        "preference",
        [
            {"prompt": "q", "response_a": "a", "response_b": "b", "winner": winner}
            for winner in ("response_a", "response_b")
        ],
    ),
    "strengths": (
        "preference",
        [
            {"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": strength}
            for strength in (-1, 2)
        ],
    ),
    "rejected response": (
        "preference",
        [
            {"messages": [MESSAGES[0], {**MESSAGES[1], "content": a}], "rejected_response": b}
            for a, b in (("a", "b"), ("b", "a"))
        ],
    ),
    "openai": (
        "preference",
        [
            {
                "input": {"messages": MESSAGES[:1]},
                "preferred_output": [{"role": "assistant", "content": first}],
                "non_preferred_output": [{"role": "assistant", "content": second}],
            }
            for first, second in (("a", "b"), ("b", "a"))
        ],
    ),
}  # fmt: skip


def _opposite(example: Any) -> Any:
    """A rated example with the other label, without its info."""
    if isinstance(example, Judgement):
        return example.prompt, example.completion, not example.label
    assert isinstance(example, Preference)
    return example.prompt, example.rejected, example.chosen, example.soft


def _plain(example: Any) -> Any:
    if isinstance(example, Judgement):
        return example.prompt, example.completion, example.label
    return example.prompt, example.chosen, example.rejected, example.soft


@pytest.mark.parametrize("name", FORMATS)
def test_flipped_rows_of_all_formats_are_read_as_their_opposite(serve: Serve, name: str) -> None:
    kind, rows = FORMATS[name]
    served = serve(rows)
    for index in (0, 1):
        assert served.decide(index, "flip").status_code == 200
    flipped = served.rows()
    assert all(row["info"]["review"]["decision"] == "flip" for row in flipped)
    before, after = (
        load([DataFile(str(path))], kind).examples
        for path in (served.out.with_name("rows.jsonl"), served.out)
    )
    assert list(map(_plain, after)) == list(map(_opposite, before))
    if name == "pairs":
        assert flipped[0]["margin"] == 0
        assert (flipped[0]["chosen_model"], flipped[0]["rejected_model"]) == ("y", "x")
        assert flipped[0]["info"]["review"]["margin"] == 2.0
    else:
        served.post("/api/undo")
        served.post("/api/undo")
        assert served.rows() == rows


def test_tables_with_other_columns_are_reviewed_and_read_with_the_same_keys(
    tmp_path: Path,
) -> None:
    file, out = tmp_path / "rows.csv", tmp_path / "reviewed.jsonl"
    file.write_text('question,answer,verdict,meta\nq,a,yes,\nq,a,no,"{""rater"": ""x""}"\n')
    keys = {"prompt": "question", "completion": "answer", "label": "verdict", "info": "meta"}
    result = audit_rows([json.dumps({"path": str(file), "keys": keys})])
    with closing(LabelReview(result, out)) as review:
        review.decide(1, "flip", "anna", version=0)
    assert [row["verdict"] for row in lines(out)] == ["yes", "yes"]
    examples = load([DataFile(str(out), keys=keys)], "judgement").examples
    assert [example.info.get("rater") for example in examples] == [None, "x"]
    assert examples[1].info["review"]["was"] is False


def test_scores_are_replaced(serve: Serve) -> None:
    rows = [{"prompt": "q", "completion": "a", "score": score} for score in (1, 5, 5)]
    served = serve(rows)
    assert served.decide(0, "flip").status_code == 400
    assert served.decide(0, "score").status_code == 400
    assert served.decide(0, "keep", score=2).status_code == 400
    assert served.decide(0, "score", score=4.5).status_code == 200
    assert served.decide(1, "keep").status_code == 200
    first, second, third = served.rows()
    assert (first["score"], first["info"]["review"]["was"]) == (4.5, 1)
    assert (second["score"], second["info"]["review"]["was"]) == (5, 5)
    assert third == rows[2]
    card = served.post("/api/case", {"number": 0}).json()["cards"][0]
    assert (card["label"], card["score"], card["decision"]["score"]) == ("low", 1, 4.5)


@pytest.mark.parametrize("kind", ["thumbs", "pairs", "scores"])
def test_reviewed_rows_train(place: Path, kind: RowKind) -> None:
    rows: list[dict[str, Any]] = {
        "thumbs": thumbs(),
        "pairs": [pair("a", "b"), pair("b", "a"), pair("c", "d")],
        "scores": [{"prompt": "q", "completion": "a", "score": score} for score in (0.1, 0.2, 1)],
    }[kind]
    result = audited(Path("feedback.jsonl"), rows)
    with closing(LabelReview(result, Path("reviewed.jsonl"))) as review:
        score = 0.5 if kind == "scores" else None
        choice: Choice = "flip" if score is None else "score"
        review.decide(0, choice, "anna", version=0, score=score)
    method = {"thumbs": "kto", "pairs": "dpo", "scores": "pointwise"}[kind]
    words = ["method=" + method, "data.train=reviewed.jsonl", "data.eval=[]"]
    assert command("train", "recipe.yaml", *words, "train.max_steps=1", "train.batch_size=2") == 0


# Files


def test_a_review_goes_on_with_more_rows_and_says_which_are_gone(tmp_path: Path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "reviewed.jsonl"
    with closing(LabelReview(audited(file, thumbs()), out)) as review:
        review.decide(0, "flip", "anna", version=0)
        review.decide(5, "drop", "anna", version=0)
    more = [{"prompt": "new", "completion": "new", "label": True}]
    with closing(LabelReview(audited(file, more + thumbs()[:5]), out)) as review:
        assert review.num_obsolete == 1
        assert choices(review) == ["flip", None, None]
    rows = lines(out)
    assert (len(rows), rows[0], rows[1]["label"]) == (6, more[0], False)


def test_unreadable_rows_and_rows_without_a_label_stay_as_they_are(tmp_path: Path) -> None:
    rows = thumbs()
    rows.insert(1, {"prompt": "q", "completion": 3, "label": True})
    rows.insert(3, {"prompt": "q", "completion": "no label", "label": None})
    out = tmp_path / "reviewed.jsonl"
    with closing(LabelReview(audited(tmp_path / "rows.jsonl", rows), out)) as review:
        review.decide(0, "keep", "anna", version=0)
    assert lines(out)[1:] == rows[1:]


def test_files_that_no_review_wrote_and_edited_ones_are_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "reviewed.jsonl"
    out.write_text("something else\n")
    result = audited(file, thumbs())
    with raises_error("path-exists", where=str(out)):
        LabelReview(result, out)
    assert out.read_text() == "something else\n"
    out.unlink()
    LabelReview(result, out).close()
    written = out.read_bytes()
    out.write_bytes(written + b"\n")
    with raises_error("output-edited", where=str(out)):
        LabelReview(result, out)
    out.unlink()
    LabelReview(result, out).close()
    assert out.read_bytes() == written
    log = tmp_path / "reviewed.decisions.jsonl"
    log.write_text(log.read_text().replace("wrote", "writes", 1))
    with raises_error("output-line-damaged", where=f"{log}:1"):
        LabelReview(result, out)


def test_two_reviews_of_one_file_are_refused(tmp_path: Path) -> None:
    result, out = audited(tmp_path / "rows.jsonl", thumbs()), tmp_path / "reviewed.jsonl"
    with closing(LabelReview(result, out)), raises_error("output-locked"):
        LabelReview(result, out)
    LabelReview(result, out).close()


def test_links_are_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    (tmp_path / "reviewed.decisions.jsonl").symlink_to(target)
    with raises_error("path-is-symlink"):
        LabelReview(audited(tmp_path / "rows.jsonl", thumbs()), tmp_path / "reviewed.jsonl")


def test_files_of_different_columns_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps({"prompt": "q", "completion": "a", "label": True}) + "\n")
    second.write_text(json.dumps({"prompt": "q", "response": "a", "preference": 0}) + "\n")
    result = audit_rows([str(first), str(second)])
    with raises_error("rows-of-two-formats", where=str(second)):
        LabelReview(result, tmp_path / "reviewed.jsonl")


def test_a_full_disk_loses_no_decision(serve: Serve) -> None:
    served = serve()
    served.decide(0, "flip")
    with full_disk():
        assert served.decide(1, "drop").status_code == 507
    assert choices(served.review) == ["flip", None, None, None, None]
    obstacle = part_path(served.review.out)  # a folder where the rows are written
    obstacle.mkdir()
    assert served.decide(1, "keep").status_code == 200
    assert served.errors
    obstacle.rmdir()
    served.close()
    assert choices(serve().review) == ["flip", "keep", None, None, None]


# The web application


ROUTES = [("GET", "/api/session"), ("POST", "/api/case"), ("POST", "/api/decide"),
          ("POST", "/api/undo"), ("GET", "/openapi.json")]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_request_without_a_known_token_is_refused(serve: Serve, method: str, path: str) -> None:
    served = serve()
    for token in ("", "wrong", "token-of-ann"):
        response = served.request(method, path, {}, token=token)
        assert response.status_code == 401
        assert HEADERS.items() <= response.headers.items()
    assert served.rows() == thumbs()


def test_the_page_needs_no_token_and_its_files_are_served(serve: Serve) -> None:
    served = serve()
    page = served.request("GET", "/", token="")
    assert "page/review.js" in page.text
    for name in ("common.js", "review.js", "review.css", "page.css"):
        response = served.request("GET", f"/page/{name}", token="")
        assert (response.status_code, f"page/{name}" in page.text) == (200, True)
        assert HEADERS.items() <= response.headers.items()


BAD_BODIES = [
    ("/api/decide", {"row": 0, "version": 0, "choice": "perhaps"}, 400),
    ("/api/decide", {"row": 0, "choice": "keep"}, 400),
    ("/api/decide", {"row": "x", "version": 0, "choice": "keep"}, 400),
    ("/api/decide", {"row": 3, "version": 0, "choice": "keep"}, 404),
    ("/api/decide", {"row": 99, "version": 0, "choice": "keep"}, 404),
    ("/api/decide", {"row": 0, "version": 0, "choice": "score", "score": 1}, 400),
    ("/api/decide", {"row": 0, "version": 0, "choice": "keep", "other": 1}, 400),
    ("/api/case", {"number": -1}, 400),
    ("/api/case", {"after": "x"}, 400),
]


@pytest.mark.parametrize(("path", "body", "status"), BAD_BODIES)
def test_bad_requests_change_nothing(serve: Serve, path: str, body: Any, status: int) -> None:
    served = serve()
    assert served.post(path, body).status_code == status
    assert choices(served.review) == [None] * 5


def test_without_tokens_everybody_is_the_same_rater(serve: Serve) -> None:
    served = serve(tokens={})
    served.decide(0, "flip", token="any")
    assert served.rows()[0]["info"]["review"]["by"] == "local"
    assert served.post("/api/undo", token="").json()["row"] == 0


# The command


def test_what_the_command_refuses(place: Path) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in thumbs()))
    audit = ("audit", "rows.jsonl")
    review = (*audit, "--review")
    out = ("--out", "reviewed.jsonl", "--port", "0")
    for words, code, where in (
        (review, "out-missing", "--review"),
        ((*review, "--out", "reviewed.csv"), "output-not-jsonl", "reviewed.csv"),
        ((*review, "--out", "rows.jsonl"), "path-exists", "rows.jsonl"),
        ((*review, *out, "--json"), "option-conflict", "--json"),
        ((*review, *out, "--rater", "a", "--rater", "a"), "rater-duplicate", "--rater"),
        ((*review, *out, "--no-token", "--host", "0.0.0.0"), "server-token-missing", "--host"),
        ((*audit, "--rater", "anna"), "option-conflict", "--rater"),
        ((*audit, "--out", "reviewed.jsonl"), "out-needs-model", "--out"),
        (("audit", "empty.jsonl", "--review", *out), "file-not-found", "empty.jsonl"),
    ):
        error = command_error(*words)
        check_error(error, code)
        assert where in (error.where or "")
    Path("empty.jsonl").write_text("")
    check_error(command_error("audit", "empty.jsonl", "--review", *out), "file-empty")
    assert not Path("reviewed.jsonl").exists()


def test_without_a_suspicious_row_all_rows_are_written(place: Path) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in thumbs()[3:5]))
    words = ("--review", "--out", "reviewed.jsonl", "--port", "0")
    assert command("audit", "rows.jsonl", *words) == 0
    assert lines(Path("reviewed.jsonl")) == thumbs()[3:5]


# Kills


def decide() -> None:
    reviewing.main(*sys.argv[1:])


@pytest.mark.slow
def test_decisions_and_rows_agree_after_kills(tmp_path: Path) -> None:
    message = tmp_path / "said"
    rows = [
        {"prompt": f"question {i // 2}", "completion": "same", "label": i % 2 == 0}
        for i in range(2 * NUM_PAIRS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    random.seed(0)
    confirmed, expected = 0, dict[int, str]()
    for _ in range(8):
        message.unlink(missing_ok=True)
        program = Program(str(tmp_path), str(confirmed), main=decide, output=message)
        while not (message.exists() and message.read_text().startswith("open\n")):
            assert program.poll() is None, message.read_text()
            time.sleep(0.01)
        time.sleep(random.uniform(0.02, 0.3))
        os.kill(program.pid, signal.SIGKILL)
        program.process.join()
        numbers = [int(line) for line in message.read_text().splitlines(keepends=True)[1:]
                   if line.endswith("\n")]  # fmt: skip
        confirmed += len(numbers)
        expected |= {number % len(rows): choice_of(number) for number in numbers}
        # also before a restart, the file is whole
        assert all(isinstance(row, dict) for row in lines(tmp_path / "reviewed.jsonl"))
        out = tmp_path / "reviewed.jsonl"
        with closing(LabelReview(audited(tmp_path / "rows.jsonl"), out)) as review:
            result = dict(enumerate(choices(review)))
        changed = {index for index, choice in result.items() if choice != expected.get(index)}
        assert changed <= {confirmed % len(rows)}  # it was not confirmed any more
        for index in changed:
            expected[index] = str(result[index])
        remaining = [row for index, row in enumerate(rows) if expected.get(index) != "drop"]
        assert [row["prompt"] for row in lines(out)] == [row["prompt"] for row in remaining]
    assert confirmed > 20
