"""Losses that learn from a teacher. They return the unreduced loss of each trained token [T]."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from valence.losses.lazy import Tensor

_MAX_EXPONENT = 20.0  # as for policy-gradient losses


def from_teacher(
    logp_t: Tensor, teacher_t: Tensor, old_t: Tensor, divergence_t: Tensor, *,
    target: Literal["token", "distribution"] = "token",
    clip: Annotated[float, Gt(0)] | None = 5.0, max_ratio: Annotated[float, Gt(0)] = 2.0,
    beta: Annotated[float, Ge(0), Le(1)] = 1.0, top_k: Annotated[int, Gt(0)] | None = None,
) -> Tensor:  # fmt: skip
    """Move the policy towards its teacher at each token of a completion.

    token: -w_t*A_t*logp_t, A_t = sg(clamp(teacher_t - logp_t, -clip, clip)), w_t =
    sg(min(exp(logp_t - old_t), max_ratio)), sg = stop-gradient. Kleine Buening et al. 2026, arXiv
    2603.12273. On tokens that the policy has sampled, the expected gradient is that of KL(policy,
    teacher) for the next token. distribution: beta*KL(P, M) + (1 - beta)*KL(Q, M), P = teacher, Q =
    policy, M = beta*P + (1 - beta)*Q; KL(P, Q) for beta 0, KL(Q, P) for beta 1. Agarwal et al.
    2024, arXiv 2306.13649, Eq. 1.

    logp_t[T]: log-probability of each trained token (nats); teacher_t[T]: that of the teacher;
    old_t[T]: that of the policy that sampled the token, logp_t if it is not known; divergence_t[T]:
    divergence of the distributions of teacher and policy at the token (nats).

    target: what the policy learns: the teacher's probability of the completion's tokens (token), or
        of the whole vocabulary in their places (distribution).
    clip: largest absolute value of A_t (nats). null: no limit.
    max_ratio: largest weight w_t of a token, if its sampling policy is known.
    beta: 1: KL(policy, teacher), which avoids what the teacher would not write. 0: KL(teacher,
        policy), which covers all that it would. Between: a mixture.
    top_k: compare only the teacher's k most likely tokens, all others as one. null: all.
    """
    if target == "distribution":
        return divergence_t
    signal = (teacher_t - logp_t).detach()
    if clip is not None:
        signal = signal.clamp(-clip, clip)
    ratio = (logp_t - old_t).detach().clamp(max=_MAX_EXPONENT).exp().clamp(max=max_ratio)
    return -ratio * signal * logp_t
