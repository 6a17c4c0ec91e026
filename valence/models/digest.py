"""Digests that identify a model by its weights, configuration and computation."""

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

from valence.models.adapters import is_adapter_weight
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
"""Settings that may differ between copies of a model without an effect on results."""


class Digests(NamedTuple):
    """model: of the weights, configuration and computation. weights: of the weights only."""

    model: str
    weights: str


def model_digest(engine: PolicyModel, *, adapter: bool) -> str:
    """Return the digest of the model (see ``digests``)."""
    return digests(engine, adapter=adapter).model


def digests(engine: PolicyModel, *, adapter: bool) -> Digests:
    """Return 32 hexadecimal digits of the configuration, all weights with their dtypes (with or
    without an adapter and its configuration), the computation and the type of the device; and 32
    of the weights only.

    The weights are those in memory, after loading and casting. The wrapper of an adapter does not
    change the names of the weights of the base model. With sharded weights, all processes call
    this together.
    """
    model: Any = engine.model
    adapters = getattr(model, "peft_config", {}) if adapter else {}
    settings = [
        _without(engine.causal.config.to_dict(), OF_A_COPY),
        {name: _without(config.to_dict(), OF_AN_ADAPTER_COPY) for name, config in adapters.items()},
    ]
    model_hash = hashlib.sha256(f"{engine.computation} {engine.device.type}".encode())
    weights_hash = hashlib.sha256()
    model_hash.update(json.dumps(settings, sort_keys=True, default=_plain).encode())
    trained = {
        name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }
    weights = {
        _name_in_base(name): weight
        for name, weight in {**model.state_dict(), **states(model)}.items()
        if adapter or not (name in trained or is_adapter_weight(name))
    }
    names = sorted(weights)
    for name, content in zip(names, _contents(weights[name] for name in names), strict=True):
        for hash_ in (model_hash, weights_hash):
            hash_.update(
                f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode() + content
            )
    return Digests(model_hash.hexdigest()[:32], weights_hash.hexdigest()[:32])


def _name_in_base(name: str) -> str:
    """Return the name of a weight in the model without an adapter's wrappers."""
    name = name.replace("base_model.model.", "").replace(".token_adapter.base_layer.", ".")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _contents(weights: Iterable[Any]) -> Iterator[bytes]:
    """Yield a hash of each tensor's bytes, computed in a few threads.

    Sharded weights are gathered in this thread, in the same order in all processes.
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
        yield from (future.result() for future in waiting)


def _content(weight: Tensor) -> bytes:
    return hashlib.sha256(
        weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    ).digest()


def _without(settings: Any, names: set[str]) -> Any:
    """Return nested settings without these names."""
    if not isinstance(settings, dict):
        return settings
    return {
        str(name): _without(value, names) for name, value in settings.items() if name not in names
    }


def _plain(value: object) -> object:
    """Return a JSON value for a set (sorted) or any other object (its text)."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
