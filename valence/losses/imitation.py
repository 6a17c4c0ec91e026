"""Losses of demonstrations. They return the unreduced loss of each trained token [T]."""

from __future__ import annotations

from valence.losses.lazy import Tensor


def sft(logp_t: Tensor) -> Tensor:
    """Supervised fine-tuning: the negative log-likelihood of the demonstration.

    -logp_t, averaged over all trained tokens of the optimizer step.

    logp_t[T]: log-probability of each trained token (nats).
    """
    return -logp_t


def dft(logp_t: Tensor) -> Tensor:
    """Dynamic fine-tuning: the negative log-likelihood of each token, weighted by its probability,
    so that unlikely tokens do not dominate.

    -sg(p_t)*logp_t, p_t = exp(logp_t), sg = stop-gradient; averaged over all trained tokens of the
    optimizer step. Wu et al. 2025, arXiv 2508.05629.

    logp_t[T]: log-probability of each trained token (nats).
    """
    return -logp_t.detach().exp() * logp_t
