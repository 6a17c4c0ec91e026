"""A run's folder that somebody else wrote executes no code unless a flag of the command line allows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

import valence
from tests.command import command
from tests.models import tiny
from tests.tiny import tiny_tokenizer
from tests.training.test_run import folder, recipe
from valence.errors import UserError
from valence.reward import rules
from valence.training.restore import restore
from valence.training.reward_models import reward_model

__all__ = ["folder"]


def change(run: Path, **sections: Any) -> None:
    """Writes other settings into the recipe that a run keeps."""
    yaml = YAML(typ="safe", pure=True)
    kept = yaml.load(run / "config.yaml")
    for name, section in sections.items():
        kept[name] = {**kept[name], **section} if isinstance(section, dict) else section
    yaml.dump(kept, run / "config.yaml")


@pytest.fixture
def online_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose folder names a reward function that leaves a mark when its module is imported."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("a", "b", "c", "d"))
    (tmp_path / "prompts.jsonl").write_text(rows)
    settings = {
        "method": "grpo",
        "model": {"name": str(folder)},
        "reward": [{"reward": "length"}],
        "data": {"train": "prompts.jsonl", "eval": "prompts.jsonl"},
        "rollout": {"max_new_tokens": 4, "num_rollouts": 2},
        "train": {"batch_size": 2, "max_steps": 1},
        "eval": {"at_start": False},
        "run": {"dir": str(tmp_path / "run")},
    }
    valence.train(settings, quiet=True)
    (tmp_path / "foreign_reward.py").write_text(
        "from pathlib import Path\nPath('mark').touch()\n\ndef score(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    change(tmp_path / "run", reward=[{"reward": "foreign_reward:score"}])
    return tmp_path / "run"


@pytest.mark.parametrize("words", [
    ["export", "run", "out"],
    ["sample", "run", "--prompt", "say a", "--max-new-tokens", "2"],
    ["sample", "run", "--data", "prompts.jsonl", "--out", "out.jsonl", "--max-new-tokens", "2"],
    ["score", "run", "--data", "rows.jsonl", "--out", "out.jsonl"],
])  # fmt: skip
def test_a_command_that_needs_no_reward_does_not_import_it(words: list[str], online_run: Path) -> None:
    Path("rows.jsonl").write_text('{"prompt": "say a", "completion": "b"}\n')
    assert command(*words) == 0
    assert not Path("mark").exists()


def test_evaluating_a_run_imports_its_reward_only_with_a_flag(online_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("evaluate", "run") == 2
    said = capsys.readouterr().err
    assert "foreign_reward:score" in said
    assert "--trust-reward" in said
    assert not Path("mark").exists()
    assert command("evaluate", "run", "--trust-reward") == 0
    assert Path("mark").exists()


@pytest.mark.parametrize(("reward", "allowed"), [
    ("http://127.0.0.1:9/get_reward", False), ("length", True), ("foreign_reward:score", False),
])  # fmt: skip
def test_only_rewards_that_are_code_or_servers_need_the_flag(reward: str, allowed: bool, online_run: Path) -> None:
    change(online_run, reward=[{"reward": reward}])
    assert "length" in rules.RULES
    if allowed:
        assert restore(online_run, quiet=True, rewards=True).evaluate().metrics
        return
    with pytest.raises(UserError, match=re.escape(reward)) as error:
        restore(online_run, quiet=True, rewards=True)
    assert "--trust-reward" in str(error.value.fix)


def test_evaluating_a_run_starts_no_program_that_its_folder_names(online_run: Path) -> None:
    program = online_run.parent / "program"
    program.write_text("#!/bin/sh\ntouch mark\nexit 1\n")
    program.chmod(0o755)
    change(online_run, reward=[{"reward": "length"}], rollout={"engine": "vllm", "start": True, "python": str(program)})
    assert restore(online_run, quiet=True, rewards=True).evaluate().metrics
    assert not Path("mark").exists()


@pytest.fixture
def run_with_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose folder names a model that comes with Python files, and allows to execute them."""
    monkeypatch.chdir(tmp_path)
    valence.train(recipe(folder, tmp_path, train={"max_steps": 1}), quiet=True)
    tokenizer = tiny_tokenizer()
    model: Any = tiny(vocab_size=len(tokenizer), dtype=torch.float32)
    model.save_pretrained("coded")
    tokenizer.save_pretrained("coded")
    config = json.loads(Path("coded/config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    Path("coded/config.json").write_text(json.dumps(config))
    Path("coded/code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    change(tmp_path / "run", model={"name": str(tmp_path / "coded"), "trust_remote_code": True})
    return tmp_path / "run"


@pytest.mark.parametrize("words", [
    ["export", "run", "out"],
    ["evaluate", "run"],
    ["sample", "run", "--prompt", "a"],
    ["sample", "run", "--prompt", "a", "--out", "out.jsonl"],
    ["score", "run", "--data", "rows.jsonl", "--out", "out.jsonl"],
    ["score", "run", "--reward", "length", "--data", "rows.jsonl", "--out", "out.jsonl"],
])  # fmt: skip
def test_files_of_a_model_are_executed_only_with_a_flag(
    words: list[str], run_with_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert command(*words) == 2
    said = capsys.readouterr().err
    assert "coded" in said
    assert "--trust-remote-code" in said
    assert not Path("mark").exists()
    with pytest.raises(Exception):  # noqa: B017 - of the library that runs the files, which define nothing
        assert command(*words, "--trust-remote-code") == 0
    assert Path("mark").exists()


def test_a_run_that_is_a_reward_model_does_not_allow_its_own_code(run_with_code: Path) -> None:
    with pytest.raises(UserError, match="coded"):
        reward_model(str(run_with_code), {}, "reward.0")
    assert not Path("mark").exists()
