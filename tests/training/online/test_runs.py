"""Online runs."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.errors import check_error, raises_error
from tests.tiny import tiny_tokenizer
from tests.training.online.recipes import PROMPTS, logged, make, recipe, recipe_without_eval
from tests.training.resuming import facts, killed, resumed_steps, train, weights
from tests.training.scoring import FILES, read, score, write
from valence.errors import UserError
from valence.methods import ONLINE, method_of
from valence.rollouts import HFGenerator
from valence.training.trainer import Trainer
from valence.types import Completion

LOGGED = (
    "reward/mean",
    "reward/std",
    "rollout/length",
    "rollout/truncated",
    "rollout/failed",
    "rounds",
    "prompts",
    "step",
)
METHODS = (
    "rejection",
    "online_dpo",
    "online_kto",
    *(name for name in ONLINE if ONLINE[name].is_on_policy and name != "online_distill"),
)
"""``test_distill`` has online_distill, which needs another model."""

FAST = ("rejection", "online_kto", "grpo", "ppo")
"""One of each family."""
SHORT = {"rejection": {"mask_truncated": False}}
"""What trains on completions of 6 tokens, of which hardly any ends by itself."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in METHODS],
)
def test_every_method_runs_and_logs_what_it_did(method: str, place: Path) -> None:
    # the reward returns no text, so a teacher reads the best completion
    more = {"teacher": {"context": "demonstration"}} if method == "hindsight" else {}
    settings = recipe(place, method, rollout={"epochs": 2} | SHORT.get(method, {}), **more)
    run, printed = train(settings)
    first, *rows = logged(place)
    assert first["step"] == 0
    assert {"eval/reward/mean", "eval/kl", "eval/rollout/length"} <= first.keys()
    assert first["eval/kl"] == pytest.approx(0, abs=1e-9)
    assert set(LOGGED) <= rows[0].keys()
    assert "kl" in rows[0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["prompts"] for row in rows] == [
        3,
        3,
        6,
        6,
        9,
        9,
    ]  # the third round starts the next epoch
    assert [row["rounds"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert "reward/mean" not in rows[1]  # a second pass over the answers of a round
    assert all(torch.isfinite(p).all() for p in weights(run).values())
    assert (place / "run/model/model.safetensors").is_file()
    assert f"reward/mean {first['eval/reward/mean']:.4g}" in printed


@pytest.mark.parametrize(("method", "step"), [
    ("ppo", 4),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [("grpo", 3), ("rejection", 2), ("online_kto", 5), ("dapo", 3)]
    ),
])  # fmt: skip
def test_a_killed_run_ends_as_one_that_was_not(method: str, step: int, place: Path) -> None:
    """Also one that is killed in the middle of a round, whose answers are then not sampled
    again.
    """
    more: dict[str, Any] = {"rollout": {"epochs": 2} | SHORT.get(method, {})}
    more |= {"loss": {"kl_target": 0.5}} if method == "ppo" else {}
    settings = recipe(place, method, **more)
    full, _ = train(recipe(place, method, **more, run={"dir": str(place / "whole")}))
    killed(settings, step)
    again, _ = train(settings)
    assert resumed_steps(place / "run") == [step - 1]
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(full).items())
    assert logged(place) == logged(place, "whole")


def test_an_edited_reward_is_one_warning(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    source = "def {}(completions):\n    return [{} * len(each.text) for each in completions]\n"
    for name in ("long", "short"):
        (place / f"{name}_answers.py").write_text(source.format(name, 1))
    settings = recipe_without_eval(place, reward=["long_answers:long", "short_answers:short"])
    killed(settings, 3)
    (place / "short_answers.py").write_text(source.format("short", -1))
    del sys.modules["short_answers"]
    train(settings)
    train(settings | {"train": settings["train"] | {"max_steps": 7}})
    matches = [
        re.search(
            r"\breward (long|short)\b\D+(\d+)",
            warning,
        )
        for warning in facts(place / "run")["warnings"]
    ]
    assert [match.groups() for match in matches if match] == [("short", "3")]  # from round 3 on


@pytest.mark.parametrize("name", ["epochs", "steps"])
def test_rounds_of_another_number_of_steps_are_refused(name: str, place: Path) -> None:
    killed(recipe_without_eval(place, rollout={"epochs": 2}), 2)
    other = recipe_without_eval(place, rollout={"epochs": 2, name: 3})
    with raises_error("run-differs", where=str(place / "run"), fix="model.name") as raised:
        train(other, allow=["rollout"])
    assert f"rollout.{name}: " in raised.error.message


def test_answers_are_trained_on_at_the_temperature_at_which_they_were_measured(place: Path) -> None:
    """A round in flight is let go when that is changed."""
    killed(recipe_without_eval(place, rollout={"epochs": 2}), 2)
    assert [row["rounds"] for row in logged(place)] == [1, 1]
    train(
        recipe_without_eval(place, rollout={"epochs": 2, "temperature": 0.7}),
        allow=["rollout.temperature"],
    )
    assert [row["rounds"] for row in logged(place)] == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(("before", "after", "steered"), [
    pytest.param({}, {"kl_target": 0.5}, True, marks=pytest.mark.slow),
    pytest.param({"kl_target": 0.5}, {}, False, marks=pytest.mark.slow),
    ({"kl_target": 0.5}, {"kl_target": 0.5, "kl_beta": 0.2}, True),
])  # fmt: skip
def test_settings_of_the_kl_coefficient_may_change(
    before: dict[str, float], after: dict[str, float], steered: bool, place: Path
) -> None:
    killed(recipe_without_eval(place, "ppo", loss=before), 3)
    run, _ = train(recipe_without_eval(place, "ppo", loss=after), allow=["loss"])
    rows = [row for row in logged(place) if row["step"] > 2]
    assert ["kl_beta" in row for row in rows] == [steered] * len(rows)
    assert run.examples is not None
    assert (run.examples.kl_beta is not None) is steered
    if "kl_beta" in after:
        # from where it is now said to begin
        assert rows[0]["kl_beta"] == pytest.approx(0.2, rel=0.05)


def test_a_run_is_scored_at_a_temperature_of_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its answers were sampled at: of its model and its reference alike."""
    monkeypatch.chdir(place)
    options = {"temperature": 0.5, "measure_kl": True}
    train(recipe(place, model={"lora": None}, rollout=options, train={"max_steps": 1}))
    write("rows.jsonl", FILES["preference"])
    results: dict[str, list[dict[str, float]]] = {}
    for name in ("run", "run/model", "model"):
        score("rows.jsonl", target=name, out="out.jsonl")
        results[name] = [
            answer for line in read("out.jsonl") for answer in line["valence"]["answers"]
        ]
        Path("out.jsonl").unlink()
    assert [a["logp"] for a in results["run"]] == pytest.approx(
        [a["logp"] for a in results["run/model"]], abs=1e-3
    )
    assert [a["ref"] for a in results["run"]] == pytest.approx(
        [a["logp"] for a in results["model"]], abs=1e-3
    )


def test_a_policy_whose_logits_are_not_finite_is_an_error(place: Path) -> None:
    class Break(valence.Callback):
        def on_start(self, run: Trainer) -> None:
            run.policy.causal.get_output_embeddings().weight.data.fill_(torch.nan)

    with raises_error("sampling-failed", where="step 0", fix="train.learning_rate"):
        train(recipe_without_eval(place), callbacks=[Break()])


def test_a_round_is_cut_into_steps_by_prompts(place: Path) -> None:
    """Three prompts in two steps, twice: the counters tell of four steps a round."""
    train(recipe_without_eval(place, rollout={"epochs": 2, "steps": 2}, train={"max_steps": 5}))
    rows = logged(place)
    assert [row["rounds"] for row in rows] == [1, 1, 1, 1, 2]
    assert [row["examples_seen"] for row in rows[:4]] in (
        [4, 12, 16, 24],
        [4, 12, 20, 24],
        [8, 12, 20, 24],
        [8, 12, 16, 24],
    )


def test_the_path_of_the_prompts_changes_no_step(place: Path) -> None:
    """Several paths, because two of them may give the same order by chance."""
    settings = recipe_without_eval(
        place, rollout={"epochs": 4, "steps": 3}, train={"max_steps": 12}
    )
    results: list[list[dict[str, Any]]] = []
    for name in ("a", "b", "c"):
        copy = place / f"{name}.jsonl"
        copy.write_bytes((place / "prompts.jsonl").read_bytes())
        data = {**settings["data"], "train": [str(copy)]}
        train({**settings, "data": data, "run": {**settings["run"], "dir": str(place / name)}})
        results.append(logged(place, name))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("method", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_micro_batches_change_no_number(method: str, place: Path) -> None:
    """Advantages and the averages' counts are those of the whole round and step."""
    runs = []
    for tokens in (64, 4096):
        options: dict[str, Any] = {"rollout": {"epochs": 2}, "model": {"dtype": "float64"}}
        options["train"] = {"micro_batch_tokens": tokens, "max_steps": 2}
        train(
            recipe_without_eval(place, method, **options, run={"dir": str(place / f"run-{tokens}")})
        )
        runs.append(logged(place, f"run-{tokens}"))
    for ours, theirs in zip(*runs, strict=True):
        for name in ours.keys() - {"micro_batches", "tokens", "tokens_seen", "waste"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-7, abs=1e-9), name


def test_completions_without_a_score_are_omitted_and_counted(place: Path) -> None:
    reward = "tests.training.online.rewards:patchy"
    run, _ = train(
        recipe_without_eval(
            place,
            reward=reward,
            rollout={"max_failed": 0.5},
            train={"max_steps": 2},
        ),
    )
    rows = logged(place)
    assert all(row["rollout/failed"] == 0.25 for row in rows)
    assert rows[0]["examples_seen"] == 9
    warnings = facts(place / "run")["warnings"]
    assert [re.findall(r"\d+", warning)[:2] for warning in warnings] == [["1", "3"], ["2", "3"]]
    assert all(torch.isfinite(p).all() for p in weights(run).values())


def test_a_completion_without_tokens_is_omitted(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = HFGenerator.generate

    def generate(self: HFGenerator, *args: Any, **options: Any) -> list[list[Completion]]:
        answers = plain(self, *args, **options)
        return [
            [replace(answer[0], tokens=(), logps=(), text="", stop="length"), *answer[1:]]
            for answer in answers
        ]

    monkeypatch.setattr(HFGenerator, "generate", generate)
    run, _ = train(recipe_without_eval(place, rollout={"max_failed": 0.5}, train={"max_steps": 2}))
    assert all(row["rollout/failed"] == 0.25 and row["skipped"] == 0 for row in logged(place))
    assert len(facts(place / "run")["warnings"]) == 2  # of each round
    assert all(torch.isfinite(p).all() for p in weights(run).values())


@pytest.mark.parametrize(("rollout", "code", "setting"), [
    ({}, "reward-failures", "rollout.max_failed: 0.1"),
    ({"max_failed": 1.0, "on_failure": "stop"}, "reward-failed", "rollout.on_failure"),
])  # fmt: skip
def test_a_reward_that_fails_too_often_stops_the_run(
    rollout: dict[str, Any],
    code: str,
    setting: str,
    place: Path,
) -> None:
    settings = recipe_without_eval(
        place,
        reward="tests.training.online.rewards:patchy",
        rollout=rollout,
    )
    with raises_error(code, where="reward") as raised:
        train(settings)
    assert setting in raised.error.message
    assert "nan" in raised.error.message.lower()


def test_complete_groups_are_omitted_on_request(place: Path) -> None:
    rollout = {"max_failed": 1.0, "on_failure": "drop_group"}
    settings = recipe_without_eval(
        place,
        reward="tests.training.online.rewards:patchy",
        rollout=rollout,
    )
    with raises_error("nothing-to-learn", where="step 0"):
        train(settings)


def test_equal_rewards_have_no_gradient(place: Path) -> None:
    """Advantages are exactly 0, and nothing moves; a method that compares completions cannot
    train.
    """
    same = "tests.training.online.rewards:constant"
    train(recipe_without_eval(place, reward=same, train={"max_steps": 2}))
    assert [row["grad_norm"] for row in logged(place)] == [0.0, 0.0]
    assert [row["rollout/tied"] for row in logged(place)] == [1.0, 1.0]
    settings = recipe_without_eval(place, "online_dpo", reward=same, rollout={"max_resample": 2})
    with raises_error("nothing-to-learn", where="step 0", fix="rollout.num_rollouts") as raised:
        train(settings, fresh=True)
    assert raised.error.message.startswith("3 ")  # rounds in a row


@pytest.mark.parametrize(("method", "replaces", "drops", "per_prompt"), [
    ("dapo", None, True, 4), ("dapo", False, False, 4), ("grpo", None, False, 4),
    ("grpo", True, True, 4), ("rloo", True, True, 4), ("online_dpo", True, True, 1),
    ("online_dpo", None, True, 1), ("rejection", True, True, 1),
])  # fmt: skip
def test_prompts_with_equal_rewards_are_replaced(
    method: str, replaces: bool | None, drops: bool, per_prompt: int, place: Path
) -> None:
    """A round has three prompts. Four of the seven have equal rewards. Without replacement, a
    policy gradient also trains on those, with advantages of 0.
    """
    settings = recipe_without_eval(
        place,
        method,
        reward="tests.training.online.rewards:tied_for_even",
        rollout={"replace_tied": replaces} | SHORT.get(method, {}),
        train={"max_steps": 1},
    )
    train(settings)
    (row,) = logged(place)
    num_tied = round(row["rollout/tied"] * row["prompts"])
    assert num_tied > 0
    assert row["prompts"] == (3 + num_tied if replaces or (method == "dapo" and drops) else 3)
    trained = row["prompts"] - num_tied if drops else row["prompts"]
    assert row["examples_seen"] == per_prompt * trained


def test_other_columns_of_a_prompt_reach_the_reward(place: Path) -> None:
    reward = "tests.training.online.rewards:of_info"
    train(
        recipe_without_eval(
            place,
            reward=reward,
            rollout={"num_rollouts": 2},
            train={"batch_size": 7, "max_steps": 1},
        )
    )
    assert logged(place)[0]["reward/mean"] == pytest.approx(0.5)
    assert len(PROMPTS) == logged(place)[0]["prompts"]


def test_the_tools_of_a_prompt_reach_the_reward(place: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained(place / "model")
    rows = [{**row, "tools": [{"name": "clock"}] * (k % 2)} for k, row in enumerate(PROMPTS[:6])]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "tests.training.online.rewards:of_tools"
    train(
        recipe_without_eval(
            place,
            reward=reward,
            rollout={"num_rollouts": 2},
            train={"batch_size": 6, "max_steps": 1},
        )
    )
    assert logged(place)[0]["reward/mean"] == pytest.approx(0.5)


def test_held_out_prompts_have_one_answer_each(place: Path) -> None:
    run, _ = train(recipe(place, train={"max_steps": 1}))
    result = run.evaluate()
    assert len(result.rows) == 3
    assert {"id", "origin", "prompt", "completion", "reward", "tokens", "stop"} <= result.rows[
        0
    ].keys()
    assert result.metrics["reward/mean"] == pytest.approx(
        sum(row["reward"] for row in result.rows) / 3
    )
    assert run.evaluate().rows == result.rows


@pytest.mark.parametrize(("changes", "code", "where"), [
    ({"method": "dpo"}, "method-without-reward", "method"),
    (
        {"method": "online_kto", "loss": {"class_weights": "auto"}},
        "setting-conflict", "loss.class_weights",
    ),
    (
        {"method": "ppo", "loss": {"kl_target": 0.5, "kl_beta": 0.0}},
        "setting-conflict", "loss.kl_target",
    ),
    (
        {"rollout": {"engine": "vllm", "start": True}, "model": {"gguf_file": "a.gguf"}},
        "setting-conflict", "rollout.start",
    ),
    ({"method": "rejection", "reward": []}, "method-needs-reward", "method"),
    ({"rollout": {"num_rollouts": 1}}, "setting-conflict", "rollout.num_rollouts"),
    ({"rollout": {"top_n": 2}}, "setting-no-effect", "rollout.top_n"),
    ({"method": "rejection", "rollout": {"top_n": 9}}, "setting-conflict", "rollout.top_n"),
    ({"rollout": {"engine": "vllm"}}, "setting-conflict", "rollout.url"),
    (
        {
            "rollout": {"engine": "vllm", "url": "http://127.0.0.1:1"},
            "model": {"lora": {"use_dora": True}},
        },
        "setting-conflict",
        "model.lora.use_dora",
    ),
    (
        {
            "rollout": {
                "engine": "vllm",
                "url": ["http://127.0.0.1:1", "http://127.0.0.1:2"],
                "transport": "ipc",
            },
            "model": {"lora": None},
        },
        "setting-conflict",
        "rollout.transport",
    ),
    ({"rollout": {"engine": "vllm", "url": []}}, "setting-conflict", "rollout.url"),
    ({"rollout": {"url": "http://127.0.0.1:1"}}, "setting-no-effect", "rollout.url"),
    (
        {"rollout": {"engine": "openai", "url": "http://127.0.0.1:1"}},
        "setting-conflict", "rollout.engine",
    ),
    ({"value": {"trunk": "shared"}}, "setting-no-effect", "value.trunk"),
    ({"run": {"keep_best": {}}}, "setting-conflict", "run.keep_best"),
    ({"reference": {"cache": "somewhere"}}, "setting-no-effect", "reference.cache"),
    ({"rollout": {"max_new_tokens": 128}}, "max-length-too-small", "data.max_length"),
    ({"data": {"convert": "scores_to_pairs"}}, "setting-conflict", "data.convert"),
])  # fmt: skip
def test_mistakes_are_found_before_anything_is_sampled(
    changes: dict[str, Any], code: str, where: str, place: Path
) -> None:
    (place / "model/model.safetensors").unlink()
    method = changes.pop("method", "grpo")
    with raises_error(code, where=f"({where})" if code.startswith("setting") else where):
        valence.train(recipe(place, method, **changes))


def test_the_reward_decides_whether_a_method_is_online() -> None:
    assert method_of("grpo").kind == "ranking"
    assert method_of("grpo", True).kind == "prompt"
    assert "kl_beta" in method_of("ppo", True).settings.model_fields
    assert "kl_beta" not in method_of("ppo").settings.model_fields


@pytest.mark.parametrize(("reward", "where", "fix"), [
    ("tests.training.online.rewards:vowel", "reward.0.reward", "vowels"),
    ("lenght", "reward.0.reward", "length"),
    ("no_such_package:fn", "reward.0.reward: no_such_package:fn", ""),
    ({"reward": "length", "settings": {"most": -1}}, "reward.0.settings.most", ""),
    ({"reward": "vader", "token_env": "X"}, "reward.0.token_env", ""),
])  # fmt: skip
def test_a_reward_that_cannot_be_had_is_found_before_the_model_loads(
    reward: Any, where: str, fix: str, place: Path
) -> None:
    (place / "model/model.safetensors").unlink()
    with pytest.raises(UserError) as info:
        valence.train(recipe(place) | {"reward": reward})
    assert info.value.code.startswith("reward-")
    check_error(info.value, info.value.code, where=where, fix=fix)


def test_memory_that_runs_out_while_sampling_is_an_error(place: Path) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    class Fill(valence.Callback):
        def on_start(self, run: Trainer) -> None:
            run.policy.causal.register_forward_pre_hook(full)

    with raises_error("out-of-memory", where="rollout.at_once: 64", fix="rollout.max_new_tokens"):
        train(recipe(place), callbacks=[Fill()])
