"""Losses that learn from a teacher. They return the unreduced loss of each trained token [T]."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from valence.losses.lazy import Tensor

_MAX_EXPONENT = 20.0  # as for policy-gradient losses


def hindsight(
    logp_t: Tensor, teacher_t: Tensor, old_t: Tensor, *,
    clip: Annotated[float, Gt(0)] | None = 5.0, max_ratio: Annotated[float, Gt(0)] = 2.0,
) -> Tensor:  # fmt: skip
    """Self-distillation from feedback: raise the likelihood of a token if the teacher, which has
    read the feedback, finds it more likely than the policy, and lower it otherwise.

    -w_t*A_t*logp_t, A_t = sg(clamp(teacher_t - logp_t, -clip, clip)), w_t = sg(min(exp(logp_t -
    old_t), max_ratio)), sg = stop-gradient. Kleine Buening et al. 2026, arXiv 2603.12273. On tokens
    that the policy has sampled, the expected gradient is that of KL(policy, teacher) for the next
    token. The mean is taken over the tokens of a completion, then over completions.

    logp_t[T]: log-probability of each trained token (nats); teacher_t[T]: that of the teacher;
    old_t[T]: that of the policy that sampled the token, logp_t if it is not known.

    clip: largest absolute value of A_t (nats). null: no limit.
    max_ratio: largest weight of a token whose sampling policy is known.
    """
    signal = (teacher_t - logp_t).detach()
    if clip is not None:
        signal = signal.clamp(-clip, clip)
    ratio = (logp_t - old_t).detach().clamp(max=_MAX_EXPONENT).exp().clamp(max=max_ratio)
    return -ratio * signal * logp_t
