"""A name for weights: the same for the same weights, another for any other."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(model: nn.Module, *, adapter: bool, how: str) -> str:
    """32 hexadecimal digits for all weights (with or without those of an adapter), their types, and how they are computed with.

    An adapter's wrapper around a model does not change the names of the model's own weights here.
    """
    digest = hashlib.sha256(how.encode())
    for full_name, weight in sorted(model.state_dict().items()):
        if adapter or "lora_" not in full_name:
            name = full_name.replace("base_model.model.", "").replace(".base_layer.", ".")
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
