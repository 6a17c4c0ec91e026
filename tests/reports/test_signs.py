"""Warning signs of a failing run: each is detected in a log with it, and none in a healthy run."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.reports.synthetic import (
    AUDIT,
    online_log,
    online_rows,
    pair_rows,
    thumbs_rows,
    write_run,
)
from valence.reports.diagnostics import Diagnosis, diagnose
from valence.reports.page import report_markdown, write_page
from valence.reports.run_record import RunRecord

Json = dict[str, Any]
Change = Callable[[Json, float], Json]
KINDS = ("thumbs", "pairs", "own")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    folder = tmp_path_factory.mktemp("healthy")
    return {kind: RunRecord.read(write_run(folder / kind, kind)) for kind in KINDS}


def logged(run: RunRecord, change: Change) -> RunRecord:
    """The run with another log. change: of a record, and of how far the run was then (0 to 1)."""
    last = run.metrics[-1]["step"]
    return replace(
        run,
        metrics=tuple(
            {**record, **change(dict(record), record["step"] / last)} for record in run.metrics
        ),
    )


def ended(run: RunRecord, change: Callable[[Json], Json]) -> RunRecord:
    """The run with another last evaluation."""
    assert run.last is not None
    return replace(
        run, last={**run.last, "rows": [{**row, **change(row)} for row in run.last["rows"]]}
    )


def only(run: RunRecord) -> Diagnosis:
    result = diagnose(run)
    assert len(result) == 1, result
    assert result[0].advice
    return result[0]


def numbers(text: str) -> list[float]:
    return [float(item) for item in re.findall(r"-?\d+(?:\.\d+)?", text)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_shows_no_sign(kind: str, healthy: dict[str, RunRecord]) -> None:
    assert diagnose(healthy[kind]) == []


@pytest.mark.parametrize("seed", range(1, 6))
def test_healthy_runs_of_other_random_numbers_show_none_either(
    seed: int, healthy: dict[str, RunRecord]
) -> None:
    for kind, make in (("thumbs", thumbs_rows), ("pairs", pair_rows), ("own", online_rows)):
        first, last = (
            {"step": step, "metrics": {}, "rows": make(step / 60, 40, seed)} for step in (0, 60)
        )
        run = replace(healthy[kind], first=first, last=last)
        if kind == "own":
            run = replace(run, metrics=tuple(online_log(100, [], seed)))
        assert diagnose(run) == []


def test_an_empty_folder_shows_none(tmp_path: Path) -> None:
    assert diagnose(RunRecord.read(tmp_path)) == []


def test_numbers_that_are_not_finite(healthy: dict[str, RunRecord]) -> None:
    def spoilt(record: Json, at: float) -> Json:
        return {"loss": "nan", "grad_norm": "inf"} if 0.5 < at < 0.6 else {}

    sign = only(logged(healthy["thumbs"], spoilt))
    assert sign.name == "not finite"
    assert numbers(sign.message) == [5, 31, 5, 31]
    assert sign.message.index("loss") < sign.message.index("grad_norm")
    skipped = only(
        logged(
            healthy["thumbs"],
            lambda record, at: {"skipped": 1.0} if record["step"] in (7, 9) else {},
        )
    )
    assert (skipped.name, numbers(skipped.message)) == ("skipped", [2, 7])


def test_sampled_answers_with_rewards_for_length(healthy: dict[str, RunRecord]) -> None:
    rng = random.Random(0)
    longer = ended(
        healthy["own"],
        lambda row: {"tokens": 2 * row["tokens"], "reward": row["tokens"] / 30 + rng.gauss(0, 0.1)},
    )
    sign = only(longer)
    assert sign.name == "length"
    correlation, before, after = numbers(sign.message)
    assert correlation > 0.9
    assert after == pytest.approx(2 * before, rel=0.2)
    # Longer for another reason, or paid for length without becoming longer.
    assert diagnose(ended(healthy["own"], lambda row: {"tokens": 2 * row["tokens"]})) == []
    assert diagnose(ended(healthy["own"], lambda row: {"reward": row["tokens"] / 30})) == []


def test_rounds_with_rewards_for_length_without_held_out_rows(
    healthy: dict[str, RunRecord],
) -> None:
    alone = replace(healthy["own"], first=None, last=None)
    assert diagnose(alone) == []
    sign = only(logged(alone, lambda _, at: {"rollout/length": 30 * (1 + at)}))
    correlation, before, after = numbers(sign.message)
    assert sign.name == "length"
    assert correlation > 0.45
    assert 30 <= before < 40 < 55 < after <= 60


def test_stored_answers_whose_reward_follows_length(healthy: dict[str, RunRecord]) -> None:
    rng = random.Random(0)

    def by_length(row: Json) -> Json:
        tokens = int(rng.gauss(60 if row["label"] else 40, 10))
        return {
            "tokens": tokens,
            "reward": (tokens - 50) / 20 + rng.gauss(0, 0.1),
            "logp": -1.6 * tokens,
        }

    run = ended(healthy["thumbs"], by_length)
    sign = only(run)
    assert sign.name == "length"
    preferred, others, *correlations = numbers(sign.message)
    assert preferred > 1.2 * others
    assert min(correlations) > 0.45
    pairs = ended(
        healthy["pairs"],
        lambda row: {
            f"{name}_{side}": value
            for side, tokens in (
                ("chosen", int(rng.gauss(60, 10))),
                ("rejected", int(rng.gauss(40, 10))),
            )
            for name, value in (
                ("tokens", tokens),
                ("reward", (tokens - 50) / 20),
                ("logp", -1.4 * tokens),
            )
        },
    )
    assert only(pairs).name == "length"


def test_short_answers_gain_where_all_become_rare_and_that_is_one_sign(
    healthy: dict[str, RunRecord],
) -> None:
    rng = random.Random(0)

    def shorter(row: Json, lost: float) -> Json:
        tokens = int(rng.gauss(40 if row["label"] else 60, 10))
        return {
            "tokens": tokens,
            "reward": (50 - tokens) / 20 + rng.gauss(0, 0.1),
            "logp": -(1.6 + lost) * tokens,
        }

    sign = only(ended(healthy["thumbs"], lambda row: shorter(row, 0.0)))
    assert sign.name == "length"
    preferred, others, *correlations = numbers(sign.message)
    assert others > 1.2 * preferred
    assert max(correlations) < -0.45
    assert only(ended(healthy["thumbs"], lambda row: shorter(row, 0.3))).name == "rarer"


def test_verdicts_that_go_with_length_are_no_sign_by_themselves(
    healthy: dict[str, RunRecord],
) -> None:
    """The reward of a long answer is a sum over more tokens, in whichever direction its verdict
    points.
    """
    rng = random.Random(0)

    def by_verdict(row: Json) -> Json:
        tokens = int(rng.gauss(60 if row["label"] else 40, 10))
        return {
            "tokens": tokens,
            "reward": (0.01 if row["label"] else -0.01) * tokens,
            "logp": -1.6 * tokens,
        }

    assert diagnose(ended(healthy["thumbs"], by_verdict)) == []


def test_preferred_answers_that_become_rare(healthy: dict[str, RunRecord]) -> None:
    sign = only(
        ended(
            healthy["pairs"],
            lambda row: {"logp_chosen": row["ref_chosen"] - 0.3 * row["tokens_chosen"]},
        )
    )
    assert sign.name == "rarer"
    assert numbers(sign.message)[:2] == [-1.4, -1.7]
    assert (
        diagnose(
            ended(
                healthy["pairs"],
                lambda row: {"logp_rejected": row["ref_rejected"] - 1.0 * row["tokens_rejected"]},
            )
        )
        == []
    )
    fallen = ended(healthy["thumbs"], lambda row: {"logp": row["logp"] - 0.3 * row["tokens"]})
    assert only(fallen).name == "rarer"


def test_a_divergence_that_has_not_settled(healthy: dict[str, RunRecord]) -> None:
    assert only(logged(healthy["own"], lambda _, at: {"kl": 25 * at * at})).name == "divergence"
    # far, and held there
    assert diagnose(logged(healthy["own"], lambda _, at: {"kl": min(15.0, 60 * at)})) == []


def test_a_policy_that_moves_as_a_whole(healthy: dict[str, RunRecord]) -> None:
    assert only(logged(healthy["thumbs"], lambda _, at: {"kl/raw": 20 * at})).name == "drift"
    # kl is 0 then, and the loss as usual
    assert diagnose(logged(healthy["thumbs"], lambda _, at: {"kl/raw": -20 * at})) == []
    gentle = replace(healthy["thumbs"], config={**healthy["thumbs"].config, "loss": {"beta": 0.01}})
    assert diagnose(logged(gentle, lambda _, at: {"kl/raw": 20 * at})) == []


@pytest.mark.parametrize(
    ("still", "weight"), [(True, "desirable_weight"), (False, "undesirable_weight")]
)
def test_a_class_that_is_left_behind(
    still: bool, weight: str, healthy: dict[str, RunRecord]
) -> None:
    sign = only(
        ended(
            healthy["thumbs"],
            lambda row: {"reward": 0.02 * row["reward"]} if row["label"] is still else {},
        )
    )
    assert sign.name == "one class"
    assert f"loss.{weight}" in sign.advice
    # neither has moved yet
    assert diagnose(ended(healthy["thumbs"], lambda row: {"reward": 0.02 * row["reward"]})) == []


def test_pairs_that_are_all_right_and_only_grow_apart(healthy: dict[str, RunRecord]) -> None:
    grown = logged(
        healthy["pairs"],
        lambda _, at: {"rewards/accuracies": 1.0 if at > 0.4 else 0.8, "rewards/margins": 4 * at},
    )
    assert only(grown).name == "training accuracy stuck at 1"
    settled = logged(
        healthy["pairs"], lambda _, at: {"rewards/accuracies": 1.0, "rewards/margins": 2.0}
    )
    assert diagnose(settled) == []


def test_answers_that_are_cut_off(healthy: dict[str, RunRecord]) -> None:
    sign = only(
        ended(healthy["own"], lambda row: {"stop": "length" if int(row["id"], 16) % 3 else "end"})
    )
    assert (sign.name, numbers(sign.message)) == ("cut off", [67, 64])
    assert "a lower reward" in sign.advice
    assert (
        only(logged(healthy["own"], lambda _, at: {"rollout/truncated": 0.4 * at})).name
        == "cut off"
    )
    without_reward = replace(healthy["own"], config={"method": "online_distill"})
    sign = only(ended(without_reward, lambda row: {"stop": "length"}))
    assert sign.advice == "Raise rollout.max_new_tokens."


def test_a_policy_that_calls_no_tools(healthy: dict[str, RunRecord]) -> None:
    run = healthy["own"]
    never = logged(run, lambda *_: {"rollout/tool_calls": 0.0})
    no_longer = logged(run, lambda _, at: {"rollout/tool_calls": max(0.0, 0.5 - at)})
    assert only(never).name == only(no_longer).name == "few tool calls"
    assert diagnose(logged(run, lambda _, at: {"rollout/tool_calls": at / 2})) == []


def test_rows_that_are_too_long(healthy: dict[str, RunRecord]) -> None:
    cut = {
        **AUDIT,
        "train": {
            **AUDIT["train"],
            "truncation": {"rows": 100, "too_long": 9, "max_length": 512, "keeps_99": 700},
        },
    }
    sign = only(replace(healthy["thumbs"], audit=cut))
    assert (sign.name, numbers(sign.message)[:2], numbers(sign.message)[-1]) == (
        "too long",
        [9, 100],
        512,
    )
    assert "data.max_length" in sign.advice
    assert 700 in numbers(sign.advice)


def test_a_held_out_loss_that_rises_while_the_other_falls(healthy: dict[str, RunRecord]) -> None:
    def course(record: Json, at: float) -> Json:
        return {"loss": 0.5 - 0.4 * at} | (
            {"eval/loss": 0.5 - 0.2 * at + 0.3 * at * at} if "eval/loss" in record else {}
        )

    sign = only(logged(healthy["thumbs"], course))
    assert (sign.name, numbers(sign.message)[0]) == ("overfits", 20)
    assert (
        diagnose(
            logged(
                healthy["thumbs"],
                lambda _, at: {"loss": 0.5 - 0.4 * at, "eval/loss": 0.5 - 0.1 * at},
            )
        )
        == []
    )


@pytest.mark.parametrize("minimum", [0.0, 1e-6])
def test_a_held_out_loss_that_stays_near_zero_has_not_turned(
    minimum: float, healthy: dict[str, RunRecord]
) -> None:
    """As that of a hinge, or of pairs that are all far apart."""

    def course(record: Json, at: float) -> Json:
        return {"loss": 0.5 * (1 - at)} | (
            {"eval/loss": max(0.5 - 2 * at, minimum * (1 + at))} if "eval/loss" in record else {}
        )

    assert diagnose(logged(healthy["pairs"], course)) == []


@pytest.mark.parametrize(("name", "value"), [("failed", 0.2), ("tied", 0.7)])
def test_rounds_that_teach_little(name: str, value: float, healthy: dict[str, RunRecord]) -> None:
    assert only(logged(healthy["own"], lambda *_: {f"rollout/{name}": value})).name == name


def test_warnings_follow_the_answers(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "own")
    audit = json.loads((folder / "audit.json").read_text())
    audit["train"]["truncation"] |= {"too_long": 100, "max_length": "<script>"}
    (folder / "audit.json").write_text(json.dumps(audit))
    page = write_page(folder).read_text(encoding="utf-8")
    [sign] = diagnose(RunRecord.read(folder))
    sections = re.split(r'<section id="s\d+">', page.split("<main>")[1])[1:]
    assert [section.split("</h2>")[0] for section in sections[:3]] == [
        "<h2>Answers",
        "<h2>Warnings",
        "<h2>Metrics",
    ]
    assert sections[1].startswith(
        '<h2>Warnings</h2><div class="sign"><p>' + html.escape(sign.message)
    )
    assert html.escape(sign.advice) in sections[1]
    assert page.index('id="verdict"') < page.index("<main>")


def letters_and_digits(text: str) -> str:
    """The page and the Markdown quote other characters in their own ways."""
    return re.sub(r"[^a-z0-9]", "", html.unescape(text).lower())


def test_markdown_has_the_warnings_of_the_page(run_dir: Path) -> None:
    records = [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for record in records[len(records) // 2 :]:
        record["kl"] = 400.0 + record["step"]
        record["reward/mean"] = 1.0
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    facts = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    facts["warnings"] = ["step 12: the loss jumped"]
    (run_dir / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    run = RunRecord.read(run_dir)
    assert diagnose(run)
    assert run.audit_warnings
    page = letters_and_digits(write_page(run_dir).read_text(encoding="utf-8"))
    document = report_markdown(run)
    wanted = [item for sign in diagnose(run) for item in (sign.message, sign.advice)]
    for text in (*wanted, *run.audit_warnings, *run.problems, *facts["warnings"]):
        assert letters_and_digits(text) in page
        assert letters_and_digits(text) in letters_and_digits(document)
    first = document.index(diagnose(run)[0].message.split("(")[0][:20].replace("_", "\\_"))
    assert first < document.index("**kto**")  # above everything else


ODD = (None, [], "x", {"a": 1}, True, "nan")


def write_odd(folder: Path, name: str, odd: Sequence[object]) -> None:
    """Write the pages of two runs, with stored and own answers, whose rows have these values."""
    run = RunRecord.read(write_run(folder, "thumbs", rows=24, times=2))
    for make in (thumbs_rows, online_rows):
        rows = [{**row, name: odd[i % len(odd)]} for i, row in enumerate(make(1.0, 24))]
        (folder / "eval" / "step-60.json").write_text(
            json.dumps({"step": 60, "metrics": {"loss": odd[0]}, "rows": rows})
        )
        write_page(folder)
    assert run.problems == ()


@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "tokens",
        "logp",
        "label",
        "id",
        "stop",
        "scores",
        "target",
        "origin",
        "prompt",
        "parts",
    ],
)
def test_values_that_a_row_cannot_have_are_passed_over(name: str, tmp_path: Path) -> None:
    """Whatever another program has written there."""
    write_odd(tmp_path, name, ODD)


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "tokens",
        "logp",
        "label",
        "id",
        "stop",
        "scores",
        "target",
        "origin",
        "prompt",
        "parts",
    ],
)
def test_values_that_no_row_can_have_are_passed_over_in_all_rows(
    name: str,
    odd: object,
    tmp_path: Path,
) -> None:
    write_odd(tmp_path, name, [odd])
