"""Sampled answers with their tokens: reading, with and without ratings, and conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import Source, load_rows, shown_findings, write
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from valence.batching.micro_batches import make_micro_batch
from valence.data.audit import audit
from valence.data.audit_text import render
from valence.data.convert import CONVERSIONS, Unused, best_to_demonstrations
from valence.data.detect import detect
from valence.data.encode import Encoder
from valence.data.encoded_set import EncodedSet
from valence.data.load import Loaded, load
from valence.training.evaluate import texts
from valence.types import Chat, Demonstration, Ids, Judgement, Origin, Prompt, Ranking

HERE = Origin("rows.jsonl", 1)
TOKENIZER = tiny_tokenizer()
DIGEST = Encoder(TOKENIZER, max_length=99).vocab.digest


def answer(
    prompt: int, *ids: int, score: float | None = None, error: str | None = None, **more: Any
) -> dict[str, Any]:
    """A row as `valence sample` and `valence score` write it."""
    sampled = {
        "by": "x",
        "position": 0,
        "seed": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "vocabulary": DIGEST,
    }
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "q"}],
        "prompt_ids": [9, prompt],
        "rendered": "q",
        "completion": "text",
        "completion_ids": list(ids),
        "logps": [-n / 8 for n in range(len(ids))],
        "stop": "eos",
        "version": 0,
        "index": 0,
        "info": {"label": True, "answer": 3},
        "sampled": sampled,
    }
    judged = (
        {"score": score, "parts": {"a": 1.0}} if error is None else {"score": None, "error": error}
    )
    return row | ({} if score is None and error is None else judged) | more


def encoded(loaded: Loaded, **options: Any) -> EncodedSet:
    return Encoder(TOKENIZER, **{"max_length": 99, **options}).encode_all(
        loaded.examples, loaded.sources
    )


# Formats


def test_rows_with_text_and_tokens_are_read_by_their_tokens(tmp_path: Path) -> None:
    assert detect([answer(1, 5, 6)]) == "demonstration_ids"
    assert detect([answer(1, 5, 6, score=1)]) == "scored_ids"
    assert detect([answer(1, 5, error="x")] * 3 + [answer(1, 5, score=1)]) == "scored_ids"
    assert detect([answer(1, 5, label=False)]) == "judgement_ids"
    loaded = load_rows(tmp_path, "demonstration", answer(1, 5, 6))
    assert loaded.ignored_columns == {}
    [example] = loaded.examples
    assert isinstance(example, Demonstration)
    assert (example.prompt, example.completion) == (Ids((9, 1)), Ids((5, 6)))
    assert example.id == Demonstration(prompt=Ids((9, 1)), completion=Ids((5, 6)), origin=HERE).id
    [unit] = encoded(loaded).units
    assert (unit.prompt_ids, unit.answers[0].ids, unit.answers[0].mask) == (
        (9, 1),
        (5, 6),
        (True, True),
    )


def test_a_text_is_a_prompt_with_all_its_other_columns(tmp_path: Path) -> None:
    rows = [
        {"text": "1 + 1 = ", "answer": 2, "weight": 0.5, "more": {"a": [1]}},
        {"text": "2 + 2 = "},
    ]
    loaded = load_rows(tmp_path, "prompt", *rows)
    assert [(e.prompt, e.info, e.weight) for e in loaded.examples if isinstance(e, Prompt)] == [
        ("1 + 1 = ", {"answer": 2, "more": {"a": [1]}}, 0.5),
        ("2 + 2 = ", {}, 1.0),
    ]
    [named] = load_rows(tmp_path, "prompt", {"body": "x", "n": 1}, keys={"text": "body"}).examples
    assert isinstance(named, Prompt)
    assert (named.prompt, named.info) == ("x", {"n": 1})
    assert detect([{"prompt": "p", "text": "t"}]) == "prompt"
    assert detect([{"prompt": "p", "completion": "c", "label": True, "text": "t"}]) == "judgement"
    with raises_error("format-unknown-columns"):
        detect([{"text": "t", "label": True}])
    turns = [{"role": "user", "content": "q"}]
    [chat] = load_rows(tmp_path, "prompt", {"text": turns}).examples
    assert chat.prompt == Chat(tuple(turns))


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        ({"logps": [-0.5]}, "row-length-mismatch", ["logps", "1", "2"]),
        ({"logps": [-0.5, "x"]}, "row-number-invalid", ["number 2 of logps", "'x'"]),
        ({"logps": [-0.5, 0.5]}, "row-logps-invalid", ["logps", "0.5"]),
        ({"logps": "many"}, "row-logps-invalid", ["logps", "'many'"]),
        ({"sampled": 3}, "row-value-type", ["sampled", "3"]),
        (
            {"sampled": {"temperature": "hot"}},
            "row-number-invalid",
            ["temperature", "sampled", "'hot'"],
        ),
        ({"completion_ids": []}, "row-tokens-invalid", ["completion_ids", "[]"]),
        ({"score": None, "error": None}, "row-rating-missing", ["score"]),
    ],
)
def test_an_invalid_record_of_sampling_is_a_bad_row(
    change: dict[str, Any], code: str, names: list[str], tmp_path: Path
) -> None:
    with raises_error(code, where="rows.jsonl:2") as raised:
        load_rows(tmp_path, "scored", answer(1, 5, score=1), answer(1, 5, 6, score=1) | change)
    assert all(name in raised.error.message for name in names), raised.error


# Tokens of another tokenizer, or of an unknown one


ONE = {"prompt_ids": [5, 6], "completion_ids": [7, 8]}
TEXT = {"prompt": "question ", "completion": "yes"}
CHAT = {"prompt": [{"role": "user", "content": "question"}], "completion": "yes"}
PAIR = {"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "thumbs": ("judgement", ONE | {"label": True}, TEXT | {"label": True}),
    "thumbs in a chat": ("judgement", ONE | {"label": True}, CHAT | {"label": True}),
    "scores": ("scored", ONE | {"score": 0.5}, TEXT | {"score": 0.5}),
    "demonstrations": ("demonstration", ONE, TEXT),
    "demonstrations in a chat": ("demonstration", ONE, CHAT),
    "pairs": ("preference", PAIR, {"prompt": "question ", "chosen": "yes", "rejected": "no"}),
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "no sampling": {},
    "null sampling": {"sampled": None},
    "empty sampling": {"sampled": {}},
    "sampling without it": {"sampled": {"temperature": 1.0}},
    **{
        f"digest {value!r}": {"sampled": {"vocabulary": value}}
        for value in ("0" * 16, "", None, 0, 12, [], {}, [DIGEST], True, f" {DIGEST}")
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", UNKNOWN)
def test_tokens_are_used_only_with_the_digest_of_the_vocabulary(
    tmp_path: Path, kind: str, case: str
) -> None:
    """The text is tokenized again, if the row has it."""
    method, ids, text = KINDS[kind]

    def read(row: dict[str, Any]) -> EncodedSet:
        return encoded(load_rows(tmp_path, method, row))

    known = read(text | ids | {"sampled": {"vocabulary": DIGEST}})
    assert (known.units[0].prompt_ids, known.units[0].answers[0].ids) == ((5, 6), (7, 8))
    assert known.notes == {}
    expected, again = read(text), read(text | ids | UNKNOWN[case])
    for name in ("prompt_ids", "answers", "label", "scores"):
        assert getattr(again.units[0], name) == getattr(expected.units[0], name)
    assert len(again.notes["tokenized_again"]) == 1
    refused = read(ids | UNKNOWN[case])
    assert [unit.kind for unit in refused.unusable] == ["another_vocabulary"]
    assert DIGEST in str(refused.unusable[0].fix)


def test_the_text_of_a_row_is_shown_and_not_what_its_tokens_mean_to_another_tokenizer(
    tmp_path: Path,
) -> None:
    rows = [ONE | TEXT | {"label": True, "sampled": {"vocabulary": "0" * 16}}, TEXT]
    shown = [
        texts(load_rows(tmp_path, kind, row).examples[0], TOKENIZER)
        for kind, row in zip(("judgement", "demonstration"), rows, strict=True)
    ]
    assert shown[0] == shown[1] == TEXT


@pytest.mark.parametrize(
    "part", ["prompt", "completion", "prompt is not text", "completion is empty", "truncated"]
)
def test_tokens_of_another_tokenizer_without_their_whole_text_are_refused(
    tmp_path: Path, part: str
) -> None:
    row = ONE | TEXT | {"label": True}
    if part in TEXT:
        del row[part]
    row |= {
        "prompt is not text": {"prompt": 3},
        "completion is empty": {"completion": " "},
        "truncated": {"stop": "length"},  # its text has no end
    }.get(part, {})
    result = encoded(load_rows(tmp_path, "judgement", row))
    assert [unit.kind for unit in result.unusable] == ["another_vocabulary"]


def test_answers_of_two_tokenizers_are_read_by_the_tokens_of_one_and_the_text_of_the_other(
    tmp_path: Path,
) -> None:
    rows = [answer(1, 5, 6, score=1), answer(1, 7, score=0), answer(2, 5, score=1)]
    rows += [answer(2, 8, score=0)]
    for row in rows[2:]:
        row["sampled"] = row["sampled"] | {"vocabulary": "0" * 16}
    rows[3]["completion"] = "other"
    result = ranked(tmp_path, *rows)
    assert [a.ids for a in result.units[0].answers] == [(5, 6), (7,)]
    expected = ranked(
        tmp_path,
        *({n: r[n] for n in ("prompt", "completion", "score")} | {"weight": 1} for r in rows[2:]),
    )
    assert [a.ids for a in result.units[1].answers] == [a.ids for a in expected.units[0].answers]
    assert "old" not in dict(result.units[1].answers[0].columns)
    shown = shown_findings(
        audit(load_rows(tmp_path, "scored", *rows), result, Encoder(TOKENIZER, max_length=99))
    )
    assert "tokenized_again" in shown


# How likely answers were


def ranked(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> EncodedSet:
    return encoded(load_rows(tmp_path, "ranking", *rows, convert="scores_to_rankings"), **options)


def test_stored_log_probabilities_reach_the_micro_batch_token_by_token(tmp_path: Path) -> None:
    result = ranked(
        tmp_path,
        answer(1, 5, 6, 7, score=1),
        answer(2, 5, score=0),
        answer(1, 5, 8, score=0),
        answer(2, 6, score=1),
    )
    assert [unit.scores for unit in result.units] == [(1.0, 0.0), (0.0, 1.0)]
    assert result.units[0].answers[0].columns == (("old", (0.0, -0.125, -0.25)),)
    assert result.notes == {}
    batch = make_micro_batch(result.units)
    ids, owner = batch.tokens[batch.scored].tolist(), batch.sequence_ids[batch.scored].tolist()
    messages = sorted(zip(owner, ids, batch.token_columns["old"].tolist(), strict=True))
    assert messages == [
        (0, 5, 0.0),
        (0, 6, -0.125),
        (0, 7, -0.25),
        (1, 5, 0.0),
        (1, 8, -0.125),
        (2, 5, 0.0),
        (3, 6, 0.0),
    ]


@pytest.mark.parametrize("drawn", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.9}])
def test_log_probabilities_of_another_distribution_are_not_read(
    drawn: dict[str, float], tmp_path: Path
) -> None:
    first = answer(1, 5, 6, score=1)
    first["sampled"] = first["sampled"] | drawn
    loaded = load_rows(
        tmp_path, "ranking", first, answer(1, 7, score=0), convert="scores_to_rankings"
    )
    result = encoded(loaded)
    assert [unit.columns for unit in result.units[0].answers] == [(), ()]
    assert set(result.notes) == {"logps_of_others", "logps_missing"}
    assert "logps_of_others" in shown_findings(
        audit(loaded, result, Encoder(TOKENIZER, max_length=99))
    )


def test_log_probabilities_of_some_answers_are_not_read(tmp_path: Path) -> None:
    bare = {name: item for name, item in answer(2, 5, score=1).items() if name != "logps"}
    result = ranked(
        tmp_path, answer(1, 5, score=1), answer(1, 6, score=0), bare, answer(2, 6, score=0)
    )
    assert [item.columns for unit in result.units for item in unit.answers] == [()] * 4
    assert {name: [origin.line for origin in rows] for name, rows in result.notes.items()} == {
        "logps_missing": [3]
    }


def test_a_truncated_answer_keeps_the_log_probabilities_of_its_tokens(tmp_path: Path) -> None:
    result = ranked(
        tmp_path,
        answer(1, 5, 6, 7, 8, score=1),
        answer(1, 6, score=0),
        max_length=4,
        long_rows="cut_completion",
    )
    long, short = result.units[0].answers
    assert (long.ids, long.columns, long.complete) == ((5, 6), (("old", (0.0, -0.125)),), False)
    assert short.columns == (("old", (0.0,)),)


def test_only_rankings_ask_how_likely_answers_were(tmp_path: Path) -> None:
    rows = [answer(1, 5, score=1), answer(1, 6, score=0)]
    for kind, convert in (
        ("preference", "scores_to_pairs"),
        ("demonstration", "best_to_demonstrations"),
        ("scored", None),
    ):
        units = encoded(load_rows(tmp_path, kind, *rows, convert=convert)).units
        assert units
        assert not any(item.columns for unit in units for item in unit.answers)


# Answers whose reward failed


@pytest.mark.parametrize(
    ("kind", "convert", "threshold", "result"),
    [
        ("ranking", "scores_to_rankings", None, 1),
        ("preference", "scores_to_pairs", None, 1),
        ("scored", None, None, 3),
        ("judgement", "scores_to_judgements", 0.5, 3),
        ("demonstration", "best_to_demonstrations", None, 1),
    ],
)
def test_failures_are_counted_and_never_read_as_scores(
    kind: Any, convert: str | None, threshold: float | None, result: int, tmp_path: Path
) -> None:
    rows = [answer(1, n, score=score) for n, score in ((5, 1.0), (6, -1.0), (7, 0.25))]
    rows += [answer(1, 8, error="the server is down"), *[answer(2, n, error="nan") for n in (5, 6)]]
    loaded = load_rows(
        tmp_path, kind, rows[3], *rows[:3], *rows[4:], convert=convert, threshold=threshold
    )
    assert len(loaded.examples) == result
    unused = loaded.files[0].unused
    assert unused[Unused.REWARD_FAILED] == 1
    assert unused[Unused.ALL_REWARDS_FAILED] == 2
    assert loaded.files[0].rows == 6
    assert 8 not in [i for u in encoded(loaded).units for item in u.answers for i in item.ids]
    shown = render(audit(loaded, encoded(loaded), Encoder(TOKENIZER, max_length=99)))
    assert Unused.ALL_REWARDS_FAILED in shown


def test_when_every_reward_failed_nothing_is_trained_on(tmp_path: Path) -> None:
    with raises_error("no-usable-rows") as raised:
        load_rows(tmp_path, "scored", answer(1, 5, error="x"), answer(1, 6, error="y"))
    assert f"2 x {Unused.ALL_REWARDS_FAILED}" in raised.error.message


def test_text_rows_may_have_failed_too(tmp_path: Path) -> None:
    row = {"prompt": "p", "completion": "c"}
    loaded = load_rows(
        tmp_path, "scored", {**row, "score": None, "error": "late"}, {**row, "score": 2}
    )
    assert [e.score for e in loaded.examples if isinstance(e, Judgement)] == [2.0]
    assert loaded.files[0].unused == {Unused.REWARD_FAILED: 1}


# The best of each prompt


def chosen(
    tmp_path: Path, top_n: int, *rows: dict[str, Any], **options: Any
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    source = Source(write(tmp_path / "rows.jsonl", *rows))
    loaded = load(
        [source], "demonstration", convert="best_to_demonstrations", top_n=top_n, **options
    )
    results = [
        e.completion.ids
        for e in loaded.examples
        if isinstance(e, Demonstration) and isinstance(e.completion, Ids)
    ]
    return results, dict(loaded.files[0].unused)


def test_the_best_answers_of_each_prompt_are_selected_by_score_and_position(
    tmp_path: Path,
) -> None:
    rows = [answer(1, n, score=score) for n, score in ((5, 0.5), (6, 2.0), (7, 0.5), (8, 0.1))]
    below, tied = (
        "other completions of its prompt have larger scores",
        "a completion of its prompt with the same score comes before it",
    )
    assert chosen(tmp_path, 1, *rows) == ([(6,)], {below: 2, WORST: 1})
    assert chosen(tmp_path, 2, *rows) == ([(6,), (5,)], {tied: 1, WORST: 1})
    assert chosen(tmp_path, 9, *rows) == ([(6,), (5,), (7,)], {WORST: 1})


WORST = "no other completion of its prompt has a smaller score"


def test_prompts_without_a_difference_of_scores_give_no_demonstration(tmp_path: Path) -> None:
    """With a 0/1 verifier all of their completions may be wrong."""
    right = [answer(1, 5, score=0), answer(1, 6, score=1)]
    rows = [*right, answer(2, 5, score=0), answer(2, 6, score=0), answer(3, 7, score=0)]
    unused = {
        WORST: 1, "all completions of its prompt have the same score": 2,
        "its prompt has no other scored completion": 1,
    }  # fmt: skip
    assert chosen(tmp_path, 2, *rows) == ([(6,)], unused)
    ranking = {"prompt": "p", "completions": ["a", "b"], "scores": [1, 1]}
    other = {"prompt": "q", "completions": ["a", "b"], "scores": [1, 2]}
    loaded = load_rows(tmp_path, "demonstration", ranking, other, convert="best_to_demonstrations")
    assert [e.completion for e in loaded.examples if isinstance(e, Demonstration)] == ["b"]
    assert loaded.files[0].unused == {"all completions of its prompt have the same score": 1}


def test_a_threshold_is_the_smallest_score_that_is_imitated(tmp_path: Path) -> None:
    """Also of a prompt with a single completion, which has nothing to be compared with."""
    rows = [answer(1, n, score=n / 10) for n in (5, 6, 7)]
    rows += [answer(2, 8, score=0.9), answer(3, 9, score=0.1)]
    result, unused = chosen(tmp_path, 3, *rows, threshold=0.6)
    assert result == [(7,), (6,), (8,)]
    assert unused == {"its score is below data.threshold": 2}


def test_truncated_completions_are_imitated_only_when_asked_for(tmp_path: Path) -> None:
    rows = [
        answer(1, 5, score=2) | {"stop": "length"},
        answer(1, 6, score=1) | {"stop": "eos"},
        answer(1, 7, score=0),
    ]
    assert chosen(tmp_path, 3, *rows) == ([(6,)], {"it was truncated": 1, WORST: 1})
    assert chosen(tmp_path, 3, *rows, mask_truncated=False) == ([(5,), (6,)], {WORST: 1})


def test_rankings_give_their_best_too(tmp_path: Path) -> None:
    row = {"prompt": "p", "completions": ["a", "b", "c"], "scores": [1, 3, 3], "weight": 2}
    loaded = load_rows(tmp_path, "demonstration", row, convert="best_to_demonstrations")
    assert [(e.completion, e.weight) for e in loaded.examples if isinstance(e, Demonstration)] == [
        ("b", 2.0)
    ]
    assert loaded.files[0].unused == {}


@given(st.lists(st.integers(0, 3).map(float), min_size=1, max_size=8), st.integers(1, 9))
def test_no_omitted_answer_is_better_than_a_selected_one(scores: list[float], top_n: int) -> None:
    examples = [
        Judgement(prompt="p", completion=f"{n}", score=score, origin=HERE)
        for n, score in enumerate(scores)
    ]
    result, unused = best_to_demonstrations(examples, None, top_n)
    selected = [
        int(e.completion)
        for e in result
        if isinstance(e, Demonstration) and isinstance(e.completion, str)
    ]
    assert len(selected) == min(top_n, sum(score > min(scores) for score in scores))
    left = [n for n in range(len(scores)) if n not in selected]
    assert len(unused) == len(left)
    assert all((scores[t], -t) > (scores[n], -n) for t in selected for n in left)


def test_groups_without_a_difference_make_no_pair_and_are_counted(tmp_path: Path) -> None:
    rows = [
        answer(1, 5, score=1),
        answer(1, 6, score=1),
        answer(2, 5, score=0),
        answer(2, 6, score=1),
    ]
    loaded = load_rows(tmp_path, "preference", *rows, convert="scores_to_pairs")
    assert len(loaded.examples) == 1
    assert loaded.files[0].unused == {"all completions of its prompt have the same score": 2}


def test_a_tokenized_ranking_does_not_depend_on_sampler_log_probabilities(tmp_path: Path) -> None:
    rows = [answer(1, 5, score=1), answer(1, 6, score=0)]
    bare = [
        {name: item for name, item in row.items() if name not in ("logps", "sampled")}
        for row in rows
    ]
    [first], [second] = (
        load_rows(tmp_path, "ranking", *item, convert="scores_to_rankings").examples
        for item in (rows, bare)
    )
    assert isinstance(first, Ranking)
    assert first == second
    assert first.id == second.id
    assert "best_to_demonstrations" in CONVERSIONS
