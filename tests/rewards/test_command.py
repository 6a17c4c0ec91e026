"""The command that lists rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import valence
from tests.command import command, command_error, place
from tests.errors import check_error, raises_error
from valence.rewards.rules import RULES, settings_of

__all__ = ["place"]

RECIPE = """\
method: grpo
model: {name: ./model, lora: {rank: 4}}
data: {train: prompts.jsonl}
reward:
  - length
  - reward: "typed_rewards:short"
    settings:
      per: 2.0
"""
FUNCTION = """\
def short(completions, *, per: float = 50.0):
    return [-len(answer.text) / per for answer in completions]
"""


def test_rules_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("docs") == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in RULES)
    assert command("docs", "length") == 0
    explained = capsys.readouterr().out
    settings = settings_of("length").model_fields
    assert all(f"settings.{name}" in explained for name in settings)
    assert str(settings["fall"].description) in explained
    assert command("docs", "lenth") == 2
    assert "length" in capsys.readouterr().err


def test_a_wrong_setting_is_named_before_the_model_is_loaded(place: Path) -> None:
    (place / "online.yaml").write_text(RECIPE)
    (place / "typed_rewards.py").write_text(FUNCTION)
    (place / "prompts.jsonl").write_text(json.dumps({"prompt": "question"}) + "\n")
    (place / "model" / "model.safetensors").unlink()
    for words, setting in (
        (("reward.1.settings.per=two",), "reward.1.settings.per"),
        (("reward.1.settings.pre=2",), "reward.1.settings.pre"),
        (("reward.0={reward: length, settings: {fall: -1}}",), "reward.0.settings.fall"),
        (
            ("reward.0={judge: 'http://a/v1', settings: {pre: 1, model: m}}",),
            "reward.0.settings.pre",
        ),
    ):
        code = "reward-setting-unknown" if setting.endswith("pre") else "reward-setting-value"
        for name in ("check", "train"):
            check_error(command_error(name, "online.yaml", *words), code, where=setting)
    (place / "online.yaml").write_text(RECIPE.replace("2.0", "two"))
    error = command_error("check", "online.yaml")
    check_error(error, "reward-setting-value", where="online.yaml:7 (reward.1.settings.per)")
    judge = "- length\n  - judge: http://127.0.0.1:1/v1\n    settings: {model: m, temprature: 1}"
    for entry, name, line in (
        ("- {reward: length, settings: {fal: 1}}", "settings.fal", 5),
        (judge, "settings.temprature", 7),
        ("- name: pattern\n    reward: regex", "settings.pattern", 5),
    ):
        (place / "online.yaml").write_text(RECIPE.replace("- length", entry, 1))
        error = command_error("check", "online.yaml")
        number = entry.count("- ") - 1
        code = "reward-setting-missing" if "regex" in entry else "reward-setting-unknown"
        check_error(error, code, where=f"online.yaml:{line} (reward.{number}.{name})")
    assert not (place / "runs").exists()


def test_a_function_object_has_the_types_of_its_annotations(place: Path) -> None:
    def short(completions: list[valence.Completion], *, per: float = 50.0) -> list[float]:
        return [-len(answer.text) / per for answer in completions]

    reward = {"reward": short, "settings": {"per": "two"}}
    with raises_error("reward-setting-value", where="reward.0.settings.per"):
        valence.train(method="grpo", model="./model", train=[{"prompt": "q"}], reward=reward)
