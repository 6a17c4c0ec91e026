"""Rows held out by their prompts: sides that depend on nothing else, and an account of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import Source, write
from tests.errors import raises_error
from valence.data.load import InMemory, Loaded, load, load_split
from valence.data.split import PromptSplit, prompt_key
from valence.types import Chat, Content, Example, Ids

SPLIT = PromptSplit(0.3)


def rows(num_prompts: int = 40, num_answers: int = 2) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {i}", "completion": f"answer {i} {k}", "label": k == 0}
        for k in range(num_answers)
        for i in range(num_prompts)
    ]


def divided(sources: Sequence[Any], kind: Any = "judgement", **options: Any) -> list[Loaded]:
    split = options.pop("split", SPLIT)
    return list(load_split(sources, kind, split, where="data.eval", **options))


def held_out_of(num_prompts: int) -> set[str]:
    return {row["prompt"] for row in rows(num_prompts, 1) if SPLIT.is_held_out(row["prompt"])}


def prompts(loaded: Loaded) -> set[Content]:
    return {example.prompt for example in loaded.examples}


def contents(examples: Sequence[Example]) -> list[str]:
    return sorted(example.id for example in examples)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Yes."}


@given(st.text(), st.integers(0, 2**40), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_larger_share_holds_out_what_a_smaller_one_does(text, seed, share, other) -> None:
    small, large = sorted((share, other))
    assert PromptSplit(small, seed).is_held_out(text) <= PromptSplit(large, seed).is_held_out(text)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_the_share_is_about_that_of_the_prompts(share: float) -> None:
    split = PromptSplit(share, 3)
    held_out = sum(split.is_held_out(f"question {i}") for i in range(4000))
    assert abs(held_out / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_sides_are_the_same_on_every_machine_and_differ_with_the_seed() -> None:
    sides = [PromptSplit(0.3).is_held_out(f"question {i}") for i in range(12)]
    assert sides == [i in (0, 8, 9, 10) for i in range(12)]  # written down once
    others = [PromptSplit(0.3, 1).is_held_out(f"question {i}") for i in range(12)]
    assert others != sides


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("Hi?", Chat((user("Hi?"),)), True),
        ("Hi?", Chat((user("Hi?"), ANSWER, user("And?"))), True),
        (Chat((SYSTEM, user("Hi?"))), Chat((SYSTEM, user("Hi?"), ANSWER, user("Go on."))), True),
        ("Hi?", Chat((SYSTEM, user("Hi?"))), False),
        ("Hi?", "Hi", False),
        (Ids((1, 2)), Ids((1, 2)), True),
        (Ids((1, 2)), Ids((1, 3)), False),
        ("Hi?", Ids((1, 2), readable="Hi?"), True),
        (Chat((user("Hi?"),)), Ids((1, 2), readable=Chat((user("Hi?"), ANSWER, SYSTEM))), True),
    ],
)
def test_rows_of_a_conversation_are_on_one_side(
    one: Content, other: Content, are_equal: bool
) -> None:
    assert (SPLIT.position(one) == SPLIT.position(other)) is are_equal


def test_the_key_of_a_prompt_has_all_of_its_turns_and_tools() -> None:
    chat = Chat((user("Hi?"),))
    assert prompt_key("Hi?") == prompt_key(chat)
    assert prompt_key(chat) != prompt_key(Chat((user("Hi?"), ANSWER, user("And?"))))
    assert prompt_key(chat) != prompt_key(Chat(chat.messages, ({"name": "f"},)))
    assert prompt_key(Ids((1,))) != prompt_key(Ids((2,)))


def test_both_sides_together_are_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *rows())
    train, held_out = divided([Source(path)])
    assert not prompts(train) & prompts(held_out)
    assert prompts(held_out) == held_out_of(40)
    everything = load([Source(path)], "judgement")
    assert contents([*train.examples, *held_out.examples]) == contents(list(everything.examples))
    assert train.files[0].rows + held_out.files[0].rows == 80
    assert held_out.files[0].rows == len(held_out.examples) == held_out.files[0].examples


def test_rows_that_are_added_move_no_other_row(tmp_path: Path) -> None:
    before = divided([Source(write(tmp_path / "a.jsonl", *rows(20)))])
    after = divided(
        [
            Source(write(tmp_path / "b.jsonl", *reversed(rows(40, 3)))),
            Source(write(tmp_path / "a.jsonl", *rows(20))),
        ]
    )
    for old, new in zip(before, after, strict=True):
        assert prompts(old) <= prompts(new)


def test_files_keep_their_weights_keys_and_bad_rows(tmp_path: Path) -> None:
    renamed = [
        {"question": r["prompt"], "completion": r["completion"], "label": r["label"]}
        for r in rows()
    ]
    bad = {"question": "question 0", "completion": "", "label": "perhaps"}
    first = Source(
        write(tmp_path / "a.jsonl", *renamed, bad), keys={"prompt": "question"}, weight=2.0
    )
    second = Source(write(tmp_path / "b.jsonl", *rows(60)))
    train, held_out = divided([first, second], on_bad_row="skip")
    assert (len(train.bad), len(held_out.bad)) == (1, 0)
    assert [file.bad for file in (*train.files, *held_out.files)] == [1, 0, 0, 0]
    for loaded in (train, held_out):
        weights = {(e.origin.path, e.weight) for e in loaded.examples}
        assert weights == {(first.path, 2.0), (second.path, 1.0)}
    assert sum(f.rows for f in (*train.files, *held_out.files)) == 81 + 120


def test_conversions_combine_the_rows_of_one_side(tmp_path: Path) -> None:
    scored = [
        {"prompt": r["prompt"], "completion": r["completion"], "score": i % 7}
        for i, r in enumerate(rows(40, 3))
    ]
    path = write(tmp_path / "rows.jsonl", *scored)
    train, held_out = divided([Source(path)], "preference", convert="scores_to_pairs")
    everything = load([Source(path)], "preference", convert="scores_to_pairs")
    assert contents([*train.examples, *held_out.examples]) == contents(list(everything.examples))
    assert not prompts(train) & prompts(held_out)
    assert sum(sum(f.unused.values()) for f in (*train.files, *held_out.files)) == len(
        everything.unused
    )


def test_a_limit_counts_the_rows_of_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *rows())
    train, held_out = divided([Source(path)], limit=30)
    assert len(train.examples) + len(held_out.examples) == 30
    assert prompts(held_out) == held_out_of(30)


def test_rows_in_memory_may_be_read_only_once() -> None:
    train, held_out = divided([InMemory(iter(rows()))])
    assert len(train.examples) + len(held_out.examples) == 80
    assert not prompts(train) & prompts(held_out)


def test_rows_left_out_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *rows(10))
    loaded = load([Source(path)], "judgement", leave_out=lambda prompt: prompt == "question 3")
    assert "question 3" not in prompts(loaded)
    assert (loaded.files[0].rows, sum(loaded.files[0].unused.values())) == (20, 2)
    with raises_error("no-usable-rows"):
        load([Source(path)], "judgement", leave_out=lambda prompt: True)


@pytest.mark.parametrize(("share", "seed"), [(0.01, 0), (0.99, 0), (0.001, 5)])
def test_a_share_that_divides_too_few_prompts_names_one_that_does(
    tmp_path: Path, share: float, seed: int
) -> None:
    source = Source(write(tmp_path / "rows.jsonl", *rows(6)))
    split = PromptSplit(share, seed)
    with raises_error("split-too-small", where="data.eval") as raised:
        divided([source], split=split)
    better = float((raised.error.fix or "").split("set it to ")[1].split(",")[0])
    train, held_out = divided([source], split=PromptSplit(better, seed))
    assert len(prompts(held_out)) >= 2
    assert prompts(train)


def test_two_prompts_cannot_be_divided(tmp_path: Path) -> None:
    with raises_error("split-too-small"):
        divided([Source(write(tmp_path / "rows.jsonl", *rows(2)))], split=PromptSplit(0.5))


@pytest.mark.parametrize("prompt", ["question 1", [user("question 1"), ANSWER, user("And?")]])
def test_tokens_are_divided_by_the_prompt_next_to_them(tmp_path: Path, prompt: Any) -> None:
    row = {"prompt_ids": [5, 6], "completion_ids": [7], "label": True, "prompt": prompt}
    [example] = load([Source(write(tmp_path / "rows.jsonl", row))], "judgement").examples
    assert example.prompt == Ids((5, 6))
    assert SPLIT.position(example.prompt) == SPLIT.position("question 1")


def test_tokens_without_a_readable_prompt_are_divided_by_themselves(tmp_path: Path) -> None:
    row = {"prompt_ids": [5, 6], "completion_ids": [7], "label": True, "prompt": 3}
    [example] = load([Source(write(tmp_path / "rows.jsonl", row))], "judgement").examples
    assert SPLIT.position(example.prompt) == SPLIT.position(Ids((5, 6)))
