"""Audits of labels: results, files, and rejected input."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import command, command_error, place
from tests.errors import check_error, raises_error
from tests.jobs.chat_log import chat_log, entry, write_export
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.apps.feedback.audit_labels import audit_labels, hidden_states
from valence.apps.feedback.import_rows import import_feedback
from valence.data.encode import Encoder
from valence.data.label_audit import (
    RaterVerdict,
    near_duplicates,
    rater_agreement,
    ratings_of_rows,
)
from valence.data.load import load
from valence.models.policy_model import PolicyModel
from valence.options import AuditOptions, ImportOptions
from valence.reports.form import form_of
from valence.reports.regression import cross_fit, fit_logistic
from valence.types import Judgement, Origin

__all__ = ["chat_log", "place"]

GOOD = ("sun", "star", "moon", "earth", "helpful")
BAD = ("hello", "world", "capital", "France", "tool")
FLIPPED = (3, 10, 17, 24, 31, 38)
NUM_ROWS = 60


def thumbs() -> list[dict[str, Any]]:
    """Rows whose completions of equal form are rated by their words; those in FLIPPED, wrongly."""
    generator = random.Random(0)
    rows: list[dict[str, Any]] = []
    for i in range(NUM_ROWS):
        is_good = i % 2 == 0
        words = " ".join(generator.choices(GOOD if is_good else BAD, k=6))
        label = is_good is not (i in FLIPPED)
        rows.append({"prompt": f"question {i}", "completion": words, "label": label})
    return rows


def write(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def judgement(completion: str, label: bool, line: int = 1, **changes: Any) -> Judgement:
    origin = Origin("rows.jsonl", line)
    return Judgement(
        prompt="question", completion=completion, label=label, origin=origin, **changes
    )


# Contradictions and near-duplicates


def test_columns_with_other_names_are_read_and_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``valence init`` reads them."""
    names = {"prompt": "question", "completion": "answer", "label": "liked"}
    rows = [{names[name]: value for name, value in row.items()} for row in thumbs()]
    files = write("thumbs.jsonl", thumbs()), write("export.jsonl", rows)
    expected, audit = (audit_labels([file], AuditOptions()) for file in files)
    assert audit == expected
    assert "prompt from question, completion from answer, label from liked" in (
        capsys.readouterr().out
    )


def test_contradictions_and_near_duplicates_are_named(place: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "The sun is a star, and it is hot.", "label": True},
        {"prompt": "q", "completion": "The sun is a star, and it is hot.", "label": False},
        {"prompt": "q", "completion": "the sun is a star, and it is hot", "label": False},
        {"prompt": "another", "completion": "the sun is a star, and it is hot", "label": False},
        {"prompt": "q", "completion": "Nobody knows.", "label": False},
    ]
    result = audit_labels([write("thumbs.jsonl", rows)])
    assert result.contradictions == (("thumbs.jsonl:2", "thumbs.jsonl:1"),)
    # 8 of 9 shingles of the one are all of the other
    assert result.near_duplicates == (("thumbs.jsonl:1", "thumbs.jsonl:3", round(8 / 9, 3)),)


def test_pairs_that_are_preferred_both_ways_contradict(place: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "b", "rejected": "a"},
        {"prompt": "q", "chosen": "b", "rejected": "a", "soft": 0.1},
        {"prompt": "q", "chosen": "a", "rejected": "c", "soft": 0.5},
    ]
    result = audit_labels([write("pairs.jsonl", rows)])
    assert result.contradictions == (
        ("pairs.jsonl:2", "pairs.jsonl:1"),
        ("pairs.jsonl:3", "pairs.jsonl:2"),
    )
    assert [(kind.kind, kind.rows, kind.up) for kind in result.kinds] == [("pairs", 3, 2)]
    assert result.unrated == 1


def test_pairs_that_their_scores_contradict_are_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"{n}", "chosen": "a", "rejected": "b", "score_chosen": n, "score_rejected": 2}
        for n in (3, 1, 2, 0)
    ]
    file = write("pairs.jsonl", rows)
    assert audit_labels([file]).contradicted_pairs == ("pairs.jsonl:2", "pairs.jsonl:4")
    assert command("audit", file) == 0
    assert "2 pairs have a larger score for the rejected" in capsys.readouterr().out


def test_near_duplicates_are_those_that_a_search_of_all_finds() -> None:
    generator = random.Random(1)
    texts = [" ".join(generator.choices("abcd", k=generator.randint(2, 14))) for _ in range(150)]
    texts += [f"{text} {generator.choice('abcd')}" for text in texts]
    texts = list(dict.fromkeys(texts))
    rows = [(judgement(t, generator.random() < 0.3, i + 1), t) for i, t in enumerate(texts)]

    def shingles(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))}

    for threshold in (0.5, 0.8):
        expected = {
            (a.origin.line, b.origin.line)
            for a, one in rows
            for b, other in rows
            if a.label and not b.label and one != other
            and len(shingles(one) & shingles(other))
            >= threshold * len(shingles(one) | shingles(other))
        }  # fmt: skip
        result = near_duplicates(rows, threshold)
        assert len(expected) > 5
        assert {(item.up.origin.line, item.down.origin.line) for item in result} == expected
        assert len(result) == len(expected)


def test_copies_of_near_duplicates_are_all_named_once_or_more() -> None:
    texts = ["a b c d e f g h i j k"] * 3 + ["a b c d e f g h i j k l"] * 4 + ["a b c"] * 2
    rows = [(judgement(text, i < 3, i), text) for i, text in enumerate(texts)]
    pairs = [
        (near_duplicate.up.origin.line, near_duplicate.down.origin.line)
        for near_duplicate in near_duplicates(rows)
    ]
    assert sorted(pairs) == [(0, 3), (0, 4), (0, 5), (0, 6), (1, 3), (2, 3)]
    same = [(judgement("same", i % 2 == 0, i), "same") for i in range(20_000)]
    assert near_duplicates(same) == []


# Agreement


def ratings(verdicts: dict[str, str]) -> list[RaterVerdict]:
    """By target, a letter for the verdict of each rater."""
    return [
        RaterVerdict(target, f"r{i}", verdict)
        for target, letters in verdicts.items()
        for i, verdict in enumerate(letters)
    ]


def test_agreement_is_that_computed_by_hand() -> None:
    """Three targets: up up down, up down, down down; a fourth has one rating and does not count.

    Disagreeing ordered pairs: 4 / (3 - 1) = 2 and 2 / (2 - 1) = 2, of 7 ratings: 4/7. Expected: 3
    up and 4 down give 2 * 3 * 4 / (7 * 6) = 4/7. So alpha is 0.
    """
    verdicts = {"t1": "uud", "t2": "ud", "t3": "dd", "t4": "u"}
    result = rater_agreement(ratings(verdicts))
    assert result is not None
    assert (result.targets, result.ratings) == (3, 7)
    assert result.alpha == pytest.approx(0)
    assert result.disagreement == pytest.approx(3 / 5)
    # r2 differs from both others on t1; r1 from r2 and r0; r0 from r2 and, on t2, from r1
    assert [(r.rater, r.ratings, r.pairs, r.disagreement) for r in result.raters] == [
        ("r2", 1, 2, 1.0),
        ("r0", 3, 4, 0.5),
        ("r1", 3, 4, 0.5),
    ]


def test_agreement_beyond_chance_and_without_variation() -> None:
    """Two raters, four targets, one disagreement: 1 - (2/8) / (2 * 5 * 3 / 56) = 1 - 7/15."""
    verdicts = {"t1": "uu", "t2": "uu", "t3": "ud", "t4": "dd"}
    result = rater_agreement(ratings(verdicts))
    assert result is not None
    assert result.alpha == pytest.approx(1 - 7 / 15)
    alike = rater_agreement([RaterVerdict("t1", "r0", "u"), RaterVerdict("t1", "r1", "u")])
    assert alike is not None
    assert alike.alpha is None
    assert rater_agreement([RaterVerdict("t1", "r0", "u"), RaterVerdict("t2", "r1", "u")]) is None


@pytest.mark.usefixtures("chat_log")
def test_votes_beside_the_rows_are_read(place: Path) -> None:
    votes = [
        entry(number, number != 2, message="m1", question="q", answer="a") for number in (1, 2, 3)
    ]
    export = write_export(Path("log.jsonl"), *votes)
    import_feedback("chat_log", [export], ImportOptions(out=Path("feedback.jsonl")))
    audited = audit_labels(["feedback.jsonl"]).agreement
    assert audited is not None
    assert (audited.targets, audited.ratings) == (1, 3)
    assert audited.disagreement == pytest.approx(2 / 3)
    assert audited.raters[0].disagreement == 1
    assert "person" not in str(audited)
    assert audit_labels([export], AuditOptions(format="chat_log")).agreement == audited
    Path("feedback.votes.jsonl").write_text('{"label": true}\n')
    with raises_error("votes-file-invalid", where="feedback.votes.jsonl:1"):
        audit_labels(["feedback.jsonl"])


def test_rows_may_name_their_rater() -> None:
    rows = [
        judgement("a", True, info={"rater": "x"}),
        judgement("a", False, info={"raters": ["y"]}),
        judgement("a", False, info={"raters": ["y", "z"]}),
        judgement("a", False),
    ]
    result = rater_agreement(ratings_of_rows(rows))
    assert result is not None
    assert (result.ratings, result.disagreement) == (2, 1.0)


# Form


def test_form_counts_what_it_says() -> None:
    text = "I'm sorry, I cannot.\n- one\n2. two\n```\ncode\n```\nWhy? Why?"
    assert form_of(text) == {
        "words": 13, "list items": 2, "code blocks": 1, "question marks": 2, "refusals": 2,
    }  # fmt: skip
    plain = form_of("He cannot. A well-known I.")
    assert {**plain, "words": 0} == dict.fromkeys(form_of(""), 0)


def test_labels_that_follow_from_length_are_predicted_and_others_are_not(place: Path) -> None:
    rows = thumbs()
    for row in rows:
        row["label"] = len(row["completion"]) % 2 == 0
        row["completion"] += " more words" * (3 if row["label"] else 0)
    (result,) = audit_labels([write("long.jsonl", rows)]).kinds
    assert result.form is not None
    assert result.form.is_predictive
    assert result.form.auc == 1
    words = result.form.features[0]
    assert (words.name, words.up, words.down, words.auc) == ("words", 12, 6, 1)
    (result,) = audit_labels([write("equal.jsonl", thumbs())]).kinds
    assert result.form is not None
    assert not result.form.is_predictive
    few = [row for row in thumbs() if row["label"]] + [row for row in thumbs() if not row["label"]][
        :9
    ]
    (result,) = audit_labels([write("few.jsonl", few)]).kinds
    assert (result.down, result.form) == (9, None)


# Cross-fitting


def test_a_regression_is_the_minimum_of_its_own_loss() -> None:
    torch.manual_seed(0)
    x, included = torch.randn(40, 5).double(), (torch.rand(40, 3) < 0.7).double()
    y = (torch.rand(40) < 0.5).double()
    weights, biases = fit_logistic(x, y, included, 2.0)
    errors = (torch.sigmoid(x @ weights + biases) - y[:, None]) * included
    assert (2.0 * x.T @ errors + weights).abs().max() < 1e-4
    assert errors.sum(0).abs().max() < 1e-4


def test_no_row_is_predicted_from_itself_or_its_copies() -> None:
    """With more random features than rows, a model that sees a label predicts it."""
    torch.manual_seed(0)
    features = torch.randn(40, 200)
    labels = [i % 2 == 0 for i in range(40)]
    groups = [str(i) for i in range(40)]
    doubled = torch.cat([features, features])
    probabilities = cross_fit(doubled, labels * 2, groups * 2, 10.0).probabilities
    for part in (probabilities[:40], probabilities[40:]):
        ups = torch.tensor(labels)
        assert part[ups].mean() - part[~ups].mean() < 0.1
    leaking = cross_fit(doubled, labels * 2, [str(i) for i in range(80)], 10.0).probabilities
    assert leaking[:40][ups].mean() - leaking[:40][~ups].mean() > 0.3


@pytest.mark.parametrize("num_up", [10, 13, 37, 200])
def test_constant_features_predict_nothing(num_up: int) -> None:
    labels = [i < num_up for i in range(num_up + 33)]
    result = cross_fit(
        torch.full((len(labels), 3), 0.1), labels, [str(i) for i in range(len(labels))], 1.0
    )
    assert result.auc == 0.5
    assert result.interval[0] < 0.5 < result.interval[1]


def test_features_without_information_have_an_auc_around_chance() -> None:
    torch.manual_seed(0)
    labels = [i % 3 == 0 for i in range(60)]
    groups = [str(i) for i in range(60)]
    results = [cross_fit(torch.randn(60, 2), labels, groups, 1.0) for _ in range(60)]
    assert sum(result.auc for result in results) / 60 == pytest.approx(0.5, abs=0.03)
    covered = sum(result.interval[0] <= 0.5 <= result.interval[1] for result in results)
    assert covered >= 54


def test_completions_of_equal_form_do_not_predict_the_label(place: Path) -> None:
    rows = [{"prompt": f"q {i}", "completion": f"word{i}", "label": i % 3 > 0} for i in range(40)]
    (result,) = audit_labels([write("equal.jsonl", rows)]).kinds
    assert result.form is not None
    assert result.form.auc == 0.5
    assert not result.form.is_predictive


def test_classes_that_share_no_fold_have_no_auc() -> None:
    labels = [i < 10 for i in range(40)]
    groups = ["up" if label else "down" for label in labels]
    result = cross_fit(torch.randn(40, 2), labels, groups, 1.0)
    assert (result.auc, result.interval) == (0.5, (0.0, 1.0))


# Hidden states


def test_states_are_those_of_each_sequence_alone() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny(vocab_size=len(tokenizer), layers=4, dtype=torch.float32)
    encoder = Encoder(tokenizer, max_length=128)
    shared = [judgement("The sun is", True), judgement("The sun is a star.", False, 2)]
    units = encoder.encode_all(shared).units
    policy = PolicyModel(model).eval()
    packed = hidden_states(policy, units)
    policy.lay_out(packed=False)
    alone = hidden_states(policy, units)
    for unit, one, other in zip(units, packed, alone, strict=True):
        ids = torch.tensor([unit.prompt_ids + unit.answers[0].ids])
        with torch.no_grad(), policy.stock():
            states = model(ids, output_hidden_states=True).hidden_states[3][0]
        completion = states[len(unit.prompt_ids) :]
        expected = torch.cat([completion[-1], completion.mean(0)])[None]
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(other, expected, atol=1e-4, rtol=1e-4)


def test_planted_flips_are_found(place: Path) -> None:
    result = audit_labels([write("thumbs.jsonl", thumbs())], AuditOptions(model="model"))
    states = result.kinds[0].states
    assert states is not None
    assert states.is_informative
    assert states.rows == NUM_ROWS
    lines = [int(suspect.origin.rpartition(":")[2]) - 1 for suspect in states.suspects]
    # by chance 0.6 of the first six are flipped
    assert len(set(lines[:6]) & set(FLIPPED)) >= 4
    scores = [suspect.score for suspect in states.suspects]
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0.5
    assert all(suspect.label is not suspect.predicted for suspect in states.suspects)


def test_scores_count_as_high_or_low_and_planted_mistakes_are_found(place: Path) -> None:
    rows = thumbs()
    for row in rows:
        row["score"] = 5 if row.pop("label") else 1
    rows += [{**rows[0], "score": 1}, {**rows[1], "score": 5}]
    middle = {"prompt": "q", "completion": "sun", "score": 3}
    file = write("scores.jsonl", [*rows, middle])
    result = audit_labels([file], AuditOptions(model="model", top=6, out=Path("sorted.jsonl")))
    (scores,) = result.kinds
    assert (scores.kind, scores.rows, scores.up, result.unrated) == ("scores", 62, 31, 1)
    assert result.contradictions == ((f"{file}:61", f"{file}:1"), (f"{file}:62", f"{file}:2"))
    assert result.agreement is None
    assert scores.states is not None
    lines = [int(suspect.origin.rpartition(":")[2]) - 1 for suspect in scores.states.suspects]
    assert len(set(lines) & {*FLIPPED, 0, 1, 60, 61}) >= 4
    assert {suspect.label for suspect in scores.states.suspects} <= {"high", "low"}
    written = [json.loads(line) for line in Path("sorted.jsonl").read_text().splitlines()]
    assert Counter(row["score"] for row in written) == {1: 31, 3: 1, 5: 31}


def test_planted_flips_of_pairs_are_found(place: Path) -> None:
    generator = random.Random(0)
    rows: list[dict[str, Any]] = []
    for i in range(NUM_ROWS):
        good, bad = (" ".join(generator.choices(words, k=6)) for words in (GOOD, BAD))
        chosen, rejected = (bad, good) if i in FLIPPED else (good, bad)
        rows.append({"prompt": f"question {i}", "chosen": chosen, "rejected": rejected})
    result = audit_labels([write("pairs.jsonl", rows)], AuditOptions(model="model", top=6))
    states = result.kinds[0].states
    assert states is not None
    lines = [int(suspect.origin.rpartition(":")[2]) - 1 for suspect in states.suspects]
    assert len(set(lines) & set(FLIPPED)) >= 5
    assert {(suspect.label, suspect.predicted) for suspect in states.suspects} == {
        ("chosen", "rejected")
    }


def test_a_model_that_cannot_tell_labels_apart_lists_nothing(place: Path) -> None:
    generator = random.Random(3)
    rows = [row | {"label": generator.random() < 0.5} for row in thumbs()]
    result = audit_labels(
        [write("thumbs.jsonl", rows)], AuditOptions(model="model", out=Path("review.jsonl"))
    )
    states = result.kinds[0].states
    assert states is not None
    assert not states.is_informative
    assert states.interval[0] <= 0.5 <= states.interval[1]
    assert (states.suspects, states.num_suspects, result.out) == ((), 0, None)
    assert not Path("review.jsonl").exists()


def test_rows_are_written_again_and_train(place: Path) -> None:
    rows = [*thumbs(), {"prompt": "unrated", "completion": "sun", "label": None}]
    rows[5]["info"] = {"comment": "kept"}
    # a row that is too long for the model has no score and is written all the same
    rows[7]["completion"] = "sun " * 3000
    file = write("thumbs.jsonl", rows[:-1])
    result = audit_labels([file], AuditOptions(model="model", out=Path("review.jsonl")))
    assert result.out == "review.jsonl"
    lines = [json.loads(line) for line in Path("review.jsonl").read_text().splitlines()]
    assert len(lines) == NUM_ROWS
    audits = [line["info"]["audit"] for line in lines if "audit" in line.get("info", {})]
    assert len(audits) == NUM_ROWS - 1
    assert sum(result.kinds[0].unusable.values()) == 1
    scores = [audit["score"] for audit in audits]
    assert scores == sorted(scores, reverse=True)
    assert all(
        (audit["score"] > 0.5) is (audit["label"] is not audit["predicted"]) for audit in audits
    )
    assert all(line["info"]["audit"]["label"] is line["label"] for line in lines[: len(audits)])
    (remaining,) = (line for line in lines if line["prompt"] == "question 5")
    assert remaining["info"]["comment"] == "kept"
    before, after = ({e.id for e in load_all(name)} for name in ("thumbs.jsonl", "review.jsonl"))
    assert before == after
    assert command("train", "recipe.yaml", "data.train=review.jsonl", "train.max_steps=1") == 0


def load_all(name: str) -> tuple[Any, ...]:
    from valence.data.load import DataFile

    return load([DataFile(name)], "judgement").examples


# Mistakes


def test_mistakes(place: Path) -> None:
    file = write("thumbs.jsonl", thumbs())
    pairs = write("pairs.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    demonstrations = write("demonstrations.jsonl", [{"prompt": "q", "completion": "a"}])
    with raises_error("no-rated-rows", where=demonstrations):
        audit_labels([demonstrations])
    with raises_error("no-rated-rows", where="bad.jsonl:1"):
        audit_labels([write("bad.jsonl", [{"prompt": "q", "completion": 3, "label": True}])])
    with raises_error("file-listed-twice", where=file):
        audit_labels([file, file])
    with raises_error("out-needs-model", fix="--model"):
        audit_labels([file], AuditOptions(out=Path("review.jsonl")))
    with raises_error("output-not-jsonl", where="review.csv"):
        audit_labels([file], AuditOptions(model="model", out=Path("review.csv")))
    with raises_error("output-is-input", where=file):
        audit_labels([file], AuditOptions(model="model", out=Path(file)))
    with raises_error("path-exists", where=pairs):
        audit_labels([file], AuditOptions(model="model", out=Path(pairs)))
    with raises_error("path-invalid-output", where="no/review.jsonl"):
        audit_labels([file], AuditOptions(model="model", out=Path("no/review.jsonl")))
    with raises_error("rows-of-two-kinds", where="review.jsonl"):
        audit_labels([file, pairs], AuditOptions(model="model", out=Path("review.jsonl")))
    with raises_error("model-not-found"):
        audit_labels([file], AuditOptions(model="./no-model"))
    check_error(command_error("audit", "absent.jsonl"), "file-not-found")
    assert command("audit", file, "--top", "0") == 2


# The command


def test_the_command_prints_what_was_found(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("thumbs.jsonl", thumbs())
    assert command("audit", file, "--model", "model", "--top", "3") == 0
    shown = capsys.readouterr().out
    assert f"{NUM_ROWS} thumbs: 30 up, 30 down" in shown
    assert "0.5 is chance" in shown
    assert shown.count("thumbs.jsonl:") == 3
    assert command("audit", file, "--model", "model", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["kinds"][0]["rows"]) == ("done", NUM_ROWS)
    assert command("audit", "absent.jsonl", "--json") == 2
    assert json.loads(capsys.readouterr().out)["code"] == "file-not-found"


def test_rows_that_are_left_out_are_counted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = thumbs()[:20]
    rows[7]["completion"] = "sun " * 3000
    Path("few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    assert command("audit", "few.jsonl", "--model", "model") == 0
    shown = capsys.readouterr().out
    assert "1 row that cannot be read:" in shown
    assert "data.max_length is 1024" in shown
    assert "19 of 20" in shown


# Texts


def test_feedback_without_labels_is_audited(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "q", "completion": "a", "feedback": "Mail ann@example.org, not me"}
    write("feedback.unlabelled.jsonl", [row, row | {"prompt": "other"}])
    assert command("audit", "feedback.unlabelled.jsonl") == 0
    shown = capsys.readouterr().out
    place_of_first = "feedback.unlabelled.jsonl:1"
    assert f"e-mail address in feedback: 2 rows, such as {place_of_first}" in shown
    assert "2 rows with the text of another one" in shown
    assert "Opposite labels" not in shown
    with raises_error("no-rated-rows"):
        audit_labels([write("rows.jsonl", [{"prompt": "q", "completion": "a"}])])


def test_personal_data_is_part_of_the_audit_of_labels(place: Path) -> None:
    rows = thumbs()
    rows[4] |= {"feedback": "Call +49 30 123456-78", "prompt": "a@example.org"}
    result = audit_labels([write("thumbs.jsonl", rows)])
    assert {(item.kind, item.part, item.rows) for item in result.personal} == {
        ("phone number", "feedback", ("thumbs.jsonl:5",)),
        ("e-mail address", "prompt", ("thumbs.jsonl:5",)),
    }
    assert result.feedback is not None
    assert result.feedback.rows == 1
