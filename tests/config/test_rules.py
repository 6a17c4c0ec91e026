"""Relations between settings: settings without effect, and contradictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.facts import GOOD, check_recipe_error, load_error
from tests.errors import raises_error
from tests.units import ADVANTAGES
from valence.config.load import load_recipe
from valence.methods import ONLINE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("feedback.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("")
    return tmp_path


# (overrides, setting, settings and values that the error quotes, what the fix names)

NO_EFFECT: dict[str, tuple[list[str], str, str, str]] = {
    "evaluation without data": (
        ["data.eval=[]", "eval.every=7"],
        "eval.every",
        "data.eval",
        "data.eval",
    ),
    "first evaluation without data": (
        ["data.eval=[]", "eval.at_start=false"],
        "eval.at_start",
        "data.eval",
        "data.eval",
    ),
    "examples of nothing": (
        ["data.eval=[]", "eval.max_examples=3"],
        "eval.max_examples",
        "data.eval",
        "data.eval",
    ),
    "examples of the test": (
        ["data.eval=[]", "data.test=held_out.jsonl", "eval.max_examples=3"],
        "eval.max_examples",
        "data.eval",
        "data.eval",
    ),
    "reference model unread": (["method=sft", "reference.model=m"], "reference.model", "sft", ""),
    "reference cache unread": (
        ["method=sft", "reference.cache=off"],
        "reference.cache",
        "sft",
        "",
    ),
    "number of the best of none": (
        ["data.top_n=2"],
        "data.top_n",
        "data.convert: best_to_demonstrations",
        "data.convert",
    ),
    "threshold without scores": (
        ["data.threshold=1"],
        "data.threshold",
        "scores_to_judgements and scores_to_pairs",
        "data.convert",
    ),
    "threshold of pairs": (
        ["method=dpo", "data.convert=judgements_to_pairs", "data.threshold=1"],
        "data.threshold",
        "scores_to_pairs",
        "data.convert",
    ),
    "threshold of rankings": (
        ["method=grpo", "data.convert=scores_to_rankings", "data.threshold=1"],
        "data.threshold",
        "scores_to_all_pairs",
        "data.convert",
    ),
    "turns of a judgement": (["data.train_on=assistant"], "data.train_on", "kto", "sft"),
    "strata of pairs": (["method=dpo", "data.stratify=true"], "data.stratify", "dpo", "kto"),
    "export without adapter": (["run.export=adapter"], "run.export", "adapter", "model.lora"),
    "length of no samples": (
        ["run.samples.max_new_tokens=9"],
        "run.samples.max_new_tokens",
        "",
        "run.samples.prompts",
    ),
    "heat of no samples": (
        ["run.samples.temperature=0.7"],
        "run.samples.temperature",
        "",
        "run.samples.prompts",
    ),
    "samples of no prompts": (
        ["data.eval=[]", "run.samples.prompts=3"],
        "run.samples.prompts",
        "data.test",
        "data.eval",
    ),
    "split of a file": (["data.train.0.split=test"], "data.train.0.split", "", ""),
    "subset of a file": (["data.train.0.subset=main"], "data.train.0.subset", "", "hub"),
}
CONFLICTS: dict[str, tuple[list[str], str, str, str]] = {
    "converted to scores for labels": (
        ["data.convert=rankings_to_scored"],
        "data.convert",
        "kto",
        "data.convert",
    ),
    "converted to pairs for scores": (
        ["method=pointwise", "data.convert=scores_to_pairs"],
        "data.convert",
        "pointwise",
        "data.convert",
    ),
    "converted to another kind": (
        ["data.convert=judgements_to_pairs"],
        "data.convert",
        "kto",
        "data.convert",
    ),
    "scores without threshold": (
        ["data.convert=scores_to_judgements"],
        "data.threshold",
        "scores_to_judgements",
        "data.threshold",
    ),
    "singular vectors of weights in 4 bits": (
        ["model.quantize=nf4", "model.lora.init_lora_weights=pissa"],
        "model.lora.init_lora_weights",
        "model.quantize",
        "gaussian",
    ),
    "tokens and products that processes share": (
        ["parallel.context=2", "parallel.tensor=2"],
        "parallel.context",
        "parallel.tensor",
        "parallel.tensor",
    ),
    "replicas of shared tokens": (
        ["parallel.context=2", "parallel.shard=full", "parallel.shard_size=2"],
        "parallel.shard_size",
        "parallel.context",
        "parallel.context",
    ),
    "compiled layers of shared tokens": (
        ["parallel.context=2", "train.compile=on"],
        "train.compile",
        "parallel.context",
        "parallel.context",
    ),
    "balanced routers of shared tokens": (
        ["parallel.context=2", "train.router_aux_loss=0.01"],
        "train.router_aux_loss",
        "parallel.context",
        "parallel.context",
    ),
    "dropout of shared tokens": (
        ["parallel.context=2", "model.lora.dropout=0.1"],
        "model.lora.dropout",
        "parallel.context",
        "parallel.context",
    ),
    "two adapters": (
        ["model.lora.rank=4", "model.adapter=folder"],
        "model.lora",
        "model.adapter",
        "model.lora",
    ),
}


@pytest.mark.parametrize("name", [*NO_EFFECT, *CONFLICTS])
def test_senseless_settings(name: str, folder: Path):
    words, setting, value, fix = (NO_EFFECT | CONFLICTS)[name]
    code = "setting-no-effect" if name in NO_EFFECT else "setting-conflict"
    is_set = any(word.startswith(setting) for word in words)
    (folder / "r.yaml").write_text(GOOD)
    place = "command line" if is_set else "r.yaml:4"
    check_recipe_error(load_error("r.yaml", *words), f"{place} ({setting})", code, value, fix)


EFFECTIVE: dict[str, list[str]] = {
    "defaults are harmless": [
        "data.eval=[]",
        "eval.every=50",
        "run.export=auto",
        "data.threshold=null",
        "data.stratify=false",
    ],
    "reference defaults": ["method=sft", "reference.cache=auto", "reference.model=null"],
    "evaluation": ["eval.every=7", "eval.at_start=false"],
    "a reference": ["reference.model=m", "reference.cache=folder"],
    "turns": ["method=sft", "data.train_on=assistant"],
    "strata": ["data.stratify=true"],
    "export of an adapter": ["model.lora={}", "run.export=adapter"],
    "export of a continued adapter": ["model.adapter=folder", "run.export=adapter"],
    "samples": ["run.samples.prompts=3", "run.samples.temperature=0"],
    "samples of the test": ["data.eval=[]", "data.test=held_out.jsonl", "run.samples.prompts=3"],
    "threshold": ["data.convert=scores_to_judgements", "data.threshold=3"],
    "the best ones": ["method=sft", "data.convert=best_to_demonstrations", "data.top_n=3"],
    "truncated ones": [
        "method=sft",
        "data.convert=best_to_demonstrations",
        "data.mask_truncated=false",
    ],
    "difference": ["method=dpo", "data.convert=scores_to_pairs", "data.threshold=0.5"],
    "any difference": ["method=dpo", "data.convert=scores_to_pairs"],
    "difference of all pairs": [
        "method=dpo",
        "data.convert=scores_to_all_pairs",
        "data.threshold=0.5",
    ],
    "rankings": ["method=grpo", "data.convert=scores_to_rankings"],
    "judgements as verdicts": ["method=pointwise", "data.convert=pairs_to_judgements"],
    "scores as verdicts": ["method=pointwise", "data.convert=rankings_to_scored"],
    "strata of verdicts": ["method=pointwise", "data.stratify=true"],
    "chosen": ["method=sft", "data.convert=chosen_to_demonstrations"],
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_settings_that_make_sense(name: str, folder: Path):
    (folder / "r.yaml").write_text(GOOD)
    load_recipe("r.yaml", EFFECTIVE[name])


# Sampling from a part of the vocabulary (rollout.top_p below 1)


def load_top_p(method: str, *overrides: str) -> float:
    recipe = {
        "method": method,
        "model": {"name": "some/model"},
        "reward": "length",
        "data": {"train": "feedback.jsonl"},
        "rollout": {"num_rollouts": 4},
    }
    return load_recipe(recipe, overrides).recipe.rollout.top_p


@pytest.mark.parametrize("method", ADVANTAGES)
@pytest.mark.parametrize("correction", ["2.0", "null"])
def test_methods_with_a_ratio_of_probabilities_sample_from_the_whole_vocabulary(
    method: str, correction: str
):
    """With or without the correction: no weight brings back tokens that are never drawn."""
    overrides = ("rollout.top_p=0.9", f"loss.correction={correction}")
    with raises_error("setting-conflict", where="rollout.top_p", fix="online_dpo") as raised:
        load_top_p(method, *overrides)
    assert method in raised.error.message
    assert load_top_p(method, f"loss.correction={correction}") == 1


@pytest.mark.parametrize("method", sorted(n for n, m in ONLINE.items() if not m.is_on_policy))
def test_methods_that_learn_from_completions_as_data_may_sample_from_a_part(method: str):
    assert load_top_p(method, "rollout.top_p=0.9") == 0.9
