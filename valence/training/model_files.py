"""Write the policy as a model folder that transformers and vLLM load, with its model card."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
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
from valence.reports.run_record import RunRecord
from valence.reports.verdict import run_verdict
from valence.storage import atomic_folder, part_path, read_json, rename
from valence.training.folder import versions
from valence.training.prepare import Prepared
from valence.training.state import TrainState
from valence.training.state_files import agreed, is_sharded, without_shared_memory

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
            feedback_test=self.facts.get("feedback_test", {}),
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
        return run_verdict(RunRecord.read(self.log.parent, until=self.state.step)).text

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


MAX_FILE_BYTES = 5 * 10**9
"""Maximum size of a file of weights."""
Merge = Callable[[nn.Module, Mapping[str, Tensor]], nn.Module]
SaveAdapter = Callable[[Any, Path, Mapping[str, Tensor] | None], None]


def _save_adapter(model: Any, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    model.save_pretrained(folder, state_dict=weights)


def export(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    kind: Literal["auto", "merged", "adapter"],
    card: str,
    ends: Collection[int] = (),
    config: Mapping[str, Any] | None = None,
    group: Group | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    merge: Merge | None = None,
    save_adapter: SaveAdapter = _save_adapter,
) -> Path:
    """Write weights (safetensors), tokenizer with chat template, generation settings and card.

    kind: ``merged`` (also ``auto``) merges the adapter into a copy of the weights; ``adapter``
    writes it alone. Without an adapter, all weights are written.
    ends: additional stop tokens.
    config: additional entries of config.json.
    group: the processes over which weights are sharded; all of them call this. Rank 0 gathers and
    writes one piece after another and keeps at most ``max_file_bytes``, or all weights if
    transformers saves them in other pieces than it trains.
    merge: builds the merged model from the model and its adapter's weights, for quantized models;
    rank 0 then has a full model in CPU memory.
    save_adapter: writes the files of an adapter; its last argument has all tensors of the model
    if the model itself does not.

    Raises UserError in all processes if the folder cannot be written.
    """
    leads = group is None or group.rank == 0
    adapter = hasattr(model, "peft_config") and kind == "adapter"
    with ExitStack() as opened:
        with agreed(group):
            folder = opened.enter_context(atomic_folder(target)) if leads else part_path(target)
        if merge is not None and hasattr(model, "peft_config") and not adapter:
            _write_merged(model, folder, group, config or {}, merge, max_file_bytes)
        elif any(is_sharded(p) for p in model.parameters()):
            if adapter:
                _write_adapter(model, folder, group, save_adapter)
            else:
                _write_gathered(model, folder, group, config or {}, max_file_bytes)
        elif leads:
            if adapter:
                save_adapter(model, folder, None)
            else:
                _write_local(model, folder, config or {})
        with agreed(group):
            if leads:
                tokenizer.save_pretrained(folder)
                _set_paths(folder)
                _add_stop_tokens(ends, folder)
                (folder / "README.md").write_text(card, encoding="utf-8")
            opened.close()
    return target


def portable_name(name: str) -> str:
    """A model's name for publication: the last part of an absolute path, else the name itself."""
    return Path(name).name or name if name.startswith(("/", "~")) else name


PATHS_IN = {
    "adapter_config.json": "base_model_name_or_path",
    "config.json": "_name_or_path",
    "tokenizer_config.json": "name_or_path",
}
"""Where transformers and peft record the path that a model was loaded from."""


ADAPTER_CONFIG = "adapter_config.json"


def portable_settings(folder: Path) -> dict[str, str]:
    """The files of a folder that name absolute paths, by name, with the last part of each path.

    Absolute paths reveal details of this machine, and do not exist elsewhere.
    """
    return _renamed(folder, portable_name, PATHS_IN)


def _set_paths(folder: Path) -> None:
    """Remove absolute paths, except that of an adapter's base model, which loading needs."""
    texts = _renamed(folder, portable_name, [file for file in PATHS_IN if file != ADAPTER_CONFIG])
    texts |= _renamed(folder, _findable_name, [ADAPTER_CONFIG])
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


def _findable_name(name: str) -> str:
    """A model's name that is valid in every working directory of this machine."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.is_dir() else name


def _renamed(folder: Path, rename: Callable[[str], str], files: Collection[str]) -> dict[str, str]:
    """The new texts of those files in which ``rename`` changes the name of a model."""
    texts: dict[str, str] = {}
    for file in files:
        path, key = folder / file, PATHS_IN[file]
        if not path.exists():
            continue
        settings = read_json(path)
        name = settings.get(key)
        if isinstance(name, str) and rename(name) != name:
            settings[key] = rename(name)
            texts[file] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return texts


def _add_stop_tokens(ends: Collection[int], folder: Path) -> None:
    """Add stop tokens for ``generate`` and servers, so that a base model stops after its turn.

    Adapters and reward models have no generation settings.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return
    settings = read_json(path)
    known = settings.get("eos_token_id")
    before = known if isinstance(known, list) else [] if known is None else [known]
    if missing := sorted(set(ends) - set(before)):
        stop_ids = [*before, *missing]
        settings["eos_token_id"] = stop_ids if len(stop_ids) > 1 else stop_ids[0]
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_local(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model that is not sharded, with its adapter merged."""
    saved: Any = model
    if hasattr(model, "peft_config"):
        saved = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    saved.config.update(config)
    saved.save_pretrained(folder)


@torch.no_grad()
def _write_gathered(
    model: Any,
    folder: Path,
    group: Group | None,
    config: Mapping[str, Any],
    max_file_bytes: int,
) -> None:
    """Write a sharded model, with its adapter merged."""
    leads = group is None or group.rank == 0
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    base.config.update(config)
    pieces, shapes = _pieces(base)
    names = _names_on_disk(base, shapes)
    files, gathered = _WeightFiles(folder, max_file_bytes), dict[str, Tensor]()
    with agreed(group):
        if leads and names is not None:
            base.save_pretrained(folder, state_dict={})
    for name, piece in pieces.items():
        weights = (
            {name: _gather(piece, leads)}
            if isinstance(piece, Tensor)
            else _merge_layer(name, piece, leads)
        )
        with agreed(group):
            if leads and names is not None:
                files.add({names[name]: weight for name, weight in weights.items()})
            elif leads:
                gathered |= weights
    with agreed(group):
        if leads and names is not None:
            files.close()
        elif leads:
            base.save_pretrained(folder, state_dict=gathered, max_shard_size=max_file_bytes)


def _write_adapter(
    model: Any, folder: Path, group: Group | None, save_adapter: SaveAdapter
) -> None:
    """Write the adapter of a sharded model."""
    leads = group is None or group.rank == 0
    values = gather_adapter(model, leads)
    with agreed(group):
        if leads:
            save_adapter(model, folder, values)


@torch.no_grad()
def _write_merged(
    model: Any,
    folder: Path,
    group: Group | None,
    config: Mapping[str, Any],
    merge: Merge,
    max_file_bytes: int,
) -> None:
    """Write the model that ``merge`` builds from the adapter."""
    from peft import get_peft_model_state_dict

    leads = group is None or group.rank == 0
    values = gather_adapter(model, leads)
    with agreed(group):
        if leads:
            merged: Any = merge(model, get_peft_model_state_dict(model, state_dict=values))
            merged.config.update(config)
            merged.save_pretrained(folder, max_shard_size=max_file_bytes)


def gather_adapter(model: Any, keep: bool) -> dict[str, Tensor]:
    """All tensors of a model, with those of its adapter gathered on the CPU.

    All processes call it. keep: as for ``_gather``.
    """
    from peft import get_peft_model_state_dict

    values = model.state_dict(keep_vars=True)
    adapter = {id(value) for value in get_peft_model_state_dict(model, state_dict=values).values()}
    return {
        name: _gather(value, keep) if id(value) in adapter else value
        for name, value in values.items()
    }


def _gather(tensor: Any, keep: bool) -> Tensor:
    """The full tensor on the CPU, gathered by all processes if sharded; empty without keep."""
    full = (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()
    return full.cpu().contiguous() if keep else full.new_empty(0)


def _merge_layer(name: str, layer: Any, keep: bool) -> dict[str, Tensor]:
    """The weights of a layer with its adapter merged, by name; empty without keep."""
    gathered = {
        id(p): nn.Parameter(_gather(p, keep), requires_grad=False) for p in layer.parameters()
    }
    if not keep:
        return {}
    twin = copy.deepcopy(layer, gathered)
    if hasattr(twin, "unload_and_optionally_merge_module"):
        plain = twin.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    else:
        twin.merge()
        plain = twin.get_base_layer()
    return {f"{name}.{key}": value for key, value in plain.state_dict().items()}


def _pieces(base: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The units to gather by name, in model order: a tensor, or a layer with an adapter.

    Tied weights appear once. Also returns the resulting tensors on the meta device.
    """
    layers = {
        n: m
        for n, m in base.named_modules()
        if (n and hasattr(m, "unload_and_optionally_merge_module")) or _has_adapter(m)
    }
    pieces, shapes = dict[str, Any](), dict[str, Tensor]()
    tied = _tied(base, layers)
    for key, value in base.state_dict(keep_vars=True).items():
        owner = _owner(key, layers)
        if owner is not None:
            pieces[owner] = layers[owner]
            kind, *rest = key.removeprefix(f"{owner}.").split(".")
            if kind not in ("base_layer", "original_module"):
                continue
            key = ".".join([owner, *(part for part in rest if part != "base_layer")])
        elif key in tied or key in (base._keys_to_ignore_on_save or ()):
            continue
        else:
            pieces[key] = value
        shapes[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return pieces, shapes


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merge")


def _owner(key: str, layers: Mapping[str, Any]) -> str | None:
    """The outermost of these layers that contains a tensor."""
    parts = key.split(".")
    heads = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((head for head in heads if head in layers), None)


def _tied(base: Any, layers: Mapping[str, Any]) -> set[str]:
    """Names of tied tensors that transformers restores from another name when loading."""
    names: dict[int, list[str]] = {}
    for key, value in base.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(key)
    tied: set[str] = set()
    for keys in names.values():
        if len(keys) > 1 and any(_owner(key, layers) for key in keys):
            raise UserError(
                f"the adapter changes weights that are tied ({', '.join(keys)})",
                code="adapter-tied-weights",
                where="run.export",
                fix="set run.export: adapter (valence export: --adapter), or use "
                "parallel.shard: off",
            )
        extra = [key for key in keys if key in base.all_tied_weights_keys]
        tied |= set(extra if len(extra) < len(keys) else extra[1:])
    return tied


def _names_on_disk(base: Any, shapes: dict[str, Tensor]) -> dict[str, str] | None:
    """The name of each weight in the files of transformers.

    None if transformers also splits or joins weights to save them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = {
        id(tensor): name for name, tensor in revert_weight_conversion(base, dict(shapes)).items()
    }
    renamed = {name: names[id(tensor)] for name, tensor in shapes.items() if id(tensor) in names}
    return renamed if len(renamed) == len(names) == len(shapes) else None


class _WeightFiles:
    """Weights in files of at most ``max_bytes``, named as transformers names them."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._open: dict[str, Tensor] = {}
        self._size = 0
        self._weight_names: list[list[str]] = []
        self._total = 0

    def add(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            if self._open and self._size + weight.nbytes > self.max_bytes:
                self._write()
            self._open[name] = weight
            self._size += weight.nbytes

    def close(self) -> None:
        """Rename the files to include their number, and add the index if there are several."""
        self._write()
        count = len(self._weight_names)
        file_names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )
        for i, name in enumerate(file_names):
            rename(self._path(i), [self.folder / name])
        if count > 1:
            weight_map = {
                weight: file_names[i]
                for i, weights in enumerate(self._weight_names)
                for weight in weights
            }
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (self.folder / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2) + "\n", encoding="utf-8"
            )

    def _path(self, i: int) -> Path:
        return self.folder / f"part-{i}.safetensors"

    def _write(self) -> None:
        weights = without_shared_memory(self._open)
        save_file(weights, self._path(len(self._weight_names)), metadata={"format": "pt"})
        self._weight_names.append(list(self._open))
        self._total += self._size
        self._open, self._size = {}, 0
