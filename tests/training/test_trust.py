"""A run folder from someone else executes no code without a flag on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

import valence
from tests.command import command
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.conftest import SharedRuns, copy_run
from tests.training.scoring import invoke
from tests.training.test_run import folder
from valence.training.open_run import restore
from valence.training.reward_models import reward_model

__all__ = ["folder"]


def change(run: Path, **sections: Any) -> None:
    """Writes other settings into the recipe that a run keeps."""
    yaml = YAML(typ="safe", pure=True)
    remaining = yaml.load(run / "config.yaml")
    for name, section in sections.items():
        remaining[name] = {**remaining[name], **section} if isinstance(section, dict) else section
    yaml.dump(remaining, run / "config.yaml")


@pytest.fixture(scope="module")
def trained_online(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a reward that is not code, next to its prompts."""
    place = tmp_path_factory.mktemp("online")
    rows = "".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("a", "b", "c", "d"))
    (place / "prompts.jsonl").write_text(rows)
    settings = {
        "method": "grpo",
        "model": {"name": str(folder)},
        "reward": [{"reward": "length"}],
        "data": {"train": str(place / "prompts.jsonl"), "eval": str(place / "prompts.jsonl")},
        "rollout": {"max_new_tokens": 4, "num_rollouts": 2},
        "train": {"batch_size": 2, "max_steps": 1},
        "eval": {"at_start": False},
        "run": {"dir": str(place / "run")},
    }
    valence.train(settings, quiet=True)
    return place / "run"


@pytest.fixture
def online_run(trained_online: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose folder names a reward function that leaves a mark when its module is imported."""
    monkeypatch.chdir(tmp_path)
    copy_run(trained_online, tmp_path / "run")
    shutil.copy(trained_online.parent / "prompts.jsonl", tmp_path)
    (tmp_path / "foreign_reward.py").write_text(
        "from pathlib import Path\nPath('mark').touch()\n\ndef score(completions, **_):\n    "
        "Path('called').touch()\n    return [1.0] * len(completions)\n"
    )
    change(tmp_path / "run", reward=[{"reward": "foreign_reward:score"}])
    return tmp_path / "run"


@pytest.mark.parametrize("words", [
    ["export", "run", "out"],
    ["inspect", "run/config.yaml"],
    ["doctor", "run/config.yaml"],
    pytest.param(
        ["sample", "run", "--prompt", "say a", "--max-new-tokens", "2"], marks=pytest.mark.slow
    ),
    ["sample", "run", "--data", "prompts.jsonl", "--out", "out.jsonl", "--max-new-tokens", "2"],
    ["score", "run", "--data", "rows.jsonl", "--out", "out.jsonl"],
])  # fmt: skip
def test_a_command_that_needs_no_reward_does_not_import_it(
    words: list[str], online_run: Path
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "say a", "completion": "b"}\n')
    assert command(*words) == 0
    assert not Path("mark").exists()


def test_check_imports_the_reward_of_a_recipe_and_does_not_call_it(online_run: Path) -> None:
    assert command("check", "run/config.yaml", "run.dir=new") == 0
    assert Path("mark").exists()
    assert not Path("called").exists()


def test_evaluating_a_run_imports_its_reward_only_with_a_flag(online_run: Path) -> None:
    with raises_error("code-not-trusted", where="config.yaml", fix="--trust-reward") as raised:
        invoke("evaluate", "run")
    assert "foreign_reward:score" in raised.error.message
    assert not Path("mark").exists()
    assert command("evaluate", "run", "--trust-reward") == 0
    assert Path("mark").exists()
    assert Path("called").exists()


def test_only_rewards_that_are_code_or_servers_need_the_flag(online_run: Path) -> None:
    for reward, code in (
        ("http://127.0.0.1:9/get_reward", "server-not-trusted"),
        ("foreign_reward:score", "code-not-trusted"),
    ):
        change(online_run, reward=[{"reward": reward}])
        with raises_error(code, where="config.yaml", fix="--trust-reward") as raised:
            restore(online_run, rewards=True)
        assert reward in raised.error.message
    change(online_run, reward=[{"reward": "length"}])
    assert restore(online_run, rewards=True).evaluate().metrics


def test_evaluating_a_run_starts_no_program_that_its_folder_names(online_run: Path) -> None:
    program = online_run.parent / "program"
    program.write_text("#!/bin/sh\ntouch mark\nexit 1\n")
    program.chmod(0o755)
    change(
        online_run,
        reward=[{"reward": "length"}],
        rollout={"engine": "vllm", "start": True, "python": str(program)},
    )
    assert restore(online_run, rewards=True).evaluate().metrics
    assert not Path("mark").exists()


@pytest.fixture
def run_with_code(shared_runs: SharedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose folder names a model that comes with Python files, and allows to execute them."""
    monkeypatch.chdir(tmp_path)
    shared_runs.copy(tmp_path)
    tokenizer = tiny_tokenizer()
    model: Any = tiny(vocab_size=len(tokenizer), dtype=torch.float32)
    model.save_pretrained("coded")
    tokenizer.save_pretrained("coded")
    config = json.loads(Path("coded/config.json").read_text())
    config |= {
        "model_type": "strange",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    Path("coded/config.json").write_text(json.dumps(config))
    Path("coded/code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    change(tmp_path / "run", model={"name": str(tmp_path / "coded"), "trust_remote_code": True})
    return tmp_path / "run"


COMMANDS = (
    "export run out",
    "evaluate run",
    "sample run --prompt a",
    "sample run --prompt a --out out.jsonl",
    "score run --data rows.jsonl --out out.jsonl",
    "score run --reward length --data rows.jsonl --out out.jsonl",
)


def test_files_of_a_model_are_not_executed_without_a_flag(run_with_code: Path) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for words in COMMANDS:
        with raises_error("code-not-trusted", fix="--trust-remote-code") as raised:
            invoke(*words.split())
        assert "coded" in raised.error.message
        assert "config.yaml" in (raised.error.where or "")
    with raises_error("code-not-trusted", where="config.yaml"):
        reward_model(str(run_with_code), {}, "reward.0")
    assert not Path("mark").exists()


@pytest.mark.parametrize("words", [
    COMMANDS[0],
    *(pytest.param(words, marks=pytest.mark.slow) for words in COMMANDS[1:]),
])  # fmt: skip
def test_files_of_a_model_are_executed_with_a_flag(words: str, run_with_code: Path) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(Exception):  # noqa: B017 - of the library that runs the files, which define nothing
        assert command(*words.split(), "--trust-remote-code") == 0
    assert Path("mark").exists()
