"""The models of a run: the policy, and what it is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from valence.config.schema import Model, Recipe
from valence.data.targets import ONE
from valence.distributed.fsdp2 import shard
from valence.distributed.protocol import Group
from valence.distributed.single import Single
from valence.distributed.tensor import tensor_parallel
from valence.distributed.together import same
from valence.errors import UserError
from valence.lifecycle.changes import rows_of
from valence.models.build import (
    DTYPES,
    best_device,
    build_policy,
    build_reference,
    check_positions,
    check_vocabulary,
    load_model,
    vocabulary_size,
)
from valence.models.cache import CachedReference
from valence.models.check import check_layout
from valence.models.compiling import compile_layers, why_not
from valence.models.digest import model_digest
from valence.models.loading import fingerprint
from valence.models.memory import Split, free_memory
from valence.models.policy_model import PolicyModel
from valence.models.quantized import is_quantized
from valence.models.reference import FrozenReference, Reference
from valence.models.router import check_router
from valence.models.scores import is_reward_model
from valence.models.shape import decoder_layers, shape_of
from valence.models.stream import CannotStreamError, Stream, outline
from valence.models.values import add_values
from valence.planning.memory import (
    at_rest,
    choose_split,
    fits_whole,
    layers_of,
    least_free,
    trains_whole,
)
from valence.planning.plan import pays_to_compile
from valence.trainer.prepare import Prepared
from valence.types import Origin


def build_models(
    prepared: Prepared,
    *,
    group: Group | None = None,
    model: nn.Module | None = None,
    reference: nn.Module | None = None,
    fills: bool = False,
    compiled: bool | None = None,
    sharded: bool | None = None,
) -> tuple[PolicyModel, Reference | None]:
    """Loads the policy and what it is compared with.

    Objects given replace those that the recipe names.

    fills: for a run that trains: a cache in its own folder is added to (else it is only read), and
    layers may be compiled.
    compiled, sharded: whether layers are compiled, and weights split over processes, where that was
    chosen before.
    group: all processes, which call it together.
    """
    group = group or Single()
    with prepared.source.placing():
        recipe = prepared.recipe
        check_folders(prepared, group, model=model is None, reference=reference is None)
        same(group, lambda: rows_of(prepared), "give all processes the same rows")
        data, layers = group.split(recipe.parallel.tensor)
        split = _split(prepared, model, group, sharded)
        loads = _Loads(prepared, split, data, layers)
        policy, stream = loads.policy(model)
        if model is not None:
            _check_same_weights(group, "model", policy)
        check_vocabulary(policy.causal, prepared.tokenizer)
        _check_lengths(policy, prepared)
        if fills and recipe.train.router_aux_loss:
            check_router(policy)
        if fills and split.single and _compiles(prepared, policy, compiled, group.size):
            compile_layers(policy)
        own = recipe.reference.model if reference is None else None
        copied = prepared.needs_reference and reference is None and own is None
        # a copy is made of what is still whole, or still nothing
        built = loads.reference(policy, None) if copied else None
        loads.share(policy, stream)
        if isinstance(built, FrozenReference):
            loads.share(built.engine, stream)
        elif prepared.needs_reference and not copied:
            built = (
                loads.reference(policy, reference, among=group)
                if reference is not None
                else loads.named_reference(policy, own)
            )
        # How the reference's weights can be had once more.
        whole = copied and model is None and trains_whole(recipe)
        again = partial(loads.named_reference, policy, own) if own or whole else None
        if data.rank:
            # an adapter's dropout is another in each process
            torch.manual_seed(recipe.train.seed + data.rank)
        # those without which this process cannot run the reference
        among = group if split.ways > 1 else layers
        return policy, None if built is None else _kept(built, recipe, fills, again, among.any)


@dataclass(frozen=True)
class _Loads:
    """Loads the models of a run.

    Where they are split, each process has its part alone: a model is made without weights, what is
    to be a copy of it is copied, and then each is shared and read. Only what cannot be read in
    parts is loaded whole before.
    """

    prepared: Prepared
    split: Split
    data: Group
    layers: Group

    def policy(self, model: nn.Module | None) -> tuple[PolicyModel, Stream | None]:
        """Of the model given, or the recipe's."""
        recipe, spec, stream = self.prepared.recipe, self.prepared.recipe.model, None
        torch.manual_seed(recipe.train.seed)
        if model is None:
            model, stream = self._model(None)
        scores = self.prepared.method.is_reward_model
        if is_reward_model(model) is not scores:
            what = "is a reward model" if not scores else "has no head for scores"
            raise UserError(
                f"the model given {what}",
                code="model-kind",
                where="model",
                fix=f"give what {recipe.method} trains",
            )
        _check_quantized(model, spec)
        # the adapter's random half is drawn here, whatever loading has drawn
        torch.manual_seed(recipe.train.seed)
        policy = build_policy(
            model.to(best_device()),
            dtype=DTYPES[spec.dtype],
            lora=spec.lora,
            adapter=spec.adapter,
            checkpointing=recipe.train.checkpointing,
            levels=recipe.loss.get("levels"),
            check=self.split.single,
        )
        if stream:
            stream.forget(policy.causal)
        if self.prepared.method.online and recipe.loss.get("value"):
            if not self.split.single:
                what = "values are not computed where weights are split over processes"
                raise UserError(
                    what,
                    code="value-head-unsupported",
                    where="parallel.shard",
                    fix="set parallel.shard: off and parallel.tensor: 1",
                )
            add_values(policy, trunk=recipe.value.trunk)
        return policy, stream

    def named_reference(self, policy: PolicyModel, name: str | None) -> Reference:
        """The model of a folder or hub id; None: that of the policy, as it is there."""
        model, stream = self._model(name)
        return self.reference(policy, model, stream)

    def reference(
        self,
        policy: PolicyModel,
        model: nn.Module | None,
        stream: Stream | None = None,
        among: Group | None = None,
    ) -> Reference:
        """The model given, or the policy as it is now, which is then still to be shared. among:
        processes that call this together, and whose weights are to be the same.
        """
        recipe = self.prepared.recipe
        name = recipe.reference.model
        if model is not None:
            _check_same_vocabulary(policy, model, name or "")
            model.to(policy.device)
        built = build_reference(
            policy,
            fresh_adapter=recipe.model.lora is not None and recipe.model.adapter is None,
            model=model,
            name=name or "the model given",
            follows=recipe.reference.sync_every is not None,
            check=self.split.single,
        )
        # as the policy is computed, to the last bits
        if policy.compiled and isinstance(built, FrozenReference):
            compile_layers(built.engine)
        if model is not None and isinstance(built, FrozenReference):
            if stream:
                stream.forget(built.engine.causal)
            elif among is not None:
                _check_same_weights(among, "reference", built.engine)
            self.share(built.engine, stream)
        return built

    def share(self, engine: PolicyModel, stream: Stream | None) -> None:
        """Leaves this process its part, and chooses the layout."""
        if self.split.single:
            return
        share(engine, stream, self.split, self.data, self.layers, best_device())
        trains = engine.training
        check_layout(engine.eval())
        engine.train(trains)

    def _model(self, name: str | None) -> tuple[nn.Module, Stream | None]:
        recipe, spec = self.prepared.recipe, self.prepared.recipe.model
        more: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
        more["dtype"] = at_rest(recipe)
        file = spec.gguf_file if name is None else None
        if name is None and self.prepared.method.is_reward_model:
            more["attributes"] = spec.attributes or ONE
        name = name or spec.name
        # what is in 4 bits is made of whole weights
        if not self.split.single and not spec.quantize:
            try:
                return outline(name, device=best_device(), gguf_file=file, **more)
            except CannotStreamError as why:
                if self.data.rank == self.layers.rank == 0:
                    warnings.warn(
                        f"each process loads all weights of {name} before they are split, as {why}",
                        stacklevel=2,
                    )
        return load_model(name, gguf_file=file, quantize=spec.quantize is not None, **more), None


def _check_quantized(model: nn.Module, spec: Model) -> None:
    """Raises UserError when a model is in 4 bits and the recipe does not say so, or the other way
    round.
    """
    if is_quantized(model) and not spec.quantize:
        fix = "name the model that it was made of, and set model.quantize: nf4"
        raise UserError(
            "its weights are kept in 4 bits",
            code="model-quantized",
            where=f"model.name: {spec.name}",
            fix=fix,
        )
    if spec.quantize and not is_quantized(model):
        fix = "load it so, give its name instead, or remove model.quantize"
        raise UserError(
            "the model given has no weights of 4 bits",
            code="model-quantized",
            where="model.quantize",
            fix=fix,
        )


def _check_same_weights(group: Group, name: str, engine: PolicyModel) -> None:
    """Raises UserError when the processes have different ones."""
    same(
        group,
        lambda: {name: model_digest(engine, adapter=True)},
        "let all processes give or load the same weights",
    )


def _split(prepared: Prepared, model: nn.Module | None, group: Group, before: bool | None) -> Split:
    """How the processes share the weights."""
    spec, device = prepared.recipe.model, best_device()

    def fits() -> bool:
        bare = layers_of(prepared, model)
        shape = shape_of(
            bare, lora=spec.lora, adapter=spec.adapter, quantize=spec.quantize is not None
        )
        return fits_whole(prepared, shape, device, least_free(free_memory(device), device, group))

    return choose_split(prepared.recipe, group.size, device, before=before, fits=fits)


def _compiles(prepared: Prepared, policy: PolicyModel, chosen: bool | None, processes: int) -> bool:
    if prepared.recipe.train.router_aux_loss:  # compiled layers return no router logits
        return False
    if chosen and (why := why_not(policy.device)):
        fix = "install what is missing, or go on without: train.compile=off --allow train.compile"
        raise UserError(
            f"the layers of this run were compiled, and now {why}",
            code="compile-changed",
            where="train.compile",
            fix=fix,
        )
    weights = sum(p.numel() for p in policy.parameters())
    return (
        pays_to_compile(prepared, weights, policy.device, processes) if chosen is None else chosen
    )


def own_cache(recipe: Recipe) -> Path:
    """Where a run keeps its reference's values when the recipe names no other place."""
    return Path(recipe.run.dir) / "reference"


def _kept(
    built: Reference,
    recipe: Recipe,
    fills: bool,
    again: Callable[[], Reference] | None,
    agree: Callable[[bool], bool],
) -> Reference:
    """The reference with the cache that the recipe asks for."""
    kept = recipe.reference.cache
    # own answers are new in each round
    if kept == "off" or recipe.reference.sync_every is not None or recipe.reward:
        return built
    about = (
        f"{recipe.reference.model or recipe.model.name} in "
        f"{recipe.model.quantize or recipe.model.dtype}"
    )
    if kept == "auto":
        return CachedReference(
            built, own_cache(recipe), about=about, fills=fills, again=again, agree=agree
        )
    return CachedReference(built, Path(kept), about=about, again=again, agree=agree)


def _check_lengths(policy: PolicyModel, prepared: Prepared) -> None:
    """Check that the model has positions for the longest row."""
    if not prepared.corpora:
        return
    own = prepared.recipe.rollout.max_new_tokens if prepared.method.online else 0
    longest: list[tuple[int, Origin]] = []
    for units in (corpus.units for corpus in prepared.corpora.values()):
        answers = np.where(units.columns["num_answers"] > 0, units.longest, own)
        lengths = units.of_prompts("num_tokens") + answers
        longest.append((int(lengths.max()), units.origins[int(lengths.argmax())]))
    length, origin = max(longest, key=lambda row: row[0])
    check_positions(
        policy.causal,
        length,
        "this row has",
        code="row-too-long-for-model",
        where=str(origin),
        fix="set data.max_length: {limit}",
    )


def _check_same_vocabulary(policy: PolicyModel, reference: nn.Module, name: str) -> None:
    ours, theirs = vocabulary_size(policy.causal), vocabulary_size(reference)
    if ours != theirs:
        raise UserError(
            f"policy and reference have vocabularies of {ours} and {theirs} tokens: their "
            f"log-probabilities do not compare",
            code="vocabulary-mismatch",
            where=f"reference.model: {name}",
            fix="use a reference with the policy's tokenizer",
        )


def check_folders(prepared: Prepared, group: Group, *, model: bool, reference: bool) -> None:
    """Raises UserError, on all processes, when what one of them would load is not what rank 0
    would. model, reference: whether these are loaded from where the recipe says.
    """
    if group.size == 1:
        return
    recipe = prepared.recipe
    names = {
        "model.name": recipe.model.name if model else None,
        "model.adapter": recipe.model.adapter,
        "reference.model": recipe.reference.model if reference else None,
    }
    facts: dict[str, Any] = {}
    for setting, name in names.items():
        for file, fact in fingerprint(name).items() if name else ():
            facts[f"{file} of {setting}"] = fact
    same(
        group,
        lambda: facts,
        "let all processes read the same folders, as from a disk that they share",
    )


def share(
    engine: PolicyModel,
    stream: Stream | None,
    split: Split,
    data: Group,
    layers: Group,
    device: torch.device,
) -> None:
    """Leaves each process its part of an engine's weights, and reads that from the files, unless
    they were loaded whole. data: the processes that have other rows; layers: those that share each
    layer.
    """
    tensor_parallel(engine.model, layers)
    engine.shared = layers.size > 1
    if split.ways > 1:
        among: Any = data
        shard(
            engine,
            decoder_layers(engine.causal),
            among,
            compute=engine.compute,
            reshard=split.reshard,
            each=split.each,
            offload=split.offload,
        )
    if stream:
        stream.fill(engine.causal, device, parts_on=torch.device("cpu") if split.offload else None)
