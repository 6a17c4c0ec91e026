"""An adapter on a 4-bit quantized model: training, reference, and saved files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import valence
from tests.distributed.process_groups import full
from tests.distributed.process_groups import run as run_in_processes
from tests.errors import raises_error
from tests.logs import repeatable
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.config.load import load_recipe
from valence.distributed.process_group import Group, SingleProcess
from valence.distributed.tensor_parallel import local
from valence.models.build import best_device, build_policy, load_model
from valence.models.check import plain_batch
from valence.models.digest import model_digest
from valence.models.memory import predict
from valence.models.policy_model import PolicyModel
from valence.models.quantized import disable_cpu_repacking, states
from valence.models.reference import FrozenReference, SyncedReference
from valence.models.shape import shape_of, skeleton
from valence.training.models import build_models
from valence.training.open_run import restore
from valence.training.plan import describe, make_plan
from valence.training.prepare import Prepared, prepare
from valence.training.trainer import Trainer

THUMBS = [
    {
        "prompt": f"question {i} ",
        "completion": f"answer {'at length ' * (i % 3)}{i}",
        "label": i % 2,
    }
    for i in range(8)
]
PAIRS = [
    {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
    for i in range(8)
]
STARS = [
    {"prompt": f"question {i} ", "completion": f"answer {i}", "score": i % 2} for i in range(8)
]
ROWS = {"kto": THUMBS, "dpo": PAIRS, "pointwise": STARS}
DEVICE = best_device()
BATCH = plain_batch(
    [torch.arange(*ends, device=DEVICE) for ends in ((3, 20), (30, 70))],
    torch.arange(5, 9, device=DEVICE),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    for name, seed in (("llama", 0), ("other", 1)):
        model: Any = tiny(
            seed=seed,
            vocab_size=len(tokenizer),
            dtype=torch.float32,
            hidden_size=64,
            intermediate_size=96,
        )
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def recipe(place: Path, tmp_path: Path, method: str = "kto", **sections: Any) -> dict[str, Any]:
    rows = tmp_path / f"{method}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[method]))
    model = {"name": str(place / "llama"), "quantize": "nf4", "lora": {"rank": 2}}
    results: dict[str, Any] = {
        "method": method,
        "model": model,
        "data": {"train": [{"path": str(rows)}]},
        "train": {"batch_size": 4, "learning_rate": 0.01},
        "run": {"dir": str(tmp_path / "run")},
    }
    for name, section in sections.items():
        results[name] = {**results.get(name, {}), **section}
    return results


def prepared(source: dict[str, Any]) -> Prepared:
    return prepare(load_recipe(source))


def loaded(place: Path, **more: Any) -> Any:
    """The quantized model without an adapter."""
    return load_model(str(place / "llama"), **{"dtype": torch.float32, "quantize": True} | more)


@torch.no_grad()
def logps_of(model: Any) -> Tensor:
    """Log-probabilities by the model's own forward."""
    return PolicyModel(disable_cpu_repacking(model).to(DEVICE).eval())(BATCH).logp


def weights(run: Trainer) -> dict[str, Tensor]:
    return {name: full(p).detach() for name, p in run.state.trained_weights.items()}


def records(path: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [repeatable(row) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_a_step_does_not_depend_on_how_it_is_cut(method: str, place: Path, tmp_path: Path) -> None:
    results = []
    for cut in (4096, 24):
        sections = {"train": {"micro_batch_tokens": cut}, "run": {"dir": str(tmp_path / str(cut))}}
        results.append(
            weights(valence.train(recipe(place, tmp_path, method, **sections), quiet=True))
        )
    ours, theirs = results
    assert any(weight.abs().max() > 0.005 for name, weight in ours.items() if "lora_B" in name)
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-3, atol=2e-4)
    first, second = records(tmp_path / "4096"), records(tmp_path / "24")
    assert [row["loss"] for row in first] == pytest.approx(
        [row["loss"] for row in second], rel=1e-4
    )


def test_the_reference_is_the_quantized_model(place: Path, tmp_path: Path) -> None:
    source = recipe(place, tmp_path, reference={"cache": "off"})
    policy, reference = build_models(prepared(source))
    assert reference is not None
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_()
        alone = logps_of(loaded(place))
        assert torch.equal(reference(BATCH), alone)
        assert (logps_of(loaded(place, quantize=False)) - alone).abs().max() > 0.01
        assert not torch.allclose(policy.eval()(BATCH).logp, alone, atol=0.1)


def test_a_separate_reference_is_quantized_in_the_same_way(place: Path, tmp_path: Path) -> None:
    source = recipe(place, tmp_path, reference={"cache": "off", "model": str(place / "llama")})
    policy, reference = build_models(prepared(source))
    assert isinstance(reference, FrozenReference)
    with torch.no_grad():
        assert torch.equal(reference(BATCH), policy(BATCH).logp)


def test_a_reference_that_follows_shares_the_quantized_weights(place: Path, tmp_path: Path) -> None:
    policy, reference = build_models(prepared(recipe(place, tmp_path, reference={"sync_every": 1})))
    assert isinstance(reference, SyncedReference)
    ours, theirs = (
        engine.causal.model.layers[0].mlp.up_proj.base_layer.weight
        for engine in (policy, reference.engine)
    )
    assert theirs.data_ptr() == ours.data_ptr()
    with torch.no_grad():
        assert torch.equal(reference(BATCH), policy(BATCH).logp)


def test_only_linear_layers_are_quantized_and_nothing_casts_them(place: Path) -> None:
    lora: Any = type(
        "Lora", (), {"rank": 2, "alpha": None, "dropout": 0.0, "targets": "all-linear"}
    )
    base = loaded(place, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    policy = build_policy(base, dtype=torch.bfloat16, lora=lora)
    assert policy.packs
    digest = model_digest(policy, adapter=False)
    after = {
        name.replace(".base_layer.", "."): w
        for name, w in policy.causal.state_dict().items()
        if "lora_" not in name
    }
    assert {name: w.dtype for name, w in after.items()} == {
        name: w.dtype for name, w in before.items()
    }
    assert all(
        torch.equal(weight.view(torch.uint8), before[name].view(torch.uint8))
        for name, weight in after.items()
    )
    narrow = {name.partition(".weight.")[0] for name in states(policy.causal)}
    assert len(narrow) == 14
    assert not any("norm" in name or "lm_head" in name or "embed" in name for name in narrow)
    with torch.no_grad():
        policy.eval()(BATCH)
    assert model_digest(policy, adapter=False) == digest
    again = build_policy(loaded(place, dtype=torch.bfloat16), dtype=torch.bfloat16, lora=lora)
    assert model_digest(again, adapter=False) == digest
    wider = build_policy(loaded(place, dtype=torch.bfloat16), dtype=torch.float32, lora=lora).causal
    assert wider.lm_head.weight.dtype == torch.float32
    for name in narrow:
        remaining = wider.get_submodule(name).weight
        assert torch.equal(
            remaining.view(torch.uint8),
            before[f"{name.replace('.base_layer', '')}.weight"].view(torch.uint8),
        )


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(
    place: Path, tmp_path: Path
) -> None:
    class KilledError(BaseException):
        pass

    def kill(run: Trainer, record: Any) -> None:
        if record["step"] == 3:
            run.state.is_consistent = False  # no state is saved any more
            raise KilledError

    sections: dict[str, Any] = {"train": {"epochs": 2}, "run": {"save_every": 2}}
    source = recipe(place, tmp_path, **sections)
    complete = valence.train(
        {**source, "run": {"dir": str(tmp_path / "whole"), "save_every": 2}}, quiet=True
    )
    with pytest.raises(KilledError):
        valence.train(source, quiet=True, callbacks=[kill])
    again = valence.train(source, quiet=True)
    assert again.step == complete.step == 4
    assert all(
        torch.equal(weight, weights(again)[name]) for name, weight in weights(complete).items()
    )
    assert records(tmp_path / "run") == records(tmp_path / "whole")


@pytest.mark.parametrize("method", ["dpo", pytest.param("pointwise", marks=pytest.mark.slow)])
def test_the_exported_model_is_the_whole_one_with_the_adapter(
    method: str, place: Path, tmp_path: Path
) -> None:
    run = valence.train(recipe(place, tmp_path, method), quiet=True)
    trained = weights(run)
    settings = json.loads((tmp_path / "run/model/config.json").read_text())
    assert "quantization_config" not in settings
    attributes = None if method == "dpo" else ("reward",)
    result = load_model(
        str(tmp_path / "run/model"), dtype=torch.float32, attributes=attributes
    ).state_dict()
    for name, base in (
        load_model(str(place / "llama"), dtype=torch.float32, attributes=attributes)
        .state_dict()
        .items()
    ):
        halves = [
            w for key, w in trained.items() if f".{name.removesuffix('.weight')}.lora_" in key
        ]
        if halves:
            down, up = halves
            torch.testing.assert_close(
                result[name], base + 2 * up @ down
            )  # alpha is twice the rank
            assert not torch.equal(result[name], base)
        elif name == "score.weight":
            assert torch.equal(
                result[name], next(w for key, w in trained.items() if "score" in key)
            )
        else:
            assert torch.equal(result[name], base)


@pytest.mark.slow
def test_a_run_is_measured_and_exported_afterwards(place: Path, tmp_path: Path) -> None:
    run = valence.train(
        recipe(place, tmp_path, "dpo", data={"eval": [{"path": str(tmp_path / "dpo.jsonl")}]}),
        quiet=True,
    )
    result = restore(tmp_path / "run")
    assert result.evaluate().metrics["loss"] == run.evaluate().metrics["loss"]
    result.model_writer.write(tmp_path / "adapter", "adapter")
    put_on = PeftModel.from_pretrained(loaded(place), str(tmp_path / "adapter"))
    theirs = logps_of(put_on)
    torch.testing.assert_close(theirs, result.policy.eval()(BATCH).logp)
    merged = logps_of(AutoModelForCausalLM.from_pretrained(tmp_path / "run/model"))
    rounding = (logps_of(loaded(place)) - logps_of(loaded(place, quantize=False))).abs().max()
    assert 0 < (merged - theirs).abs().max() <= 2 * rounding


@pytest.mark.slow
def test_training_continues_from_an_exported_adapter(place: Path, tmp_path: Path) -> None:
    first = valence.train(recipe(place, tmp_path, run={"export": "adapter"}), quiet=True)
    sections: dict[str, Any] = {
        "model": {"lora": None, "adapter": str(tmp_path / "run/model")},
        "run": {"dir": str(tmp_path / "second")},
    }
    policy, reference = build_models(prepared(recipe(place, tmp_path, **sections)))
    assert reference is not None
    with torch.no_grad():
        expected = first.policy.eval()(BATCH).logp
        assert torch.equal(policy.eval()(BATCH).logp, expected)
        assert torch.equal(reference(BATCH), expected)


def test_memory_is_planned(tmp_path: Path, place: Path) -> None:
    large: Any = tiny(
        dtype=torch.bfloat16, hidden_size=256, intermediate_size=512, num_attention_heads=32
    )
    large.save_pretrained(tmp_path / "large")
    lora: Any = type(
        "Lora", (), {"rank": 2, "alpha": None, "dropout": 0.0, "targets": "all-linear"}
    )
    shape = shape_of(skeleton(str(tmp_path / "large")), lora=lora, quantize=True)
    result: Any = load_model(str(tmp_path / "large"), dtype=torch.bfloat16, quantize=True)
    held = sum(weight.nbytes for weight in result.state_dict().values())
    memory = predict(shape, width=2, frozen_copy=True)
    assert memory.reference == pytest.approx(held, rel=0.05)
    assert memory.weights == memory.reference + 4 * shape.trained + 2 * 256 * 512
    plan = make_plan(prepared(recipe(place, tmp_path)))
    assert any(f"{2 * 64 * (32 + 16 + 16 + 32 + 3 * 96):,}" in line for line in describe(plan))


@pytest.mark.parametrize(
    ("sections", "where", "fix"),
    [
        ({"model": {"lora": None}}, "model.quantize", "model.lora"),
        ({"model": {"gguf_file": "a.gguf"}}, "model.quantize", "model.gguf_file"),
        ({"model": {"dtype": "float64"}}, "model.quantize", "model.dtype"),
        ({"parallel": {"tensor": 2}}, "model.quantize", "parallel.tensor"),
        ({"train": {"compile": "on"}}, "train.compile", "train.compile"),
    ],
)
def test_incompatible_settings_are_errors(
    sections: dict[str, Any], where: str, fix: str, place: Path, tmp_path: Path
) -> None:
    with raises_error("setting-conflict", where=where, fix=fix):
        prepared(recipe(place, tmp_path, **sections))


def test_a_missing_library_is_reported_before_the_model_loads(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises_error("library-missing", where="model.quantize", fix="valence-align[eightbit]"):
        prepared(recipe(place, tmp_path))


def test_models_are_quantized_to_4_bits_if_the_recipe_requests_it(
    place: Path, tmp_path: Path
) -> None:
    with raises_error("model-quantized", where="model.quantize"):
        build_models(prepared(recipe(place, tmp_path)), model=loaded(place, quantize=False))
    with raises_error("model-quantized", where="model.name"):
        build_models(
            prepared(recipe(place, tmp_path, model={"quantize": None})), model=loaded(place)
        )
    loaded(place).save_pretrained(tmp_path / "narrow")
    with raises_error("model-quantized-already", where=str(tmp_path / "narrow")):
        load_model(str(tmp_path / "narrow"), dtype=torch.float32, quantize=True)


NEAR: dict[str, dict[str, float]] = {
    "float32": {"rtol": 1e-3, "atol": 2e-4},
    "bfloat16": {"rtol": 0.05, "atol": 0.02},
}


def trained(group: Group, place: Path, tmp_path: Path) -> dict[str, Any]:
    """What two steps on this group's processes, which split the weights if there are several, lead
    to.
    """
    return {
        dtype: _trained(group, place, tmp_path / f"{dtype}-{group.size}", dtype) for dtype in NEAR
    }


def _trained(group: Group, place: Path, folder: Path, dtype: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    sections: dict[str, Any] = {
        "model": {"dtype": dtype},
        "parallel": {"shard": "full"} if group.size > 1 else {},
    }
    if dtype == "bfloat16":
        sections["train"] = {"checkpointing": "full"}
    run = valence.train(recipe(place, folder, **sections), quiet=True, group=group)
    frozen = [p for p in run.policy.parameters() if not p.requires_grad and p.ndim > 1]
    return {
        "weights": weights(run),
        "digest": model_digest(run.policy, adapter=False),
        "held": sum(local(p).numel() for p in frozen),
        "lockstep": run.policy.is_sharded,
    }


@pytest.mark.slow
@pytest.mark.dist
def test_split_over_processes_it_trains_as_on_one(place: Path, tmp_path: Path) -> None:
    everything = trained(SingleProcess(), place, tmp_path)
    ranks = run_in_processes(trained, 2, place, tmp_path, deadline=60.0)
    assert [rank.error for rank in ranks] == ["", ""]
    for dtype, near in NEAR.items():
        alone = everything[dtype]
        for result in (rank.value[dtype] for rank in ranks):
            assert result["lockstep"]
            assert result["digest"] == alone["digest"]
            assert result["held"] <= 0.51 * alone["held"]
            for name, weight in alone["weights"].items():
                torch.testing.assert_close(result["weights"][name], weight, **near)
        one, two = (
            load_model(str(tmp_path / f"{dtype}-{n}/run/model"), dtype=torch.float32).state_dict()
            for n in (1, 2)
        )
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, **near)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-2), (torch.bfloat16, 0.3)])
def test_a_quantized_model_returns_the_same_values_on_a_gpu(
    dtype: torch.dtype, near: float, place: Path
) -> None:
    model = loaded(place, dtype=dtype)
    assert model.device.type == "cuda"
    result = logps_of(model)
    with torch.no_grad():
        hosted = PolicyModel(disable_cpu_repacking(loaded(place, dtype=dtype).to("cpu")).eval())
        batch = plain_batch([torch.arange(3, 20), torch.arange(30, 70)], torch.arange(5, 9))
        torch.testing.assert_close(result.cpu(), hosted(batch).logp, rtol=near, atol=near)
