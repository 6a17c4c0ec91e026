"""Load-balancing loss of the routers of mixture-of-experts models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from valence.errors import UserError
from valence.types import MicroBatch, sent

ROUTER_AUX_LOSS = "router_aux_loss"
"""Name of the output of the engine, and of the metric."""
SETTING = "train.router_aux_loss"


class RouterBalance:
    """Accumulate how tokens are routed over the forward passes of one micro-batch.

    The loss is that of Switch Transformers (arXiv 2101.03961, equations 4 to 6) for several experts
    per token, as ``load_balancing_loss_func`` of transformers computes it over all layers together:
    num_experts * sum_e f_e * P_e. f_e is the number of tokens that expert e gets, and P_e its
    router probability, each as a mean over tokens and layers. Only P_e has a gradient.
    """

    def __init__(self, num_experts_per_token: int) -> None:
        self.num_experts_per_token = num_experts_per_token
        self.num_rows: Tensor | float = 0.0
        self.assignments: Tensor | float = 0.0
        self.probabilities: Tensor | float = 0.0

    def add(self, router_logits: Sequence[Tensor], weights: Tensor) -> None:
        """Count one forward pass.

        router_logits: [rows, E] of each layer. weights[T]: how often each of the first T rows
        counts; further rows are padding.
        """
        for layer_logits in router_logits:
            logits = layer_logits.reshape(-1, layer_logits.shape[-1])[: len(weights)]
            logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
            row_weights = weights.to(logits.dtype)[:, None]
            probabilities = logits.softmax(-1)
            experts = probabilities.detach().topk(self.num_experts_per_token, dim=-1).indices
            chosen = torch.zeros_like(logits).scatter(1, experts, 1.0)
            self.assignments = self.assignments + (chosen * row_weights).sum(0)
            self.probabilities = self.probabilities + (probabilities * row_weights).sum(0)
            self.num_rows = self.num_rows + row_weights.sum()

    def loss(self) -> Tensor:
        """Return the loss, a scalar; 1 * num_experts_per_token when the load is uniform."""
        assert isinstance(self.assignments, Tensor)
        shares = (self.assignments / self.num_rows) * (self.probabilities / self.num_rows)
        return len(self.assignments) * shares.sum()


def num_experts_per_token(causal: Any) -> int | None:
    """Return how many experts each token is routed to; None where transformers has no such loss.

    It defines the loss for architectures whose routers choose by softmax probability. Others, such
    as DeepSeek-V3, balance their load by a bias, and dense models have no router.
    """
    module = sys.modules[type(causal).__module__]
    decoder = getattr(causal, causal.base_model_prefix)
    records = getattr(decoder, "_can_record_outputs", None) or {}
    if not hasattr(module, "load_balancing_loss_func") or "router_logits" not in records:
        return None
    config = causal.config.get_text_config()
    count = getattr(causal, "num_experts_per_tok", getattr(config, "num_experts_per_tok", None))
    return count if isinstance(count, int) else None


def check_router(engine: Any) -> None:
    """Raise UserError when the model has no router whose load can be balanced."""
    causal = engine.causal
    found = num_experts_per_token(causal) is not None
    if found:  # a configuration may leave all layers dense
        decoder = getattr(causal, causal.base_model_prefix)
        token = torch.zeros(1, 1, dtype=torch.long, device=engine.device)
        training = engine.training
        engine.eval()
        with torch.no_grad(), engine.stock():
            outputs = decoder(input_ids=token, use_cache=False, output_router_logits=True)
        engine.train(training)
        found = bool(outputs.get("router_logits"))
    if not found:
        raise UserError(
            f"{type(causal).__name__} has no router with a load-balancing loss",
            code="router-missing",
            where=SETTING,
            fix="remove it, or use a mixture-of-experts model such as Mixtral or Qwen3-MoE",
        )


def sequence_counts(batch: MicroBatch) -> list[int]:
    """Return for each segment in how many sequences that train it is."""
    counts = [0] * len(batch.segments)
    for leaf, trains in zip(batch.leaves, batch.requires_grad, strict=True):
        for segment in batch.path(leaf) if trains else ():
            counts[segment] += 1
    return counts


def token_weights(batch: MicroBatch) -> Tensor:
    """Return in how many sequences that train each token is: [T], float32."""
    weights = torch.zeros(len(batch.cpu_tokens))
    for (start, end, _), count in zip(batch.segments, sequence_counts(batch), strict=True):
        weights[start:end] = count
    return sent(weights, batch.tokens.device)


def num_trained_tokens(batch: MicroBatch) -> int:
    """Return the number of tokens of the sequences that train, a shared one once per sequence."""
    counts = zip(batch.segments, sequence_counts(batch), strict=True)
    return sum((end - start) * count for (start, end, _), count in counts)
