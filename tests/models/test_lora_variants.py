"""Every variant of LoRA that a recipe can set: against one sequence at a time, against its
reference, and saved.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from pydantic import ValidationError
from torch import Tensor

from tests.errors import raises_error
from tests.models.test_oracle import PATTERNS, compare, oracle, prefix_tree_batch, sequences
from tests.prefix_trees import conversations
from tests.tiny_models import tiny
from valence.config.schema import (
    LORA_FIELDS_REFUSED,
    LORA_FIELDS_SET,
    LoraSettings,
    peft_fields,
)
from valence.models.adapters import save_adapter, starts_at_base, unsplittable, with_adapter
from valence.models.build import build_policy, build_reference
from valence.models.check import plain_batch
from valence.models.memory import predict
from valence.models.policy_model import PolicyModel
from valence.models.reference import AdapterDisabledReference, FrozenReference
from valence.models.shape import shape_of

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("gpt2", {"use_dora": True}),
    "rslora": ("gpt2", {"use_rslora": True}),
    "pissa": ("gpt2", {"init_lora_weights": "pissa"}),
    "rank_pattern": (
        "llama",
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 6}, "alpha_pattern": {"q_proj": 3.0}},
    ),
    "layers": ("gpt2", {"layers_to_transform": [1]}),
    "head": ("llama", {"modules_to_save": ["lm_head"]}),
    "dora-llama": ("llama", {"use_dora": True}),
    "pissa-llama": ("llama", {"init_lora_weights": "pissa"}),
    "pissa-fast": ("llama", {"init_lora_weights": "pissa_niter_4"}),
    "pissa-dora-rslora": (
        "llama",
        {"init_lora_weights": "pissa", "use_dora": True, "use_rslora": True},
    ),
    "olora": ("llama", {"init_lora_weights": "olora"}),
    "mica": ("llama", {"init_lora_weights": "mica"}),
    "orthogonal": ("llama", {"init_lora_weights": "orthogonal"}),
    "gaussian": ("llama", {"init_lora_weights": "gaussian"}),
    "random": ("llama", {"init_lora_weights": False}),
    "embedding": ("llama", {"modules_to_save": ["embed_tokens", "norm"]}),
    "tied": ("llama-tied", {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    "tokens": ("llama", {"trainable_token_indices": [3, 5, 8]}),
    "tokens-tied": ("llama-tied", {"trainable_token_indices": [3, 5, 8]}),
    "regex": ("llama", {"targets": r".*\.[qv]_proj"}),
    "exclude": ("llama", {"exclude_modules": ["q_proj"]}),
    "bias": ("gpt2", {"bias": "all"}),
    "lora_only": ("gpt2", {"bias": "lora_only"}),
    "lora_bias": ("gpt2", {"lora_bias": True}),
    "experts": ("qwen3_moe", {"targets": ["q_proj"], "target_parameters": EXPERTS}),
}
FAST = ("dora", "rslora", "pissa", "rank_pattern", "layers", "head")
SOME = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
AT_BASE = {"pissa", "olora", "random", "orthogonal", "bias", "lora_only"}
"""Parts of the names of variants whose reference is not the model with the adapter disabled."""


def settings_of(name: str) -> LoraSettings:
    return LoraSettings(rank=4, **VARIANTS[name][1])


def policy(name: str, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """A new adapter of a variant on the tiny model that the variant is tested with."""
    torch.manual_seed(0)
    model = tiny(VARIANTS[name][0], dtype=torch.float32)
    return build_policy(model, dtype=dtype, lora=settings_of(name))


def trained_by_a_step(engine: PolicyModel) -> PolicyModel:
    """The policy with every trained weight moved along its gradient: its updates are not zero."""
    for _ in range(2):  # the second moves what has no gradient while another factor is zero
        engine.zero_grad()
        engine(plain_batch(sequences())).logp.sum().backward()
        with torch.no_grad():
            for p in engine.parameters():
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm().clamp_min(1e-12), alpha=0.3)
    engine.zero_grad()
    return engine


def logps(model: Any) -> Tensor:
    """Log-probabilities of all tokens by the model's own forward, one sequence at a time."""
    with torch.no_grad():
        return torch.cat([oracle(model, tokens) for tokens in sequences()])


@pytest.mark.parametrize("name", SOME)
def test_packed_equals_one_by_one_in_values_and_gradients(name: str) -> None:
    engine = trained_by_a_step(policy(name))
    engine.max_columns = 5
    assert engine.packs
    is_moe = name == "experts"  # its grouped products refuse float64
    if not is_moe:
        engine.model.double()
    for trains in PATTERNS:
        compare(engine, prefix_tree_batch(conversations(), trains), rough=is_moe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOME)
def test_training_starts_at_the_reference_exactly_and_leaves_it(
    name: str, dtype: torch.dtype
) -> None:
    engine = policy(name, dtype)
    reference = build_reference(engine, fresh_adapter=starts_at_base(settings_of(name)))
    is_copy = any(part in AT_BASE for part in name.split("-"))
    assert isinstance(reference, FrozenReference if is_copy else AdapterDisabledReference)
    batch = plain_batch(sequences())
    start = engine(batch).logp
    assert torch.equal(start, reference(batch))
    start.sum().backward()
    trained = [p for p in engine.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.dtype == torch.float32 for p in trained)
    trained_by_a_step(engine)
    assert torch.equal(start, reference(batch))
    assert not torch.equal(start, engine(batch).logp)


@pytest.mark.parametrize("name", ["pissa-llama", "olora"])
def test_a_moved_part_of_the_weights_leaves_the_model_as_it_is(name: str) -> None:
    """The start is the unchanged model; with the adapter disabled it is far from it."""
    base = logps(tiny("llama", dtype=torch.float32))
    engine = policy(name)
    with engine.stock():
        torch.testing.assert_close(logps(engine.model), base, rtol=0, atol=5e-6)
    off = AdapterDisabledReference(engine)(batch := plain_batch(sequences()))
    assert (off - engine(batch).logp).abs().max() > 0.05


@pytest.mark.parametrize("name", SOME)
def test_a_saved_adapter_and_a_merged_model_give_the_policys_log_probabilities(
    name: str, tmp_path: Path
) -> None:
    """The adapter is loaded by PEFT onto the model that the run began with."""
    architecture = VARIANTS[name][0]
    engine = trained_by_a_step(policy(name))
    with engine.stock():
        wanted = logps(engine.model)
        assert (wanted - logps(tiny(architecture, dtype=torch.float32))).abs().max() > 1e-3
        save_adapter(engine.model, tmp_path)
    base = tiny(architecture, dtype=torch.float32)
    loaded: Any = PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(logps(loaded), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(logps(loaded.merge_and_unload()), wanted, rtol=0, atol=2e-5)


def test_an_adapter_for_the_unchanged_model_has_the_update_of_the_definition(
    tmp_path: Path,
) -> None:
    """W + s (B A - B0 A0) with B0 A0 from an SVD of the model's own weights, in float64."""
    settings = settings_of("pissa-llama")
    engine = trained_by_a_step(policy("pissa-llama"))
    save_adapter(engine.model, tmp_path)
    loaded: Any = PeftModel.from_pretrained(tiny("llama", dtype=torch.float32), str(tmp_path))
    name = "model.layers.0.mlp.up_proj"
    weight = tiny("llama", dtype=torch.float32).get_submodule(name).weight.double()
    trained: Any = engine.causal.get_submodule(name)
    scale = 2.0  # alpha/rank
    u, s, v = torch.linalg.svd(weight)
    rank = settings.rank
    principal = u[:, :rank] * s[:rank] @ v[:rank]
    update = (
        scale
        * trained.lora_B["default"].weight.double()
        @ (trained.lora_A["default"].weight.double())
    )
    ours = loaded.get_base_model().get_submodule(name).get_delta_weight("default").double()
    torch.testing.assert_close(ours, update - principal, rtol=0, atol=1e-5)
    assert (update - principal).abs().max() > 1e-2


@pytest.mark.parametrize("name", SOME)
def test_an_estimate_counts_trained_weights(name: str) -> None:
    engine = policy(name)
    shape = shape_of(tiny(VARIANTS[name][0]), lora=settings_of(name))
    assert shape.trained == sum(p.numel() for p in engine.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_estimate_includes_dora_activations(dtype: torch.dtype) -> None:
    """What the backward pass keeps per token, beyond that of LoRA, measured and predicted."""
    measured, predicted = list[float](), list[int]()
    for use_dora in (False, True):
        lora = LoraSettings(rank=4, use_dora=use_dora)
        engine = build_policy(tiny("llama", dtype=torch.float32), dtype=dtype, lora=lora)
        short, long = (_saved_bytes(engine, length) for length in (64, 192))
        measured.append((long - short) / 128)
        shape = shape_of(tiny("llama"), lora=lora)
        predicted.append(predict(shape, width=dtype.itemsize, frozen_copy=False).per_token)
    assert predicted[1] - predicted[0] == pytest.approx(measured[1] - measured[0], rel=0.25)


def _saved_bytes(engine: PolicyModel, length: int) -> int:
    weights = {p.untyped_storage().data_ptr() for p in engine.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = plain_batch([torch.arange(length) % 90 + 3])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logp = engine(batch).logp  # alive until all of it is counted
    assert logp.requires_grad
    return sum(sizes.values())


def test_every_field_of_peft_can_be_set_or_is_refused_with_a_reason() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields == peft_fields() | LORA_FIELDS_REFUSED.keys() | LORA_FIELDS_SET
    assert set(LoraSettings.model_fields) - peft_fields() == {"rank", "alpha", "dropout", "targets"}


def test_a_field_that_valence_does_not_declare_reaches_peft() -> None:
    settings = LoraSettings.model_validate({"rank": 2, "megatron_core": "other"})
    adapted: Any = with_adapter(tiny("llama"), settings, None)
    assert adapted.peft_config["default"].megatron_core == "other"
    assert not starts_at_base(settings)  # the reference is a copy of the model
    assert unsplittable(settings) == "megatron_core"
    with pytest.raises(ValidationError, match="no such setting"):
        LoraSettings.model_validate({"megatron_cores": "other"})


def test_settings_that_peft_does_not_accept_are_an_error() -> None:
    settings = {"rank": 2, "alpha": None, "dropout": 0.0, "targets": ["q_proj"]}
    lora = type("Lora", (), settings | {"layers_pattern": "layers"})
    with raises_error("lora-unsupported", where="model.lora"):
        with_adapter(tiny("llama"), lora, None)


@pytest.mark.parametrize(
    ("architecture", "wrong", "setting", "near"),
    [
        ("llama", {"targets": ["q_poj"]}, "targets", "q_proj"),
        ("llama", {"exclude_modules": ["q_poj"]}, "exclude-modules", "q_proj"),
        ("llama", {"modules_to_save": ["lm_haed"]}, "modules-to-save", "lm_head"),
        ("llama", {"layers_to_transform": [1, 2]}, "layers-to-transform", "0 to 1"),
        ("llama", {"rank_pattern": {"c_attn": 3}}, "rank-pattern", "q_proj"),
        ("llama", {"alpha_pattern": {"c_attn": 3.0}}, "alpha-pattern", "q_proj"),
        ("llama", {"rank_pattern": {"(": 3}}, "rank-pattern", "regular expression"),
        ("llama", {"alpha_pattern": {"*": 3.0}}, "alpha-pattern", "regular expression"),
        ("llama", {"lora_bias": True}, "bias", "remove"),
        ("llama-tied", {"targets": ["lm_head"]}, "tied-weights", "ensure_weight_tying"),
        ("llama-tied", {"modules_to_save": ["lm_head"]}, "tied-weights", "ensure_weight_tying"),
        (
            "qwen3_moe",
            {"targets": [], "target_parameters": ["experts.gate_up_prj"]},
            "target-parameters",
            "gate_up_proj",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_errors(
    architecture: str, wrong: dict[str, Any], setting: str, near: str
) -> None:
    lora = LoraSettings(**wrong)
    with raises_error(f"lora-{setting}", where="model.lora", fix=near):
        build_policy(tiny(architecture, dtype=torch.float32), dtype=torch.float32, lora=lora)


def test_float64_has_no_initialization_by_singular_vectors() -> None:
    with raises_error("lora-unsupported", where="model.lora"):
        policy("pissa", torch.float64)
