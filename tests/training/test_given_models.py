"""A model that is passed as an object remains usable, in its class, and is not built again."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.command import place
from tests.errors import raises_error
from valence import build_run, train
from valence.config.schema import LoraSettings
from valence.models.attention import NAME
from valence.models.shape import shape_of

__all__ = ["place"]

IDS = torch.arange(5, 25).reshape(2, 10)
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0


class Other(LlamaForCausalLM):
    """A subclass whose constructor needs more than a configuration."""

    def __init__(self, config: Any, depth: int) -> None:
        super().__init__(config)
        self.depth = depth


def load(**options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32, **options)


def outputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()]
        tokens = model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
    return logits, tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lora", ["null", "{rank: 2}"])
def test_a_model_computes_before_during_and_after_a_run(
    place: Path, attention: str, lora: str
) -> None:
    model = load(attn_implementation=attention).eval()
    kind, before = type(model), outputs(model)
    run = build_run("recipe.yaml", [f"model.lora={lora}"], model=model, quiet=True)
    for now, then in zip(outputs(model), before, strict=True):
        assert torch.equal(now, then)
    assert model.config._attn_implementation == NAME  # of the run
    run.fit()
    model.eval()
    logits, _ = outputs(model)
    assert not torch.equal(logits, before[0])  # it is the trained model
    assert type(model) is kind
    model.set_attn_implementation(attention)
    assert torch.equal(outputs(model)[0], logits)


def test_a_run_does_not_depend_on_calls_of_others(place: Path) -> None:
    weights: list[Any] = []
    for calls in (False, True):
        run = build_run("recipe.yaml", model=(model := load()), quiet=True, fresh=True)
        if calls:
            outputs(model)
        run.fit()
        weights.append({k: v.clone() for k, v in run.policy.state_dict().items()})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_failed_call_leaves_the_run_as_it_was(place: Path) -> None:
    run = build_run("recipe.yaml", model=(model := load()), quiet=True)
    with pytest.raises(IndexError):
        model(input_ids=IDS + 10**6)
    assert model.config._attn_implementation == NAME
    run.fit()


def test_a_subclass_with_another_constructor_trains(place: Path) -> None:
    stock = load()
    model = Other(stock.config, depth=3)
    model.load_state_dict(stock.state_dict())
    model.name_or_path = "model"
    train(recipe="recipe.yaml", model=model, quiet=True)
    assert type(model) is Other


def test_an_estimate_leaves_the_model_as_it_is(place: Path) -> None:
    """A subclass with a planned adapter, and a model that has one."""
    from peft import LoraConfig, get_peft_model

    lora = LoraSettings(rank=2, targets=["q_proj"])
    expected = shape_of(load(), lora=lora)
    model = Other(load().config, depth=3)
    names = list(model.state_dict())
    assert shape_of(model, lora=lora) == expected
    assert list(model.state_dict()) == names
    assert all(p.requires_grad and not p.is_meta for p in model.parameters())
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapted = shape_of(get_peft_model(model, config))
    assert adapted.parameters == expected.parameters
    assert adapted.trained == expected.trained + model.config.vocab_size * model.config.hidden_size


class Wrapper(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config


@pytest.mark.parametrize("argument", ["model", "reference"])
@pytest.mark.parametrize("build", [Wrapper, lambda model: nn.Linear(2, 2)])
def test_another_object_is_a_mistake(place: Path, argument: str, build: Any) -> None:
    with raises_error("model-kind", where=argument):
        options: Any = {argument: build(load())}
        build_run("recipe.yaml", quiet=True, **options)
    assert not (place / "runs").exists()


def test_a_compiled_model_trains_without_the_wrapper(place: Path) -> None:
    expected = train(recipe="recipe.yaml", overrides=["run.dir=one"], model=load(), quiet=True)
    model = cast(Any, torch.compile(load()))
    run = train(recipe="recipe.yaml", overrides=["run.dir=two"], model=model, quiet=True)
    for one, two in zip(expected.policy.parameters(), run.policy.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_adapter_of_a_peft_model_trains(place: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load(), config)
    frozen = {k: v.clone() for k, v in model.state_dict().items() if "lora_" not in k}
    run = train(recipe="recipe.yaml", overrides=["model.lora=null"], model=model, quiet=True)
    names = [name for name, p in run.policy.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    assert any(p.any() for name, p in model.named_parameters() if "lora_B" in name)
    for name, weight in frozen.items():
        assert torch.equal(model.state_dict()[name], weight)
    with raises_error("model-has-adapter", where="model.lora"):
        train(recipe="recipe.yaml", overrides=["run.dir=two"], model=model, quiet=True)


@pytest.mark.parametrize("checkpointing", ["off", "full"])
@pytest.mark.parametrize("lora", ["null", "{rank: 2}"])
def test_all_uses_of_a_trained_model(place: Path, lora: str, checkpointing: str) -> None:
    model = load().eval()
    overrides = [f"model.lora={lora}", f"train.checkpointing={checkpointing}"]
    train(recipe="recipe.yaml", overrides=overrides, model=model, quiet=True)
    assert not any(module.training for module in model.modules())
    logits, tokens = outputs(model)
    assert model.model(IDS).last_hidden_state.shape[:2] == IDS.shape
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(same)[0], logits)
        assert torch.equal(outputs(same)[1], tokens)
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_model_remains_usable_after_a_failure(place: Path, error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error

    model = load().eval()
    with pytest.raises(error):
        train(recipe="recipe.yaml", model=model, callbacks=[fail], quiet=True)
    assert not any(module.training for module in model.modules())
    assert outputs(model)[1].shape == (2, 14)


def test_an_interrupted_call_leaves_the_run_as_it_was(place: Path) -> None:
    results: list[Any] = []
    for is_interrupted in (False, True):
        overrides = [f"run.dir=runs/{is_interrupted}", "train.checkpointing=full"]
        run = build_run("recipe.yaml", overrides, model=(model := load()), quiet=True)
        if is_interrupted:

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            hook = model.model.layers[0].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(IDS)
            hook.remove()
        run.fit()
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
        results.append({name: p.clone() for name, p in run.policy.named_parameters()})
    assert all(torch.equal(weight, results[1][name]) for name, weight in results[0].items())


def test_a_model_trains_twice(place: Path) -> None:
    model = load()
    full = {"recipe": "recipe.yaml", "model": model, "quiet": True}
    for name in ("one", "two"):
        before = outputs(model)[0]
        train(**full, overrides=["model.lora=null", f"run.dir={name}"])
        assert not torch.equal(outputs(model)[0], before)
    run = train(**full, overrides=["run.dir=three"])
    for lora in ("null", "{rank: 2}"):  # the object has the layers of the adapter now
        with raises_error("model-adapter-bare", where="model"):
            train(**full, overrides=[f"model.lora={lora}", "run.dir=four"])
    assert not (place / "four").exists()
    adapter = cast(Any, run.policy.model)
    train(**full | {"model": adapter}, overrides=["model.lora=null", "run.dir=four"])


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_frozen_model_is_a_mistake(place: Path, has_adapter: bool) -> None:
    from peft import LoraConfig, get_peft_model

    model = load()
    if has_adapter:
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    model.requires_grad_(False)
    with raises_error("model-frozen", where="model"):
        train(recipe="recipe.yaml", overrides=["model.lora=null"], model=model, quiet=True)


def test_an_adapter_of_prompts_is_a_mistake(place: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with raises_error("model-adapter-kind", where="model"):
        model: Any = get_peft_model(load(), config)
        train(recipe="recipe.yaml", overrides=["model.lora=null"], model=model, quiet=True)
