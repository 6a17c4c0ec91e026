"""Build models without their weights and load the weights later, so that each process reads only
its shard of each weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from valence.errors import UserError
from valence.models.build import read_config, silence_transformers
from valence.models.loading import loading, read_generation_config
from valence.models.scores import has_score_head, is_reward_model
from valence.models.weights import (
    check_finite,
    check_stored_weights,
    naming,
    warn_unexpected,
    weight_files,
)


class CannotStreamError(UserError):
    """The weights of a model cannot be loaded in shards; the message is the reason, a clause."""


@dataclass(frozen=True, slots=True)
class WeightLocation:
    """Where a weight is stored: a file, its key in the file, and the dtype that it is loaded in."""

    file: Path
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class DeferredWeights:
    """The locations of weights that are not loaded yet, by their names in the model.

    Until they are loaded, the model has placeholders with the shape, dtype and device of each
    weight, which need the memory of one number.
    """

    locations: Mapping[str, WeightLocation]
    setting: str = "model.name"
    """The setting that names the model, for messages."""

    def move_to_meta(self, model: nn.Module) -> None:
        """Move the placeholders to the meta device, where they can be copied and split.

        model: with or without an adapter.
        """
        _replace(model, self.locations, lambda _, weight: torch.empty_like(weight, device="meta"))

    def load(
        self, model: nn.Module, device: torch.device, *, shard_device: torch.device | None = None
    ) -> None:
        """Load the weights; of a DTensor only the shard of this process.

        shard_device: the device of the shards, if it is not ``device``. Raises UserError when a
        file is damaged.
        """
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(_open(path))
                for path in {location.file for location in self.locations.values()}
            }

            def read(name: str, placeholder: Tensor) -> Tensor:
                location = self.locations[name]
                is_split = hasattr(placeholder, "placements")
                weight = torch.empty_like(
                    placeholder, device=shard_device or device if is_split else device
                )
                local, slices = local_shard(weight)
                if local.numel():
                    values = (
                        files[location.file].get_slice(location.key)[slices]
                        if is_split
                        else files[location.file].get_tensor(location.key)
                    )
                    needs_cast = local.dtype != location.dtype
                    local.copy_(values.to(location.dtype) if needs_cast else values)
                    check_finite([(name, local)], str(location.file), where=self.setting)
                return weight

            _replace(model, self.locations, read)


def build_without_weights(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attributes: Sequence[str] | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    setting: str = "model.name",
) -> tuple[nn.Module, DeferredWeights]:
    """Build the model that ``load_model`` returns, with placeholders for its weights.

    Buffers and a head for scores are small, and are loaded at once.

    Raises CannotStreamError when the weights are not in safetensors files, or their names or shapes
    differ from the model's. Raises UserError when the model does not exist.
    """
    if gguf_file:
        raise CannotStreamError("the weights are stored in a GGUF file", code="weights-gguf")
    config = read_config(name, attributes=attributes, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise CannotStreamError("the weights are quantized", code="weights-quantized")
    files = _files(name)
    with loading("model", name):
        model = _empty(name, config, dtype, attributes is not None, trust_remote_code)
        locations, unexpected = _locations(model, files)
        heads = {"score.weight"} if attributes is not None else set[str]()
        immediate = heads | {buffer for buffer, _ in model.named_buffers()}
        for tensor in sorted(locations.keys() & immediate):
            location = locations.pop(tensor)
            with _open(location.file) as file:
                value = file.get_tensor(location.key).to(location.dtype, copy=True)
                _set_tensor(model, tensor, value)
                check_finite([(tensor, value)], name, where=setting, is_buffer=tensor not in heads)
    check_stored_weights(files, model, name, where=setting)
    warn_unexpected(unexpected, name, is_reward_model=attributes is not None)
    _replace(
        model,
        locations,
        lambda _, weight: torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape),
    )
    if heads:
        head: Any = model.score
        if head.weight.is_meta and not has_score_head(config):
            _set_tensor(model, "score.weight", torch.zeros_like(head.weight, device="cpu"))
    if missing := [weight for weight, p in model.named_parameters() if p.is_meta]:
        raise CannotStreamError(
            f"the files lack weights, such as {missing[0]}", code="weights-missing"
        )
    return model.to(device), DeferredWeights(locations, setting)


def local_shard(weight: Any) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the local shard of a weight, and its slices in the full weight.

    The shard of a weight that is not a DTensor is the full weight.

    A weight is split along the last axis of the mesh first (tensor parallel), and the resulting
    shards along the axis before.
    """
    spans = [range(size) for size in weight.shape]
    if not hasattr(weight, "placements"):
        return weight.detach(), tuple(slice(span.start, span.stop) for span in spans)
    mesh = weight.device_mesh
    for axis in reversed(range(mesh.ndim)):
        if not weight.placements[axis].is_replicate():
            span, rank = spans[weight.placements[axis].dim], mesh.get_local_rank(axis)
            size = -(-len(span) // mesh.size(axis))  # of all shards but the last ones
            spans[weight.placements[axis].dim] = span[rank * size : (rank + 1) * size]
    local = weight.detach().to_local()
    assert list(local.shape) == [len(span) for span in spans]
    return local, tuple(slice(span.start, span.stop) for span in spans)


def _empty(
    name: str, config: Any, dtype: torch.dtype, scores: bool, trust_remote_code: bool
) -> Any:
    """Build the model with its weights on the meta device and with computed buffers."""
    from accelerate import init_empty_weights

    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False), silence_transformers():
        model: Any = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    if scores and not is_reward_model(model):
        raise CannotStreamError("the model has no linear head for scores", code="head-missing")
    if model._keep_in_fp32_modules_strict and dtype == torch.bfloat16:
        raise CannotStreamError("some weights need float32", code="weights-mixed-types")
    if model.can_generate():
        # without a file, it is derived from the configuration
        model.generation_config = read_generation_config(
            name
        ) or GenerationConfig.from_model_config(config)
    return model.eval()


def _files(name: str) -> list[Path]:
    """Return the safetensors files of a folder or hub id, downloaded if necessary."""
    with loading("model", name):
        files = weight_files(name)
    if not files or files[0].suffix != ".safetensors":
        raise CannotStreamError("the weights are not in safetensors files", code="not-safetensors")
    return files


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")


def _locations(model: Any, files: Sequence[Path]) -> tuple[dict[str, WeightLocation], list[str]]:
    """Return the location of each weight and buffer, and the keys that the model does not have. The
    names of a tied weight have the same location.
    """
    ignored = [r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())]
    unexpected: list[str] = []
    tensors = model.state_dict(keep_vars=True)
    name_in_model = naming(model)
    locations: dict[str, WeightLocation] = {}
    for path in files:
        with _open(path) as file:
            for key in file.keys():  # noqa: SIM118 (the file is not a mapping)
                name, is_converted = name_in_model(key)
                if is_converted:
                    raise CannotStreamError(
                        f"transformers converts the values of {key}", code="weights-converted"
                    )
                if name not in tensors:
                    if not any(re.search(pattern, key) for pattern in ignored):
                        unexpected.append(key)
                    continue
                shape = list(tensors[name].shape)
                if name in locations or file.get_slice(key).get_shape() != shape:
                    raise CannotStreamError(
                        f"{key} has another shape in the model, or is stored twice",
                        code="weight-shape",
                    )
                locations[name] = WeightLocation(path, key, tensors[name].dtype)
    for names in _tied(tensors):
        stored = [name for name in names if name in locations]
        if len(stored) > 1:
            raise CannotStreamError(
                f"{stored[0]} and {stored[1]} are tied, but are stored separately",
                code="tied-weights-apart",
            )
        locations |= {name: locations[stored[0]] for name in names if stored}
    return locations, unexpected


def _tied(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, weight in tensors.items():
        names.setdefault(id(weight), []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def _replace(
    model: nn.Module,
    names: Mapping[str, WeightLocation],
    replacement: Callable[[str, Tensor], Tensor],
) -> None:
    """Replace these weights. Tied weights get the same replacement."""
    replaced: dict[Tensor, nn.Parameter] = {}
    for name, module, attribute, weight in _weights(model):
        if name in names:
            if weight not in replaced:
                replaced[weight] = nn.Parameter(replacement(name, weight), weight.requires_grad)
            setattr(module, attribute, replaced[weight])


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield for each weight its name in the model without an adapter, its module, its attribute in
    the module, and the weight. A tied weight appears under all of its names.
    """
    for path, module in list(model.named_modules()):
        for attribute, weight in list(module.named_parameters(recurse=False)):
            name = f"{path}.{attribute}" if path else attribute
            yield name.replace(".base_layer.", "."), module, attribute, weight


def _set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a weight or a buffer."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    is_buffer = attribute in dict(module.named_buffers(recurse=False))
    setattr(module, attribute, value if is_buffer else nn.Parameter(value))
