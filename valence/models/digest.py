"""A name for a model: the same for the same computation, another for other weights or settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from valence.models.quantized import states

if TYPE_CHECKING:
    from valence.models.policy_model import PolicyModel

OF_A_COPY = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "architectures",
    "use_cache",
}
OF_AN_ADAPTER_COPY = {
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "inference_mode",
    "auto_mapping",
}
"""Settings that differ between copies of one model, and change no value."""


class Digests(NamedTuple):
    """Of a model as it is computed with, and of its weights alone, wherever and however that is."""

    model: str
    weights: str


def model_digest(engine: PolicyModel, *, adapter: bool) -> str:
    """See ``digests``."""
    return digests(engine, adapter=adapter).model


def digests(engine: PolicyModel, *, adapter: bool) -> Digests:
    """32 hexadecimal digits for the model's configuration, all weights with their types (with or
    without those of an adapter, and its configuration), and how and on what kind of device they are
    computed with; and as many for the weights alone.

    It is taken of the weights as they are, not of a file: what a loader, a cast or an adapter made
    of them is in it. An adapter's wrapper around a model does not change the names of the model's
    own weights here. Where weights are split over processes, all of them call this together.
    """
    model: Any = engine.model
    adapters = getattr(model, "peft_config", {}) if adapter else {}
    settings = [
        _without(engine.causal.config.to_dict(), OF_A_COPY),
        {name: _without(config.to_dict(), OF_AN_ADAPTER_COPY) for name, config in adapters.items()},
    ]
    digest, alone = (
        hashlib.sha256(f"{engine.computation} {engine.device.type}".encode()),
        hashlib.sha256(),
    )
    digest.update(json.dumps(settings, sort_keys=True, default=_plain).encode())
    trained = {
        name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    weights = {
        _name_in_base(name): weight
        for name, weight in {**model.state_dict(), **states(model)}.items()
        # modules_to_save: such as a head that trains with the adapter
        if adapter
        or not (
            name in trained or any(part in name for part in ("lora_", ".modules_to_save.", DELTA))
        )
    }
    names = sorted(weights)
    for name, content in zip(names, _contents(weights[name] for name in names), strict=True):
        for each in (digest, alone):
            each.update(
                f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode() + content
            )
    return Digests(digest.hexdigest()[:32], alone.hexdigest()[:32])


DELTA = ".token_adapter.trainable_tokens_"
"""Part of the names of what PEFT keeps for single tokens of an embedding that train."""


def _name_in_base(name: str) -> str:
    """The name that a weight has in the model without an adapter's wrappers."""
    name = name.replace("base_model.model.", "").replace(".token_adapter.base_layer.", ".")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _contents(weights: Iterable[Any]) -> Iterator[bytes]:
    """A hash of each tensor's bytes.

    Some are made at once, as hashing lets other threads run; what is split over processes is put
    together here, so that all of them do it in one order.
    """
    waiting: deque[Future[bytes]] = deque()
    at_once = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(at_once) as pool:
        for weight in weights:
            waiting.append(
                pool.submit(
                    _content, weight.full_tensor() if hasattr(weight, "full_tensor") else weight
                )
            )
            if len(waiting) > at_once:
                yield waiting.popleft().result()
        yield from (each.result() for each in waiting)


def _content(weight: Tensor) -> bytes:
    return hashlib.sha256(
        weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    ).digest()


def _without(settings: Any, names: set[str]) -> Any:
    """Nested settings without those of these names."""
    if not isinstance(settings, dict):
        return settings
    return {
        str(name): _without(value, names) for name, value in settings.items() if name not in names
    }


def _plain(value: object) -> object:
    """What JSON has no form for: a set in order, all else by its text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
