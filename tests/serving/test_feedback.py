"""Answers and votes on disk: nothing that was confirmed is lost, and the rows train."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.disk import full_disk
from tests.errors import raises_error
from tests.serving.kit import rows, sample, saved_model, trainer
from valence.apps.feedback.import_store import ImportStore
from valence.apps.serve import feedback
from valence.apps.serve.chat import Answer
from valence.apps.serve.feedback import FeedbackStore
from valence.apps.serve.prompts import prompt_id
from valence.config.load import load_recipe
from valence.data.load import DataFile, load
from valence.errors import UserError
from valence.storage import part_path
from valence.training.prepare import prepare
from valence.types import Ids, Judgement

Open = Callable[[], FeedbackStore]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "feedback.jsonl"


@pytest.fixture
def opened(out: Path) -> Iterator[Open]:
    """Opens the store, after closing the one before."""
    stores = list[FeedbackStore]()

    def open_store() -> FeedbackStore:
        for store in stores:
            store.close()
        stores.append(FeedbackStore(out))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def answers(store: FeedbackStore, number: int, **changes: Any) -> list[Answer]:
    """Answers to the same prompt, which the store has."""
    results = [sample(seed=seed, **changes) for seed in range(number)]
    for answer in results:
        store.add(answer)
    return results


def rows_of(store: FeedbackStore, kind: str = "") -> list[dict[str, Any]]:
    store.flush()
    return rows(store.out.with_suffix(f".{kind}.jsonl" if kind else ".jsonl"))


def test_votes_and_answers_survive_a_restart(opened: Open) -> None:
    store = opened()
    first, second = answers(store, 2)
    store.rate(first, "anna", label=True, comment="short", tags=["good"])
    before = rows_of(store)
    store = opened()
    assert store.num_votes == 1
    assert store.has_voted("anna", prompt_id(first.prompt))
    assert not store.has_voted("ben", prompt_id(first.prompt))
    again = store.answer(second.id)
    assert again == replace(
        second,
        completion=replace(second.completion, prompt_id=""),
        sampling=again.sampling,
    )
    assert (again.sampling.temperature, again.sampling.top_p) == (1.0, 1.0)
    store.rate(again, "anna", label=False)
    after = rows_of(store)
    assert after[0] == before[0]
    assert (after[1]["label"], after[1]["logps"]) == (False, list(second.completion.logps))


def test_a_changed_vote_replaces_the_old_row(opened: Open) -> None:
    store = opened()
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", label=True)
    (old,) = rows_of(store)
    store.rate(answer, "anna", label=False, comment="wrong")
    (new,) = rows_of(store)
    assert (old["label"], new["label"]) == (True, False)
    assert new["info"]["comment"] == "wrong"
    assert store.num_votes == 1


def test_a_vote_counts_although_the_clock_was_set_back(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", label=True)
    monkeypatch.setattr(feedback.time, "time", lambda: 1e9)
    store.rate(answer, "anna", label=False)
    first, second = rows(store.out.with_suffix(".pending.jsonl"))
    assert second["updated_at"] > first["updated_at"]
    assert [row["label"] for row in rows_of(store)] == [False]
    assert [row["label"] for row in rows_of(opened())] == [False]


def test_a_withdrawn_vote_leaves_no_row(opened: Open, out: Path) -> None:
    store = opened()
    first, second = answers(store, 2)
    store.rate(first, "anna", label=True, correction="better")
    store.compare(first, second, "a", "anna")
    assert [len(rows_of(store, kind)) for kind in ("", "pairs", "demonstrations")] == [1, 2, 1]
    store.rate(first, "anna")
    store.compare(second, first, None, "anna")
    assert [rows_of(store, kind) for kind in ("", "pairs", "demonstrations")] == [[], [], []]
    assert store.num_votes == 0
    assert not store.has_voted("anna", prompt_id(first.prompt))
    assert opened().num_votes == 0


def test_raters_are_told_apart_and_not_named(opened: Open, out: Path) -> None:
    store = opened()
    (answer,) = answers(store, 1)
    for rater in ("anna", "ben", "carl <b>"):
        store.rate(answer, rater, label=rater != "ben")
    (row,) = rows_of(store)
    assert (row["label"], row.get("weight")) == (True, None)
    assert len(row["info"]["raters"]) == 3
    texts = "".join(path.read_text() for path in out.parent.glob("feedback.*"))
    assert not {"anna", "carl"} & set(texts.replace('"', " ").split())


def wait_for_row(out: Path) -> None:
    until = time.monotonic() + 30
    while not rows(out) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(rows(out)) == 1


def test_rows_are_written_in_the_background(out: Path) -> None:
    with closing(FeedbackStore(out, pause=0.01)) as store:
        (answer,) = answers(store, 1)
        store.rate(answer, "anna", label=True)
        wait_for_row(out)


def test_votes_are_on_the_disk_before_rows_are(opened: Open, out: Path) -> None:
    store = opened()
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", label=True)
    (pending,) = rows(out.with_suffix(".pending.jsonl"))
    assert (pending["label"], pending["message"]) == (True, answer.id)
    assert not out.exists()
    store.close()
    assert not out.with_suffix(".pending.jsonl").exists()
    assert len(rows(out)) == 1


def test_votes_during_a_write_of_the_rows_are_kept(
    opened: Open, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    first, second = answers(store, 2)
    store.rate(first, "anna", label=True)
    replace_file = Path.replace

    def vote_meanwhile(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace_file)
        thread = threading.Thread(target=lambda: store.rate(second, "anna", label=False))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()  # a vote does not wait for the rows
        return path.replace(target)

    monkeypatch.setattr(Path, "replace", vote_meanwhile)
    store.flush()
    assert len(rows(out)) == 1
    (pending,) = rows(out.with_suffix(".pending.jsonl"))
    assert pending["message"] == second.id
    assert [row["label"] for row in rows_of(store)] == [True, False]


def test_lines_that_a_crash_has_cut_off_are_removed(opened: Open, out: Path) -> None:
    store = opened()
    first, second = answers(store, 2)
    store.rate(first, "anna", label=True)
    pending = out.with_suffix(".pending.jsonl").read_bytes()
    store.close()
    path = out.with_suffix(".answers.jsonl")
    full = path.read_bytes()
    path.write_bytes(full[:-1])  # without the end of the second answer
    out.with_suffix(".pending.jsonl").write_bytes(pending + pending[: len(pending) // 2])
    store = opened()
    assert store.answer(first.id).id == first.id
    with pytest.raises(KeyError):
        store.answer(second.id)
    assert store.num_votes == 1
    store.add(second)
    assert path.read_bytes().count(b"\n") == 2
    assert len(rows_of(store)) == 1


def test_a_line_that_was_changed_is_an_error(opened: Open, out: Path) -> None:
    store = opened()
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", label=True)
    pending = out.with_suffix(".pending.jsonl").read_text()
    store.close()
    out.with_suffix(".pending.jsonl").write_text(pending.replace('"label": true', '"label": false'))
    with raises_error("output-line-damaged", where="feedback.pending.jsonl:1"):
        FeedbackStore(out)
    out.with_suffix(".pending.jsonl").unlink()
    path = out.with_suffix(".answers.jsonl")
    path.write_text(path.read_text().replace('"stop": "length"', '"stop": "eos"'))
    with raises_error("output-line-foreign", where="feedback.answers.jsonl:1"):
        opened().answer(answer.id)


def test_a_second_process_is_refused(opened: Open, out: Path) -> None:
    opened()
    with raises_error("output-locked", where="feedback.jsonl"):
        FeedbackStore(out)


@pytest.mark.parametrize("name", ["feedback.jsonl", "feedback.pairs.jsonl", "feedback.votes.jsonl"])
def test_files_of_something_else_are_refused_at_the_start(out: Path, name: str) -> None:
    out.with_name(name).write_text('{"prompt": "mine"}\n')
    with raises_error("output-foreign", where=name):
        FeedbackStore(out)
    assert out.with_name(name).read_text() == '{"prompt": "mine"}\n'


def test_answers_of_something_else_are_refused(out: Path) -> None:
    out.with_suffix(".answers.jsonl").write_text("mine\n")
    with raises_error("output-line-foreign", where="feedback.answers.jsonl:1"):
        FeedbackStore(out)
    out.with_suffix(".answers.jsonl").unlink()
    FeedbackStore(out).close()  # nothing is locked any more


def test_links_are_not_followed(out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    out.with_suffix(".answers.jsonl").symlink_to(other)
    with raises_error("path-is-symlink", where="feedback.answers.jsonl"):
        FeedbackStore(out)
    assert not other.exists()


def test_a_full_disk_refuses_votes_and_loses_none(opened: Open, out: Path) -> None:
    store = opened()
    first, second = answers(store, 2)
    store.rate(first, "anna", label=True)
    store.flush()
    store.rate(second, "anna", label=True)
    pending, answer = out.with_suffix(".pending.jsonl"), sample(seed=9)
    with full_disk(pending.stat().st_size + 100):  # the start of what is written has space
        with raises_error("file-not-writable", where="feedback"):
            store.rate(first, "anna", label=False)
        with raises_error("file-not-writable", where="answers"):
            store.add(answer)
        with raises_error("file-not-writable", where="feedback"):
            store.flush()
    assert (store.num_votes, len(rows(out))) == (2, 1)
    assert list(out.parent.glob(".*.part")) == []
    assert [row["message"] for row in rows(pending)] == [second.id]
    third = sample(seed=10)
    store.add(third)
    store.rate(third, "anna", label=False)
    assert [row["label"] for row in rows_of(store)] == [True, True, False]
    again = opened()
    assert again.num_votes == 3
    assert again.answer(third.id).completion.tokens == third.completion.tokens


def test_a_disk_that_is_full_at_the_end_keeps_the_votes(opened: Open, out: Path) -> None:
    store = FeedbackStore(out)
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", label=True)
    with full_disk(), raises_error("file-not-writable"):
        store.close()
    store.close()
    assert [row["label"] for row in rows_of(opened())] == [True]


def test_rows_that_cannot_be_written_are_reported_and_written_later(out: Path) -> None:
    errors = list[UserError]()
    obstacle = part_path(out)  # a folder where the rows are written
    obstacle.mkdir()

    def on_error(error: UserError) -> None:
        errors.append(error)
        obstacle.rmdir()

    with closing(FeedbackStore(out, on_error=on_error, pause=0.01)) as store:
        (answer,) = answers(store, 1)
        store.rate(answer, "anna", label=True)
        wait_for_row(out)
    assert [error.code for error in errors] == ["file-not-writable"]


def test_a_correction_gives_a_pair_and_a_demonstration(opened: Open) -> None:
    store = opened()
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", correction="better", correction_ids=[5, 6])
    (pair,) = rows_of(store, "pairs")
    assert (pair["chosen"], pair["rejected"]) == ("better", answer.completion.text)
    assert (pair["chosen_ids"], pair["rejected_ids"]) == ([5, 6], list(answer.completion.tokens))
    assert pair["sampled"] == {"vocabulary": answer.vocabulary}
    (shown,) = rows_of(store, "demonstrations")
    assert shown["completion"] == "better"
    store.rate(answer, "anna", correction="better")  # of a model with another tokenizer
    (pair,) = rows_of(store, "pairs")
    assert "chosen_ids" not in pair
    assert pair["chosen"] == "better"


@pytest.mark.parametrize("change", [{"vocabulary": "other"}, {"prompt_ids": (9,)}])
def test_a_pair_of_answers_with_other_vocabularies_has_text_alone(
    opened: Open, change: dict[str, Any]
) -> None:
    """Of two models with different tokenizers, a liked and a disliked answer to one message."""
    store = opened()
    a, b = answers(store, 2)
    b = replace(b, **change)
    store.add(b)
    store.rate(a, "anna", label=True)
    store.rate(b, "anna", label=False)
    (pair,) = rows_of(store, "pairs")
    assert {"prompt", "chosen", "rejected"} <= pair.keys()
    assert not {"prompt_ids", "chosen_ids", "rejected_ids", "sampled"} & pair.keys()
    assert [row["sampled"]["vocabulary"] for row in rows_of(store)] == [a.vocabulary, b.vocabulary]


def test_an_answer_that_a_stop_string_cut_has_text_alone(opened: Open) -> None:
    """Its tokens hold the stop string, which the rated text does not."""
    store = opened()
    a, b = answers(store, 2)
    cut = replace(a, completion=replace(a.completion, text=a.completion.text[:3], stop="stop"))
    store.add(cut)
    store.rate(cut, "anna", label=True)
    (row,) = rows_of(store)
    assert row["completion"] == cut.completion.text
    assert not {"prompt_ids", "completion_ids", "logps"} & row.keys()
    store.rate(cut, "anna", correction="better", correction_ids=[5, 6])
    store.compare(b, cut, "a", "ben")
    for pair in rows_of(store, "pairs"):
        assert not {"prompt_ids", "chosen_ids", "rejected_ids"} & pair.keys()


def test_a_tie_and_two_bad_answers(opened: Open) -> None:
    store = opened()
    a, b, c = answers(store, 3)
    store.compare(a, b, "tie", "anna")
    store.compare(b, c, "both_bad", "anna")
    (pair,) = rows_of(store, "pairs")
    assert pair["soft"] == 0.5
    assert [row["completion"] for row in rows_of(store)] == [b.completion.text, c.completion.text]
    assert not any(row["label"] for row in rows_of(store))


def test_the_better_answer_is_chosen_whatever_its_side(opened: Open) -> None:
    store = opened()
    a, b = answers(store, 2)
    for rater, first, second, winner in (("anna", a, b, "b"), ("ben", b, a, "a")):
        store.compare(first, second, winner, rater)  # type: ignore[arg-type]
        (pair,) = rows_of(store, "pairs")
        assert pair["chosen_ids"] == list(b.completion.tokens)
        assert pair["rejected_ids"] == list(a.completion.tokens)


def test_scores_have_a_file_of_their_own(opened: Open) -> None:
    store = opened()
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", score=0.5)
    assert [row["score"] for row in rows_of(store, "scores")] == [0.5]


def test_tools_of_the_prompt_are_kept(opened: Open) -> None:
    store = opened()
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    answer = sample()
    answer = replace(answer, tools=(tool,), key=prompt_id(answer.prompt, (tool,)))
    store.add(answer)
    store.rate(answer, "anna", label=True)
    assert rows_of(store)[0]["tools"] == [tool]
    assert opened().answer(answer.id).tools == (tool,)
    assert not store.has_voted("anna", prompt_id(answer.prompt))
    assert store.has_voted("anna", prompt_id(answer.prompt, answer.tools))


def prepared_rows(method: str, path: Path) -> Any:
    """The tokenized rows that a method would train on."""
    settings = {
        "method": method,
        "model": {"name": saved_model().name},
        "data": {"train": [{"path": str(path)}], "max_length": 256},
    }
    return prepare(load_recipe(settings, [])).corpora["train"].units


def test_the_tokens_that_train_are_those_that_were_sampled(opened: Open, out: Path) -> None:
    store = opened()
    first, second = answers(store, 2)
    end = trainer().prepared.encoder.end_ids[0]
    nothing = replace(first.completion, tokens=(end,), logps=(-1.5,), text="", stop="eos")
    empty = replace(first, id="empty", completion=nothing)
    store.add(empty)
    other = sample("another", seed=5)
    store.add(other)
    store.rate(first, "anna", label=True)
    store.rate(empty, "anna", label=False)
    store.rate(other, "anna", label=True)
    store.compare(first, second, "b", "anna")
    correction_ids = (7, 8, end)
    store.rate(second, "anna", correction="right", correction_ids=correction_ids)
    store.flush()

    kto = prepared_rows("kto", out)
    assert [(item.prompt_ids, item.answers[0].ids, item.label) for item in kto] == [
        (first.prompt_ids, first.completion.tokens, True),
        (empty.prompt_ids, empty.completion.tokens, False),
        (other.prompt_ids, other.completion.tokens, True),
    ]

    dpo = prepared_rows("dpo", out.with_suffix(".pairs.jsonl"))
    assert {tuple(side.ids for side in example.answers) for example in dpo} == {
        (second.completion.tokens, first.completion.tokens),
        (first.completion.tokens, empty.completion.tokens),
        (correction_ids, second.completion.tokens),
    }
    assert {example.prompt_ids for example in dpo} == {first.prompt_ids}

    (sft,) = prepared_rows("sft", out.with_suffix(".demonstrations.jsonl"))
    assert sft.prompt_ids == first.prompt_ids
    text = trainer().prepared.tokenizer.decode(sft.answers[0].ids)
    assert text == "right<|im_end|>"


def test_rated_answers_of_a_model_with_another_tokenizer_train_as_text(
    opened: Open, out: Path
) -> None:
    store = opened()
    first, second = answers(store, 2)
    completion = replace(
        second.completion, tokens=(5, 6), logps=(-1.0, -2.0), text="from another model"
    )
    foreign = replace(second, id="foreign", vocabulary="other", completion=completion)
    other = sample("another", seed=5)
    store.add(foreign)
    store.add(other)
    store.rate(other, "anna", label=True)
    store.rate(first, "anna", label=True)
    store.rate(foreign, "anna", label=False)
    store.compare(first, foreign, "a", "anna")
    store.flush()
    tokenizer = trainer().prepared.tokenizer

    _, same, retokenized = prepared_rows("kto", out)
    assert same.answers[0].ids == first.completion.tokens
    assert tokenizer.decode(retokenized.answers[0].ids) == "from another model<|im_end|>"
    assert [unit.prompt_ids for unit in (same, retokenized)] == [first.prompt_ids] * 2

    for pair in prepared_rows("dpo", out.with_suffix(".pairs.jsonl")):
        texts = {tokenizer.decode(side.ids) for side in pair.answers}
        assert "from another model<|im_end|>" in texts


def test_rows_hold_the_log_probabilities_exactly(opened: Open, out: Path) -> None:
    store = opened()
    (answer,) = answers(store, 1, temperature=0.7)
    store.rate(answer, "anna", label=True)
    store.flush()
    (example,) = load([DataFile(str(out))], "judgement").examples
    assert isinstance(example, Judgement)
    assert isinstance(example.completion, Ids)
    assert example.completion.sampled is not None
    assert tuple(example.completion.sampled.logps) == answer.completion.logps
    (row,) = rows(out)
    expected = {"temperature": 0.7, "top_p": 1.0, "vocabulary": answer.vocabulary}
    assert row["sampled"] == expected


def test_two_threads_may_vote_at_once(opened: Open, out: Path) -> None:
    store = opened()
    result = answers(store, 6)

    def vote(rater: str) -> None:
        for number, answer in enumerate(result):
            store.rate(answer, rater, label=number % 2 == 0)

    threads = [threading.Thread(target=vote, args=(rater,)) for rater in ("anna", "ben", "carl")]
    for thread in threads:
        thread.start()
    for _ in range(5):
        store.flush()
    for thread in threads:
        thread.join()
    assert store.num_votes == 18
    written = rows_of(store)
    assert [row["weight"] for row in written] == [3.0] * 6
    assert [row["label"] for row in written] == [True, False] * 3
    assert len(rows(out.with_suffix(".votes.jsonl"))) == 18


def test_an_import_into_the_same_files_includes_pending_votes(out: Path) -> None:
    store = FeedbackStore(out)
    (answer,) = answers(store, 1)
    store.rate(answer, "anna", label=True)
    pending = out.with_suffix(".pending.jsonl").read_bytes()
    store.rate(answer, "anna", label=False)
    store.close()
    out.with_suffix(".pending.jsonl").write_bytes(pending)  # as if it had been killed
    with ImportStore(out).locked() as files:
        (vote,) = files.votes
        assert vote.label is False  # the later vote counts
        votes = [vote, replace(vote, id="other", message="other")]
        files.write(votes, feedback.make_rows(votes), "thumbs")
    assert not out.with_suffix(".pending.jsonl").exists()
    assert [row["label"] for row in rows(out)] == [False, False]
