"""The time and memory estimate of a run, and the size of micro-batches chosen from free memory."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
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
from valence.models import speed
from valence.models.build import DTYPES
from valence.models.memory import NCCL_BUFFERS
from valence.reports.formatting import duration
from valence.training import models, plan, state_files
from valence.training.memory import SLEEPING_SERVER
from valence.training.open_run import restore
from valence.training.plan import MARGIN, MAX_TOKENS, MIN_TOKENS, Plan, describe, make_plan
from valence.training.prepare import prepare
from valence.training.trainer import Trainer

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
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("train.checkpointing=auto", "train.micro_batch_tokens=2048")
    assert planned(recipe, "train.checkpointing=auto").checkpointing == "off"
    monkeypatch.setattr(plan, "free_memory", lambda _: 1)
    assert planned(recipe, *overrides).checkpointing == "off"  # with one layer it saves nothing
    deep: Any = tiny(vocab_size=len(tiny_tokenizer()), layers=4, dtype=torch.float32)
    deep.save_pretrained(recipe["model"]["name"])
    plain, full = (
        planned(recipe, f"train.checkpointing={mode}", overrides[1]) for mode in ("off", "full")
    )
    assert plain.memory.total(2048) > full.memory.total(2048)
    enough = int(plain.memory.total(2048) / MARGIN) + 1
    for free, expected in ((enough, plain), (enough - 100, full), (None, plain)):
        monkeypatch.setattr(plan, "free_memory", lambda _, free=free: free)
        result = planned(recipe, *overrides)
        assert result.checkpointing == expected.checkpointing
        assert result.memory == expected.memory
        assert f"checkpointing: {expected.checkpointing} (auto" in " ".join(describe(result))
    monkeypatch.setattr(models, "free_memory", lambda _: enough - 100)
    run = build_run(recipe, [*overrides, "train.max_steps=1"], rows=OBJECTS, quiet=True)
    assert run.policy.checkpointing == "full"


def test_products_are_stored_if_they_fit_and_layers_are_not_compiled(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
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
        monkeypatch.setattr(plan, "free_memory", lambda _, free=free: int(free / MARGIN) + 1)
        assert planned(recipe, *overrides).checkpointing == expected
    monkeypatch.setattr(plan, "free_memory", lambda _: int(sizes["selective_op"] / MARGIN) + 1)
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
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(plan, "free_memory", lambda _: 1)
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


def test_sampling_is_predicted_where_this_process_samples(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "seconds_per_weight", lambda *_: 1e-6)
    result = online_plan(recipe)
    assert result.round_seconds is not None
    rollouts = result.prepared.rollouts(result.shape, result.device)
    assert rollouts is not None
    rows, prompt, new = rollouts
    assert (rows, new) == (4 * 3, 8)
    longest = len(result.prepared.tokenizer("question 11").input_ids)
    assert prompt in (longest, longest + 1)
    (line,) = [line for line in describe(result) if line.startswith("sampling:")]
    assert duration(result.round_seconds) in line
    assert " 8 " in line
    assert online_plan(recipe, "rollout.max_new_tokens=16").round_seconds > 2 * result.round_seconds  # type: ignore[operator]
    two_turns = online_plan(recipe, "rollout.at_once=6").round_seconds
    assert two_turns is not None
    assert two_turns > result.round_seconds  # two prompts' answers at once, of four
    served = online_plan(recipe, "rollout.engine=vllm", "rollout.url=http://127.0.0.1:1")
    assert served.round_seconds is None
    assert served.memory.sampling == 0 < result.memory.sampling


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


def test_rollouts_are_measured_once_per_round(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the policy where it moves within the round, and by the reference if there is one; a value
    model trains in addition.
    """
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)

    def passes(result: Plan) -> float:
        """How many forward passes over its answers a step takes."""
        item = [part for step in result.work for part in step]
        assert all(measured.tokens == 0 for _, _, measured in item)
        forward = fmean(speed.forward(result.shape, trained) for _, trained, _ in item)
        return result.seconds() * 1e9 * speed.EFFICIENCY[torch.float32] / forward

    assert passes(online_plan(recipe, "rollout.measure_kl=false")) == pytest.approx(3)
    assert passes(online_plan(recipe)) == pytest.approx(3)  # which costs no second model
    assert passes(online_plan(recipe, "rollout.measure_kl=true")) == pytest.approx(4)
    assert online_plan(recipe).seconds() == online_plan(recipe).seconds(again=True)
    assert passes(
        online_plan(recipe, "rollout.measure_kl=false", "rollout.epochs=2")
    ) == pytest.approx(3.5)
    shared, separate = (
        online_plan(recipe, "method=ppo", f"value.trunk={trunk}")
        for trunk in ("shared", "separate")
    )
    assert shared.memory.value == 0 < separate.memory.value
    assert shared.seconds() < separate.seconds()


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


def test_the_estimate_of_a_run_is_printed_before_it(
    recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)
    result = planned(recipe, "train.epochs=2")
    lines = {line.split(":")[0]: line for line in describe(result)}
    assert list(lines) == ["steps", "tokens", "weights", "memory", "time"]
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
    assert result.evaluation_seconds > 0  # of training rows, in the end
    assert duration(result.total_seconds + result.evaluation_seconds) in lines["time"]
    assert duration(result.evaluation_seconds) in lines["time"]
    *same, more = describe(replace(result, free=1))
    assert len(same) == len(lines)
    assert "0.00 GB" in more  # are free
    console = Console(file=io.StringIO(), width=200)
    build_run(recipe, rows=OBJECTS, console=console)
    assert "time: " in console.file.getvalue()  # type: ignore[attr-defined]


def test_time_follows_the_work(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)
    kto = planned(recipe).seconds()
    # which has no mismatched rows
    assert planned(recipe | {"method": "apo_zero_unpaired"}).seconds() < kto
    assert planned(recipe, "train.checkpointing=full").seconds() > kto
    assert planned(recipe, "train.batch_size=12").seconds() > 2 * kto
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 2e9)
    assert planned(recipe).seconds() == pytest.approx(kto / 2)


def test_later_epochs_take_less_where_the_reference_is_kept(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)
    remaining, computed = (
        planned(recipe, f"reference.cache={cache}", "train.epochs=3") for cache in ("auto", "off")
    )
    assert remaining.seconds() == computed.seconds() == computed.seconds(again=True)
    assert remaining.seconds(again=True) < remaining.seconds()
    assert computed.total_seconds == 9 * computed.seconds()
    assert remaining.total_seconds == 3 * remaining.seconds() + 6 * remaining.seconds(again=True)


HELD_OUT = {
    "train": ROWS,
    "eval": [{**row, "prompt": f"held out {row['prompt']}"} for row in ROWS[:6]],
}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("eval.every=2",),
        ("eval.every=0.34",),
        ("eval.every=4", "eval.at_start=false"),
        ("train.max_steps=5",),
    ],
)
def test_evaluations_are_counted_as_the_run_makes_them(
    overrides: tuple[str, ...], recipe: dict[str, Any]
) -> None:
    result = planned(recipe, "train.epochs=3", *overrides, settings=HELD_OUT)
    total = result.prepared.total_steps
    run: Any = SimpleNamespace(
        prepared=result.prepared, recipe=result.prepared.recipe, total_steps=total, ended_early=""
    )
    outcome = sum(Trainer._is_evaluated(run, step) for step in range(total + 1))
    assert result.evaluations == outcome > 0
    assert planned(recipe).evaluations == 0


def test_evaluation_is_part_of_the_time(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)

    def seconds(*overrides: str) -> float:
        return planned(
            recipe, "eval.train_examples=0", *overrides, settings=HELD_OUT
        ).evaluation_seconds

    once, off = seconds("eval.at_start=false"), "reference.cache=off"
    # the second time the reference's numbers are known
    assert seconds() == pytest.approx(1.5 * once)
    assert seconds(off) == pytest.approx(2 * once)
    assert seconds("eval.at_start=false", "eval.max_examples=3") < 0.7 * once
    # without mismatched rows
    assert seconds("method=apo_zero_unpaired", "eval.at_start=false") < once
    assert planned(recipe, "eval.train_examples=0").evaluation_seconds == 0
    assert (
        planned(recipe, "eval.train_examples=12").evaluation_seconds
        > planned(recipe, "eval.train_examples=4").evaluation_seconds
    )
    monkeypatch.setattr(plan, "ROWS_COUNTED", 3)
    assert seconds("eval.at_start=false") == pytest.approx(once, rel=0.3)


def test_the_evaluation_of_an_online_run_is_not_predicted(recipe: dict[str, Any]) -> None:
    assert online_plan(recipe).evaluation_seconds == 0


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
