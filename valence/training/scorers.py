"""Score completions: log-probabilities of a model, alone or against a reference, or rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from valence.config.load import LoadedRecipe
from valence.config.needs import method_in
from valence.config.schema import Model, Recipe
from valence.errors import UserError
from valence.losses.metrics import Reward, log_ratio
from valence.models.adapters import with_adapter
from valence.models.build import (
    DTYPES,
    best_device,
    build_reference,
    check_positions,
    check_vocabulary,
    load_model,
    load_tokenizer,
    without_dropout,
)
from valence.models.check import check_layout
from valence.models.digest import model_digest
from valence.models.loading import load_config
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference
from valence.models.scores import Scorer, has_score_head, widen_head
from valence.targets import require_loss, with_dtype
from valence.training.saved_models import load_saved_models
from valence.types import MicroBatch

BETA = 0.1
"""Default beta of the implicit reward."""
SCALES = ("beta", "tau")
"""Settings of losses that an implicit reward may read."""
Numbers = dict[str, float | dict[str, float]]
"""The numbers of one completion by name; those of several attributes by their names."""


class CompletionScorer(Protocol):
    """Compute the numbers of each sequence of a micro-batch. facts: what they depend on."""

    @property
    def facts(self) -> Mapping[str, Any]: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, batch: MicroBatch) -> list[Numbers]: ...


@dataclass(frozen=True)
class LogProbScorer:
    """Sums of log-probabilities over the tokens of a completion, in nats.

    ``logp`` under the model, ``ref`` under the reference, ``logratio`` their difference;
    ``mean_logp`` per token; ``reward``: the implicit reward of a loss with these settings.
    """

    policy: PolicyModel
    reference: Reference | None
    implicit: Reward | None
    settings: Mapping[str, Any]

    @property
    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"model": model_digest(self.policy, adapter=True)}
        facts["reference"] = None if self.reference is None else self.reference.digests().model
        if self.implicit is not None:
            facts["reward"] = self.implicit.__name__
            facts |= {name: self.settings[name] for name in SCALES if name in self.settings}
        return facts

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> list[Numbers]:
        logp, n = sum_logps(batch, self.policy(batch).logp), count_tokens(batch)
        columns, sums = {"logp": logp, "tokens": n, "mean_logp": logp / n}, {"logp": logp, "n": n}
        if self.reference is not None:
            sums["ref"] = sum_logps(batch, self.reference(batch))
            columns |= {"ref": sums["ref"], "logratio": logp - sums["ref"]}
        if self.implicit is not None:
            columns["reward"] = self.implicit(sums, self.settings)
        rows = zip(*(values.tolist() for values in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class RewardModelScorer:
    """The ``score`` of a reward model, and ``normalised`` by its saved mean and deviation.

    Several attributes are scored by name.
    """

    engine: Scorer

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"model": model_digest(self.engine, adapter=True), "reference": None}

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> list[Numbers]:
        config, score = self.engine.causal.config, self.engine(batch).score
        assert score is not None
        names, values = list(config.id2label.values()), score.cpu().double()
        columns = {"score": values}
        mean, std = (
            torch.tensor(getattr(config, name, None) or []).double()
            for name in ("reward_mean", "reward_std")
        )
        if len(mean) == len(std) == len(names) and bool((std > 0).all()):
            columns["normalised"] = (values - mean) / std
        counts = count_tokens(batch).tolist()
        return [
            {
                **{
                    name: _by_attribute(names, column[s].tolist())
                    for name, column in columns.items()
                },
                "tokens": counts[s],
            }
            for s in range(batch.sequences)
        ]


def _by_attribute(names: Sequence[str], values: Sequence[float]) -> float | dict[str, float]:
    return values[0] if len(names) == 1 else dict(zip(names, values, strict=True))


def count_tokens(batch: MicroBatch) -> Tensor:
    """Scored tokens of each sequence: [S]."""
    return torch.bincount(batch.cpu_scored[1], minlength=batch.sequences)


def sum_logps(batch: MicroBatch, logp: Tensor) -> Tensor:
    """logp[T] summed over each sequence: [S]."""
    values = logp[batch.scored].cpu().double()
    return torch.zeros(batch.sequences, dtype=torch.float64).index_add_(
        0, batch.cpu_scored[1], values
    )


def load_scorer(
    source: LoadedRecipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    beta: float | None,
    run: Path | None,
    overrides: Sequence[str],
) -> CompletionScorer:
    """Load the model of a recipe, and its reference if one is named.

    run: the folder of the run whose weights are used; it is scored with the implicit reward that it
    trains. The recipe's starting model is not used as a reference. Raises UserError if a model
    cannot be loaded or the tokenizers differ.
    """
    source = with_dtype(source)
    recipe = source.recipe
    if run is not None:
        require_loss(run, recipe)
    implicit = None if run is None else method_in(recipe).loss.reward
    if implicit is not None and beta is not None:
        raise UserError(
            f"a run of {recipe.method} is scored with the implicit reward of its recipe",
            code="beta-unused",
            where="--beta",
            fix="remove --beta, or score the exported model with --reference",
        )
    with source.placing():
        reference = None
        if run is not None:
            saved = load_saved_models(run, overrides)
            policy, reference = saved.policy, saved.reference
        else:
            policy = _policy(recipe.model, method_in(recipe).is_reward_model)
            check_vocabulary(policy.causal, tokenizer)
        check_positions(
            policy.causal,
            recipe.data.max_length,
            "rows may have",
            code="max-length-too-large",
            where="data.max_length",
            fix="set --max-length {limit}, or settings.max_length={limit} for a reward model",
            warn=False,
        )
        other = recipe.reference.model
        if other is not None and isinstance(policy, Scorer):
            raise UserError(
                "reward models do not use a reference model",
                code="reference-unused",
                where="reference.model",
                fix="remove --reference (reference.model)",
            )
        if reference is None and other is not None:
            reference = _reference(policy, other, recipe, tokenizer)
    if reference is None and beta is not None:
        raise UserError(
            "--beta scales implicit rewards, which need a reference model",
            code="beta-needs-reference",
            where="--beta",
            fix="add --reference MODEL, or remove --beta",
        )
    policy.eval()
    if isinstance(policy, Scorer):
        return RewardModelScorer(policy)
    if implicit is not None:
        return LogProbScorer(policy, reference, implicit, recipe.loss)
    settings = {"beta": recipe.loss.get("beta", BETA) if beta is None else beta}
    return LogProbScorer(policy, reference, None if reference is None else log_ratio, settings)


def _policy(spec: Model, is_reward_model: bool) -> PolicyModel:
    """Load a model for scoring, without float32 master weights."""
    dtype, attributes = DTYPES[spec.dtype], _attributes(spec)
    if is_reward_model and attributes is None:
        raise UserError(
            "the reward model has no trained head, so its scores mean nothing",
            code="reward-model-untrained",
            where="model.name",
            fix="score with the run folder of a trained reward model, or with its exported model",
        )
    model = load_model(
        spec.name,
        dtype=dtype,
        attributes=attributes,
        gguf_file=spec.gguf_file,
        trust_remote_code=spec.trust_remote_code,
    )
    model.to(best_device())
    if attributes is not None:
        widen_head(model)
    model, compute = without_dropout(model), None
    if spec.adapter is not None:  # adapter weights are float32, whatever the model's dtype
        model, compute = (
            with_adapter(model, None, spec.adapter),
            torch.bfloat16 if dtype == torch.bfloat16 else None,
        )
    engine = (PolicyModel if attributes is None else Scorer)(model, compute=compute).eval()
    check_layout(engine)
    return engine


def _attributes(spec: Model) -> list[str] | None:
    """The attributes that a saved reward model scores; None for other models."""
    if spec.gguf_file is not None:
        return None
    config = load_config(spec.name, trust_remote_code=spec.trust_remote_code)
    labels: Any = config.id2label
    return list(labels.values()) if has_score_head(config) else None


def _reference(
    policy: PolicyModel, name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Reference:
    """Load a separate reference model. Raises UserError if its tokenizer differs, or if it has
    fewer positions than rows may have.
    """
    spec = recipe.model
    if not Path(name).is_dir() or any(Path(name).glob("tokenizer*")):
        ref_tokenizer = load_tokenizer(
            name, trust_remote_code=spec.trust_remote_code, setting="reference.model"
        )
        if ref_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UserError(
                "model and reference have different tokenizers, so their log-probabilities "
                "cannot be compared",
                code="tokenizer-mismatch",
                where=f"reference.model: {name}",
                fix="use a reference model with the tokenizer of the model",
            )
    dtype = policy.causal.get_input_embeddings().weight.dtype
    model = load_model(
        name, dtype=dtype, trust_remote_code=spec.trust_remote_code, setting="reference.model"
    )
    check_vocabulary(model, tokenizer)
    check_positions(
        model,
        recipe.data.max_length,
        "rows may have",
        code="max-length-too-large",
        where="data.max_length",
        fix="set --max-length {limit}",
        warn=False,
        name="the reference model",
    )
    return build_reference(policy, fresh_adapter=False, model=model.to(policy.device), name=name)
