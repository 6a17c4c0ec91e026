"""Load the models of a run: the policy and its reference."""

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

from valence.config.needs import caches_reference
from valence.config.schema import Model, Recipe
from valence.data.targets import ONE
from valence.distributed.context_parallel import context_parallel
from valence.distributed.fsdp2 import shard
from valence.distributed.process_group import Group, SingleProcess, check_ranks_agree
from valence.distributed.tensor_parallel import tensor_parallel
from valence.errors import UserError
from valence.models.adapters import (
    check_adapter,
    planned_adapter,
    read_adapter_weights,
    starts_at_base,
)
from valence.models.build import (
    DTYPES,
    best_device,
    build_policy,
    build_reference,
    check_positions,
    check_vocabulary,
    load_model,
    position_limit,
    vocabulary_size,
)
from valence.models.cache import CachedReference
from valence.models.check import check_layout
from valence.models.checkpointing import Checkpointing
from valence.models.compiling import compile_layers, why_not
from valence.models.digest import model_digest
from valence.models.loading import fingerprint
from valence.models.memory import Split, free_memory
from valence.models.policy_model import PolicyModel
from valence.models.quantized import is_quantized
from valence.models.reference import FrozenReference, Reference
from valence.models.router import check_router
from valence.models.scores import is_reward_model
from valence.models.shape import Shape, decoder_layers
from valence.models.stream import CannotStreamError, DeferredWeights, build_without_weights
from valence.models.values import add_values
from valence.models.weights import check_loaded_weights
from valence.training.changes import rows_of
from valence.training.memory import (
    at_rest,
    can_compile,
    choose_checkpointing,
    choose_split,
    fits_on_one_device,
    min_free_memory,
    shape_of_run,
    skeleton_of_recipe,
)
from valence.training.plan import pays_to_compile
from valence.training.prepare import Prepared
from valence.training.server_teacher import ServerTeacher
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
    """Load the policy and its reference.

    model, reference: used instead of the models that the recipe names. fills: the run trains, so
    the cache in its folder is extended (otherwise it is only read) and layers may be compiled.
    compiled, sharded: earlier decisions to compile layers and to split weights over processes; None
    decides now. group: all processes call this together.
    """
    group = group or SingleProcess()
    with prepared.source.placing():
        recipe = prepared.recipe
        check_folders(prepared, group, model=model is None, reference=reference is None)
        check_ranks_agree(group, lambda: rows_of(prepared), "give all processes the same rows")
        split = _split(prepared, model, group, sharded)
        shard_size = split.ways if split.ways > 1 and split.context == 1 else None
        data, neighbours = group.split(*recipe.parallel.neighbours, shard_size=shard_size)
        checkpointing = _checkpointing(prepared, model, group, split)
        for argument, module in {"model": model, "reference": reference}.items():
            if module is not None:
                check_loaded_weights(module, type(module).__name__, where=argument)
        loader = _ModelLoader(prepared, split, group, data, neighbours, checkpointing)
        policy, stream = loader.policy(model)
        if model is not None:
            _check_same_weights(group, "model", policy)
        check_vocabulary(policy.causal, prepared.tokenizer)
        _check_lengths(policy.causal, prepared)
        if fills and recipe.train.router_aux_loss:
            check_router(policy)
        compiles = (
            fills
            and can_compile(recipe, split)
            and _should_compile(prepared, policy, compiled, group.size)
        )
        if compiles and split.single:
            compile_layers(policy)
        name = recipe.reference_model[1] if reference is None else None
        is_served = recipe.teacher.is_served
        is_copy = prepared.needs_reference and reference is None and name is None and not is_served
        # Copied before the policy's weights are split, or read.
        built = loader.reference(policy, None) if is_copy else None
        loader.share(policy, stream)
        if compiles and not split.single:  # around gathered weights
            compile_layers(policy)
        if isinstance(built, FrozenReference):
            loader.share(built.engine, stream)
            if policy.compiled and not split.single:
                compile_layers(built.engine)
        elif prepared.needs_reference and not is_copy:
            built = (
                loader.reference(policy, reference, among=group)
                if reference is not None
                else loader.named_reference(policy, name)
            )
        # The cache may free the reference's weights and load them again.
        can_reload = name or (is_copy and model is None and not recipe.trains_adapter)
        again = partial(loader.named_reference, policy, name) if can_reload else None
        if data.rank:
            # an adapter's dropout differs between processes
            torch.manual_seed(recipe.train.seed + data.rank)
        if built is None:
            return policy, None
        # the processes that run the reference together
        among = group if split.ways > 1 else neighbours
        return policy, _with_cache(built, recipe, fills, again, among.any)


@dataclass(frozen=True)
class _ModelLoader:
    """Load the models of a run.

    Where weights are split, each process only ever holds its part: the model is built without
    weights, the reference is copied from it, and then each is split and read. Models that cannot be
    read in parts are loaded in full first.
    """

    prepared: Prepared
    split: Split
    world: Group
    data: Group
    """The processes with other rows."""
    neighbours: Group
    """The processes with the same rows."""
    checkpointing: Checkpointing

    def policy(self, model: nn.Module | None) -> tuple[PolicyModel, DeferredWeights | None]:
        """The policy from this model, or from the one that the recipe names."""
        recipe, spec, stream = self.prepared.recipe, self.prepared.recipe.model, None
        torch.manual_seed(recipe.train.seed)
        if model is None:
            model, stream = self._model(None)
        scores = self.prepared.method.is_reward_model
        if is_reward_model(model) is not scores:
            problem = "is a reward model" if not scores else "has no head for scores"
            raise UserError(
                f"the model object {problem}",
                code="model-kind",
                where="model",
                fix=f"pass a {'reward' if scores else 'causal language'} model, which "
                f"{recipe.method} trains",
            )
        _check_quantized(model, spec)
        # The adapter's random weights must not depend on the numbers that loading has drawn.
        torch.manual_seed(recipe.train.seed)
        policy = build_policy(
            model.to(best_device()),
            dtype=DTYPES[spec.dtype],
            lora=spec.lora,
            adapter=spec.adapter,
            checkpointing=self.checkpointing,
            levels=recipe.loss.get("levels"),
            check=self._is_complete,
        )
        if stream:
            stream.move_to_meta(policy.causal)
        if self.prepared.method.online and recipe.loss.get("value"):
            if not self.split.single:
                raise UserError(
                    "the value head does not support weights split over processes",
                    code="value-head-unsupported",
                    where="parallel.shard",
                    fix="set parallel.shard: off and parallel.tensor: 1",
                )
            add_values(policy, trunk=recipe.value.trunk)
        return policy, stream

    def named_reference(self, policy: PolicyModel, name: str | None) -> Reference:
        """The reference from a folder, hub id or server; None: from where the policy was loaded."""
        teacher = self.prepared.recipe.teacher
        if teacher.is_served:
            return ServerTeacher(
                teacher.model, self.prepared.tokenizer, policy.vocabulary, log=warnings.warn
            )
        model, stream = self._model(name)
        return self.reference(policy, model, stream)

    def reference(
        self,
        policy: PolicyModel,
        model: nn.Module | None,
        stream: DeferredWeights | None = None,
        among: Group | None = None,
    ) -> Reference:
        """The reference from this model, or a copy of the policy, which is not split yet.

        among: processes that call this together and must hold the same weights.
        """
        recipe = self.prepared.recipe
        setting, name = recipe.reference_model
        if model is not None:
            if setting == "reference.model":
                _check_same_vocabulary(policy, model, name or "")
            _check_lengths(model, self.prepared, "the reference model")
            model.to(policy.device)
        built = build_reference(
            policy,
            fresh_adapter=recipe.model.lora is not None and starts_at_base(recipe.model.lora),
            model=model,
            name=name or "the model object",
            follows=recipe.reference.sync_every is not None,
            check=self._is_complete,
        )
        is_complete = model is None or self._is_complete
        # so that policy and reference agree to the last bit
        if policy.compiled and isinstance(built, FrozenReference) and is_complete:
            compile_layers(built.engine)
        if model is not None and isinstance(built, FrozenReference):
            if stream:
                stream.move_to_meta(built.engine.causal)
            elif among is not None:
                _check_same_weights(among, "reference", built.engine)
            self.share(built.engine, stream)
            if policy.compiled and not is_complete:
                compile_layers(built.engine)
        return built

    def share(self, engine: PolicyModel, stream: DeferredWeights | None) -> None:
        """Keep this process's part of the weights, and choose the layout."""
        if self._is_complete:
            return
        share(engine, stream, self.split, self.world, self.data, self.neighbours, best_device())
        trains = engine.training
        check_layout(engine.eval())
        engine.train(trains)

    @property
    def _is_complete(self) -> bool:
        """Whether each process has all weights, and all tokens of its rows."""
        return self.split.single and self.split.context == 1

    def _model(self, name: str | None) -> tuple[nn.Module, DeferredWeights | None]:
        recipe, spec = self.prepared.recipe, self.prepared.recipe.model
        options: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
        options["dtype"] = at_rest(recipe)
        file = spec.gguf_file if name is None else None
        if name is None and self.prepared.method.is_reward_model:
            options["attributes"] = spec.attributes or ONE
        setting = "model.name" if name is None else recipe.reference_model[0]
        name = name or spec.name
        # 4-bit weights are quantized from full ones
        if not self.split.single and not spec.quantize:
            try:
                return build_without_weights(
                    name, device=best_device(), gguf_file=file, setting=setting, **options
                )
            except CannotStreamError as reason:
                if self.world.rank == 0:
                    warnings.warn(
                        f"each process needs memory for all weights of {name}, because it cannot "
                        f"load only its part: {reason}",
                        stacklevel=2,
                    )
        model = load_model(
            name, gguf_file=file, quantize=spec.quantize is not None, setting=setting, **options
        )
        return model, None


def check_model_files(prepared: Prepared) -> None:
    """Raise UserError if a weight of the recipe's models is missing, not finite or an integer, or
    a row exceeds the positions of a model.

    Reads one weight at a time. Models in GGUF files and quantized models are only checked when they
    are loaded.
    """
    recipe, spec = prepared.recipe, prepared.recipe.model
    attributes = (spec.attributes or ONE) if prepared.method.is_reward_model else None
    models = {"model.name": spec.name} if spec.gguf_file is None else {}
    setting, name = recipe.reference_model
    if name is not None and prepared.needs_reference:
        models[setting] = name
    with prepared.source.placing():
        for setting, name in models.items():
            model = load_model(
                name,
                dtype=at_rest(recipe),
                attributes=attributes if setting == "model.name" else None,
                trust_remote_code=spec.trust_remote_code,
                device="meta",
                setting=setting,
            )
            _check_lengths(
                model, prepared, "the model" if setting == "model.name" else "the reference model"
            )
            if spec.adapter is not None and setting == "model.name":
                check_adapter(planned_adapter(model, spec.lora, spec.adapter), spec.adapter)
        if spec.adapter is not None and spec.gguf_file is not None:
            read_adapter_weights(spec.adapter)


def _check_quantized(model: nn.Module, spec: Model) -> None:
    """Raise UserError unless the model is 4-bit quantized exactly if the recipe says so."""
    if is_quantized(model) and not spec.quantize:
        raise UserError(
            "the model is already 4-bit quantized, but Valence must quantize it itself",
            code="model-quantized",
            where=f"model.name: {spec.name}",
            fix="set model.name to the unquantized model, and model.quantize: nf4",
        )
    if spec.quantize and not is_quantized(model):
        raise UserError(
            "the model object is not 4-bit quantized",
            code="model-quantized",
            where="model.quantize",
            fix="load it with 4-bit quantization, pass its name instead, or remove model.quantize",
        )


def _check_same_weights(group: Group, name: str, engine: PolicyModel) -> None:
    """Raise UserError if the processes hold different weights."""
    check_ranks_agree(
        group,
        lambda: {name: model_digest(engine, adapter=True)},
        "pass or load the same weights in all processes",
    )


def _shape(prepared: Prepared, model: nn.Module | None) -> Shape:
    return shape_of_run(prepared, skeleton_of_recipe(prepared) if model is None else model)


def _checkpointing(
    prepared: Prepared, model: nn.Module | None, group: Group, split: Split
) -> Checkpointing:
    """The checkpointing mode; `auto` is decided by the free memory before the model is loaded."""
    mode = prepared.recipe.train.checkpointing
    if mode != "auto":
        return mode
    device = best_device()
    free = min_free_memory(free_memory(device), device, group)
    return choose_checkpointing(prepared, _shape(prepared, model), device, split, free, group.size)


def _split(prepared: Prepared, model: nn.Module | None, group: Group, before: bool | None) -> Split:
    """How weights are split over the processes. before: the decision of an earlier start."""
    device = best_device()

    def fits() -> bool:
        free = min_free_memory(free_memory(device), device, group)
        return fits_on_one_device(prepared, _shape(prepared, model), device, free, group.size)

    return choose_split(prepared.recipe, group.size, device, before=before, fits=fits)


def _should_compile(
    prepared: Prepared, policy: PolicyModel, chosen: bool | None, processes: int
) -> bool:
    train = prepared.recipe.train
    # compiled layers return no router logits, and choose by themselves which results they store
    if train.router_aux_loss or train.checkpointing == "selective_op":
        return False
    device = best_device()  # the weights may not be loaded yet
    if chosen and (reason := why_not(device)):
        raise UserError(
            f"the layers of this run were compiled, and now {reason}",
            code="compile-changed",
            where="train.compile",
            fix="install what is missing, or continue without compiling: train.compile=off "
            "--allow train.compile",
        )
    weights = sum(p.numel() for p in policy.parameters())
    return pays_to_compile(prepared, weights, device, processes) if chosen is None else chosen


def default_cache(recipe: Recipe) -> Path:
    """The folder of the reference cache if the recipe names no other."""
    return Path(recipe.run.dir) / "reference"


def _with_cache(
    built: Reference,
    recipe: Recipe,
    fills: bool,
    again: Callable[[], Reference] | None,
    agree: Callable[[bool], bool],
) -> Reference:
    """Add the cache that the recipe asks for to the reference.

    again: loads the reference once more. agree: whether any process says yes.
    """
    cache = recipe.reference.cache
    is_synced = recipe.reference.sync_every is not None
    if cache == "off" or is_synced or not caches_reference(recipe):
        return built
    name = recipe.reference_model[1] or recipe.model.name
    about = f"{name} in {recipe.model.quantize or recipe.model.dtype}"
    if recipe.teacher.is_served:
        about = recipe.teacher.model
    if cache == "auto":
        return CachedReference(
            built, default_cache(recipe), about=about, fills=fills, reload=again, agree=agree
        )
    return CachedReference(built, Path(cache), about=about, reload=again, agree=agree)


def _check_lengths(model: nn.Module, prepared: Prepared, name: str = "the model") -> None:
    """Raise UserError, or warn, if rows exceed the positions of the model. name: for messages."""
    if not prepared.corpora:
        return
    limit = (position_limit(model) or (prepared.recipe.data.max_length,))[0]
    num_rows = num_longer = 0
    new_tokens = prepared.recipe.rollout.max_new_tokens if prepared.method.online else 0
    longest: list[tuple[int, Origin]] = []
    for corpus in prepared.corpora.values():
        units = corpus.units
        completions = np.where(units.columns["num_answers"] > 0, units.longest_answer, new_tokens)
        lengths = units.prompt_column("num_tokens") + completions
        num_rows += len(lengths)
        num_longer += int((lengths > limit).sum())
        longest.append((int(lengths.max()), units.origins[int(lengths.argmax())]))
        if prepared.method.needs_kl_pairs:
            # a prompt may be paired with the completion of any other row
            combined = int(units.prompt_column("num_tokens").max() + completions.max())
            check_positions(
                model,
                min(combined, prepared.recipe.data.max_length),
                "a prompt with the completion of another row, which KTO needs, may have",
                code="max-length-too-large",
                where="data.max_length",
                fix="set data.max_length: {limit}",
                warn=False,
                name=name,
            )
    length, origin = max(longest, key=lambda row: row[0])
    check_positions(
        model,
        length,
        f"{num_longer} of {num_rows} rows have too many tokens: this row has",
        code="row-too-long-for-model",
        where=str(origin),
        fix="set data.max_length: {limit}",
        name=name,
    )


def _check_same_vocabulary(policy: PolicyModel, reference: nn.Module, name: str) -> None:
    ours, theirs = vocabulary_size(policy.causal), vocabulary_size(reference)
    if ours != theirs:
        raise UserError(
            f"policy and reference have vocabularies of {ours} and {theirs} tokens: their "
            f"log-probabilities cannot be compared",
            code="vocabulary-mismatch",
            where=f"reference.model: {name}",
            fix="use a reference with the policy's tokenizer",
        )


def check_folders(prepared: Prepared, group: Group, *, model: bool, reference: bool) -> None:
    """Raise UserError on all processes if one would load other files than rank 0.

    model, reference: whether they are loaded from where the recipe says.
    """
    if group.size == 1:
        return
    recipe = prepared.recipe
    setting, other = recipe.reference_model
    names = {
        "model.name": recipe.model.name if model else None,
        "model.adapter": recipe.model.adapter,
        setting: other if reference else None,
    }
    facts: dict[str, Any] = {}
    for setting, name in names.items():
        for file, fact in fingerprint(name).items() if name else ():
            facts[f"{file} of {setting}"] = fact
    check_ranks_agree(
        group,
        lambda: facts,
        "let all processes read the same folders, for example on a shared disk",
    )


def share(
    engine: PolicyModel,
    stream: DeferredWeights | None,
    split: Split,
    world: Group,
    data: Group,
    neighbours: Group,
    device: torch.device,
) -> None:
    """Keep this process's part of a model's weights, read from the files if not loaded yet.

    data: the processes with other rows. neighbours: those with the same rows, which share each
    layer or the tokens.
    """
    if split.context > 1:
        context_parallel(engine, neighbours, world)
    else:
        tensor_parallel(engine.model, neighbours)
        engine.is_tensor_parallel = neighbours.size > 1
    if split.ways > 1:
        # processes that share tokens have the same weights
        among: Any = world if split.context > 1 else data
        shard(
            engine,
            decoder_layers(engine.causal),
            among,
            size=split.ways,
            compute=engine.compute,
            reshard=split.reshard,
            sum_every_backward=split.sync_every_micro_batch,
            offload=split.offload,
        )
    if stream:
        stream.load(
            engine.causal, device, shard_device=torch.device("cpu") if split.offload else None
        )
