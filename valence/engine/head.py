"""From hidden states to log-probabilities: the linear head and its log-softmax, a chunk of rows at a time, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

CHUNK = 512  # rows of [rows, V] logits that exist at once: 100 MB at a 49k vocabulary


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a causal model with the quirks of its family: a final soft-cap (Gemma 2) or a scale (Cohere, Granite).

    ``half``: the operands of the product are bfloat16; it is accumulated in, and returned as, float32 all the same.
    """

    layer: nn.Module
    softcap: float | None = None
    scale: float = 1.0
    half: bool = False

    @classmethod
    def of(cls, model: Any, *, half: bool) -> Head:
        """The head of an unmodified Hugging Face causal model."""
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return cls(model.get_output_embeddings(), getattr(config, "final_logit_softcapping", None), scale, half)

    def logits(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """hidden[N, h] -> logits[N, V], float32 (float64 for a float64 model)."""
        if weight is None:  # an adapter on the head: only the layer itself knows its product
            logits = self.layer(hidden)
            logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
        else:
            with _bfloat16_operands(self.half and hidden.device.type == "cpu"):
                logits = linear(hidden.to(weight.dtype), weight, bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def __call__(self, hidden: Tensor, target: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each target under softmax(logits): hidden[N, h], target[N] -> [N] (nats), and the entropy [N].

        No more than CHUNK rows of logits exist at once; the backward pass computes them again.
        """
        weight = bias = None
        if type(self.layer) is nn.Linear:
            wide = torch.promote_types(torch.float32, self.layer.weight.dtype)
            weight, bias = self.layer.weight.to(wide), None if self.layer.bias is None else self.layer.bias.to(wide)
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, hidden.shape[0], CHUNK):
            rows = hidden[start : start + CHUNK], target[start : start + CHUNK], weight, bias, entropy
            grad = torch.is_grad_enabled() and hidden.requires_grad
            parts.append(checkpoint(self._chunk, *rows, use_reentrant=False) if grad else self._chunk(*rows))
        logp, spread = (torch.cat(column) for column in zip(*parts, strict=True))
        return logp, spread if entropy else None

    def _chunk(
        self, hidden: Tensor, target: Tensor, weight: Tensor | None, bias: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        # Autocast would turn the product back into bfloat16.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = self.logits(hidden, weight, bias)
            logp: Any = TargetLogProb.apply(logits, target)
            if not entropy:
                return logp, logp.new_empty(0)
            logps = torch.log_softmax(logits, -1)
        return logp, -(logps.exp() * logps).sum(-1)


class TargetLogProb(torch.autograd.Function):
    """log softmax(logits)[target]: logits[N, V], target[N] -> [N] (nats).

    In float32 and at a 49k vocabulary ``log_softmax`` was measured to be off by 8e-6 nats per token of a real model on a CPU,
    always in the same direction, so that the errors of an answer add up; this by 1e-7, in no direction, in the same time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        spread = (logits - top).exp_().sum(-1, keepdim=True).log()
        ctx.save_for_backward(logits, target, top, spread)
        return (logits.gather(1, target[:, None]) - top - spread).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, target, top, spread = ctx.saved_tensors
        slope = (logits - (top + spread)).exp_().mul_(-grad[:, None])
        return slope.scatter_add_(1, target[:, None], grad[:, None]), None


@contextmanager
def _bfloat16_operands(wanted: bool) -> Iterator[None]:
    """Lets a float32 product round its operands to bfloat16 (exact when they were bfloat16 already), accumulating in float32."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if wanted else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
