"""The memory estimate of a run, and the size of micro-batches chosen from free memory."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.errors import raises_error
from tests.simulated_cuda import CUDA, simulated_device
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.api import build_run
from valence.config.load import load_recipe
from valence.distributed.process_group import PlannedGroup
from valence.models.build import DTYPES
from valence.models.memory import NCCL_BUFFERS
from valence.training import state_files
from valence.training.memory import SLEEPING_SERVER, choose_checkpointing
from valence.training.open_run import restore
from valence.training.plan import MARGIN, MAX_TOKENS, MIN_TOKENS, Plan, describe, make_plan
from valence.training.prepare import prepare

WORDS = "one two three four five six seven eight nine ten"
ROWS = [
    {"prompt": f"question {i} ", "completion": f"answer {WORDS[: 4 * i]}", "label": i % 2}
    for i in range(12)
]
OBJECTS = {"train": ROWS, "eval": None}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """A recipe of a model folder."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32).save_pretrained(
        tmp_path / "model"
    )  # type: ignore[operator]
    tokenizer.save_pretrained(tmp_path / "model")
    return {
        "method": "kto",
        "model": {"name": str(tmp_path / "model")},
        "train": {"batch_size": 4},
        "run": {"dir": str(tmp_path / "run")},
    }


def planned(recipe: dict[str, Any], *overrides: str, settings: Mapping[str, Any] = OBJECTS) -> Plan:
    in_memory = [name for name, rows in settings.items() if rows]
    return make_plan(prepare(load_recipe(recipe, overrides, in_memory=in_memory), rows=settings))


def test_as_many_tokens_run_at_once_as_fit_and_are_of_use(recipe: dict[str, Any]) -> None:
    result = planned(recipe)
    assert result.free is not None
    largest = MAX_TOKENS["cpu"]
    assert (
        replace(result, free=None).micro_batch_tokens
        == replace(result, free=2**50).micro_batch_tokens
        == largest
    )
    assert replace(result, free=1).micro_batch_tokens == MIN_TOKENS
    just = int(result.memory.total(largest) / MARGIN) + 1
    assert replace(result, free=just).micro_batch_tokens == largest
    assert replace(result, free=just - 100).micro_batch_tokens == largest // 2


def test_a_number_in_the_recipe_is_taken(recipe: dict[str, Any]) -> None:
    result = planned(recipe, "train.micro_batch_tokens=77")
    assert replace(result, free=1).micro_batch_tokens == result.micro_batch_tokens == 77


def test_layers_are_recomputed_only_where_memory_requires_it(
    recipe: dict[str, Any], report_free_memory: Callable[[int], None]
) -> None:
    overrides = ("train.checkpointing=auto", "train.micro_batch_tokens=2048")
    assert planned(recipe, "train.checkpointing=auto").checkpointing == "off"
    report_free_memory(1)
    assert planned(recipe, *overrides).checkpointing == "off"  # with one layer it saves nothing
    deep: Any = tiny(vocab_size=len(tiny_tokenizer()), layers=4, dtype=torch.float32)
    deep.save_pretrained(recipe["model"]["name"])
    plain, full = (
        planned(recipe, f"train.checkpointing={mode}", overrides[1]) for mode in ("off", "full")
    )
    assert plain.memory.total(2048) > full.memory.total(2048)
    enough = int(plain.memory.total(2048) / MARGIN) + 1
    for free, expected in ((enough, plain), (enough - 2048, full)):
        report_free_memory(free)
        result = planned(recipe, *overrides)
        assert result.checkpointing == expected.checkpointing
        assert result.memory == expected.memory
        assert f"checkpointing: {expected.checkpointing} (auto" in " ".join(describe(result))
    prepared, shape, device = result.prepared, result.shape, result.device
    assert choose_checkpointing(prepared, shape, device, result.split, None, 1) == "off"
    run = build_run(recipe, [*overrides, "train.max_steps=1"], rows=OBJECTS, quiet=True)
    assert run.policy.checkpointing == "full"


def test_products_are_stored_if_they_fit_and_layers_are_not_compiled(
    recipe: dict[str, Any], report_free_memory: Callable[[int], None]
) -> None:
    deep: Any = tiny(vocab_size=len(tiny_tokenizer()), layers=4, dtype=torch.float32)
    deep.save_pretrained(recipe["model"]["name"])
    overrides = ("train.checkpointing=auto", "train.micro_batch_tokens=2048", "train.compile=off")
    sizes = {
        mode: planned(recipe, f"train.checkpointing={mode}", *overrides[1:]).memory.total(2048)
        for mode in ("off", "selective_op", "full")
    }
    assert sizes["off"] > sizes["selective_op"] > sizes["full"]
    for free, expected in (
        (sizes["off"], "off"),
        (sizes["selective_op"], "selective_op"),
        (sizes["full"], "full"),
        (1, "full"),
    ):
        report_free_memory(int(free / MARGIN) + 1)
        assert planned(recipe, *overrides).checkpointing == expected
    report_free_memory(int(sizes["selective_op"] / MARGIN) + 1)
    assert planned(recipe, *overrides[:2]).checkpointing == "full"
    result = planned(recipe, *overrides)
    assert "checkpointing: selective_op (auto" in " ".join(describe(result))


def test_stored_keys_and_buffers_of_communication_are_counted(recipe: dict[str, Any]) -> None:
    """KL pairs read the keys and values of a first pass, unless there are several processes."""
    with simulated_device():
        single = planned(recipe, "model.dtype=bfloat16")
        prepared = single.prepared
        double = make_plan(prepared, group=PlannedGroup(2))
        lines = " ".join(describe(double))
    assert prepared.method.needs_kl_pairs
    assert single.device.type == "cuda"
    shape = single.shape
    stored = 2 * shape.layers * shape.keys * DTYPES[prepared.recipe.model.dtype].itemsize
    assert single.memory.per_token == double.memory.per_token + stored
    assert (single.memory.communication, double.memory.communication) == (0, NCCL_BUFFERS)
    assert double.memory.total(0) - NCCL_BUFFERS == single.memory.total(0)
    assert "communication" in lines


def test_the_number_is_written_down_and_kept(
    recipe: dict[str, Any], tmp_path: Path, report_free_memory: Callable[[int], None]
) -> None:
    """By a resumed run and by a restored one, whatever memory is free then."""
    run = build_run(recipe, rows=OBJECTS, quiet=True)
    largest = MAX_TOKENS["cpu"]
    assert (
        run.state.budget.at(0, "training")
        == run.model_writer.facts["micro_batch_tokens"][0][2]
        == largest
    )
    run.state.counters.step = 1
    run.save()
    report_free_memory(1)
    again = build_run(recipe | {"run": {"dir": str(tmp_path / "again")}}, rows=OBJECTS, quiet=True)
    assert again.state.budget.at(0, "training") == MIN_TOKENS
    again.load_state_dict(state_files.load(tmp_path / "run/checkpoints/step-1"))
    assert again.state.budget.at(0, "training") == largest
    assert restore(tmp_path / "run").state.budget.at(1, "evaluation") == largest
    resumed = build_run(recipe, rows=OBJECTS, quiet=True)
    assert resumed.step == 1
    assert resumed.state.budget.at(1, "training") == largest


ONLINE = {
    "method": "grpo",
    "reward": "exact_match",
    "rollout": {"num_rollouts": 3, "max_new_tokens": 8},
}


def online_plan(recipe: dict[str, Any], *overrides: str) -> Plan:
    """Of a run that learns from its own answers."""
    settings = {
        "train": [{"prompt": f"question {i}", "answer": "x"} for i in range(12)],
        "eval": None,
    }
    overrides = ("data.as_chat=false", *overrides)  # prompts of text alone, which are short
    return make_plan(
        prepare(
            load_recipe(recipe | ONLINE, overrides, in_memory=["train"]),
            rows=settings,
        )
    )


def test_the_plan_of_an_online_run_counts_prompts(recipe: dict[str, Any]) -> None:
    (line,) = [line for line in describe(online_plan(recipe)) if "prompts" in line]
    assert re.findall(r"\d+", line) == ["3", "3", "12"]  # steps in all and per epoch, prompts


def test_all_answers_of_a_step_may_run_at_once(recipe: dict[str, Any]) -> None:
    """Of four prompts three answers each, behind prompts too short to be shared."""
    result, more = online_plan(recipe), online_plan(recipe, "rollout.num_rollouts=6")
    assert result.largest > 4 * 3 * 8
    assert more.largest == 2 * result.largest
    assert (
        online_plan(recipe, "rollout.num_rollouts=6", "rollout.steps=2").largest == result.largest
    )
    assert online_plan(recipe, "train.micro_batch_tokens=50").largest == 50


def test_sampling_is_counted_where_this_process_samples(recipe: dict[str, Any]) -> None:
    result = online_plan(recipe)
    rollouts = result.prepared.rollouts(result.shape, result.device)
    assert rollouts is not None
    rows, prompt, new = rollouts
    assert (rows, new) == (4 * 3, 8)
    longest = len(result.prepared.tokenizer("question 11").input_ids)
    assert prompt in (longest, longest + 1)
    served = online_plan(recipe, "rollout.engine=vllm", "rollout.url=http://127.0.0.1:1")
    assert served.memory.sampling == 0 < result.memory.sampling


def test_a_separate_value_model_is_counted(recipe: dict[str, Any]) -> None:
    shared, separate = (
        online_plan(recipe, "method=ppo", f"value.trunk={trunk}")
        for trunk in ("shared", "separate")
    )
    assert shared.memory.value == 0 < separate.memory.value


def test_a_gpu_samples_as_many_completions_at_once_as_its_memory_allows(
    recipe: dict[str, Any],
) -> None:
    """A quarter of the simulated device's 80 GB, whatever is free at the moment."""
    result = online_plan(recipe)
    prepared, small = result.prepared, result.shape
    tokens = prepared.rollouts(small, result.device)[1] + 8  # type: ignore[index]
    limit = 80 * 2**30 // 4
    large = replace(small, layers=1, keys=limit // (2 * 150 * tokens * 4))  # 150 completions fit
    with simulated_device():
        assert prepared.completions_per_batch(small, CUDA) == 512
        assert prepared.completions_per_batch(large, CUDA) == 128
        assert prepared.completions_per_batch(replace(large, keys=10 * large.keys), CUDA) == 64
        chosen = online_plan(recipe, "rollout.at_once=6").prepared
        assert chosen.completions_per_batch(small, CUDA) == 6
    assert prepared.completions_per_batch(small, torch.device("cpu")) == 64


SERVER = ("rollout.engine=vllm", "rollout.start=true")


def test_a_server_on_the_gpu_of_training_has_what_training_leaves(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 80 * 2**30
    with simulated_device():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        result = online_plan(recipe, *SERVER)
        alone = online_plan(recipe, "rollout.engine=vllm", "rollout.url=http://127.0.0.1:1")
        chosen = online_plan(recipe, *SERVER, "rollout.memory_share=0.25")
        (line,) = [line for line in describe(result) if line.startswith("server:")]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        other = online_plan(recipe, *SERVER)
        (other_line,) = [line for line in describe(other) if line.startswith("server:")]
    assert alone.server is None
    assert result.server is not None
    assert (result.server.devices, result.server.sleeps) == ((0,), True)
    assert result.memory.total(512) == alone.memory.total(512) + SLEEPING_SERVER
    assert result.server_share is not None
    trainer = result.memory.total(MIN_TOKENS)
    assert result.server_share == pytest.approx(MARGIN * (1 - trainer / total), abs=0.01)
    assert f"{result.server_share:.0%}" in line
    assert "GPU 0" in line
    assert chosen.server_share == 0.25
    assert other.server is not None
    assert (other.server.devices, other.server_share, other.memory.server) == ((1,), None, 0)
    assert "GPU 1" in other_line


def test_a_server_without_room_for_its_weights_is_reported(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated_device():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        result = online_plan(recipe, *SERVER)
        large = replace(result, shape=replace(result.shape, parameters=30 * 10**9))
        assert not [line for line in describe(result) if "rollout.devices" in line]
        assert [line for line in describe(large) if "rollout.devices" in line]


def test_reward_models_are_counted(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Their weights, in the type that they are loaded in."""
    config = AutoConfig.from_pretrained(recipe["model"]["name"], num_labels=1)
    judge: Any = AutoModelForSequenceClassification.from_config(config)
    judge.save_pretrained(tmp_path / "judge")
    result = online_plan(
        recipe, f"reward.0.reward={tmp_path / 'judge'}", "reward.0.settings={dtype: float32}"
    )
    assert result.memory.reward_models == 4 * sum(p.numel() for p in judge.parameters())
    assert "reward models 0.00 GB" in "\n".join(describe(result))
    assert "reward models" not in "\n".join(describe(online_plan(recipe)))
    assert online_plan(recipe).memory.reward_models == 0
    (tmp_path / "judge/config.json").unlink()
    with raises_error("model-not-loadable", where="reward.0.reward"):
        online_plan(recipe, f"reward.0.reward={tmp_path / 'judge'}")


def test_the_estimate_of_a_run_is_printed_before_it(recipe: dict[str, Any]) -> None:
    result = planned(recipe, "train.epochs=2")
    lines = {line.split(":")[0]: line for line in describe(result)}
    assert list(lines) == ["steps", "tokens", "weights", "memory"]
    assert re.findall(r"\d+", lines["steps"]) == ["6", "3", "12"]  # in all and per epoch, rows
    assert f"{MAX_TOKENS['cpu']:,} " in lines["tokens"]
    assert re.findall(r"[\d,]*\d", lines["weights"]) == [f"{result.shape.parameters:,}"]
    adapted = planned(recipe, "model.lora={rank: 2}")
    (weights,) = [line for line in describe(adapted) if line.startswith("weights")]
    assert re.findall(r"[\d,]*\d", weights) == [
        f"{adapted.shape.parameters:,}",
        f"{adapted.shape.trained:,}",
    ]
    assert "KL pairs" not in lines["tokens"]
    assert [line for line in describe(result, in_detail=True) if "KL pairs" in line]
    assert f"{result.memory.total(result.largest) / 1e9:.2f} GB" in lines["memory"]
    *same, more = describe(replace(result, free=1))
    assert len(same) == len(lines)
    assert "0.00 GB" in more  # are free
    console = Console(file=io.StringIO(), width=200)
    build_run(recipe, rows=OBJECTS, console=console)
    assert "memory: " in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("override", "code", "where"), [
    ("train.checkpointing=offloaded", "checkpointing-unsupported", "train.checkpointing"),
    ("model.lora={targets: [no_such]}", "lora-targets", "model.lora.targets"),
])  # fmt: skip
def test_unsupported_settings_are_errors_before_weights_are_loaded(
    override: str, code: str, where: str, recipe: dict[str, Any]
) -> None:
    (Path(recipe["model"]["name"]) / "model.safetensors").unlink()
    with raises_error(code, where=where):
        planned(recipe, override)


def test_a_language_model_is_no_reward_model(recipe: dict[str, Any]) -> None:
    with raises_error("reward-not-a-reward-model", where="reward.0.reward", fix="bradley_terry"):
        online_plan(recipe, f"reward.0.reward={recipe['model']['name']}")
