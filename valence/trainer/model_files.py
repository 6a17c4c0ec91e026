"""Write the policy as a model folder that transformers and vLLM load, with its model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from valence.config.describe import shorten_value
from valence.data.sampler import canonical_order
from valence.data.targets import ONE
from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError
from valence.models.adapters import merge_adapter, save_adapter
from valence.models.build import DTYPES, load_model
from valence.models.scores import Scorer, with_padding
from valence.reports.card import CardFacts, last_record, license_of, model_card
from valence.reports.rundata import read_run
from valence.reports.verdict import run_verdict
from valence.runs.export import export
from valence.runs.folder import versions
from valence.trainer.prepare import Prepared
from valence.trainer.state import TrainState

NUM_SCORED = 1024
"""Training rows whose scores give the mean and spread saved with a reward model: the mean is then
known to a thirtieth of the spread.
"""

ALWAYS_SHOWN = (
    "train.learning_rate",
    "train.batch_size",
    "train.seed",
    "model.dtype",
    "model.lora.rank",
    "data.as_chat",
)
"""Settings in the model card, whatever their origin."""

SavedWith = tuple[PreTrainedTokenizerBase, Mapping[str, Any] | None]
"""The tokenizer that is saved with a model, and further entries of its configuration."""


@dataclass(frozen=True)
class ModelWriter:
    """Writes the policy of a run.

    facts: those of run.json. audit: of the training rows. log: the run's metrics.jsonl.
    """

    prepared: Prepared
    state: TrainState
    world: Group
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    audit: Mapping[str, Any] = field(default_factory=dict[str, Any])
    log: Path | None = None

    def saved_with(self) -> SavedWith:
        """Return what is saved with the weights. All processes call it."""
        policy = self.state.policy
        if isinstance(policy, Scorer):
            with self.state.evaluation_weights():
                return self._describe_reward_model(policy)
        return self.prepared.encoder.tokenizer, None

    def write(
        self,
        target: Path,
        kind: Literal["auto", "merged", "adapter"],
        saved_with: SavedWith | None = None,
    ) -> None:
        """Write the policy as it is, with its card.

        All processes call it. Where each holds all weights and ``saved_with`` is known, one is
        enough.

        Raises UserError for an adapter of a reward model.
        """
        recipe, state = self.prepared.recipe, self.state
        if isinstance(state.policy, Scorer) and kind == "adapter":
            raise UserError(
                "an adapter cannot store the attributes of a reward model",
                code="adapter-not-exportable",
                where="run.export",
                fix="set run.export: merged, or use `valence export` without --adapter",
            )
        card = self._card(kind)
        tokenizer, config = saved_with or self.saved_with()
        if self.world.rank and not state.has_split_weights:
            return
        with state.evaluation_weights(), state.policy.stock():
            export(
                state.policy.model,
                tokenizer,
                target,
                kind=kind,
                card=model_card(card),
                ends=self.prepared.encoder.end_ids,
                config=config,
                group=self.world if state.has_split_weights else None,
                merge=self._merge_quantized if recipe.model.quantize else None,
                save_adapter=save_adapter,
            )

    def _card(self, kind: str) -> CardFacts:
        prepared, state, recipe = self.prepared, self.state, self.prepared.recipe
        has_adapter = recipe.model.lora is not None or recipe.model.adapter is not None
        steps = sorted(state.evaluations)
        methods, loss = self._losses()
        return CardFacts(
            name=Path(recipe.run.dir).name,
            base_model=recipe.model.name,
            method=" + ".join(methods),
            loss=loss,
            settings=self._shown_settings(),
            adapter=has_adapter and kind == "adapter",
            chat=prepared.uses_template,
            chat_template_kwargs=prepared.encoder.template.kwargs,
            audit=self.audit,
            before=state.evaluations[steps[0]] if len(steps) > 1 else None,
            after=state.evaluations[steps[-1]] if steps else None,
            verdict=self._verdict(),
            last=last_record(self.log, state.step) if self.log else {},
            license={} if self.world.rank else license_of(recipe.model.name),
            command=str(self.facts.get("command", "")),
            versions=versions(),
            steps=state.step,
            seconds=float(self.facts.get("seconds", 0.0)),
            reward_model=isinstance(state.policy, Scorer),
            finished=self.facts.get("status") != "interrupted",
        )

    def _losses(self) -> tuple[list[str], Mapping[str, object]]:
        """The methods of the recipe and of `mix`, and the settings of the loss.

        As the run recorded them: without a user's code, its recipe is opened with another method.
        """
        recipe = self.prepared.recipe
        recorded = self.facts.get("settings")
        if not isinstance(recorded, Mapping) or "method" not in recorded:
            method = str(self.facts.get("method", recipe.method))
            return [method, *(part.method for part in recipe.mix)], recipe.loss
        names = (f"mix.{i}.method" for i in count())
        mixed = takewhile(lambda name: name in recorded, names)
        loss = {
            name.removeprefix("loss."): value
            for name, value in recorded.items()
            if name.startswith("loss.")
        }
        return [str(recorded[name]) for name in ("method", *mixed)], loss

    def _verdict(self) -> str:
        """The verdict on the evaluations up to this step; empty in processes that write no card."""
        if self.log is None or self.world.rank or not self.state.evaluations:
            return ""
        return run_verdict(read_run(self.log.parent, until=self.state.step)).text

    def _shown_settings(self) -> dict[str, Any]:
        """Settings that the recipe sets, and those that every reader asks for."""
        shown = {*ALWAYS_SHOWN, self.prepared.recipe.train.length_setting}
        overridden = {"train.epochs"} - shown
        return {
            name: shorten_value(setting.value)
            for name, setting in self.prepared.source.settings.items()
            if (name in shown or not setting.is_default)
            and name not in overridden
            and name.split(".")[0] in ("model", "reference", "train", "data")
        }

    def _merge_quantized(self, model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """Merge an adapter on 4-bit weights into the model that these were quantized from.

        Merging into the 4-bit weights would round most of the adapter away. It takes host memory
        for the whole model in the recipe's type.
        """
        spec = self.prepared.recipe.model
        attributes = (spec.attributes or ONE) if isinstance(self.state.policy, Scorer) else None
        base = load_model(
            spec.name,
            dtype=DTYPES[spec.dtype],
            attributes=attributes,
            trust_remote_code=spec.trust_remote_code,
        )
        return merge_adapter(base, model, weights)

    @torch.no_grad()
    def _describe_reward_model(self, policy: Scorer) -> SavedWith:
        """The tokenizer of a reward model, and what its configuration says of its scores."""
        encoder, units = self.prepared.encoder, self.prepared.corpora["train"].units
        order = canonical_order(units, self.prepared.recipe.train.seed, 0)
        rows = [units[i] for i in order[:NUM_SCORED]]
        objective = self.state.objective
        local: list[list[float]] = []
        policy.eval()
        try:
            rounds = objective.rounds(objective.divide(rows))
            for batch, is_dummy in rounds:
                with rounds.running():
                    output = policy(batch).score
                    if output is not None and not is_dummy:
                        local += output.tolist()
        finally:
            policy.train()
        scores = [row for rows in gather_objects(self.state.group, local) for row in rows]
        ends = {*encoder.end_ids, *units.last_tokens}
        tokenizer = with_padding(
            encoder.tokenizer, ends, policy.causal.get_input_embeddings().weight.shape[0]
        )
        config = policy.description(torch.tensor(scores))
        return tokenizer, config | {"pad_token_id": tokenizer.pad_token_id}
