"""Answers judged by rewards, in files: scores, failures, going on, and the walk from prompts to a trained model."""

from __future__ import annotations

import json
import math
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.command import command
from tests.docs.blocks import blocks
from tests.models import tiny
from tests.tiny import tiny_tokenizer
from tests.training.rounds import REWARDS, ROOT, judge, killed, prompts, sample
from tests.training.scoring import read, write
from valence import cli
from valence.errors import UserError
from valence.training import reward_rows as module

RECIPES = {
    "grpo": "data: {train: [{path: scored.jsonl}], convert: scores_to_rankings}",
    "sft": "data: {train: [{path: scored.jsonl}], convert: best_to_demonstrations, top_n: 2, mask_truncated: false}",
    "dpo": "data: {train: [{path: scored.jsonl}], convert: scores_to_pairs}",
    "kto": "data: {train: [{path: scored.jsonl}], convert: scores_to_judgements, threshold: 4.5}",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, answers of it and rewards, which is the current one. Windows are small."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("rewards", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(module, "WINDOW", 4)
    monkeypatch.setattr(cli.console, "width", 200)
    prompts()
    Path("rewards.py").write_text(REWARDS)
    sample()
    return tmp_path


def recipe(method: str, *more: str) -> str:
    name = f"{method}.yaml"
    head = f"method: {method}\nmodel: {{name: ./model}}\ntrain: {{batch_size: 4, learning_rate: 1e-3, seed: 1}}\n"
    Path(name).write_text(head + "\n".join([RECIPES[method], *more, f"run: {{dir: runs/{method}}}"]) + "\n")
    return name


# Scores


def test_every_row_gets_its_score_and_stays_as_it_was(place: Path) -> None:
    tally = judge()
    assert (tally.rows, tally.failed) == (21, 0)
    for row, line in zip(read("answers.jsonl"), read("scored.jsonl"), strict=True):
        score = -float(len(row["completion_ids"]))
        assert line == {**row, "score": score, "parts": {"short": score}}


def test_a_reward_is_given_the_prompt_and_the_other_columns_of_its_row(place: Path) -> None:
    judge("rewards:vowels")
    for row in read("scored.jsonl"):
        assert row["score"] == pytest.approx(row["completion"].count("a") + row["info"]["answer"] / 100)


def test_several_rewards_add_up(place: Path) -> None:
    judge("rewards:short", "{reward: 'rewards:vowels', weight: 10, name: a}")
    for row in read("scored.jsonl"):
        assert set(row["parts"]) == {"short", "a"}
        assert row["score"] == pytest.approx(row["parts"]["short"] + 10 * row["parts"]["a"])


def test_a_failure_is_an_error_and_no_number(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("score", "--reward", "rewards:odd", "--data", "answers.jsonl", "--out", "scored.jsonl") == 0
    rows = read("scored.jsonl")
    failed = [row for row in rows if row["info"]["answer"] == 1]
    assert len(failed) == 3
    assert all(row["score"] is None and row["error"] for row in failed)
    assert all("error" not in row and row["score"] == row["index"] for row in rows if row not in failed)
    shown = " ".join(capsys.readouterr().out.split())
    assert "18 of 21 rows are scored in scored.jsonl" in shown
    assert "answers.jsonl:4: " in shown
    name = recipe("grpo")
    assert command("check", name) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "its reward failed, and no other answer to its prompt has a score" in shown
    assert command("train", name, "--quiet") == 0


def test_a_reward_that_is_down_stops_the_command_and_is_gone_on_with(place: Path) -> None:
    Path("broken.py").write_text(
        "def fn(completions, **context):\n    import os\n    if os.path.exists('down') and completions[0].info['answer'] > 2:\n"
        "        raise OSError('the server is down')\n    return [1.0] * len(completions)\n"
    )
    Path("down").touch()
    with pytest.raises(UserError, match=r"answers.jsonl:13: the reward failed for all 4 answers from here on.*server is down"):
        judge("{reward: 'broken:fn', retries: 0}")
    assert len(read("scored.jsonl")) == 12
    Path("down").unlink()
    assert judge("{reward: 'broken:fn', retries: 0}").earlier == 12
    assert {row["score"] for row in read("scored.jsonl")} == {1.0}


def test_the_rewards_of_a_recipe_are_those_of_its_answers(place: Path) -> None:
    Path("recipe.yaml").write_text(
        "method: rejection\nmodel: {name: ./model}\ndata: {train: [{path: prompts.jsonl}]}\nreward: rewards:short\n"
    )
    assert command("score", "recipe.yaml", "--data", "answers.jsonl", "--out", "scored.jsonl", "--quiet") == 0
    assert read("scored.jsonl")[0]["parts"].keys() == {"short"}
    assert command("score", "recipe.yaml", "--data", "answers.jsonl", "--out", "b.jsonl", "--beta", "1") == 2


def test_rows_of_text_are_put_into_tokens_by_a_model(place: Path) -> None:
    rows = [{"prompt": "1 + 1 = ", "completion": "2", "answer": 2}, {"prompt": [{"role": "user", "content": "hello"}],
            "completion": "world a", "answer": 7}]  # fmt: skip
    write("text.jsonl", rows)
    with pytest.raises(UserError, match=r"text.jsonl:1: the row has no prompt_ids and completion_ids.*\n.*name a model"):
        judge("rewards:vowels", data=("text.jsonl",))
    judge("rewards:vowels", data=("text.jsonl",), target="model")
    assert read("scored.jsonl") == [
        {**row, "score": s, "parts": {"vowels": s}} for row, s in zip(rows, (0.02, 1.07), strict=True)
    ]


@pytest.mark.parametrize(("change", "said"), [
    ({"data": ("prompts.jsonl",)}, "a reward judges one answer to a prompt"),
    ({"rewards": ("nothing:here",)}, "nothing"),
    ({"rewards": ("{reward: 'rewards:short', weight: heavy}",)}, "weight"),
    ({"out": "answers.jsonl"}, "is read and cannot be written as well"),
])  # fmt: skip
def test_what_cannot_be_judged_is_refused(change: dict[str, Any], said: str, place: Path) -> None:
    rewards = change.pop("rewards", ("rewards:short",))
    with pytest.raises(UserError, match=said):
        judge(*rewards, **change)


def test_rows_are_judged_once(place: Path) -> None:
    judge()
    with pytest.raises(UserError, match="scored.jsonl:1: the row has a column 'score' already"):
        judge(data=("scored.jsonl",), out="again.jsonl")


# Stopping and going on


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_a_file_that_was_cut_is_gone_on_with(share: float, place: Path) -> None:
    judge("rewards:odd")
    expected = Path("scored.jsonl").read_bytes()
    Path("scored.jsonl").write_bytes(expected[: int(share * len(expected))])
    tally = judge("rewards:odd")
    assert Path("scored.jsonl").read_bytes() == expected
    assert (tally.rows, tally.failed) == (21, 3)
    lines = expected[: int(share * len(expected))].count(b"\n")
    assert tally.earlier == (21 if share == 1 else lines // 4 * 4)


def test_other_rewards_and_other_rows_do_not_mix(place: Path) -> None:
    judge()
    with pytest.raises(UserError, match="another reward"):
        judge("rewards:vowels")
    rows = read("answers.jsonl")
    write("answers.jsonl", [rows[0], {**rows[1], "completion": "other"}, *rows[2:]])
    with pytest.raises(UserError, match="answers.jsonl:2: scored.jsonl:2 is not of this row as it is now"):
        judge()


def test_another_reward_model_or_schema_in_the_same_place_is_noticed(place: Path) -> None:
    Path("schema.json").write_text('{"type": "string"}')
    rule = "{reward: json_schema, settings: {schema: schema.json}}"
    judge(rule)
    Path("schema.json").write_text('{"type": "number"}')
    with pytest.raises(UserError, match="made with another judges"):
        judge(rule)
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained("model", num_labels=1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained("judge")
        tiny_tokenizer().save_pretrained("judge")
        if seed == 1:
            judge("./judge", out="by_model.jsonl")
    with pytest.raises(UserError, match="made with another judges"):
        judge("./judge", out="by_model.jsonl")


def test_a_function_may_be_mended_on_the_way(place: Path) -> None:
    judge("rewards:short")
    Path("rewards.py").write_text(REWARDS + "\n# mended\n")
    assert judge("rewards:short").earlier == 21


def test_rows_in_tokens_of_another_tokenizer_do_not_mix(place: Path) -> None:
    write("text.jsonl", [{"prompt": "1 + 1 = ", "completion": "2", "answer": 2}])
    judge("rewards:vowels", data=("text.jsonl",), target="model")
    tiny_tokenizer(chatml_tokens=False).save_pretrained("model")
    with pytest.raises(UserError, match="made with another tokenizer"):
        judge("rewards:vowels", data=("text.jsonl",), target="model")


def test_columns_that_json_has_no_form_for_are_written_as_text_and_gone_on_with(place: Path) -> None:
    rows = [row | {"at": datetime(2026, 1, 2, 3, k)} for k, row in enumerate(read("answers.jsonl")[:6])]
    for row in rows:
        del row["sampled"]
    Dataset.from_list(rows).to_parquet("answers.parquet")
    judge("rewards:short", data=("answers.parquet",))
    assert judge("rewards:short", data=("answers.parquet",)).earlier == 6
    rows[3]["at"] = None
    Dataset.from_list([row | {"extra": math.nan} for row in rows]).to_parquet("odd.parquet")
    with pytest.raises(UserError, match=r"odd.parquet:1: the row cannot be written as JSON"):
        judge("rewards:short", data=("odd.parquet",), out="odd.jsonl")


def test_settings_that_no_reward_reads_are_refused(place: Path) -> None:
    for extra in (("--dtype", "bfloat16"), ("--max-length", "8192"), ("nosuch.thing=1",)):
        asked = ("score", *(e for e in extra if "=" in e), "--reward", "rewards:short", "--data", "answers.jsonl")
        assert command(*asked, "--out", "scored.jsonl", *(e for e in extra if "=" not in e)) == 2


def test_answers_that_were_added_are_judged(place: Path) -> None:
    judge()
    sample(seed=1, append=True)
    assert judge().rows == 42
    judge(out="anew.jsonl")
    assert Path("scored.jsonl").read_bytes() == Path("anew.jsonl").read_bytes()


# From prompts to a trained model


def test_killed_on_the_way_the_walk_ends_in_the_same_model(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """valence sample, score and train, the first two killed in the middle and given again."""
    monkeypatch.setattr(module, "WINDOW", 128)
    Path("answers.jsonl").unlink()
    prompts(count=100)
    drawn = [
        "sample",
        "model",
        "--data",
        "prompts.jsonl",
        "-n",
        "4",
        "--max-new-tokens",
        "6",
        "--at-once",
        "8",
        "--quiet",
        "--out",
    ]
    judged = ["score", "--reward", "rewards:slow", "--quiet", "--data"]
    assert 30 <= killed(*drawn, "answers.jsonl", out="answers.jsonl", lines=30) < 400
    assert command(*drawn, "answers.jsonl") == 0
    assert killed(*judged, "answers.jsonl", "--out", "scored.jsonl", out="scored.jsonl", lines=100) in (128, 256)
    assert command(*judged, "answers.jsonl", "--out", "scored.jsonl") == 0
    assert command(*drawn, "whole.jsonl") == 0
    assert Path("answers.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert [row["score"] for row in read("scored.jsonl")] == [len(row["completion"]) for row in read("whole.jsonl")]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("method", RECIPES)
def test_methods_train_on_answers_that_were_judged(method: str, place: Path) -> None:
    judge("rewards:vowels" if method != "kto" else "{reward: 'rewards:short', weight: -1}")
    name = recipe(method)
    assert command("train", name, "--quiet") == 0
    last = json.loads(Path(f"runs/{method}/metrics.jsonl").read_text().splitlines()[0])
    assert last["grad_norm"] > 0
    rows = json.loads(Path(f"runs/{method}/audit.json").read_text())["train"]
    assert rows["files"][0]["rows"] == 21


def test_stored_log_probabilities_are_those_that_the_policy_is_compared_with(place: Path) -> None:
    """Those of the model that is trained change nothing; of a policy that gave its answers with other probabilities they do."""
    judge("rewards:vowels")
    rows, found = read("scored.jsonl"), list[float]()
    for change in (None, 0.0, 3.0):
        changed = [{**row, "logps": [p - (change or 0.0) for p in row["logps"]]} for row in rows]
        bare = [{name: each for name, each in row.items() if name != "logps"} for row in rows]
        write("scored.jsonl", bare if change is None else changed)
        assert command("train", recipe("grpo"), "--quiet", f"run.dir=runs/{change}") == 0
        found.append(json.loads(Path(f"runs/{change}/metrics.jsonl").read_text().splitlines()[0])["grad_norm"])
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert abs(found[2] - found[0]) > 0.05 * found[0]


def test_the_page_about_rounds_is_true(place: Path) -> None:
    """Its recipes and its commands, in their order."""
    page = (ROOT / "docs" / "rounds.md").read_text(encoding="utf-8")
    Path("my_rewards.py").write_text(REWARDS.replace("def short", "def concise"))
    Path("answers.jsonl").unlink()
    for block in blocks(page, "yaml"):
        Path(block.text.split()[1]).write_text(block.text)
    lines = [line for block in blocks(page, "sh") for line in block.text.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert command(*shlex.split(line.replace("-n 8", "-n 2").replace("64", "4"))[1:], "--quiet") == 0, line
    assert len(read("answers_2.jsonl")) == 14
    assert read("answers_2.jsonl")[0]["version"] == 1
