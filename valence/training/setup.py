"""From a recipe to the parts of a run: rows read, encoded and audited before any weight is loaded; then policy and reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from valence.config.load import LoadedRecipe
from valence.config.schema import Data, Recipe, Source
from valence.data.audit import Audit, audit, overlap
from valence.data.encode import EncodedSet, Encoder
from valence.data.load import InMemory, Loaded, Rows, load
from valence.data.mismatch import mismatch
from valence.data.sampler import Sampler
from valence.engine.cache import Cached
from valence.engine.compiling import compile_layers, why_not
from valence.engine.loading import must_exist
from valence.engine.logprobs import Engine
from valence.engine.models import DTYPES, build_policy, build_reference, load_model, load_tokenizer, position_limit
from valence.engine.reference import Frozen, Reference
from valence.errors import UserError
from valence.training.methods import Method, method_of
from valence.training.optim import check_optimizer, up
from valence.types import Encoded, Example

WORTH_COMPILING = {"cpu": 2e14, "cuda": 1e17}
"""Operations of a run, about five minutes of them, from which on compiled layers save more time than they take to compile."""


@dataclass(frozen=True)
class Corpus:
    """One list of a recipe's data (train, eval or test): its rows, their tokens, and what was found in them."""

    loaded: Loaded
    encoded: EncodedSet
    audit: Audit

    @property
    def units(self) -> tuple[Encoded, ...]:
        return self.encoded.units

    @cached_property
    def examples(self) -> dict[str, Example]:
        """The examples by content id."""
        return {example.id: example for example in self.loaded.examples}


@dataclass(frozen=True)
class Prepared:
    """Everything of a run short of its weights."""

    recipe: Recipe
    source: LoadedRecipe
    method: Method
    encoder: Encoder
    corpora: Mapping[str, Corpus]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    @property
    def sampler(self) -> Sampler:
        train = self.recipe.train
        return Sampler(self.corpora["train"].units, train.batch_size, train.seed, train.drop_last, self.recipe.data.stratify)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        train = self.recipe.train
        steps = up(train.epochs * self.sampler.steps_per_epoch)
        return steps if train.max_steps is None else min(steps, train.max_steps)

    @property
    def ends_early(self) -> str:
        """What to say when train.max_steps is never reached."""
        most = self.recipe.train.max_steps
        if most is None or self.total_steps >= most:
            return ""
        return f"train.epochs ends after {self.total_steps} steps, before train.max_steps: {most}"


def prepare(
    source: LoadedRecipe, *, tokenizer: PreTrainedTokenizerBase | None = None, given: Mapping[str, Rows | None] | None = None
) -> Prepared:
    """Reads, encodes and audits all rows of a recipe. ``given``: rows in memory that replace the recipe's train or eval files.

    Raises UserError for a mistake in the recipe or the data.
    """
    with source.placing():
        recipe = source.recipe
        model, data = recipe.model, recipe.data
        method = method_of(recipe.method)
        if tokenizer is None:
            tokenizer = load_tokenizer(
                model.tokenizer or model.name,
                gguf_file=None if model.tokenizer else model.gguf_file,
                trust_remote_code=model.trust_remote_code,
            )
        encoder = Encoder(
            tokenizer, max_length=data.max_length, long_rows=data.long_rows, train_on=data.train_on, as_chat=data.as_chat
        )
        corpora: dict[str, Corpus] = {}
        for name in ("train", "eval", "test"):
            rows = (given or {}).get(name)
            if rows is not None or getattr(data, name):
                corpora[name] = read_corpus(rows if rows is not None else getattr(data, name), method, data, encoder)
            if name in corpora and name != "train" and "train" in corpora:
                corpora[name] = _compared(corpora[name], corpora["train"])
        prepared = Prepared(recipe, source, method, encoder, corpora)
        _check(prepared)
        return prepared


def read_corpus(rows: Any, method: Method, data: Data, encoder: Encoder) -> Corpus:
    """Rows of files (``Source`` sections) or in memory, as examples of the method's kind, as tokens, audited."""
    how = {"convert": data.convert, "threshold": data.threshold, "limit": data.limit, "on_bad_row": data.on_bad_row}
    from_files = isinstance(rows, Sequence) and all(isinstance(row, Source) for row in rows)
    loaded = load(rows if from_files else [InMemory(rows)], method.kind, **how)
    encoded = encoder.encode_all(loaded.examples, loaded.sources)
    bad = [row for row in encoded.unusable if not row.dropped]
    if bad and data.on_bad_row == "stop":
        raise UserError(bad[0].reason, where=str(bad[0].origin), fix=_bad_row_remedy(bad[0].fix))
    if not encoded.units:
        raise UserError(
            f"none of the {len(loaded.examples)} rows can be used: {encoded.unusable[0].reason}",
            where=str(encoded.unusable[0].origin),
            fix=encoded.unusable[0].fix or "see the audit (`valence check RECIPE`)",
        )
    return Corpus(loaded, encoded, audit(loaded, encoded, encoder))


def _compared(corpus: Corpus, train: Corpus) -> Corpus:
    """The same with the audit also saying which of the rows are trained on."""
    shared = overlap(train.loaded.examples, corpus.loaded.examples)
    return replace(corpus, audit=replace(corpus.audit, findings={**corpus.audit.findings, **shared}))


def _bad_row_remedy(fix: str | None) -> str:
    skip = "`data.on_bad_row: skip` leaves such rows out, counts and lists them"
    return f"{fix}; {skip}" if fix else skip


def _check(prepared: Prepared) -> None:
    """What can be known to fail before a model is loaded."""
    method, recipe = prepared.method, prepared.recipe
    for setting, named in (("model.adapter", recipe.model.adapter), ("reference.model", recipe.reference.model)):
        if named:
            must_exist(named, setting)
    check_optimizer(recipe.train.optimizer, DTYPES[recipe.model.dtype])
    kept = recipe.reference.cache
    if kept not in ("auto", "off") and Path(kept).exists() and not Path(kept).is_dir():
        raise UserError(f"{kept} is a file", where="reference.cache", fix="name a folder, new or old")
    for name, corpus in prepared.corpora.items():
        _check_columns(method, corpus.units)
        if method.mismatches and prepared.recipe.loss["z0_scope"] == "step":
            most = prepared.recipe.eval.max_examples if name == "eval" else None
            mismatch(corpus.units[:most], max_length=prepared.recipe.data.max_length)  # raises when a row has no partner
    if "train" in prepared.corpora and prepared.total_steps == 0:
        raise UserError(
            f"{len(prepared.corpora['train'].units)} rows are fewer than one step of {prepared.recipe.train.batch_size}",
            where="train.drop_last",
            fix="set train.drop_last: false, or a smaller train.batch_size",
        )


def _check_columns(method: Method, units: Sequence[Encoded]) -> None:
    """No row has a column that the method would ignore."""
    for column, reads, has in (
        ("margin", "margin", [unit for unit in units if unit.margin != 0]),
        ("soft label", "wrong", [unit for unit in units if unit.soft is not None]),
    ):
        if has and reads not in method.loss.reads:
            raise UserError(
                f"the row has a {column}, which {method.name} does not read",
                where=str(has[0].origin),
                fix="remove the column, or use a method that reads it (dpo)",
            )
    even = next((unit for unit in units if unit.soft == 0.5), None)
    if even is not None and method.name == "robust_dpo":  # it divides by 1 - 2e
        raise UserError(
            "a soft label of 0.5 says nothing, and robust_dpo divides by that", where=str(even.origin), fix="leave the row out"
        )


def build_models(
    prepared: Prepared, *, model: nn.Module | None = None, reference: nn.Module | None = None, fills: bool = False
) -> tuple[Engine, Reference | None]:
    """Loads the policy and what it is compared with. Objects given replace those that the recipe names.

    fills: for a run that trains: a cache in its own folder is added to (else it is only read), and layers may be compiled.
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
        # How the reference's weights can be had once more.
        origin = partial(load, spec.name, gguf_file=spec.gguf_file) if model is None else None
        model = origin() if origin else model
        assert model is not None
        model.to(best_device())
        policy = build_policy(model, dtype=dtype, lora=spec.lora, adapter=spec.adapter, checkpointing=recipe.train.checkpointing)
        check_vocabulary(policy.causal, prepared.tokenizer)
        _check_positions(policy, prepared)
        if fills and pays_to_compile(prepared, sum(p.numel() for p in policy.parameters()), policy.device):
            compile_layers(policy)
        if not prepared.method.needs_reference:
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
    built = build_reference(policy, fresh_adapter=fresh, model=model, name=name or "the model given")
    if policy.compiled and isinstance(built, Frozen):  # as the policy is computed, to the last bits
        compile_layers(built.engine)
    return built


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
    if kept == "off":
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


def class_weight_warning(prepared: Prepared) -> str | None:
    """What to say when class weights that the recipe sets leave the range that the KTO paper advises, else None.

    At the default weights the audit of the training rows says what is advised.
    """
    settings = prepared.recipe.loss
    given = [name for name, s in prepared.source.settings.items() if name.endswith("desirable_weight") and not s.is_default]
    if not given or "train" not in prepared.corpora:
        return None
    from valence.data.audit import advised_weights

    ups = sum(unit.label is True for unit in prepared.corpora["train"].units)
    downs = len(prepared.corpora["train"].units) - ups
    return advised_weights(ups, downs, settings["desirable_weight"], settings["undesirable_weight"]).warning
