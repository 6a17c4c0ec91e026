"""Export a trained policy as a folder that transformers loads and vLLM serves."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from valence.distributed.process_group import Group
from valence.errors import UserError
from valence.runs.store import agreed, is_sharded, without_shared_memory
from valence.storage import atomic_folder, part_path, read_json, rename

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
