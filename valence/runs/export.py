"""A trained policy as a folder that transformers loads and vLLM serves."""

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

from valence.distributed.protocol import Group
from valence.errors import UserError
from valence.runs.store import agreed, apart, is_sharded, place_aside, written_aside

LARGEST = 5 * 10**9
"""Bytes of a file of weights."""
Merge = Callable[[nn.Module, Mapping[str, Tensor]], nn.Module]
SaveAdapter = Callable[[Any, Path, Mapping[str, Tensor] | None], None]


def _save_adapter(model: Any, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    model.save_pretrained(folder, state_dict=weights)


def export(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    what: Literal["auto", "merged", "adapter"],
    card: str,
    ends: Collection[int] = (),
    config: Mapping[str, Any] | None = None,
    group: Group | None = None,
    largest: int = LARGEST,
    merge: Merge | None = None,
    save_adapter: SaveAdapter = _save_adapter,
) -> Path:
    """Writes weights (safetensors), tokenizer with its chat template, generation settings and card
    (README.md).

    what: the adapter merged into a copy of the weights (also auto), or the adapter alone. Without
    an adapter: all weights.
    ends: tokens at which an answer ends, besides those at which the model stopped before.
    config: entries of config.json besides the model's own.
    group: the processes over which weights are sharded, all of which call this; rank 0 gets them
    one after another, and writes them. It holds ``largest`` bytes (of a file) of them at once; all,
    where transformers saves them in other pieces than it trains. merge: makes the merged model of
    the model and its adapter's weights, where its own weights are too coarse to merge into; rank 0
    then holds a whole model on the host. save_adapter: writes an adapter's files; its last argument
    are all tensors of the model, where the model itself does not hold them whole. Raises UserError
    in all processes when it cannot be written.
    """
    leads = group is None or group.rank == 0
    adapter = hasattr(model, "peft_config") and what == "adapter"
    with ExitStack() as opened:
        with agreed(group):
            folder = opened.enter_context(written_aside(target)) if leads else place_aside(target)
        if merge is not None and hasattr(model, "peft_config") and not adapter:
            _write_made(model, folder, group, config or {}, merge, largest)
        elif any(is_sharded(p) for p in model.parameters()):
            if adapter:
                _write_adapter(model, folder, group, save_adapter)
            else:
                _write_gathered(model, folder, group, config or {}, largest)
        elif leads:
            if adapter:
                save_adapter(model, folder, None)
            else:
                _write_whole(model, folder, config or {})
        with agreed(group):
            if leads:
                tokenizer.save_pretrained(folder)
                _remove_absolute_paths(folder)
                _stop_at(ends, folder)
                (folder / "README.md").write_text(card, encoding="utf-8")
            opened.close()
    return target


def portable_name(name: str) -> str:
    """The name of a model for others: a hub id or relative path as it is, of an absolute path the
    last part alone.
    """
    return Path(name).name or name if name.startswith(("/", "~")) else name


PATHS_IN = {
    "adapter_config.json": "base_model_name_or_path",
    "config.json": "_name_or_path",
    "tokenizer_config.json": "name_or_path",
}
"""Where transformers and peft write down what a model was loaded from."""


def _remove_absolute_paths(folder: Path) -> None:
    """Local folders would tell others of this machine, and lead nowhere on theirs."""
    for file, key in PATHS_IN.items():
        path = folder / file
        if not path.exists():
            continue
        settings = json.loads(path.read_text(encoding="utf-8"))
        name = settings.get(key)
        if isinstance(name, str) and portable_name(name) != name:
            settings[key] = portable_name(name)
            path.write_text(
                json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )


def _stop_at(ends: Collection[int], folder: Path) -> None:
    """Names tokens among those at which ``generate`` and servers stop: a base model would go on
    behind the turns that it has learned. Nothing to do for an adapter or a reward model.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return
    settings = json.loads(path.read_text(encoding="utf-8"))
    known = settings.get("eos_token_id")
    before = known if isinstance(known, list) else [] if known is None else [known]
    if missing := sorted(set(ends) - set(before)):
        named = [*before, *missing]
        settings["eos_token_id"] = named if len(named) > 1 else named[0]
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_whole(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model all of whose weights are in this process, with its adapter merged."""
    whole: Any = model
    if hasattr(model, "peft_config"):
        whole = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    whole.config.update(config)
    whole.save_pretrained(folder)


@torch.no_grad()
def _write_gathered(
    model: Any,
    folder: Path,
    group: Group | None,
    config: Mapping[str, Any],
    largest: int,
) -> None:
    """Write a model whose weights are sharded, with its adapter merged."""
    leads = group is None or group.rank == 0
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    base.config.update(config)
    pieces, shapes = _pieces(base)
    names = _names_on_disk(base, shapes)
    files, found = _Files(folder, largest), dict[str, Tensor]()
    with agreed(group):
        if leads and names is not None:
            base.save_pretrained(folder, state_dict={})
    for name, piece in pieces.items():
        weights = (
            {name: _gathered(piece, leads)}
            if isinstance(piece, Tensor)
            else _merged(name, piece, leads)
        )
        with agreed(group):
            if leads and names is not None:
                files.add({names[name]: weight for name, weight in weights.items()})
            elif leads:
                found |= weights
    with agreed(group):
        if leads and names is not None:
            files.close()
        elif leads:
            base.save_pretrained(folder, state_dict=found, max_shard_size=largest)


def _write_adapter(
    model: Any, folder: Path, group: Group | None, save_adapter: SaveAdapter
) -> None:
    """Write the adapter of a model whose weights are sharded."""
    leads = group is None or group.rank == 0
    values = _with_whole_adapter(model, leads)
    with agreed(group):
        if leads:
            save_adapter(model, folder, values)


@torch.no_grad()
def _write_made(
    model: Any,
    folder: Path,
    group: Group | None,
    config: Mapping[str, Any],
    merge: Merge,
    largest: int,
) -> None:
    """What is made of the adapter by others."""
    from peft import get_peft_model_state_dict

    leads = group is None or group.rank == 0
    values = _with_whole_adapter(model, leads)
    with agreed(group):
        if leads:
            made: Any = merge(model, get_peft_model_state_dict(model, state_dict=values))
            made.config.update(config)
            made.save_pretrained(folder, max_shard_size=largest)


def _with_whole_adapter(model: Any, keep: bool) -> dict[str, Tensor]:
    """All tensors of a model, those of its adapter whole and on the host."""
    from peft import get_peft_model_state_dict

    values = model.state_dict(keep_vars=True)
    own = {id(value) for value in get_peft_model_state_dict(model, state_dict=values).values()}
    return {
        name: _gathered(value, keep) if id(value) in own else value
        for name, value in values.items()
    }


def _gathered(tensor: Any, keep: bool) -> Tensor:
    """The whole of a tensor on the host, for which all processes come together if it is sharded;
    nothing of it without keep.
    """
    found = (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()
    return found.cpu().contiguous() if keep else found.new_empty(0)


def _merged(name: str, layer: Any, keep: bool) -> dict[str, Tensor]:
    """The weights, by their names in the model, of a layer with an adapter merged into it; none
    without keep.
    """
    gathered = {
        id(p): nn.Parameter(_gathered(p, keep), requires_grad=False) for p in layer.parameters()
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
    """What is gathered at once, by name: a tensor, or a layer with an adapter, in the order of the
    model; weights that are tied are there once. And all tensors that come of it, without memory
    behind them.
    """
    layers = {
        n: m
        for n, m in base.named_modules()
        if (n and hasattr(m, "unload_and_optionally_merge_module")) or _adapted(m)
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


def _adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merge")


def _owner(key: str, layers: Mapping[str, Any]) -> str | None:
    """The outermost of the layers that a tensor of the model is in."""
    parts = key.split(".")
    heads = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((head for head in heads if head in layers), None)


def _tied(base: Any, layers: Mapping[str, Any]) -> set[str]:
    """Names of tensors that are there under another name, which transformers ties to it when it
    loads the model.
    """
    names: dict[int, list[str]] = {}
    for key, value in base.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(key)
    found: set[str] = set()
    for same in names.values():
        if len(same) > 1 and any(_owner(key, layers) for key in same):
            what = f"the adapter is on weights that are tied ({', '.join(same)})"
            raise UserError(
                what,
                code="adapter-tied-weights",
                where="run.export",
                fix="export the adapter alone, or with parallel.shard: off",
            )
        extra = [key for key in same if key in base.all_tied_weights_keys]
        found |= set(extra if len(extra) < len(same) else extra[1:])
    return found


def _names_on_disk(base: Any, shapes: dict[str, Tensor]) -> dict[str, str] | None:
    """What transformers calls each weight in a file; None where it also cuts or joins weights to
    save them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = {
        id(tensor): name for name, tensor in revert_weight_conversion(base, dict(shapes)).items()
    }
    found = {name: names.get(id(tensor)) for name, tensor in shapes.items()}
    known = {name: there for name, there in found.items() if there is not None}
    return known if len(known) == len(names) == len(shapes) else None


class _Files:
    """Weights in files of at most so many bytes, named as transformers names them."""

    def __init__(self, folder: Path, largest: int) -> None:
        self.folder, self.largest = folder, largest
        self._open: dict[str, Tensor] = {}
        self._size = 0
        self._written: list[list[str]] = []
        self._total = 0

    def add(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            if self._open and self._size + weight.nbytes > self.largest:
                self._write()
            self._open[name] = weight
            self._size += weight.nbytes

    def close(self) -> None:
        """Gives the files their names, which say how many there are, and adds the index where they
        are several.
        """
        self._write()
        count = len(self._written)
        called = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )
        for i, name in enumerate(called):
            self._path(i).rename(self.folder / name)
        if count > 1:
            where = {
                weight: called[i] for i, weights in enumerate(self._written) for weight in weights
            }
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": dict(sorted(where.items())),
            }
            (self.folder / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2) + "\n", encoding="utf-8"
            )

    def _path(self, i: int) -> Path:
        return self.folder / f"part-{i}.safetensors"

    def _write(self) -> None:
        save_file(apart(self._open), self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._open))
        self._total += self._size
        self._open, self._size = {}, 0
