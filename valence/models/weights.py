"""Check the weights of a model when they are loaded: none is missing, integer or not finite.

transformers completes a model whose files lack weights with random values, and only logs a table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.utils.hub import cached_file

from valence.errors import UserError
from valence.models.quantized import packed_weights
from valence.storage import read_json

FILES = {
    "model.safetensors": "model.safetensors.index.json",
    "pytorch_model.bin": "pytorch_model.bin.index.json",
}
"""The file with all weights, and the index of several files; transformers prefers safetensors."""
INTEGERS = ("bool", "i", "u")
"""Starts of the names of types that are not numbers with a fraction, in lower case."""
HEADS = ("lm_head.", "embed_out.", "output.")
"""Starts of the names of a language model's head, which a reward model does not use."""
SHOWN = 3
"""Number of names in a message."""
SAVE_AGAIN = "download or save the complete model again, or use another model"


def weight_files(name: str) -> list[Path]:
    """Return the files with the weights of a folder or hub id, downloaded if necessary; none if
    they have other names.
    """
    find: Callable[..., str | None] = cached_file
    for single, index in FILES.items():
        if file := find(name, single, _raise_exceptions_for_missing_entries=False):
            return [Path(file)]
        if listing := find(name, index, _raise_exceptions_for_missing_entries=False):
            weight_map = read_json(Path(listing))["weight_map"]
            return [Path(find(name, file) or file) for file in sorted(set(weight_map.values()))]
    return []


def check_complete(
    report: Mapping[str, Any],
    name: str,
    *,
    where: str,
    is_reward_model: bool = False,
    new: Collection[str] = (),
) -> None:
    """Raise UserError if the files of a model lack weights, or have them in another shape. Warn
    about weights that the model does not have.

    report: ``output_loading_info`` of transformers. is_reward_model: a language model's head is not
    used. new: names of weights that the files need not have.
    """
    if missing := set(report["missing_keys"]).difference(new):
        raise UserError(
            f"the files lack weights of the model: {_shown(missing)}",
            code="model-incomplete",
            where=f"{where}: {name}",
            fix=SAVE_AGAIN,
        )
    if mismatched := report["mismatched_keys"]:
        key, stored, shape = min(mismatched, key=lambda item: item[0])
        raise UserError(
            f"the weight {key} has the shape {list(stored)}, but the model needs {list(shape)}",
            code="weight-shape",
            where=f"{where}: {name}",
            fix=f"correct config.json, or {SAVE_AGAIN}",
        )
    warn_unexpected(report["unexpected_keys"], name, is_reward_model=is_reward_model)


def warn_unexpected(keys: Iterable[str], name: str, *, is_reward_model: bool = False) -> None:
    """Warn about weights in the files of a model that the model does not have."""
    unexpected = {key for key in keys if not (is_reward_model and key.startswith(HEADS))}
    if unexpected:
        warnings.warn(
            f"{name} has weights that the model does not use: {_shown(unexpected)}; check that "
            "config.json is the configuration of these weights",
            stacklevel=3,
        )


def check_stored_weights(
    files: Sequence[Path],
    model: nn.Module,
    name: str,
    *,
    where: str,
    dtype: torch.dtype | None = None,
    is_quantized: bool = False,
) -> None:
    """Raise UserError if a weight of an unquantized model is stored as integers, which loading
    would convert as if they were the values, or has different values in two files.

    Reads only the headers of safetensors files. With ``dtype``, the type that the weights are
    loaded in, also reads one at a time and raises UserError if it is not finite.
    """
    tensors, name_in_model = model.state_dict(keep_vars=True), naming(model)
    places: dict[str, Path] = {}
    for path in files:
        for key, type_name, read in _stored_tensors(path):
            target = tensors.get(name_in_model(key)[0])
            is_weight = isinstance(target, nn.Parameter)
            if target is None or not (is_weight or target.is_floating_point()):
                continue
            if not is_quantized:
                check_type(key, type_name, name, where=where)
            if key in places and not torch.equal(read(), _read_tensor(places[key], key)):
                raise UserError(
                    f"{places[key].name} and {path.name} have different values of the weight {key}",
                    code="weight-ambiguous",
                    where=f"{where}: {name}",
                    fix=SAVE_AGAIN,
                )
            places[key] = path
            if dtype is not None:
                values = {key: read()}.items()
                check_finite(values, name, where=where, dtype=dtype, is_buffer=not is_weight)


def check_loaded_weights(model: nn.Module, name: str, *, where: str) -> None:
    """Raise UserError if a weight in memory is not finite, or a buffer that is saved is NaN.

    4-bit weights, whose bytes may have the type of other numbers, are not checked.
    """
    packed = packed_weights(model)
    weights = (
        (key, weight) for key, weight in model.named_parameters() if id(weight) not in packed
    )
    check_finite(weights, name, where=where)
    saved = model.state_dict(keep_vars=True)
    buffers = ((key, buffer) for key, buffer in model.named_buffers() if key in saved)
    check_finite(buffers, name, where=where, is_buffer=True)


def check_type(key: str, type_name: str, name: str, *, where: str) -> None:
    """Raise UserError if the type of a stored weight is one of integers."""
    if type_name.lower().startswith(INTEGERS):
        raise UserError(
            f"the weight {key} is stored as integers ({type_name})",
            code="weights-integer",
            where=f"{where}: {name}",
            fix="use the unquantized model, with weights in float32, float16 or bfloat16",
        )


@torch.no_grad()
def check_finite(
    weights: Iterable[tuple[str, Tensor]],
    name: str,
    *,
    where: str,
    dtype: torch.dtype | None = None,
    is_buffer: bool = False,
) -> None:
    """Raise UserError if a weight contains NaN or infinity. Buffers may be infinite, such as masks.

    weights: names and values. dtype: the type that they are loaded in, which may have a smaller
    range. Reads each weight once, and makes no temporary tensor.
    """
    for key, weight in weights:
        if not weight.numel() or not weight.is_floating_point():
            continue
        if weight.element_size() == 1:  # float8 has no minimum
            weight = weight.float()
        extremes = torch.stack(weight.aminmax()).to(dtype or weight.dtype)
        if extremes.isnan().any() or not (is_buffer or extremes.isfinite().all()):
            raise UserError(
                f"the weight {key} contains NaN or infinity",
                code="weights-not-finite",
                where=f"{where}: {name}",
                fix=SAVE_AGAIN,
            )


def naming(model: Any) -> Callable[[str], tuple[str, bool]]:
    """Return a function of a key in a file: its name in the model by the conversion rules of
    transformers, and whether these rules also change the values, such as joining experts.
    """
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    tensors = model.state_dict(keep_vars=True)

    def name_in_model(key: str) -> tuple[str, bool]:
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, tensors
        )
        if name not in tensors and key in tensors:
            return key, False
        return name, pattern is not None

    return name_in_model


def _stored_tensors(path: Path) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """Yield the name of each tensor in a file, the name of its type, and a function that reads it,
    until the next one.
    """
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (the file is not a mapping)
                yield key, file.get_slice(key).get_dtype(), partial(file.get_tensor, key)
    else:
        for key, tensor in _load_pickled(path).items():
            yield key, str(tensor.dtype).removeprefix("torch."), partial(tensor.clone)


def _read_tensor(path: Path, key: str) -> Tensor:
    return next(read() for stored, _, read in _stored_tensors(path) if stored == key)


def _load_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pytorch_model.bin, which are read when they are used."""
    stored = load_state_dict(str(path))  # tensors only: runs no code
    return {key: value for key, value in stored.items() if isinstance(value, Tensor)}


def _shown(keys: Collection[str]) -> str:
    first = sorted(keys)[:SHOWN]
    more = len(keys) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
