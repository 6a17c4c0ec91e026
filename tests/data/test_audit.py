"""The audit: counts that are easy to check on small data, and its text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import shown_findings
from tests.tiny import CHATML, NO_END, tiny_tokenizer
from valence.data.audit import Audit, Finding, Spread, WeightAdvice, advised_weights, audit, overlap
from valence.data.audit_text import REMARKS, WARNINGS, render, warnings_of
from valence.data.encode import Encoder
from valence.data.encoded_set import AuditColumns
from valence.data.example_store import ExampleStore
from valence.data.load import File, Loaded
from valence.data.sources import BadRow
from valence.data.values import NUMBER
from valence.types import (
    Chat,
    Content,
    Demonstration,
    Example,
    Ids,
    Judgement,
    Origin,
    Preference,
    Prompt,
    Sampled,
)


def judged(
    prompt: Content, completion: Content, label: bool | None, line: int, path: str = "a.jsonl"
) -> Judgement:
    score = 0.5 if label is None else None
    return Judgement(
        prompt=prompt, completion=completion, label=label, score=score, origin=Origin(path, line)
    )


def pair(chosen: str, rejected: str, line: int, prompt: str = "why") -> Preference:
    return Preference(
        prompt=prompt, chosen=chosen, rejected=rejected, origin=Origin("a.jsonl", line)
    )


def loaded(examples: Sequence[Example], bad: Sequence[BadRow] = (), **more: Any) -> Loaded:
    rows = Counter(e.origin.path for e in examples) + Counter(b.origin.path for b in bad)
    refused = Counter(b.origin.path for b in bad)
    files = (File(path=p, format="judged", rows=n, bad=refused[p], **more) for p, n in rows.items())
    return Loaded(examples=ExampleStore(examples), files=tuple(files), bad=tuple(bad))


def audit_columns(examples: Sequence[Example]) -> AuditColumns:
    return Encoder(tiny_tokenizer(None), max_length=500).encode_all(examples).audit_columns


def audited(
    examples: Sequence[Example],
    bad: Sequence[BadRow] = (),
    template: str | None = None,
    max_length: int = 500,
    **options: Any,
) -> Audit:
    encoder = Encoder(tiny_tokenizer(template), max_length=max_length, **options)
    data = loaded(examples, bad)
    return audit(data, encoder.encode_all(data.examples, data.sources), encoder)


THUMBS = (
    judged("sun", "a star", True, 1),
    judged("moon", "no star", False, 2),
    judged("earth", "a moon", True, 3),
    judged("hello", "good day", True, 4, "b.jsonl"),
)


def test_rows_by_class_and_file() -> None:
    result = audited(THUMBS)
    assert (result.kind, result.units) == ("judgement", 4)
    assert result.classes == {"up": 3, "down": 1}
    assert [(f.path, f.rows, f.classes) for f in result.files] == [
        ("a.jsonl", 3, {"up": 2, "down": 1}),
        ("b.jsonl", 1, {"up": 1}),
    ]
    assert (result.distinct_prompts, result.distinct_answers) == (4, 4)
    assert audited([pair("yes", "no", 1)]).classes == {"preferences": 1}
    assert audited([judged("sun", "a star", None, 1)]).classes == {"scored": 1}


def test_rows_not_used_with_reason_and_place() -> None:
    bad = [
        BadRow(Origin("a.jsonl", n), "label is 'maybe'", "write true or false", "row-label-invalid")
        for n in range(10, 17)
    ]
    long = [judged("sun", "star " * 60, True, 20), judged("sun", "moon " * 60, False, 21)]
    empty = judged("sun", " ", True, 22)
    result = audited([*THUMBS, *long, empty], bad, max_length=40)
    assert [(u.kind, u.count) for u in result.unused] == [
        ("bad_row", 7),
        ("too_long", 2),
        ("empty_answer", 1),
    ]
    assert result.unused[0].rows == tuple(f"a.jsonl:{n}" for n in range(10, 15))
    assert (result.files[0].rows, result.files[0].bad, result.files[0].too_long) == (13, 8, 2)
    assert (result.files[1].bad, result.files[1].too_long) == (0, 0)
    assert result.files[0].rows == sum(result.files[0].classes.values()) + 8 + 2


def test_lengths_are_those_before_any_cut() -> None:
    rows = [
        judged(Ids((5,) * n), Ids((6,) * m), True, n) for n, m in [(1, 2), (2, 2), (3, 4), (10, 90)]
    ]
    result = audited(rows, max_length=20)
    assert result.prompt_length == Spread(1, 2.5, 10, 10)
    assert result.answer_length == Spread(2, 3.0, 90, 90)


@pytest.mark.parametrize(
    ("mode", "lost"), [("drop", 100), ("cut_completion", 80), ("cut_prompt", 100)]
)
def test_the_audit_counts_truncated_tokens(mode: str, lost: int) -> None:
    rows = [
        judged(Ids((5,) * n), Ids((6,) * m), True, n) for n, m in [(1, 2), (2, 2), (3, 4), (10, 90)]
    ]
    cut = audited(rows, max_length=20, long_rows=mode).truncation
    assert cut is not None
    assert (cut.rows, cut.too_long, cut.tokens, cut.tokens_lost, cut.keeps_99) == (
        4,
        1,
        114,
        lost,
        100,
    )


def test_max_length_that_keeps_99_percent() -> None:
    rows = [judged(Ids((5,)), Ids((6,) * n), True, n) for n in range(1, 201)]
    cut = audited(rows).truncation
    assert cut is not None
    assert cut.keeps_99 == 1 + 198
    assert (cut.too_long, cut.tokens_lost) == (0, 0)


def test_duplicates_and_contradictions_name_both_rows() -> None:
    rows = [*THUMBS, judged("sun", "a star", True, 7), judged("sun", "a star", False, 8, "b.jsonl")]
    result = audited(rows).findings
    assert result["duplicates"] == Finding(1, ("a.jsonl:7 = a.jsonl:1",))
    assert result["contradictions"] == Finding(1, ("b.jsonl:8 against a.jsonl:1",))
    assert not {"duplicates", "contradictions"} & set(audited(THUMBS).findings)
    pairs = [
        pair("yes", "no", 1),
        pair("yes", "perhaps", 2),
        pair("no", "yes", 3),
        pair("yes", "no", 4),
        pair("x", "x", 5),
    ]
    result = audited(pairs).findings
    assert result["duplicates"].rows == ("a.jsonl:4 = a.jsonl:1",)
    assert result["contradictions"].rows == (
        "a.jsonl:3 against a.jsonl:1",
        "a.jsonl:4 against a.jsonl:3",
    )
    assert result["equal_sides"].rows == ("a.jsonl:5",)


def test_same_text_judged_under_two_prompts_is_no_contradiction() -> None:
    rows = [judged("sun", "a star", True, 1), judged("moon", "a star", False, 2)]
    assert "contradictions" not in audited(rows).findings


def test_length_difference_between_the_classes() -> None:
    rows = [
        judged(Ids((5, n)), Ids((6, 7) * (4 if n % 2 else 2)), bool(n % 2), n) for n in range(1, 9)
    ]
    result = audited(rows)
    assert result.mean_answer == {"up": 8.0, "down": 4.0}
    assert "length_bias" in result.findings
    assert "2.00" in render(result)
    level = [judged(Ids((5, n)), Ids((6, 7) * 2), bool(n % 2), n) for n in range(1, 9)]
    assert "length_bias" not in audited(level).findings
    sides = [
        Preference(
            prompt=Ids((5,)), chosen=Ids((6,) * 3), rejected=Ids((7,) * 9), origin=Origin("a", 1)
        )
    ]
    assert audited(sides).mean_answer == {"chosen": 3.0, "rejected": 9.0}


def test_one_class_after_the_other_is_remarked() -> None:
    def rows(labels: Sequence[bool]) -> list[Judgement]:
        return [judged(f"sun {n}", f"star {n}", label, n) for n, label in enumerate(labels)]

    assert "blocks" in audited(rows([True] * 8 + [False] * 8)).findings
    assert "blocks" not in audited(rows([True, False] * 8)).findings
    assert "blocks" not in audited(rows([True, False])).findings


def test_data_that_kto_cannot_learn_from() -> None:
    same_answer = [judged("sun", "star", True, 1), judged("moon", "star", False, 2)]
    same_prompt = [judged("sun", "star", True, 1), judged("sun", "moon", False, 2)]
    assert "no_mismatch" in audited(same_answer).findings
    assert "no_mismatch" in audited(same_prompt).findings
    assert "no_mismatch" not in audited(THUMBS).findings
    assert "one_class" in audited([THUMBS[0], THUMBS[2]]).findings
    assert "one_class" not in audited(THUMBS).findings


def test_ends_of_turns() -> None:
    ids = [judged(Ids((5,)), Ids((6, 7)), True, 1), judged(Ids((6,)), Ids((6, 4)), False, 2)]
    assert audited(ids).findings["end_of_turn_missing"].rows == ("a.jsonl:1",)
    vocabulary = Encoder(tiny_tokenizer(), max_length=500).vocab.digest
    truncated = Ids((6, 7), Sampled((), vocabulary=vocabulary, is_truncated=True))
    ids[0] = judged(Ids((5,)), truncated, True, 1)
    assert "end_of_turn_missing" not in audited(ids).findings
    assert audited(ids).findings["sampling_truncated"].rows == ("a.jsonl:1",)
    chats = [
        judged(
            Chat(({"role": "user", "content": "sun"},)),
            Chat(({"role": "assistant", "content": "star"},)),
            True,
            1,
        )
    ]
    assert audited(chats, template=NO_END).findings["end_of_turn_added"].count == 1
    cut = audited(
        [judged("sun", "star " * 30, True, 1)], max_length=20, long_rows="cut_completion"
    ).findings
    assert set(cut) == {"cut_completion", "one_class", "no_mismatch"}


def test_text_rows_on_a_chat_model() -> None:
    assert audited(THUMBS, template=CHATML, as_chat=False).findings["text_on_chat_model"].count == 4
    assert "text_on_chat_model" not in audited(THUMBS, template=None).findings
    assert "text_on_chat_model" not in audited(THUMBS, template=CHATML, as_chat=True).findings


def test_template_that_prints_the_date_is_remarked() -> None:
    chats = [
        judged(
            Chat(({"role": "user", "content": "sun"},)),
            Chat(({"role": "assistant", "content": "star"},)),
            True,
            1,
        )
    ]
    assert "dated_template" in audited(chats, template=CHATML + "{# strftime_now('%Y') #}").findings
    assert "dated_template" not in audited(chats, template=CHATML).findings


def test_other_kinds_and_no_rows_at_all() -> None:
    origin = Origin("a.jsonl", 1)
    for rows in (
        [Prompt(prompt="sun", origin=origin)],
        [Demonstration(prompt="sun", completion="star", origin=origin)],
        [],
    ):
        result = audited(rows)
        assert result.weights is None
        json.dumps(result.to_dict(), allow_nan=False)
        assert render(result) or not rows
    nothing = audited([judged("sun", "", True, 1)])
    assert (nothing.units, nothing.prompt_length, nothing.truncation, nothing.weights) == (
        0,
        None,
        None,
        None,
    )
    assert [(unused.kind, unused.count) for unused in nothing.unused] == [("empty_answer", 1)]
    assert nothing.unused[0].rows[0] in render(nothing)


def test_plain_data_is_the_same_every_time() -> None:
    first, second = audited(THUMBS).to_dict(), audited(THUMBS).to_dict()
    assert json.dumps(first) == json.dumps(second)
    assert json.loads(json.dumps(first, allow_nan=False))["classes"] == {"up": 3, "down": 1}


# --- class weights


def test_advice_names_the_smaller_classs_weight() -> None:
    few_up = advised_weights(100, 400)
    assert (few_up.ratio, few_up.change) == (0.25, "desirable_weight")
    assert (few_up.low, few_up.high) == pytest.approx((4.0, 16 / 3))
    few_down = advised_weights(400, 100)
    assert few_down.change == "undesirable_weight"
    assert (few_down.low, few_down.high) == pytest.approx((3.0, 4.0))
    assert re.search(r"loss\.undesirable_weight\D+3\D+4\b", str(few_down.warning))


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0.01, 100), st.floats(0.01, 100))
def test_advised_weights_bring_the_ratio_into_the_range(
    n_up: int, n_down: int, up: float, down: float
) -> None:
    advice = advised_weights(n_up, n_down, up, down)
    if advice.change is None:
        assert advice.ratio is not None
        assert 1 - 1e-6 <= advice.ratio <= 4 / 3 + 1e-6
        assert advice.warning is None
        return
    assert f"loss.{advice.change}" in str(advice.remedy)
    shown = [float(word) for word in str(advice.remedy).split() if NUMBER.fullmatch(word)]
    assert len(shown) == 2
    for weight in (advice.low, advice.high, *shown):
        assert weight is not None
        weights = {"desirable_weight": up, "undesirable_weight": down, advice.change: weight}
        assert advised_weights(n_up, n_down, **weights).change is None


@pytest.mark.parametrize("counts", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_class_is_reported_without_a_crash(counts: tuple[int, int]) -> None:
    advice = advised_weights(*counts)
    assert isinstance(advice, WeightAdvice)
    assert (advice.ratio, advice.change, advice.low) == (None, None, None)
    numbers = [int(word) for word in re.findall(r"x (\d+) rows", str(advice.warning))]
    assert numbers == list(counts)
    assert advised_weights(5, 5, 0.0, 1.0).ratio is None


# --- the screen


def test_the_balance_includes_the_weights_of_the_recipe() -> None:
    result = audited([judged(f"why {n}", "because", n > 0, n) for n in range(5)])
    assert re.search(r"4 up / 1 down = 4;.*undesirable_weight between 3 and 4", render(result))
    weighted = replace(result, weights=advised_weights(4, 1, 1.0, 3.0))
    (line,) = (line for line in render(weighted).splitlines() if "balance" in line)
    assert "1 x 4 up / 3 x 1 down = 1.33;" in line
    assert "weight" not in line


def test_screen_of_sound_data_has_no_findings() -> None:
    lengths = [(2, 5, True, "a.jsonl"), (4, 7, False, "a.jsonl"), (3, 6, True, "b.jsonl")]
    rows = [
        judged(Ids((5,) * n), Ids((6,) * (m - 1) + (4,)), up, i, path)
        for i, (n, m, up, path) in enumerate(lengths)
    ]
    result = audited(rows)
    lines = render(result).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["file", "format", "rows", "up", "down"],
        ["a.jsonl", "judged", "2", "1", "1"],
        ["b.jsonl", "judged", "1", "1", "0"],
        ["all", "3", "2", "1"],
    ]
    assert [line.split()[-4:] for line in lines[6:8]] == [
        ["2", "3", "4", "4"],
        ["5", "6", "7", "7"],
    ]
    assert len({len(line) for line in lines[:4]}) == 1  # columns of numbers end at the same place
    assert re.search(r"max_length\D+500\b", lines[8])
    lengths, weights = lines[10:12]
    assert re.findall(r"[\d.]+", lengths) == ["6", "7", "1.27"]
    assert re.search(r"\b2 up .*\b1 down .*\b2\b.*loss\.undesirable_weight\D+1\.5\D+2\b", weights)
    assert set(result.findings) == shown_findings(result) == {"length_bias"}
    assert len(lines) == 16  # and nothing else: the finding has two lines


def test_the_screen_names_findings_and_their_places() -> None:
    rows = [*THUMBS[:3], judged("sun", "a star", False, 4), judged("<pad>", "star " * 60, True, 5)]
    maybe = BadRow(Origin("a.jsonl", 9), "label is 'maybe'", "write true", "row-label-invalid")
    result = audited(rows, [maybe], max_length=40)
    text = render(result)
    [bad] = [line for line in text.splitlines() if "a.jsonl:9" in line]
    assert bad.split()[0] == "1"
    assert "label is 'maybe'" in bad
    assert {"contradictions", "special_tokens_in_text"} <= shown_findings(result)
    assert "duplicates" not in result.findings
    [contradiction] = [line for line in text.splitlines() if "a.jsonl:4 against :1" in line]
    assert contradiction.split()[0] == "1"
    assert re.search(r"\b1 of 5 .*\b20 %.*max_length\D+40\b", text)


def test_screen_keeps_many_reasons_short() -> None:
    bad = [
        BadRow(Origin("a.jsonl", n), f"label is {n}", "write true or false", "row-label-invalid")
        for n in range(30)
    ]
    result = audited(THUMBS, bad)
    assert len(result.unused) == 30
    assert re.search(r"^ +22  .*\b22\b", render(result), re.MULTILINE)
    assert len([line for line in render(result).splitlines() if "label is" in line]) == 8


def test_every_finding_is_either_a_warning_or_a_remark() -> None:
    assert not set(WARNINGS) & set(REMARKS)
    result = audited([*THUMBS, judged("sun", "a star", False, 9), pair("x", "x", 1)])
    assert set(result.findings) == shown_findings(result) <= {*WARNINGS, *REMARKS}


def test_rows_that_are_in_the_training_data_too() -> None:
    others = [
        judged("sun", "a star", True, 1, "held.jsonl"),
        judged("sun", "a star", False, 2, "held.jsonl"),
        judged("moon", "a lamp", False, 3, "held.jsonl"),
        judged("rain", "water", True, 4, "held.jsonl"),
    ]
    outcome = overlap(audit_columns(THUMBS), audit_columns(others))
    assert outcome == {
        "rows_in_train": Finding(1, ("held.jsonl:1",)),
        "prompts_in_train": Finding(2, ("held.jsonl:2", "held.jsonl:3")),
    }
    assert overlap(audit_columns(THUMBS), audit_columns(others[3:])) == {}
    result = audited(others)
    result = replace(result, findings={**result.findings, **outcome})
    assert json.loads(json.dumps(result.to_dict()))["findings"]["prompts_in_train"]["count"] == 2
    assert {"rows_in_train", "prompts_in_train"} <= shown_findings(result)
    (warning,) = [line for line in warnings_of(result) if "data.train: held.jsonl:2, :3" in line]
    assert warning.startswith("2 ")
