"""Answers scored by rewards, in files: scores, failures, resuming, and the steps from prompts to a
trained model.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import normalizers
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.command import command
from tests.docs.blocks import blocks
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.training.rounds import REWARDS, ROOT, judge, killed, prompts, sample
from tests.training.scoring import invoke, read, write
from valence.jobs import reward_rows as module

RECIPES = {
    "grpo": "data: {train: [{path: scored.jsonl}], convert: scores_to_rankings}",
    "sft": "data: {train: [{path: scored.jsonl}], convert: best_to_demonstrations, top_n: 2, "
    "mask_truncated: false}",
    "dpo": "data: {train: [{path: scored.jsonl}], convert: scores_to_pairs}",
    "kto": "data: {train: [{path: scored.jsonl}], convert: scores_to_judgements, threshold: 4.5}",
}


@pytest.fixture(scope="module")
def sampled(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and answers of it, to be copied."""
    folder = tmp_path_factory.mktemp("sampled")
    shutil.copytree(models / "model", folder / "model")
    with contextlib.chdir(folder):
        prompts()
        sample()
    return folder


@pytest.fixture
def place(sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, answers of it and rewards, which is the current one.

    Windows are small.
    """
    shutil.copytree(sampled, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("rewards", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(module, "WINDOW", 4)
    monkeypatch.setenv("COLUMNS", "200")
    Path("rewards.py").write_text(REWARDS)
    return tmp_path


def recipe(method: str, *more: str) -> str:
    name = f"{method}.yaml"
    head = (
        f"method: {method}\nmodel: {{name: ./model}}\ntrain: {{batch_size: 4, learning_rate: "
        f"1e-3, seed: 1}}\n"
    )
    Path(name).write_text(
        head + "\n".join([RECIPES[method], *more, f"run: {{dir: runs/{method}}}"]) + "\n"
    )
    return name


# Scores


def test_every_row_gets_its_score_and_stays_as_it_was(place: Path) -> None:
    tally = judge()
    assert (tally.rows, tally.failed) == (21, 0)
    for row, line in zip(read("answers.jsonl"), read("scored.jsonl"), strict=True):
        score = -float(len(row["completion_ids"]))
        assert line == {**row, "score": score, "parts": {"short": score}}


def test_texts_of_a_reward_become_the_feedback_of_rows_without_any(place: Path) -> None:
    """A resumed command writes the same."""
    rows = read("answers.jsonl")
    rows[0] |= {"feedback": "the user wrote this"}
    rows[1] |= {"feedback": None}
    write("answers.jsonl", rows)
    judge("rewards:words")
    lines = read("scored.jsonl")
    for row, line in zip(rows, lines, strict=True):
        number = len(row["completion"])
        text = row.pop("feedback", None) or (f"{number} letters" if number % 2 else "")
        added = {"score": float(number), "parts": {"words": float(number)}}
        assert line == {**row, **added, **({"feedback": text} if text else {})}
    complete = Path("scored.jsonl").read_bytes()
    Path("scored.jsonl").write_bytes(b"".join(complete.splitlines(True)[:9]))
    judge("rewards:words")
    assert Path("scored.jsonl").read_bytes() == complete


def test_a_reward_is_given_the_prompt_and_the_other_columns_of_its_row(place: Path) -> None:
    judge("rewards:vowels")
    for row in read("scored.jsonl"):
        assert row["score"] == pytest.approx(
            row["completion"].count("a") + row["info"]["answer"] / 100
        )


def test_several_rewards_add_up(place: Path) -> None:
    judge("rewards:short", "{reward: 'rewards:vowels', weight: 10, name: a}")
    for row in read("scored.jsonl"):
        assert set(row["parts"]) == {"short", "a"}
        assert row["score"] == pytest.approx(row["parts"]["short"] + 10 * row["parts"]["a"])


def test_a_failure_is_an_error_and_no_number(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command(
            "score", "--reward", "rewards:odd", "--data", "answers.jsonl", "--out", "scored.jsonl"
        )
        == 0
    )
    rows = read("scored.jsonl")
    failed = [row for row in rows if row["info"]["answer"] == 1]
    assert len(failed) == 3
    assert all(row["score"] is None and row["error"] for row in failed)
    assert all(
        "error" not in row and row["score"] == row["index"] for row in rows if row not in failed
    )
    shown = capsys.readouterr().out
    assert {"18", "21"} <= set(re.findall(r"\d+", shown))
    assert "answers.jsonl:4: " in shown
    assert command("train", recipe("grpo"), "--quiet") == 0
    file = json.loads(Path("runs/grpo/audit.json").read_text())["train"]["files"][0]
    assert file["not_converted"] == 3


def test_an_unavailable_reward_stops_the_command_which_resumes_later(place: Path) -> None:
    Path("broken.py").write_text(
        "def fn(completions, **context):\n    import os\n    if os.path.exists('down') and "
        "completions[0].info['answer'] > 2:\n"
        "        raise OSError('the server is down')\n    return [1.0] * len(completions)\n"
    )
    Path("down").touch()
    with raises_error("reward-failures", where="answers.jsonl:13") as raised:
        judge("{reward: 'broken:fn', retries: 0}")
    assert "the server is down" in raised.error.message  # what the reward raised
    assert len(read("scored.jsonl")) == 12
    Path("down").unlink()
    assert judge("{reward: 'broken:fn', retries: 0}").earlier == 12
    assert {row["score"] for row in read("scored.jsonl")} == {1.0}


def test_the_rewards_of_a_recipe_are_those_of_its_answers(place: Path) -> None:
    Path("recipe.yaml").write_text(
        "method: rejection\nmodel: {name: ./model}\ndata: {train: [{path: "
        "prompts.jsonl}]}\nreward: rewards:short\n"
    )
    assert (
        command(
            "score", "recipe.yaml", "--data", "answers.jsonl", "--out", "scored.jsonl", "--quiet"
        )
        == 0
    )
    assert read("scored.jsonl")[0]["parts"].keys() == {"short"}
    assert (
        command(
            "score", "recipe.yaml", "--data", "answers.jsonl", "--out", "b.jsonl", "--beta", "1"
        )
        == 2
    )


def test_rows_of_text_are_put_into_tokens_by_a_model(place: Path) -> None:
    rows = [
        {"prompt": "1 + 1 = ", "completion": "2", "answer": 2},
        {"prompt": [{"role": "user", "content": "hello"}], "completion": "world a", "answer": 7},
    ]
    write("text.jsonl", rows)
    with raises_error("row-tokens-missing", where="text.jsonl:1", fix="--data"):
        judge("rewards:vowels", data=("text.jsonl",))
    judge("rewards:vowels", data=("text.jsonl",), target="model")
    assert read("scored.jsonl") == [
        {**row, "score": s, "parts": {"vowels": s}}
        for row, s in zip(rows, (0.02, 1.07), strict=True)
    ]


@pytest.mark.parametrize(("change", "code", "where"), [
    ({"data": ("prompts.jsonl",)}, "row-not-scorable", "prompts.jsonl:1"),
    ({"rewards": ("nothing:here",)}, "reward-module-not-found", "reward.0.reward: nothing:here"),
    ({"rewards": ("{reward: 'rewards:short', weight: heavy}",)}, "setting-type", "reward.0.weight"),
    ({"out": "answers.jsonl"}, "output-is-input", "answers.jsonl"),
])  # fmt: skip
def test_rows_that_cannot_be_scored_are_refused(
    change: dict[str, Any],
    code: str,
    where: str,
    place: Path,
) -> None:
    rewards = change.pop("rewards", ("rewards:short",))
    with raises_error(code, where=where):
        judge(*rewards, **change)


def test_rows_are_judged_once(place: Path) -> None:
    judge()
    with raises_error("row-column-taken", where="scored.jsonl:1") as raised:
        judge(data=("scored.jsonl",), out="again.jsonl")
    assert "'score'" in raised.error.message


# Stopping and going on


def test_a_truncated_output_file_is_resumed(place: Path) -> None:
    judge("rewards:odd")
    expected = Path("scored.jsonl").read_bytes()
    for share in (0.0, 0.3, 0.9, 1.0):
        part = expected[: int(share * len(expected))]
        Path("scored.jsonl").write_bytes(part)
        tally = judge("rewards:odd")
        assert Path("scored.jsonl").read_bytes() == expected, share
        assert (tally.rows, tally.failed) == (21, 3), share
        assert tally.earlier == (21 if share == 1 else part.count(b"\n") // 4 * 4), share


def test_other_rewards_and_other_rows_do_not_mix(place: Path) -> None:
    judge()
    with raises_error("output-settings-differ", where="scored.jsonl (reward)"):
        judge("rewards:vowels")
    rows = read("answers.jsonl")
    write("answers.jsonl", [rows[0], {**rows[1], "completion": "other"}, *rows[2:]])
    with raises_error("output-rows-changed", where="answers.jsonl:2") as raised:
        judge()
    assert "scored.jsonl:2" in raised.error.message


def test_another_reward_model_or_schema_in_the_same_place_is_noticed(place: Path) -> None:
    Path("schema.json").write_text('{"type": "string"}')
    rule = "{reward: json_schema, settings: {schema: schema.json}}"
    judge(rule)
    Path("schema.json").write_text('{"type": "number"}')
    with raises_error("output-settings-differ", where="scored.jsonl (judges)"):
        judge(rule)
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained("model", num_labels=1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained("judge")
        tiny_tokenizer().save_pretrained("judge")
        if seed == 1:
            judge("./judge", out="by_model.jsonl")
    with raises_error("output-settings-differ", where="by_model.jsonl (judges)"):
        judge("./judge", out="by_model.jsonl")


def test_a_function_may_be_mended_on_the_way(place: Path) -> None:
    judge("rewards:short")
    Path("rewards.py").write_text(REWARDS + "\n# mended\n")
    assert judge("rewards:short").earlier == 21


@pytest.mark.parametrize("has_same_vocabulary", [False, True])
def test_rows_in_tokens_of_another_tokenizer_do_not_mix(
    place: Path, has_same_vocabulary: bool
) -> None:
    write("text.jsonl", [{"prompt": "1 + 1 = ", "completion": "2", "answer": 2}])
    judge("rewards:vowels", data=("text.jsonl",), target="model")
    other: Any = tiny_tokenizer(chatml_tokens=has_same_vocabulary)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    other.save_pretrained("model")
    with raises_error("output-settings-differ", where="scored.jsonl (tokenizer)"):
        judge("rewards:vowels", data=("text.jsonl",), target="model")


def test_columns_that_json_cannot_represent_are_written_as_text_and_resumed(
    place: Path,
) -> None:
    rows = [
        row | {"at": datetime(2026, 1, 2, 3, k)} for k, row in enumerate(read("answers.jsonl")[:6])
    ]
    for row in rows:
        del row["sampled"]
    Dataset.from_list(rows).to_parquet("answers.parquet")
    judge("rewards:short", data=("answers.parquet",))
    assert judge("rewards:short", data=("answers.parquet",)).earlier == 6
    rows[3]["at"] = None
    Dataset.from_list([row | {"extra": math.nan} for row in rows]).to_parquet("odd.parquet")
    with raises_error("row-not-json", where="odd.parquet:1"):
        judge("rewards:short", data=("odd.parquet",), out="odd.jsonl")


def test_settings_that_no_reward_reads_are_refused(place: Path) -> None:
    for setting, options, where in (
        ((), ("--dtype", "bfloat16"), "dtype"),
        ((), ("--max-length", "8192"), "max_length"),
        (("nosuch.thing=1",), (), "nosuch.thing"),
    ):
        words = (
            "score",
            *setting,
            "--reward",
            "rewards:short",
            "--data",
            "answers.jsonl",
            *options,
        )
        with raises_error("option-unused", where=where):
            invoke(*words, "--out", "scored.jsonl")


def test_answers_that_were_added_are_judged(place: Path) -> None:
    judge()
    sample(seed=1, append=True)
    assert judge().rows == 42
    judge(out="anew.jsonl")
    assert Path("scored.jsonl").read_bytes() == Path("anew.jsonl").read_bytes()


# From prompts to a trained model


@pytest.mark.slow
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
    assert killed(
        *judged, "answers.jsonl", "--out", "scored.jsonl", out="scored.jsonl", lines=100
    ) in (128, 256)
    assert command(*judged, "answers.jsonl", "--out", "scored.jsonl") == 0
    assert command(*drawn, "whole.jsonl") == 0
    assert Path("answers.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert [row["score"] for row in read("scored.jsonl")] == [
        len(row["completion"]) for row in read("whole.jsonl")
    ]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "method",
    ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "grpo")],
)
def test_methods_train_on_answers_that_were_judged(method: str, place: Path) -> None:
    judge("rewards:vowels" if method != "kto" else "{reward: 'rewards:short', weight: -1}")
    name = recipe(method)
    assert command("train", name, "--quiet") == 0
    last = json.loads(Path(f"runs/{method}/metrics.jsonl").read_text().splitlines()[0])
    assert last["grad_norm"] > 0
    rows = json.loads(Path(f"runs/{method}/audit.json").read_text())["train"]
    assert rows["files"][0]["rows"] == 21


def test_stored_log_probabilities_are_those_that_the_policy_is_compared_with(place: Path) -> None:
    """Those of the model that is trained change nothing; of a policy that gave its answers with
    other probabilities they do.
    """
    judge("rewards:vowels")
    rows, results = read("scored.jsonl"), list[float]()
    for change in (None, 0.0, 3.0):
        changed = [{**row, "logps": [p - (change or 0.0) for p in row["logps"]]} for row in rows]
        bare = [{name: item for name, item in row.items() if name != "logps"} for row in rows]
        write("scored.jsonl", bare if change is None else changed)
        assert command("train", recipe("grpo"), "--quiet", f"run.dir=runs/{change}") == 0
        results.append(
            json.loads(Path(f"runs/{change}/metrics.jsonl").read_text().splitlines()[0])[
                "grad_norm"
            ]
        )
    assert results[1] == pytest.approx(results[0], rel=1e-3)
    assert abs(results[2] - results[0]) > 0.05 * results[0]


@pytest.mark.slow
def test_the_commands_of_rounds_work(place: Path) -> None:
    """Its recipes and its commands, in their order."""
    page = (ROOT / "docs/online/training.md").read_text(encoding="utf-8")
    page = page.partition("## Rounds in separate commands")[2]
    Path("my_rewards.py").write_text(REWARDS.replace("def short", "def right"))
    Path("answers.jsonl").unlink()
    for block in blocks(page, "yaml"):
        Path(block.text.split()[1]).write_text(block.text)
    lines = [line for block in blocks(page, "sh") for line in block.text.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert (
            command(*shlex.split(line.replace("-n 8", "-n 2").replace("64", "4"))[1:], "--quiet")
            == 0
        ), line
    assert len(read("round_2.jsonl")) == 14
    assert read("round_2.jsonl")[0]["version"] == 1
