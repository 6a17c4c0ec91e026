"""Models that are made without their weights, and weights that are read later: of each only the
part that a process keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file

from valence.models.build import quiet, read_config
from valence.models.loading import LOADING_ERRORS, cannot_load
from valence.models.scores import is_reward_model

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CannotStreamError(Exception):
    """The weights of a model can only be loaded whole, for the reason that the message and the code
    name.
    """

    def __init__(self, what: str, *, code: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, slots=True)
class WeightLocation:
    """Where a weight lies: a file, its name there, and the type that it is loaded in."""

    file: Path
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Stream:
    """The weights of a model that are still to be read, by their names in the model.

    Until then each has a stand-in: of its shape and type and on the model's device, but with the
    memory of one number.
    """

    places: Mapping[str, WeightLocation]

    def forget(self, model: nn.Module) -> None:
        """Moves the stand-ins to the meta device, from where they can be copied and split. model:
        as it was made, or with an adapter on it by now.
        """
        _replace(model, self.places, lambda _, weight: torch.empty_like(weight, device="meta"))

    def fill(
        self, model: nn.Module, device: torch.device, *, parts_on: torch.device | None = None
    ) -> None:
        """Reads the weights, of those that are split (as DTensor) this process's part alone.
        parts_on: where parts are kept, if elsewhere. Raises UserError when a file is damaged.
        """
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(_opened(path))
                for path in {place.file for place in self.places.values()}
            }

            def read(name: str, weight: Tensor) -> Tensor:
                place = self.places[name]
                split = hasattr(weight, "placements")
                made = torch.empty_like(weight, device=parts_on or device if split else device)
                own, rows = part_of(made)
                if own.numel():
                    found = (
                        files[place.file].get_slice(place.key)[rows]
                        if split
                        else files[place.file].get_tensor(place.key)
                    )
                    own.copy_(found if own.dtype == place.dtype else found.to(place.dtype))
                return made

            _replace(model, self.places, read)


def outline(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attributes: Sequence[str] | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Stream]:
    """The model that ``load_model`` makes (see there), with stand-ins for its weights.

    What is small is read at once: buffers and a head for scores.

    Raises CannotStreamError when the weights are no safetensors files, or not in the form that the
    model has them; UserError when there is no such model.
    """
    if gguf_file:
        raise CannotStreamError("they are in a GGUF file", code="weights-gguf")
    config = read_config(name, attributes=attributes, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise CannotStreamError("they are quantized", code="weights-quantized")
    files = _files(name)
    try:
        model = _empty(name, config, dtype, attributes is not None, trust_remote_code)
        places = _places(model, files)
        heads = {"score.weight"} if attributes is not None else set[str]()
        early = heads | {buffer for buffer, _ in model.named_buffers()}
        for each in sorted(places.keys() & early):
            place = places.pop(each)
            with _opened(place.file) as file:
                _put(model, each, file.get_tensor(place.key).to(place.dtype, copy=True))
    except LOADING_ERRORS as error:
        raise cannot_load("model", name, error) from error
    _replace(
        model,
        places,
        lambda _, weight: torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape),
    )
    if heads:
        head: Any = model.score
        if head.weight.is_meta:
            _put(model, "score.weight", torch.zeros_like(head.weight, device="cpu"))
    if left := [each for each, weight in model.named_parameters() if weight.is_meta]:
        raise CannotStreamError(
            f"some are missing in the files, such as {left[0]}", code="weights-missing"
        )
    return model.to(device), Stream(places)


def part_of(weight: Any) -> tuple[Tensor, tuple[slice, ...]]:
    """This process's part of a weight, and where that is in the whole.

    A weight that is no DTensor is its own part.

    Along the last axis of the mesh (tensor parallel) a weight is split first, and what comes of it
    along the one before.
    """
    spans = [range(size) for size in weight.shape]
    if not hasattr(weight, "placements"):
        return weight.detach(), tuple(slice(span.start, span.stop) for span in spans)
    mesh = weight.device_mesh
    for axis in reversed(range(mesh.ndim)):
        if not weight.placements[axis].is_replicate():
            span, rank = spans[weight.placements[axis].dim], mesh.get_local_rank(axis)
            most = -(-len(span) // mesh.size(axis))
            spans[weight.placements[axis].dim] = span[rank * most : (rank + 1) * most]
    own = weight.detach().to_local()
    assert list(own.shape) == [len(span) for span in spans]
    return own, tuple(slice(span.start, span.stop) for span in spans)


def _empty(
    name: str, config: Any, dtype: torch.dtype, scores: bool, trust_remote_code: bool
) -> Any:
    """The model with its weights on the meta device, and its buffers as they are computed."""
    from accelerate import init_empty_weights

    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False), quiet():
        model: Any = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    if scores and not is_reward_model(model):
        raise CannotStreamError("the model has no linear head", code="head-missing")
    if model._keep_in_fp32_modules_strict and dtype == torch.bfloat16:
        raise CannotStreamError("some have a fixed dtype", code="weights-mixed-types")
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(name)
        except OSError:  # it has none, and that made of its configuration stays
            model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval()


def _files(name: str) -> list[Path]:
    """The safetensors files of a folder or hub id, which are downloaded if need be."""
    find: Callable[..., str | None] = cached_file
    try:
        if one := find(name, ONE_FILE, _raise_exceptions_for_missing_entries=False):
            return [Path(one)]
        index = find(name, INDEX, _raise_exceptions_for_missing_entries=False)
        if index is None:
            raise CannotStreamError("they are not in safetensors files", code="not-safetensors")
        parts = sorted(
            set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
        )
        return [Path(find(name, part) or part) for part in parts]
    except LOADING_ERRORS as error:
        raise cannot_load("model", name, error) from error


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


def _places(model: Any, files: Sequence[Path]) -> dict[str, WeightLocation]:
    """Where each weight and buffer lies; of those that are tied, the same place under each name."""
    known = model.state_dict(keep_vars=True)
    changes = get_model_conversion_mapping(model)
    found: dict[str, WeightLocation] = {}
    for path in files:
        with _opened(path) as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                name = _name_in(model, key, known, changes)
                if name not in known:
                    continue  # such as the other head
                if name in found or file.get_slice(key).get_shape() != list(known[name].shape):
                    raise CannotStreamError(
                        f"{key} is not as the model has it", code="weight-shape"
                    )
                found[name] = WeightLocation(path, key, known[name].dtype)
    for names in _tied(known):
        stored = [name for name in names if name in found]
        if len(stored) > 1:
            what = f"{stored[0]} and {stored[1]} are tied, but stored separately"
            raise CannotStreamError(what, code="tied-weights-apart")
        found |= {name: found[stored[0]] for name in names if stored}
    return found


def _name_in(model: Any, key: str, known: Mapping[str, Tensor], changes: Sequence[Any]) -> str:
    """The name in the model of what a file calls so, by the rules of transformers.

    Raises CannotStreamError when more is changed than names.
    """
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    name, pattern = rename_source_key(
        key, renamings, converters, model.base_model_prefix, dict(known)
    )
    if name not in known and key in known:
        return key
    if pattern is not None:
        raise CannotStreamError(
            f"{key} is stored in another layout than in the model", code="weights-converted"
        )
    return name


def _tied(known: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of one and the same weight, where there are several."""
    names: dict[int, list[str]] = {}
    for name, weight in known.items():
        names.setdefault(id(weight), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _replace(
    model: nn.Module, names: Mapping[str, WeightLocation], made: Callable[[str, Tensor], Tensor]
) -> None:
    """Puts others in the place of these weights, for those that are tied one."""
    done: dict[Tensor, nn.Parameter] = {}
    for name, module, own, weight in _weights(model):
        if name in names:
            if weight not in done:
                done[weight] = nn.Parameter(made(name, weight), weight.requires_grad)
            setattr(module, own, done[weight])


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Name in the model without an adapter, module, name there, and weight; the tied ones under
    each of their names.
    """
    for path, module in list(model.named_modules()):
        for own, weight in list(module.named_parameters(recurse=False)):
            name = f"{path}.{own}" if path else own
            yield name.replace(".base_layer.", "."), module, own, weight


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Sets a weight or a buffer."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    buffer = own in dict(module.named_buffers(recurse=False))
    setattr(module, own, value if buffer else nn.Parameter(value))
