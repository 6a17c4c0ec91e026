"""Preparing a model: dtypes, dropout, adapters, and errors in loaded files."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.models.test_oracle import sequences
from tests.tiny_models import tiny
from valence.models.build import (
    build_policy,
    build_reference,
    check_positions,
    load_model,
    load_tokenizer,
)
from valence.models.check import plain_batch
from valence.models.loading import must_exist
from valence.models.reference import AdapterDisabledReference

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def lora(targets: Any = "all-linear", dropout: float = 0.0) -> Any:
    return SimpleNamespace(rank=3, alpha=None, dropout=dropout, targets=targets)


@pytest.mark.parametrize(("value", "dtype", "masters", "compute"), [
    (BF16, F32, F32, None), (F32, BF16, F32, BF16), (BF16, BF16, F32, BF16), (F32, F32, F32, None),
    (F64, F32, F64, None), (F32, F64, F64, None), (F64, BF16, F32, BF16),
])  # fmt: skip
def test_weights_that_train_are_masters_whatever_comes_in(
    value: Any, dtype: Any, masters: Any, compute: Any
) -> None:
    engine = build_policy(tiny(dtype=value), dtype=dtype)
    assert {p.dtype for p in engine.parameters()} == {masters}
    assert engine.compute == compute


@pytest.mark.parametrize(
    ("value", "dtype", "adapter"), [(F32, BF16, F32), (BF16, F32, F32), (F32, F64, F64)]
)
def test_a_base_under_an_adapter_has_the_type_of_the_computation(
    value: Any, dtype: Any, adapter: Any
) -> None:
    engine = build_policy(tiny(dtype=value), dtype=dtype, lora=lora())
    assert {p.dtype for p in engine.parameters() if not p.requires_grad} == {dtype}
    assert {p.dtype for p in engine.parameters() if p.requires_grad} == {adapter}
    assert engine.compute == (BF16 if dtype == BF16 else None)


def test_rotary_frequencies_are_not_rounded() -> None:
    engine = build_policy(tiny(dtype=F32), dtype=BF16, lora=lora())
    assert {b.dtype for name, b in engine.named_buffers() if "inv_freq" in name} == {F32}


@pytest.mark.parametrize("value", [F32, BF16])
@pytest.mark.parametrize("adapter", [None, lora()])
def test_the_same_weights_as_a_reference_have_no_reward(adapter: Any, value: Any) -> None:
    weights = tiny(dtype=BF16).state_dict()
    policy, other = tiny(dtype=F32), tiny(dtype=F32, seed=7)
    policy.load_state_dict(weights)
    other.load_state_dict(weights)
    # as it is loaded: the type of the weights, and rotary frequencies in float32
    for p in other.parameters():
        p.data = p.data.to(value)
    engine = build_policy(policy, dtype=BF16, lora=adapter)
    reference = build_reference(engine, fresh_adapter=False, model=other, name="another")
    batch = plain_batch(sequences())
    assert torch.equal(engine(batch).logp, reference(batch))


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"])
def test_a_training_forward_is_not_random(kind: str) -> None:
    engine = build_policy(
        tiny(kind, dtype=F32, dropout=0.5, attention_dropout=0.5, layerdrop=0.5), dtype=F32
    )
    assert engine.training
    batch = plain_batch(sequences())
    assert torch.equal(engine(batch).logp, engine(batch).logp)


def test_an_adapters_own_dropout_stays() -> None:
    engine = build_policy(tiny(dtype=F32), dtype=F32, lora=lora(dropout=0.5))
    with torch.no_grad():
        for name, p in engine.named_parameters():
            if "lora_B" in name:
                p.fill_(0.1)
    batch = plain_batch(sequences())
    assert not torch.equal(engine(batch).logp, engine(batch).logp)


def test_a_continued_adapter_trains_without_dropout(tmp_path: Path) -> None:
    """Dropout is 0 unless the recipe sets it."""
    actual = build_policy(tiny(dtype=F32), dtype=F32, lora=lora(dropout=0.5))
    for name, p in actual.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    actual.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.warns(UserWarning, match=re.escape(str(tmp_path))) as warned:
        engine = build_policy(tiny(dtype=F32), dtype=F32, adapter=str(tmp_path))
    assert sum(str(tmp_path) in str(item.message) for item in warned) == 1
    assert engine.packs
    assert engine.training
    batch = plain_batch([torch.arange(1, 9)])
    assert torch.equal(engine(batch).logp, engine(batch).logp)


def test_a_target_that_is_no_layer_is_named_with_near_ones() -> None:
    with raises_error("lora-targets", where="model.lora.targets", fix="q_proj") as raised:
        build_policy(tiny(), dtype=F64, lora=lora(targets=["v_proj", "q_porj"]))
    assert "q_porj" in raised.error.message


@pytest.mark.parametrize("setting", ["targets", "exclude_modules"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_only_layers_that_can_have_an_adapter_are_suggested(kind: str, setting: str) -> None:
    with raises_error(f"lora-{setting.replace('_', '-')}") as raised:
        settings = SimpleNamespace(**{**vars(lora()), setting: ["nope"]})
        build_policy(tiny(kind), dtype=F64, lora=settings)
    suggested = set(re.findall(r"\w+", raised.error.fix or ""))
    names = {"llama": {"q_proj", "down_proj"}, "gpt2": {"c_attn", "c_fc", "c_proj"}}[kind]
    assert names <= suggested
    assert not {"input_layernorm", "norm", "embed_tokens", "ln_1", "ln_f", "wte"} & suggested


@pytest.mark.parametrize("target", ["input_layernorm", "mlp"])
def test_a_target_that_can_have_no_adapter_is_refused(target: str) -> None:
    with raises_error("lora-targets", where="model.lora.targets", fix="q_proj") as raised:
        build_policy(tiny(), dtype=F64, lora=lora(targets=["v_proj", target]))
    assert "base_layer" not in (raised.error.fix or "")


def test_an_adapter_for_another_base_is_warned_of(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        tiny(dtype=F32).save_pretrained(folder)  # type: ignore[operator]
    engine = build_policy(load_model(str(folders[0]), dtype=F32), dtype=F32, lora=lora())
    engine.model.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    names = ".*".join(re.escape(str(folder)) for folder in folders)
    with pytest.warns(UserWarning, match=names):
        build_policy(
            load_model(str(folders[1]), dtype=F32), dtype=F32, adapter=str(tmp_path / "adapter")
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{names}")
        again = build_policy(
            load_model(str(folders[0]), dtype=F32), dtype=F32, adapter=str(tmp_path / "adapter")
        )
    assert not isinstance(build_reference(again, fresh_adapter=False), AdapterDisabledReference)


def test_the_adapter_is_off_for_the_reference_alone() -> None:
    policy = build_policy(tiny(dtype=F32), dtype=F32, lora=lora(targets=["v_proj", "up_proj"]))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_()
    trains = {name for name, p in policy.named_parameters() if p.requires_grad}
    batch = plain_batch(sequences())
    before = policy(batch).logp.detach()
    assert torch.equal(
        AdapterDisabledReference(policy)(batch),
        build_policy(tiny(dtype=F32), dtype=F32)(batch).logp,
    )
    assert torch.equal(policy(batch).logp, before)
    with pytest.raises(AttributeError):
        AdapterDisabledReference(policy)(None)  # type: ignore[arg-type]
    assert torch.equal(policy(batch).logp, before)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trains != set()


def test_a_reference_that_is_not_causal_names_its_setting() -> None:
    policy = build_policy(tiny(dtype=F32), dtype=F32)
    with raises_error("model-not-causal", where="reference.model"):
        build_reference(policy, fresh_adapter=False, model=tiny("bert", dtype=F32), name="bert")


@pytest.mark.parametrize("name", ["", "nothing"])
def test_a_folder_without_a_tokenizer_names_it(name: str, tmp_path: Path) -> None:
    code, where = ("model-not-found", "model.name") if name else ("model-not-loadable", "model")
    with raises_error(code, where=where, fix="folder" if name else "tokenizer.json"):
        load_tokenizer(str(tmp_path / name), setting="model.name")


@pytest.mark.parametrize("setting", ["model.name", "model.tokenizer", "reference.model"])
def test_the_folder_of_a_run_is_not_a_model(setting: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("method: kto\n")
    with raises_error("model-not-loadable", where=setting, fix="valence export") as raised:
        must_exist(str(tmp_path), setting)
    assert str(tmp_path / "model") not in (raised.error.fix or "")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with raises_error("model-not-loadable", where=setting, fix=str(tmp_path / "model")):
        must_exist(str(tmp_path), setting)
    (tmp_path / "config.json").write_text("{}")  # a model's folder that also has this file
    must_exist(str(tmp_path), setting)


def test_a_damaged_weights_file_is_a_mistake_in_the_folder(tmp_path: Path) -> None:
    tiny(dtype=F32).save_pretrained(tmp_path)  # type: ignore[operator]
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    with raises_error("model-not-loadable", where="model") as raised:
        load_model(str(tmp_path), dtype=F32)
    assert str(tmp_path) in raised.error.message


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_learned_table_of_positions_ends(kind: str) -> None:
    place: dict[str, Any] = {"code": "too-long", "where": "rows:1", "fix": "at most {limit}"}
    check_positions(tiny(kind), 256, "it has", **place)
    for warn in (True, False):
        with raises_error("too-long", where="rows:1", fix="at most 256"):
            check_positions(tiny(kind), 257, "it has", **place, warn=warn)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_rotary_positions_continue_across_segments(kind: str) -> None:
    place: dict[str, Any] = {"code": "too-long", "where": "rows:1", "fix": "at most {limit}"}
    with warnings.catch_warnings(action="error"):
        check_positions(tiny(kind), 256, "it has", **place)
        check_positions(tiny(kind), 257, "it has", **place, warn=False)
    with pytest.warns(UserWarning, match=r"rows:1: .*257.*256.*at most 256"):
        check_positions(tiny(kind), 257, "it has", **place)
