"""Losses that imitate demonstrations. They return one number per trained token [T], not reduced."""

from __future__ import annotations

from torch import Tensor


def sft(logp_t: Tensor) -> Tensor:
    """Supervised fine-tuning: the negative log-likelihood of the demonstration, token by token.

    -logp_t, averaged over all trained tokens of the optimizer step.

    logp_t[T]: log-probability of each trained token (nats).
    """
    return -logp_t
