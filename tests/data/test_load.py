"""From files to Examples of one kind: weights, conversions, and an account of every row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import JUDGED, Source, load_rows, write
from tests.errors import raises_error
from valence.data.convert import CONVERSIONS, Unused
from valence.data.kind_names import METHOD_FOR
from valence.data.load import InMemory, Loaded, fitting_mapping, load
from valence.methods import method_of
from valence.types import Demonstration, Judgement, Kind, Origin, Preference, Prompt, Ranking

HERE = Origin("rows.jsonl", 1)


def up(completion: str, prompt: str = "p", **more) -> dict:
    return {"prompt": prompt, "completion": completion, "label": True, **more}


def down(completion: str, prompt: str = "p", **more) -> dict:
    return {**up(completion, prompt, **more), "label": False}


def scored(completion: str, score: float, prompt: str = "p", **more) -> dict:
    return {"prompt": prompt, "completion": completion, "score": score, **more}


def ranked(*scores: float, prompt: str = "p") -> dict:
    return {
        "prompt": prompt,
        "completions": [f"answer {n}" for n in range(len(scores))],
        "scores": list(scores),
    }


def judgements(loaded: Loaded) -> list[tuple]:
    return [(e.completion, e.label) for e in loaded.examples if isinstance(e, Judgement)]


def pairs(loaded: Loaded) -> list[tuple]:
    return [(e.prompt, e.chosen, e.rejected) for e in loaded.examples if isinstance(e, Preference)]


# Files


OTHERS = [
    Source("a", keys={"prompt": "asked", "completion": "said"}),
    Source(
        "b", keys={"prompt": "question", "completion": "answer", "label": "thumb", "weight": "w"}
    ),
    Source("c", format="openrlhf"),
]


@pytest.mark.parametrize(("row", "format", "expected"), [
    ({"question": "q", "answer": "a", "thumb": "up"}, None,
     (None, {"prompt": "question", "completion": "answer", "label": "thumb"})),
    ({"asked": "q", "said": "a"}, None, (None, {"prompt": "asked", "completion": "said"})),
    ({"question": "q"}, None, (None, {"prompt": "question"})),
    ({"input": "q", "output": "a", "label": True}, None, ("openrlhf", {})),
    ({"question": "q", "answer": "a", "thumb": 1}, "judgement",
     ("judgement", {"prompt": "question", "completion": "answer", "label": "thumb"})),
    ({"question": "q", "answer": "a"}, "judgement", None),
    ({"prompt": "q", "completion": "a", "label": True}, None, None),
    ({"answer": "a"}, None, None),
])  # fmt: skip
def test_the_mapping_of_another_file_is_used_if_it_fits(
    row: dict, format: str | None, expected: tuple | None, tmp_path: Path
):
    file = Source(write(tmp_path / "rows.jsonl", row), format=format)
    assert fitting_mapping(file, OTHERS) == expected


def test_a_file_that_cannot_be_read_has_no_mapping(tmp_path: Path):
    assert fitting_mapping(Source(str(tmp_path / "absent.jsonl")), OTHERS) is None


def test_two_files_that_share_a_prompt_are_both_kept(tmp_path: Path):
    paths = [
        write(tmp_path / name, up(f"from {name}"), {**down("again"), "prompt_id": 1})
        for name in ("a.jsonl", "b.jsonl")
    ]
    loaded = load([Source(path) for path in paths], "judgement")
    assert judgements(loaded) == [
        ("from a.jsonl", True),
        ("again", False),
        ("from b.jsonl", True),
        ("again", False),
    ]
    assert loaded.sources == (paths[0], paths[0], paths[1], paths[1])
    assert [file.format for file in loaded.files] == ["judgement", "judgement"]


def test_the_weight_of_a_file_multiplies_the_weights_of_its_rows(tmp_path: Path):
    loaded = load_rows(
        tmp_path, "judgement", up("a"), up("b", weight=0.5), up("c", weight=0), weight=3.0
    )
    assert [e.weight for e in loaded.examples] == [3.0, 1.5, 0.0]


def test_limits_count_rows_per_file_and_over_all(tmp_path: Path):
    paths = [write(tmp_path / f"{n}.jsonl", *[up(f"{n}{i}") for i in range(4)]) for n in range(3)]
    sources = [Source(paths[0], limit=2), Source(paths[1]), Source(paths[2])]
    assert [f.rows for f in load(sources, "judgement").files] == [2, 4, 4]
    loaded = load(sources, "judgement", limit=3)
    assert [f.rows for f in loaded.files] == [2, 1, 0]
    assert [c for c, _ in judgements(loaded)] == ["00", "01", "10"]


def test_a_file_listed_twice_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", JUDGED)
    with raises_error("file-listed-twice", where="a.jsonl", fix="weight: 2"):
        load([Source(path), Source(path, weight=2.0)], "judgement")


def test_columns_that_are_not_read_are_counted(tmp_path: Path):
    loaded = load_rows(
        tmp_path, "judgement", up("a", id=1, note=None), up("b", id=2, note="x", prompt_id=3)
    )
    assert loaded.ignored_columns == {"id": 2, "note": 1, "prompt_id": 1}
    assert loaded.files[0].ignored_columns == loaded.ignored_columns


def test_a_usual_column_that_another_one_stands_in_for_is_counted_as_ignored(tmp_path: Path):
    loaded = load_rows(tmp_path, "judgement", up("a", text="q"), keys={"prompt": "text"})
    assert loaded.ignored_columns == {"prompt": 1}
    assert loaded.examples[0].prompt == "q"


def test_further_columns_of_a_prompt_are_kept_and_not_reported_as_ignored(tmp_path: Path):
    loaded = load_rows(tmp_path, "prompt", {"prompt": "1+1=", "answer": 2})
    assert loaded.ignored_columns == {}
    assert loaded.examples == (
        Prompt(prompt="1+1=", info={"answer": 2}, origin=loaded.examples[0].origin),
    )


def test_a_named_format_reads_its_columns_from_rows_of_another_format(tmp_path: Path):
    loaded = load_rows(tmp_path, "prompt", up("a"), format="prompt")
    assert isinstance(loaded.examples[0], Prompt)
    assert loaded.examples[0].info == {"completion": "a", "label": True}


def test_keys_of_a_column_that_no_row_has_are_refused(tmp_path: Path):
    for keys in ({"weight": "importance"}, {"completion": "reply"}):
        row = {"prompt": "p", "answer": "a", "label": True, "completion": "c"}
        with raises_error("keys-missing-column", where="rows.jsonl", fix="prompt") as raised:
            load_rows(tmp_path, "judgement", row, keys=keys)
        assert repr(*keys.values()) in raised.error.message


@pytest.mark.parametrize(
    ("keys", "code", "columns", "near"),
    [
        (
            {"prompt": "qestion", "completion": "Answer"},
            "keys-missing-column",
            "'qestion' or 'Answer'",
            "'question' and 'answer'",
        ),
        (
            {"prompt": "question", "completion": "answer", "label": "thum"},
            "keys-missing-column",
            "'thum'",
            "'thumb'",
        ),
        ({"promt": "question"}, "keys-unknown-column", "'promt'", "'prompt'"),
        ({"question": "prompt"}, "keys-unknown-column", "'question'", "{prompt: question}"),
    ],
)
def test_the_nearest_column_is_suggested(
    keys: dict, code: str, columns: str, near: str, tmp_path: Path
):
    row = {"question": "q", "answer": "a", "thumb": True}
    with raises_error(code, where="rows.jsonl", fix=f"{near}?") as raised:
        load_rows(tmp_path, "judgement", row, keys=keys)
    assert columns in raised.error.message


# Bad rows


@pytest.mark.parametrize("empty", [None, "", " "])
def test_a_row_without_a_rating_is_no_row_of_another_format(empty: str | None, tmp_path: Path):
    """Also where most of the first rows have none."""
    rows = [{"q": "a", "a": "b", "thumb": empty}] * 3 + [{"q": "a", "a": "c", "thumb": ":+1:"}]
    keys = {"prompt": "q", "completion": "a", "label": "thumb"}
    with raises_error("row-rating-missing", where="rows.jsonl:1", fix="on_bad_row: skip") as raised:
        load_rows(tmp_path, "judgement", *rows, keys=keys)
    assert "thumb" in raised.error.message
    assert "demonstration" not in raised.error.message
    loaded = load_rows(tmp_path, "judgement", *rows, keys=keys, on_bad_row="skip")
    assert judgements(loaded) == [("c", True)]
    assert len(loaded.bad) == 3


def test_bad_rows_stop_the_reading_at_the_first(tmp_path: Path):
    with raises_error("row-label-invalid", where="rows.jsonl:2", fix="on_bad_row: skip"):
        load_rows(
            tmp_path,
            "judgement",
            up("a"),
            {**up("b"), "label": "maybe"},
            {**up("c"), "label": None},
        )


def test_skipped_bad_rows_are_counted_and_listed(tmp_path: Path):
    loaded = load_rows(
        tmp_path,
        "judgement",
        {},
        {**up("a"), "label": "maybe"},
        up("b"),
        up(" "),
        on_bad_row="skip",
    )
    assert [(bad.origin.line, bad.code) for bad in loaded.bad] == [
        (1, "row-column-missing"),
        (2, "row-label-invalid"),
        (4, "row-completion-empty"),
    ]
    assert all(bad.fix for bad in loaded.bad)
    file = loaded.files[0]
    assert (file.rows, file.bad, file.unused, file.examples) == (4, 3, {}, 1)


def test_the_format_is_found_behind_many_unreadable_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("not json\n" * 50 + '{"prompt": "p", "completion": "a", "label": true}\n')
    loaded = load([Source(str(path))], "judgement", on_bad_row="skip")
    assert (len(loaded.examples), len(loaded.bad)) == (1, 50)


@pytest.mark.parametrize("num_rated", [1, 4])
def test_a_missing_rating_is_counted_in_all_rows(tmp_path: Path, num_rated: int):
    """Also if most rows have none, so that they look like demonstrations."""
    path = tmp_path / "rows.csv"
    rows = [f"p{i},a,{i % 2 if i < num_rated else ''}\n" for i in range(7)]
    path.write_text("prompt,completion,label\n" + "".join(rows))
    with raises_error("row-rating-missing", where=f"rows.csv:{num_rated + 2}") as raised:
        load([Source(str(path))], "judgement")
    num_after = 7 - num_rated - 1
    assert f" {num_after} of the next {num_after} rows" in raised.error.message
    path.write_text("prompt,completion,label\np,a,1\np,b,\np,c,0\n")
    with raises_error("row-rating-missing", where="rows.csv:3") as raised:
        load([Source(str(path))], "judgement")
    assert "next" not in raised.error.message


# Kinds


def test_rows_of_another_kind_are_refused_with_the_conversion_that_would_help(tmp_path: Path):
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    cases: list[tuple[dict, str, tuple[str, ...]]] = [
        (pair, "judgement", ("data.convert: pairs_to_judgements",)),
        (up("a"), "preference", ("data.convert: judgements_to_pairs", "kto")),
        (up("a"), "demonstration", ("data.convert: chosen_to_demonstrations",)),
        (scored("a", 1.0), "judgement", ("scores_to_judgements and data.threshold",)),
        (ranked(1, 2), "preference", ("data.convert: scores_to_pairs",)),
        (up("a"), "ranking", ("set reward", "data.convert: scores_to_rankings if", "kto")),
        (pair, "ranking", ("set reward", "data.convert: pairs_to_rankings;")),
        ({"prompt": "p", "completion": "a"}, "ranking", ("set reward",)),
        (up("a"), "prompt", ("format: prompt",)),
        ({"prompt": "p", "reply": "a"}, "judgement", ("keys", "(reply)")),
        ({"prompt": "p", "completion": "a"}, "judgement", ("sft",)),
    ]
    for row, kind, ways in cases:
        with raises_error("kind-mismatch", where="rows.jsonl:1") as raised:
            load_rows(tmp_path, kind, row)
        fix = str(raised.error.fix)
        assert all(way in fix for way in ways), raised.error
        can_be_converted = any("data.convert" in way or "scores_to" in way for way in ways)
        assert ("data.convert:" in fix) == can_be_converted, raised.error


@pytest.mark.parametrize(("kind", "name"), METHOD_FOR.items())
def test_the_method_that_is_suggested_reads_such_rows(kind: Kind, name: str):
    name, _, reward = name.partition(" with a ")
    assert method_of(name, bool(reward)).kind == kind


def test_a_conversion_must_return_the_kind_that_the_method_needs(tmp_path: Path):
    with raises_error("conversion-mismatch", where="data.convert") as raised:
        load_rows(tmp_path, "preference", JUDGED, convert="pairs_to_judgements")
    assert "pairs_to_judgements" in raised.error.message
    with raises_error("conversion-unknown", where="data.convert", fix=", ".join(CONVERSIONS)):
        load_rows(tmp_path, "preference", JUDGED, convert="pairs")


def test_a_threshold_is_given_exactly_where_it_is_read(tmp_path: Path):
    with raises_error("threshold-missing", where="data.threshold"):
        load_rows(tmp_path, "judgement", scored("a", 1), convert="scores_to_judgements")
    for convert, threshold in (
        (None, 1.0),
        ("pairs_to_judgements", 1.0),
        ("scores_to_judgements", float("nan")),
    ):
        with raises_error("threshold-no-effect", where="data.threshold"):
            load_rows(tmp_path, "judgement", JUDGED, convert=convert, threshold=threshold)


# Conversions


def test_pairs_to_judgements_keeps_both_sides_next_to_each_other(tmp_path: Path):
    rows = [
        {"prompt": "p", "chosen": f"good {n}", "rejected": f"bad {n}", "weight": n}
        for n in range(1, 3)
    ]
    loaded = load_rows(tmp_path, "judgement", *rows, convert="pairs_to_judgements")
    assert judgements(loaded) == [
        ("good 1", True),
        ("bad 1", False),
        ("good 2", True),
        ("bad 2", False),
    ]
    assert [e.weight for e in loaded.examples] == [1, 1, 2, 2]
    assert [e.origin.line for e in loaded.examples] == [1, 1, 2, 2]
    assert (loaded.files[0].rows, loaded.files[0].unused, loaded.files[0].examples) == (2, {}, 4)


def test_rows_that_need_no_conversion_stay_as_they_are(tmp_path: Path):
    files = [
        write(tmp_path / "judged.jsonl", up("a"), down("b")),
        write(tmp_path / "paired.jsonl", {"prompt": "p", "chosen": "c", "rejected": "d"}),
    ]
    loaded = load([Source(f) for f in files], "judgement", convert="pairs_to_judgements")
    assert judgements(loaded) == [("a", True), ("b", False), ("c", True), ("d", False)]


def test_judgements_to_pairs_uses_every_answer_of_a_prompt_that_has_both(tmp_path: Path):
    rows = [
        up("u1"),
        up("u2", weight=0.5),
        down("d1", weight=0.75),
        up("u3"),
        up("lonely", "q"),
        down("sad", "r"),
    ]
    loaded = load_rows(tmp_path, "preference", *rows, convert="judgements_to_pairs")
    assert pairs(loaded) == [("p", "u1", "d1"), ("p", "u2", "d1"), ("p", "u3", "d1")]
    assert [e.weight for e in loaded.examples] == [0.75, 0.5, 0.75]
    assert loaded.files[0].unused == {
        Unused.NO_OTHER_DOWN: 1,
        Unused.NO_OTHER_UP: 1,
    }
    assert (loaded.files[0].rows, loaded.files[0].examples) == (6, 3)


def test_judgements_to_pairs_never_pairs_an_answer_with_itself(tmp_path: Path):
    loaded = load_rows(
        tmp_path,
        "preference",
        up("same"),
        down("same"),
        up("a"),
        down("b"),
        convert="judgements_to_pairs",
    )
    assert pairs(loaded) == [("p", "a", "b")]
    assert loaded.files[0].unused == {Unused.JUDGED_BOTH_WAYS: 2}


def test_judgements_to_pairs_joins_the_files_of_a_prompt(tmp_path: Path):
    files = [write(tmp_path / "up.jsonl", up("u")), write(tmp_path / "down.jsonl", down("d"))]
    assert pairs(load([Source(f) for f in files], "preference", convert="judgements_to_pairs")) == [
        ("p", "u", "d")
    ]


def test_scores_to_judgements_takes_the_threshold_as_up(tmp_path: Path):
    loaded = load_rows(
        tmp_path,
        "judgement",
        scored("a", 0.4),
        scored("b", 0.5),
        convert="scores_to_judgements",
        threshold=0.5,
    )
    assert [(e.label, e.score) for e in loaded.examples if isinstance(e, Judgement)] == [
        (False, 0.4),
        (True, 0.5),
    ]
    loaded = load_rows(
        tmp_path,
        "judgement",
        {"prompt": "p", "completions": ["a", "b", "c"], "ranks": [1, 3, 2]},
        convert="scores_to_judgements",
        threshold=-2,
    )
    assert judgements(loaded) == [("a", True), ("b", False), ("c", True)]


def test_scores_never_replace_labels_that_are_there(tmp_path: Path):
    with raises_error("row-label-and-score", where="rows.jsonl:1", fix="format: scored"):
        load_rows(
            tmp_path, "judgement", up("a", score=0.1), convert="scores_to_judgements", threshold=0.5
        )
    loaded = load_rows(
        tmp_path,
        "judgement",
        up("a", score=0.1),
        format="scored",
        convert="scores_to_judgements",
        threshold=0.5,
    )
    assert judgements(loaded) == [("a", False)]
    assert loaded.ignored_columns == {"label": 1}


def test_scores_to_pairs_takes_the_best_against_the_worst(tmp_path: Path):
    rows = [
        scored("mid", 2),
        scored("best", 3),
        scored("worst", 1),
        scored("tie 1", 1, "q"),
        scored("tie 2", 1, "q"),
        scored("alone", 1, "r"),
    ]
    loaded = load_rows(tmp_path, "preference", *rows, convert="scores_to_pairs")
    assert pairs(loaded) == [("p", "best", "worst")]
    assert loaded.files[0].unused == {
        Unused.BETWEEN_BEST_AND_WORST: 1,
        Unused.SAME_SCORES: 2,
        Unused.NO_OTHER_SCORED: 1,
    }


def test_scores_to_pairs_of_rankings_and_its_smallest_difference(tmp_path: Path):
    rows = [ranked(1, 2, 1.5), ranked(1, 1), ranked(1.5, 1)]
    loaded = load_rows(tmp_path, "preference", *rows, convert="scores_to_pairs", threshold=1.0)
    assert pairs(loaded) == [("p", "answer 1", "answer 0")]
    assert loaded.files[0].unused == {
        Unused.SAME_SCORES: 1,
        Unused.DIFFERENCE_BELOW_THRESHOLD: 1,
    }


def test_a_margin_is_never_made_of_scores(tmp_path: Path):
    loaded = load_rows(tmp_path, "preference", ranked(1, 9), convert="scores_to_pairs")
    assert [e.margin for e in loaded.examples if isinstance(e, Preference)] == [0.0]


def test_chosen_to_demonstrations(tmp_path: Path):
    files = [
        write(tmp_path / "paired.jsonl", {"prompt": "p", "chosen": "a", "rejected": "b"}),
        write(tmp_path / "judged.jsonl", up("c"), down("d")),
        write(tmp_path / "ranked.jsonl", ranked(1, 2)),
    ]
    loaded = load([Source(f) for f in files], "demonstration", convert="chosen_to_demonstrations")
    assert [e.completion for e in loaded.examples if isinstance(e, Demonstration)] == [
        "a",
        "c",
        "answer 1",
    ]
    assert loaded.files[1].unused == {Unused.JUDGED_DOWN: 1}


def test_a_conversion_without_results_reports_the_reason(tmp_path: Path):
    with raises_error("no-usable-rows", where="rows.jsonl:1") as raised:
        load_rows(tmp_path, "preference", up("a"), up("b"), convert="judgements_to_pairs")
    assert "of 2 rows" in raised.error.message
    assert f"2 x {Unused.NO_OTHER_DOWN}" in raised.error.message


texts = st.sampled_from(["a", "b", "c", "d"])
some_judgements = st.lists(
    st.builds(Judgement, prompt=texts, completion=texts, label=st.booleans(), origin=st.just(HERE))
)
some_scored = st.lists(
    st.one_of(
        st.builds(
            Judgement,
            prompt=texts,
            completion=texts,
            score=st.integers(0, 3).map(float),
            origin=st.just(HERE),
        ),
        st.builds(
            lambda prompt, scores: Ranking(
                prompt=prompt,
                completions=tuple("abcd"[: len(scores)]),
                scores=tuple(scores),
                origin=HERE,
            ),
            texts,
            st.lists(st.integers(0, 3).map(float), min_size=2, max_size=4),
        ),
    )
)


@given(some_judgements)
def test_judgements_to_pairs_accounts_for_every_row(examples: list[Judgement]):
    result, unused = CONVERSIONS["judgements_to_pairs"].run(examples, None)
    example_set = {(e.prompt, e.completion, e.label) for e in examples}
    for e in result:
        assert isinstance(e, Preference)
        assert {(e.prompt, e.chosen, True), (e.prompt, e.rejected, False)} <= example_set
        assert e.chosen != e.rejected
    left = [id(e) for e, _ in unused]
    assert len(left) == len(set(left))
    used = {
        (e.prompt, side, label)
        for e in result
        if isinstance(e, Preference)
        for side, label in ((e.chosen, True), (e.rejected, False))
    }
    assert all((e.prompt, e.completion, e.label) in used for e in examples if id(e) not in left)


@given(some_scored, st.none() | st.floats(0, 3))
def test_scores_to_pairs_accounts_for_every_row(
    examples: list[Judgement | Ranking], threshold: float | None
):
    result, unused = CONVERSIONS["scores_to_pairs"].run(examples, threshold)
    assert all(isinstance(e, Preference) and e.chosen != e.rejected for e in result)
    in_pairs = sum(2 for e in result) - sum(
        isinstance(e, Ranking) for e in examples if all(e is not u for u, _ in unused)
    )
    assert len(examples) == len(unused) + in_pairs


# Rows in memory


def test_examples_in_memory_keep_their_origin_and_mix_with_rows():
    mine = Judgement(
        prompt="p", completion="mine", label=True, weight=0.5, origin=Origin("mine.jsonl", 7)
    )
    loaded = load(
        [InMemory([mine, *([down("row")] * 30), replace(mine, completion="last")])],
        "judgement",
        on_bad_row="skip",
    )
    assert loaded.examples[0] == mine
    assert len(loaded.examples) == 32
    assert loaded.examples[1].origin == Origin("rows in memory", 2)
    assert {f.path: (f.rows, f.examples, f.bad) for f in loaded.files} == {
        "mine.jsonl": (2, 2, 0),
        "rows in memory": (30, 30, 0),
    }


def test_examples_in_memory_are_checked_and_converted_like_rows():
    pair = Preference(prompt="p", chosen="a", rejected="b", origin=HERE)
    with raises_error("kind-mismatch", fix="data.convert: pairs_to_judgements"):
        load([InMemory([pair])], "judgement")
    assert judgements(load([InMemory([pair])], "judgement", convert="pairs_to_judgements")) == [
        ("a", True),
        ("b", False),
    ]
    with raises_error("row-number-range"):
        load([InMemory([replace(pair, weight=-1.0)])], "preference")
    with raises_error("row-not-an-object", fix="Examples"):
        load([InMemory(["text"])], "preference")  # type: ignore[list-item]


def test_rows_that_a_conversion_leaves_are_named_with_the_reason(tmp_path: Path):
    loaded = load_rows(
        tmp_path, "preference", up("a"), down("b"), up("c", "lonely"), convert="judgements_to_pairs"
    )
    assert loaded.unused == ((Origin(loaded.files[0].path, 3), Unused.NO_OTHER_DOWN),)
