"""The models of a run: the policy, and what it is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from valence.config.schema import Recipe
from valence.data.targets import ONE
from valence.engine.cache import Cached
from valence.engine.compiling import compile_layers, why_not
from valence.engine.logprobs import Engine
from valence.engine.models import DTYPES, build_policy, build_reference, load_model, position_limit
from valence.engine.reference import Frozen, Reference
from valence.engine.scores import is_reward_model
from valence.errors import UserError
from valence.training.setup import Prepared

WORTH_COMPILING = {"cpu": 2e14, "cuda": 1e17}
"""Operations of a run, about five minutes of them, from which on compiled layers save more time than they take to compile."""


def build_models(
    prepared: Prepared,
    *,
    model: nn.Module | None = None,
    reference: nn.Module | None = None,
    fills: bool = False,
    compiled: bool | None = None,
) -> tuple[Engine, Reference | None]:
    """Loads the policy and what it is compared with. Objects given replace those that the recipe names.

    fills: for a run that trains: a cache in its own folder is added to (else it is only read), and layers may be compiled.
    compiled: whether they are, where that was chosen before.
    """
    with prepared.source.placing():
        recipe = prepared.recipe
        spec = recipe.model
        dtype = DTYPES[spec.dtype]
        torch.manual_seed(recipe.train.seed)  # the adapter's random half is drawn here
        # Weights that all train are float32 masters: loaded narrower, they would have lost their last bits.
        whole = spec.lora is None and spec.adapter is None
        loaded = torch.float32 if whole and dtype == torch.bfloat16 else dtype
        load = partial(load_model, dtype=loaded, trust_remote_code=spec.trust_remote_code)
        scores = prepared.method.of_scores
        # How the reference's weights can be had once more.
        attributes = (spec.attributes or ONE) if scores else None
        origin = partial(load, spec.name, gguf_file=spec.gguf_file, attributes=attributes) if model is None else None
        model = origin() if origin else model
        assert model is not None
        if is_reward_model(model) is not scores:
            what = "is a reward model" if not scores else "has no head for scores"
            raise UserError(f"the model given {what}", where="model", fix=f"give what {recipe.method} trains")
        model.to(best_device())
        policy = build_policy(
            model, dtype=dtype, lora=spec.lora, adapter=spec.adapter, checkpointing=recipe.train.checkpointing,
            levels=recipe.loss.get("levels"),
        )  # fmt: skip
        check_vocabulary(policy.causal, prepared.tokenizer)
        _check_positions(policy, prepared)
        if fills and _compiles(prepared, policy, compiled):
            compile_layers(policy)
        if not prepared.needs_reference:
            return policy, None
        if reference is None and recipe.reference.model:
            origin = partial(load, recipe.reference.model)
            reference = origin()
        elif reference is not None or not whole:
            origin = None
        built = _reference(policy, recipe, reference)
        again = (lambda: _reference(policy, recipe, origin())) if origin else None
        return policy, _kept(built, recipe, fills, again)


def _reference(policy: Engine, recipe: Recipe, model: nn.Module | None) -> Reference:
    """The model given, or the policy as it is now."""
    name = recipe.reference.model
    if model is not None:
        _check_same_vocabulary(policy, model, name or "")
        model.to(policy.device)
    fresh = recipe.model.lora is not None and recipe.model.adapter is None
    follows = recipe.reference.sync_every is not None
    built = build_reference(policy, fresh_adapter=fresh, model=model, name=name or "the model given", follows=follows)
    if policy.compiled and isinstance(built, Frozen):  # as the policy is computed, to the last bits
        compile_layers(built.engine)
    return built


def _compiles(prepared: Prepared, policy: Engine, chosen: bool | None) -> bool:
    if chosen and (why := why_not(policy.device)):
        fix = "install what is missing, or go on without: train.compile=off --allow train.compile"
        raise UserError(f"the layers of this run were compiled, and now {why}", where="train.compile", fix=fix)
    return pays_to_compile(prepared, sum(p.numel() for p in policy.parameters()), policy.device) if chosen is None else chosen


def pays_to_compile(prepared: Prepared, weights: int, device: torch.device) -> bool:
    """Whether the recipe asks for compiled layers, or leaves it open and the run is long. Counted, not measured: the values in a
    reference cache are those of one way to compute them. Raises UserError when they are asked for and cannot be had."""
    asked, why = prepared.recipe.train.compile, why_not(device)
    if asked == "on" and why:
        raise UserError(why, where="train.compile", fix="install what is missing, or set it to auto or off")
    if asked != "auto" or why or "train" not in prepared.corpora:
        return asked == "on"
    epochs = prepared.total_steps / prepared.sampler.steps_per_epoch
    tokens = epochs * sum(unit.tokens for unit in prepared.corpora["train"].units)
    return 6 * weights * tokens >= WORTH_COMPILING[device.type]


def own_cache(recipe: Recipe) -> Path:
    """Where a run keeps its reference's values when the recipe names no other place."""
    return Path(recipe.run.dir) / "reference"


def _kept(built: Reference, recipe: Recipe, fills: bool, again: Callable[[], Reference] | None) -> Reference:
    """The reference with the cache that the recipe asks for."""
    kept = recipe.reference.cache
    if kept == "off" or recipe.reference.sync_every is not None:
        return built
    about = f"{recipe.reference.model or recipe.model.name} in {recipe.model.dtype}"
    if kept == "auto":
        return Cached(built, own_cache(recipe), about=about, fills=fills, again=again)
    return Cached(built, Path(kept), about=about, again=again)


def _check_positions(policy: Engine, prepared: Prepared) -> None:
    """Rows longer than the model has positions for: an error where they are a table that ends, else a warning."""
    limit, learned = position_limit(policy.causal) or (None, False)
    if limit is None or not prepared.corpora:
        return
    rows = [(len(u.prompt_ids) + max(len(a.ids) for a in u.answers), u) for c in prepared.corpora.values() for u in c.units]
    length, unit = max(rows, key=lambda row: row[0])
    what = f"this row has {length} tokens, and the model was made for {limit}"
    if length > limit and learned:
        raise UserError(what, where=str(unit.origin), fix=f"set data.max_length: {limit}")
    if length > limit:
        warnings.warn(f"{unit.origin}: {what}; data.max_length: {limit} leaves such rows out", stacklevel=2)


def best_device() -> torch.device:
    """The first accelerator that is there, else the CPU."""
    for name in ("cuda", "mps"):
        if getattr(torch, name).is_available():
            return torch.device(name)
    return torch.device("cpu")


def _vocabulary(model: nn.Module) -> int:
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError when the tokenizer knows tokens for which the model has no embedding."""
    if len(tokenizer) > _vocabulary(model):
        raise UserError(
            f"the tokenizer knows {len(tokenizer)} tokens, the model only {_vocabulary(model)}",
            where="model.tokenizer",
            fix="use the tokenizer that belongs to the model",
        )


def _check_same_vocabulary(policy: Engine, reference: nn.Module, name: str) -> None:
    ours, theirs = _vocabulary(policy.causal), _vocabulary(reference)
    if ours != theirs:
        raise UserError(
            f"policy and reference have vocabularies of {ours} and {theirs} tokens: their log-probabilities do not compare",
            where=f"reference.model: {name}",
            fix="use a reference with the policy's tokenizer",
        )
